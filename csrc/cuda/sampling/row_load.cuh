// Brings a row of logits into the slices of a cluster, as ordered bits or as they are.
#pragma once
#include "cuda/base/vec.cuh"
#include "cuda/launchers.h"
#include "cuda/sampling/row_select.cuh"

namespace vllm_kernels::cuda {

// A slice begins at a multiple of 32 tokens: whole words of a bitmask, whole Vecs.
constexpr int kSliceStep = 32;
// Shared memory that the kernels of a cluster declare, at most.
constexpr int kStaticSharedBytes = 37 * 1024;
static_assert(sizeof(SelectShared) <= kStaticSharedBytes);

inline int slice_tokens(int vocab_size, int ctas) {
  const int step = kSliceStep * ctas;
  return (vocab_size + step - 1) / step * kSliceStep;
}

// Whether a cluster holds a row in shared memory. Otherwise one CTA holds it in global memory.
inline bool uses_cluster(int vocab_size) {
  const DeviceModel& device = current_device_model();
  return device.architecture >= 90 &&
         slice_tokens(vocab_size, kClusterSize) * 4 + kStaticSharedBytes <=
             device.shared_memory_per_block;
}

// Whether rows can be read in Vecs of 16 bytes.
inline bool reads_vecs(const LogitRows& logits) {
  const int width = 16 / size_of(logits.dtype);
  return aligned16(logits.data) && logits.stride % width == 0 && logits.vocab_size % width == 0;
}

// The calling CTA's slice. `memory` has slice_tokens() elements for each CTA of the cluster.
template <typename Cluster>
__device__ __forceinline__ Slice slice_of(uint32_t* memory, int vocab_size, int tokens) {
  const int begin = min(Cluster::rank() * tokens, vocab_size);
  return {memory, begin, min(tokens, vocab_size - begin)};
}

// The highest of the tokens that a thread visits in rising order; of equals the first.
struct Highest {
  uint32_t ordered = 0;
  int token = 0;

  __device__ __forceinline__ void visit(uint32_t other, int at) {
    if (other > ordered) {
      ordered = other;
      token = at;
    }
  }
  __device__ __forceinline__ uint64_t key() const { return max_key(ordered, token); }
};

// slice[i] = ordered(logit, whether the token is allowed), each then visited as visit(ordered bits,
// token). A slice that is not kept is only visited. allowed_from(token): Bitmask::bits_from(); a
// Vec lies in one word of the mask.
template <bool kAligned, typename T, typename Allowed, typename Ordered, typename Visit>
__device__ __forceinline__ void load_vecs(const T* row, const Slice& slice, bool keeps,
                                          const Allowed& allowed_from, const Ordered& ordered,
                                          const Visit& visit) {
  constexpr int kWidth = kVecWidth<T>, kUnroll = (kAligned ? 16 : 8) / kWidth;  // by registers
  const int vecs = (slice.size + kWidth - 1) / kWidth;
  const T* from = row + slice.begin;
  for (int first = threadIdx.x; first < vecs; first += kUnroll * kRowThreads) {
    Vec16<T> loaded[kUnroll];
    uint32_t allowed[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = first + i * kRowThreads;
      if (at < vecs) loaded[i] = load_vec<kAligned, kWidth>(from, at, slice.size);
      allowed[i] = at < vecs ? allowed_from(slice.begin + at * kWidth) : 0;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = first + i * kRowThreads;
      if (at >= vecs) continue;
      float logits[kWidth];
      upcast(loaded[i], logits);
      alignas(16) uint32_t words[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int index = at * kWidth + j;
        const bool inside = kAligned || index < slice.size;
        words[j] = inside ? ordered(logits[j], (allowed[i] >> j & 1) != 0) : 0;
        if (inside) visit(words[j], slice.begin + index);
      }
      if (!keeps) continue;
#pragma unroll
      for (int j = 0; j < kWidth; j += 4) {
        reinterpret_cast<uint4*>(slice.ordered)[(at * kWidth + j) / 4] =
            make_uint4(words[j], words[j + 1], words[j + 2], words[j + 3]);
      }
    }
  }
}

template <typename T, typename Allowed, typename Ordered, typename Visit>
__device__ __forceinline__ void load_slice(const LogitRows& logits, int64_t row, bool aligned,
                                           const Slice& slice, bool keeps,
                                           const Allowed& allowed_from, const Ordered& ordered,
                                           const Visit& visit) {
  const T* data = static_cast<const T*>(logits.data) + row * logits.stride;
  if (aligned) {
    load_vecs<true>(data, slice, keeps, allowed_from, ordered, visit);
  } else {
    load_vecs<false>(data, slice, keeps, allowed_from, ordered, visit);
  }
}

// --- logits as they are --------------------------------------------------------------------------

// A sample's mask; without words every token is allowed.
struct SampleMask {
  Bitmask bitmask;
  const int32_t* words;
};

// The bits of a mask for a batch of Vecs, kRowThreads apart. With kInside all of them are in the
// slice, and the mask has words for it.
template <bool kInside, int kWidth, int kUnroll>
__device__ __forceinline__ void load_mask(const SampleMask& mask, const Slice& slice, int first,
                                          uint32_t (&allowed)[kUnroll]) {
  const uint32_t token = static_cast<uint32_t>(slice.begin + first * kWidth);
  constexpr int kStep = kRowThreads * kWidth;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if constexpr (kInside) {
      allowed[i] =
          static_cast<uint32_t>((mask.words + token / 32)[i * (kStep / 32)]) >> (token % 32);
    } else {
      const int at = static_cast<int>(token) + i * kStep;
      allowed[i] =
          at < slice.begin + slice.size ? mask.bitmask.bits_from(mask.words, at) : 0xffffffffu;
    }
  }
}

// Loads a batch of kUnroll Vecs; see load_logits(). Returns the highest of these logits and
// `highest`.
template <bool kAligned, bool kMasked, bool kInside, int kUnroll, typename T, typename Visit>
__device__ __forceinline__ float load_batch(const T* from, const Slice& slice,
                                            const SampleMask& mask, int first, float highest,
                                            Visit& visit) {
  constexpr int kWidth = kVecWidth<T>;
  const auto is_inside = [&](int i) {
    return kInside || (first + i * kRowThreads) * kWidth < slice.size;
  };
  Vec16<T> loaded[kUnroll];
  uint32_t allowed[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (is_inside(i)) {
      loaded[i] = load_vec<kAligned, kWidth>(from, first + i * kRowThreads, slice.size);
    }
  }
  if constexpr (kMasked) load_mask<kInside, kWidth>(mask, slice, first, allowed);
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (!is_inside(i)) break;
    const int index = (first + i * kRowThreads) * kWidth;
    float logits[kWidth];
    upcast(loaded[i], logits);
    float of_vec = -INFINITY;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (kMasked && (allowed[i] >> j & 1) == 0) logits[j] = -INFINITY;
      if (!kAligned && index + j >= slice.size) logits[j] = -INFINITY;
      of_vec = j == 0 ? logits[0] : max_or_nan(of_vec, logits[j]);
    }
    highest = max_or_nan(highest, of_vec);
    if constexpr (!kMasked) visit(logits, of_vec);
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      reinterpret_cast<float4*>(slice.ordered)[(index + j) / 4] =
          make_float4(logits[j], logits[j + 1], logits[j + 2], logits[j + 3]);
    }
  }
  return highest;
}

template <bool kAligned, bool kMasked, typename T, typename Visit>
__device__ __forceinline__ float load_batches(const T* from, const Slice& slice,
                                              const SampleMask& mask, Visit& visit) {
  // Registers for what is in flight: without masks they suffice for 32 float32 logits.
  constexpr int kWidth = kVecWidth<T>, kInside = kMasked || sizeof(T) < 4 ? 4 : 8, kTail = 4;
  float highest = -INFINITY;
  int first = threadIdx.x;
  if (kAligned && (!kMasked || mask.bitmask.num_words * 32 >= slice.begin + slice.size)) {
    const int inside = slice.size - (kInside - 1) * kRowThreads * kWidth;
#pragma unroll 1
    for (; first * kWidth < inside; first += kInside * kRowThreads) {
      highest =
          load_batch<kAligned, kMasked, true, kInside>(from, slice, mask, first, highest, visit);
    }
  }
#pragma unroll 1
  for (; first * kWidth < slice.size; first += kTail * kRowThreads) {
    highest = load_batch<kAligned, kMasked, false, kTail>(from, slice, mask, first, highest, visit);
  }
  return highest;
}

// Loads the slice as the bits of float32 logits, in place of ordered bits: -inf where the mask
// forbids a token, and as padding. Returns the highest of those that the thread loads, which
// for_each_own<T>() visits; NaN if one is NaN. A logit costs one comparison and one store.
// Without a mask: visit(the logits of a Vec, the highest of them).
template <typename T, typename Visit>
__device__ __forceinline__ float load_logits(const LogitRows& logits, int64_t row, bool aligned,
                                             const Slice& slice, const SampleMask& mask,
                                             Visit& visit) {
  const T* from = static_cast<const T*>(logits.data) + row * logits.stride + slice.begin;
  if (!aligned) {
    if constexpr (Visit::kVisits) {
      if (mask.words == nullptr) return load_batches<false, false>(from, slice, mask, visit);
    }
    return load_batches<false, true>(from, slice, mask, visit);
  }
  if (mask.words == nullptr) return load_batches<true, false>(from, slice, mask, visit);
  return load_batches<true, true>(from, slice, mask, visit);
}
struct VisitNone {
  static constexpr bool kVisits = false;
  template <int kWidth>
  __device__ __forceinline__ void operator()(const float (&)[kWidth], float) {}
};

// body(word, index in the slice) for the tokens that this thread loaded. The last ones may be
// padding: 0 behind load_slice(), -inf behind load_logits().
template <typename T, typename Body>
__device__ __forceinline__ void for_each_own(const Slice& slice, const Body& body) {
  constexpr int kQuads = kVecWidth<T> / 4;
#pragma unroll 1
  for (int at = threadIdx.x; at * kVecWidth<T> < slice.size; at += kRowThreads) {
#pragma unroll
    for (int quad = at * kQuads; quad < (at + 1) * kQuads; ++quad) {
      for_each_of(slice.vec(quad), [&](uint32_t ordered, int i) { body(ordered, 4 * quad + i); });
    }
  }
}

// Makes what load_logits() loaded what load_slice() loads: ordered bits of quotients. Returns the
// thread's highest.
template <typename T>
__device__ __forceinline__ Highest divide_row(const Slice& slice, float temperature) {
  Highest highest;
  for_each_own<T>(slice, [&](uint32_t word, int index) {
    const uint32_t ordered =
        index < slice.size ? ordered_bits(bits_as<float>(word) / temperature) : 0;
    slice.ordered[index] = ordered;
    if (index < slice.size) highest.visit(ordered, slice.begin + index);
  });
  return highest;
}

// body(quad, index of its first token in the slice) for the tokens that the lanes of `loaders` of
// the calling warp loaded. All lanes call it; each has a quad of one of four loaders, or -inf.
// Behind load_logits() only.
template <typename T, typename Body>
__device__ __forceinline__ void for_each_of_loaders(const Slice& slice, uint32_t loaders,
                                                    const Body& body) {
  constexpr int kAtOnce = 4, kWidth = kVecWidth<T>, kQuads = kWidth / 4;
  const int lane = threadIdx.x % kWarpSize, warp_begin = static_cast<int>(threadIdx.x) - lane;
  const int quad = lane / kAtOnce;
#pragma unroll 1
  while (loaders != 0) {
    int loader = -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (lane % kAtOnce == i) loader = __ffs(static_cast<int>(loaders)) - 1;
      loaders &= loaders - 1;
    }
    int at = (warp_begin + loader + quad / kQuads * kRowThreads) * kWidth + quad % kQuads * 4;
#pragma unroll 1
    for (int first = 0; first < slice.size; first += kWarpSize * kRowThreads) {
      constexpr float kNone = -INFINITY;
      float4 logits = make_float4(kNone, kNone, kNone, kNone);
      if (loader >= 0 && at < slice.size) {
        logits = reinterpret_cast<const float4*>(slice.ordered)[at / 4];
      }
      body(logits, at);
      at += kWarpSize * kRowThreads;
    }
  }
}

// The memory of the CTA's slice: shared in a cluster, else its part of `scratch`.
template <typename Cluster>
__device__ __forceinline__ uint32_t* slice_memory(uint32_t* scratch, int64_t row, int tokens) {
  if constexpr (Cluster::kSize > 1) {
    extern __shared__ __align__(16) uint32_t dynamic_shared[];
    return dynamic_shared;
  } else {
    return scratch + row * tokens;
  }
}

// Launches kCluster or kSingle with a cluster per row: a cluster where the row fits in its shared
// memory.
template <auto kCluster, auto kSingle, typename Params>
void launch_clusters(const char* op, const Params& p, int64_t rows, Stream stream) {
  const LogitRows& logits = p.logits;
  const bool aligned = reads_vecs(logits);
  if (uses_cluster(logits.vocab_size)) {
    const int tokens = slice_tokens(logits.vocab_size, kClusterSize);
    dynamic_shared_memory<kCluster>(op);
    launch_kernel(op, kCluster, dim3(grid_size(op, rows * kClusterSize)), dim3(kRowThreads),
                  tokens * sizeof(uint32_t), stream, p, tokens, aligned);
  } else {
    launch_kernel(op, kSingle, dim3(grid_size(op, rows)), dim3(kRowThreads), 0, stream, p,
                  slice_tokens(logits.vocab_size, 1), aligned);
  }
}

}  // namespace vllm_kernels::cuda

// The cluster of a kernel of RowCluster<kCtas>, where the architecture has clusters.
#if !defined(__CUDA_ARCH__) || defined(VLLM_KERNELS_HAS_SM90)
#define VLLM_KERNELS_CLUSTER(ctas) __cluster_dims__(ctas, 1, 1)
#else
#define VLLM_KERNELS_CLUSTER(ctas)
#endif
