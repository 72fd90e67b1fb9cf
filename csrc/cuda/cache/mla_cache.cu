// The cache of multi-head latent attention (DeepSeek). One entry a token: latent kv_c
// [kv_lora_rank] and k_pe [pe_dim], which all heads share.
//
//   concat_and_cache_mla_kernel      writes entries [kv_c | k_pe], as they are or in fp8;
//                                    1 token a CTA up to kFewMlaTokens, else 4
//   concat_and_cache_ds_mla_kernel   writes 656-byte entries of "fp8_ds_mla"; a warp a token
//   cp_gather_and_upconvert_kernel   gathers 656-byte entries into rows; a warp an entry
//   concat_mla_q_kernel              q_out = [ql_nope | q_pe]; a grid-stride loop
//
// Nothing is read before the PDL wait. ops/mla_cache.h has the formats, duplicate_slots.cuh the
// rule for duplicate slots.
#include "ops/mla_cache.h"

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "cuda/base/dequant_row.cuh"
#include "cuda/base/exact_division.cuh"
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/cache/duplicate_slots.cuh"
#include "cuda/cache/heuristics.h"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxTokens = 32;  // of a CTA

// Loads the CTA's own slots into `list` [kMaxTokens] in shared memory. Returns a mask of the own
// tokens whose slot a later token repeats. All threads of the CTA call it.
__device__ __forceinline__ uint32_t load_slots(const ConcatAndCacheMlaParams& p, int first,
                                               int tokens, int32_t (&list)[kMaxTokens]) {
  __shared__ SlotFilter filter;
  __shared__ uint32_t own_duplicates;
  const int thread = threadIdx.x, threads = blockDim.x;
  const int from = first + tokens + thread;
  LaterSlots<8> later;
  later.load(p, from, threads);
  if (thread < 32) {
    const int32_t slot = thread < tokens ? slot_of(p, first + thread) : -1;
    list_own(thread, slot, list, filter, own_duplicates);
  }
  __syncthreads();
  const OwnFiltered own{.filter = &filter, .list = {.slots = list, .end = tokens}};
  return own_duplicates | find_duplicates<kMaxTokens>(p, from, threads, later, own);
}

// Thread i moves accesses i, i + blockDim.x, ... of the CTA's entries. An access is kWidth
// neighbouring elements: 16 bytes of the cache, or one element.
template <typename T, typename C, int kWidth>
__global__ void __launch_bounds__(kThreads)
    concat_and_cache_mla_kernel(ConcatAndCacheMlaParams p, FastDivisor block_size,
                                FastDivisor by_entry, int vecs_per_entry, int tokens) {
  launch_dependents();
  wait_for_primary_kernel();
  constexpr bool kVectors = kWidth == kVecWidth<C>;
  constexpr int kLoads = kVectors ? kWidth / kVecWidth<T> : 1;
  __shared__ int32_t own_slots[kMaxTokens];
  const int first = blockIdx.x * tokens;
  const int count = tokens * vecs_per_entry;

  using Loaded = Elements<T, kVectors ? kVecWidth<T> : 1>;
  Loaded x[kLoads];
  int token = 0, d = 0;  // of the access in x
  const auto fetch = [&](int i) {
    token = by_entry.divide(i);
    d = (i - token * vecs_per_entry) * kWidth;
    const int64_t row = min(first + token, static_cast<int>(p.num_tokens) - 1);
    const T* from = d < p.kv_lora_rank
                        ? static_cast<const T*>(p.kv_c) + row * p.kv_c_stride + d
                        : static_cast<const T*>(p.k_pe) + row * p.k_pe_stride + d - p.kv_lora_rank;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) x[j] = reinterpret_cast<const Loaded*>(from)[j];
  };
  int i = threadIdx.x;
  // Clamped instead of branching, so that all loads of the prologue are in flight together.
  fetch(min(i, count - 1));
  const Divisor scale = divisor_of<C>(p.scale, 0, 0);
  const uint32_t duplicates = load_slots(p, first, tokens, own_slots);
#pragma unroll 1
  while (i < count) {
    const int32_t slot = own_slots[token];
    if (slot >= 0 && (duplicates >> token & 1) == 0) {
      const Slot at = place_of(slot, block_size, p.block_size);
      C* to = static_cast<C*>(p.cache) + at.block * p.block_stride + at.token * p.token_stride + d;
      if constexpr (kVectors) {
        *reinterpret_cast<Elements16<C>*>(to) = quantize<T, C>(x, scale);
      } else {
        *to = to_cache<C>(x[0].data[0], scale);
      }
    }
    i += blockDim.x;
    if (i < count) fetch(i);
  }
}

// A warp writes an entry. Lane l quantizes latent elements 16 l to 16 l + 15. Eight lanes share a
// scale. The first 8 lanes store 8 elements of k_pe each.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    concat_and_cache_ds_mla_kernel(ConcatAndCacheMlaParams p, FastDivisor block_size) {
  launch_dependents();
  wait_for_primary_kernel();
  constexpr int kEach = kDsMlaLatent / 32, kRopeEach = 8;
  __shared__ int32_t own_slots[kMaxTokens];
  const int tokens = blockDim.x / 32;
  const int first = blockIdx.x * tokens;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = min(first + warp, static_cast<int>(p.num_tokens) - 1);
  const T* latent = static_cast<const T*>(p.kv_c) + row * p.kv_c_stride + lane * kEach;
  const T* rope = static_cast<const T*>(p.k_pe) + row * p.k_pe_stride + lane % 8 * kRopeEach;
  using LoadedVec = Elements<T, kAligned ? kVecWidth<T> : 1>;
  constexpr int kStoredWidth = kAligned ? kVecWidth<T> : 1;
  LoadedVec x[kEach / kStoredWidth], r[kRopeEach / kStoredWidth];
#pragma unroll
  for (int j = 0; j < kEach / kStoredWidth; ++j)
    x[j] = reinterpret_cast<const LoadedVec*>(latent)[j];
#pragma unroll
  for (int j = 0; j < kRopeEach / kStoredWidth; ++j)
    r[j] = reinterpret_cast<const LoadedVec*>(rope)[j];
  const uint32_t duplicates = load_slots(p, first, tokens, own_slots);

  float largest = 0.0f;  // fmaxf ignores NaN
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    largest = fmaxf(largest, fabsf(to_float(x[j / kStoredWidth].data[j % kStoredWidth])));
  }
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  const float scale = fmaxf(__fdiv_rn(largest, 448.0f), kDsMlaSmallestScale);
  const int32_t slot = own_slots[warp];
  if (slot < 0 || (duplicates >> warp & 1)) return;
  const Slot at = place_of(slot, block_size, p.block_size);
  char* entry = static_cast<char*>(p.cache) + at.block * p.block_stride + at.token * p.token_stride;
  Elements16<Fp8E4M3> quantized;
  auto* pairs = reinterpret_cast<uint16_t*>(quantized.data);
  const Divisor divisor = Divisor::of(scale);
#pragma unroll
  for (int j = 0; j < kEach; j += 2) {
    const auto quotient = [&](int k) {
      return divisor.divide(to_float(x[k / kStoredWidth].data[k % kStoredWidth]));
    };
    pairs[j / 2] = quantize2<Fp8E4M3>(quotient(j), quotient(j + 1));
  }
  *reinterpret_cast<Elements16<Fp8E4M3>*>(entry + lane * kEach) = quantized;
  if (lane % 8 == 0) reinterpret_cast<float*>(entry + kDsMlaScales)[lane / 8] = scale;
  if (lane < 8) {
    Elements16<BFloat16> rotated;
#pragma unroll
    for (int j = 0; j < kRopeEach; ++j) {
      rotated[j] = from_float<BFloat16>(to_float(r[j / kStoredWidth].data[j % kStoredWidth]));
    }
    reinterpret_cast<Elements16<BFloat16>*>(entry + kDsMlaRopeStart)[lane] = rotated;
  }
}

// num_splits CTAs gather a sequence. A warp reads an entry. Lanes have the same elements as in
// concat_and_cache_ds_mla_kernel.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    cp_gather_and_upconvert_kernel(UpconvertMlaParams p, FastDivisor splits, int num_splits) {
  launch_dependents();
  wait_for_primary_kernel();
  constexpr int kEach = kDsMlaLatent / 32, kWidth = 8;
  const int seq = splits.divide(blockIdx.x);
  const int split = blockIdx.x - seq * num_splits;
  const int lane = threadIdx.x % 32;
  const int64_t first_row = p.workspace_starts[seq];
  if (first_row < 0) return;
  const int64_t end = min(int64_t{p.seq_lens[seq]}, p.num_rows - first_row);
  const int step = num_splits * (kThreads / 32);
#pragma unroll 1
  for (int64_t i = split * (kThreads / 32) + threadIdx.x / 32; i < end; i += step) {
    T* row = static_cast<T*>(p.rows) + (first_row + i) * p.row_stride;
    const char* entry = p.entry(seq, i);
    Elements<Fp8E4M3, kWidth> x[2] = {};
    Elements<BFloat16, kWidth> rope = {};
    float scale = 0.0f;
    if (entry != nullptr) {
      const auto loaded = *reinterpret_cast<const Elements16<Fp8E4M3>*>(entry + lane * kEach);
      memcpy(x, &loaded, sizeof(x));
      scale = reinterpret_cast<const float*>(entry + kDsMlaScales)[lane / 8];
      if (lane < 8) {
        rope = reinterpret_cast<const Elements<BFloat16, kWidth>*>(entry + kDsMlaRopeStart)[lane];
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      T* to = row + lane * kEach + j * kWidth;
      if constexpr (sizeof(T) == 2) {
        store_dequantized<T>(to, x[j], scale);
      } else {
        Elements<Fp8E4M3, 4> halves[2];
        memcpy(halves, &x[j], sizeof(halves));
        store_dequantized<T>(to, halves[0], scale);
        store_dequantized<T>(to + 4, halves[1], scale);
      }
    }
    if (lane < 8) {
      T* to = row + kDsMlaLatent + lane * kWidth;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) to[j] = from_float<T>(to_float(rope.data[j]));
    }
  }
}

// V is the type of one access. Rows and widths of the three tensors count elements of V.
template <typename V>
__global__ void __launch_bounds__(kThreads)
    concat_mla_q_kernel(const V* nope, const V* rope, V* out, RowOffsets nope_rows,
                        RowOffsets rope_rows, RowOffsets out_rows, int nope_width, int width,
                        FastDivisor of_row, int64_t count) {
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const uint32_t row = of_row.divide(static_cast<uint32_t>(i));
    const int d = static_cast<int>(i - int64_t{row} * width);
    out[out_rows.of(row) + d] =
        d < nope_width ? nope[nope_rows.of(row) + d] : rope[rope_rows.of(row) + d - nope_width];
  }
}

bool inputs_aligned(const ConcatAndCacheMlaParams& p) {
  const int64_t width = 16 / size_of(p.dtype);
  return aligned16(p.kv_c) && aligned16(p.k_pe) && multiples(width, {p.kv_c_stride, p.k_pe_stride});
}

template <typename T>
void launch_ds_mla(const ConcatAndCacheMlaParams& p, Stream stream) {
  const int tokens = p.num_tokens <= kFewMlaTokens ? 1 : kThreads / 32;
  const auto kernel = inputs_aligned(p) ? concat_and_cache_ds_mla_kernel<T, true>
                                        : concat_and_cache_ds_mla_kernel<T, false>;
  launch_kernel("concat_and_cache_mla", kernel, dim3(ceil_div(p.num_tokens, tokens)),
                dim3(32 * tokens), 0, stream, p, FastDivisor(p.block_size));
}

template <typename T, typename C, int kWidth>
void launch_entries(const ConcatAndCacheMlaParams& p, Stream stream) {
  const int vecs_per_entry = (p.kv_lora_rank + p.pe_dim) / kWidth;
  const int tokens = p.num_tokens <= kFewMlaTokens ? 1 : 4;
  const int threads = std::min(kThreads, (tokens * vecs_per_entry + 31) / 32 * 32);
  launch_kernel("concat_and_cache_mla", concat_and_cache_mla_kernel<T, C, kWidth>,
                dim3(ceil_div(p.num_tokens, tokens)), dim3(threads), 0, stream, p,
                FastDivisor(p.block_size), FastDivisor(vecs_per_entry), vecs_per_entry, tokens);
}

void launch_once(const ConcatAndCacheMlaParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    if (p.ds_mla) return launch_ds_mla<T>(p, stream);
    dispatch_cache<T>(p.cache_dtype, [&](auto stored) {
      using C = decltype(stored);
      constexpr int kWidth = kVecWidth<C>;
      const bool aligned =
          inputs_aligned(p) && aligned16(p.cache) &&
          multiples(kWidth, {p.kv_lora_rank, p.pe_dim, p.block_stride, p.token_stride});
      aligned ? launch_entries<T, C, kWidth>(p, stream) : launch_entries<T, C, 1>(p, stream);
    });
  });
}

template <typename V>
void launch_concat(const ConcatMlaQParams& p, Stream stream) {
  const int64_t size = size_of(p.dtype);
  const auto in_accesses = [&](Rows rows) {  // strides in elements of V
    rows.outer_stride = rows.outer_stride * size / static_cast<int64_t>(sizeof(V));
    rows.inner_stride = rows.inner_stride * size / static_cast<int64_t>(sizeof(V));
    return RowOffsets(rows);
  };
  const int nope_width = p.nope_bytes / static_cast<int>(sizeof(V));
  const int width = (p.nope_bytes + p.rope_bytes) / static_cast<int>(sizeof(V));
  const int64_t count = p.out_rows.count * width;
  if (count > INT32_MAX) {
    throw std::runtime_error("concat_mla_q: too many elements for one call: split it");
  }
  const int64_t blocks =
      std::min<int64_t>(ceil_div(count, kThreads), int64_t{32} * current_device_model().num_sms);
  launch_kernel("concat_mla_q", concat_mla_q_kernel<V>, dim3(static_cast<unsigned>(blocks)),
                dim3(kThreads), 0, stream, static_cast<const V*>(p.nope),
                static_cast<const V*>(p.rope), static_cast<V*>(p.out), in_accesses(p.nope_rows),
                in_accesses(p.rope_rows), in_accesses(p.out_rows), nope_width, width,
                FastDivisor(width), count);
}

}  // namespace

void launch(const ConcatAndCacheMlaParams& params, Stream stream) {
  ConcatAndCacheMlaParams slice = params;
  const int64_t size = size_of(params.dtype);
  for (int64_t done = 0; done < params.num_tokens; done += kTokensPerLaunch) {
    slice.num_tokens = std::min(kTokensPerLaunch, params.num_tokens - done);
    slice.slot_mapping = params.slot_mapping + done;
    slice.kv_c = static_cast<const char*>(params.kv_c) + done * params.kv_c_stride * size;
    slice.k_pe = static_cast<const char*>(params.k_pe) + done * params.k_pe_stride * size;
    launch_once(slice, stream);
  }
}

void launch(const UpconvertMlaParams& p, Stream stream) {
  // Enough CTAs to fill the device if one sequence had all rows; at least one CTA a sequence.
  const int64_t wanted = std::min<int64_t>(ceil_div(p.num_rows, kThreads / 32),
                                           int64_t{16} * current_device_model().num_sms);
  const int64_t splits = std::max<int64_t>(1, wanted / p.num_seqs);
  const unsigned blocks = grid_size("cp_gather_and_upconvert_fp8_kv_cache", splits * p.num_seqs);
  dispatch_float(p.dtype, [&](auto model) {
    launch_kernel("cp_gather_and_upconvert_fp8_kv_cache",
                  cp_gather_and_upconvert_kernel<decltype(model)>, dim3(blocks), dim3(kThreads), 0,
                  stream, p, FastDivisor(splits), static_cast<int>(splits));
  });
}

void launch(const ConcatMlaQParams& p, Stream stream) {
  const bool aligned = rows_aligned16(p.nope, p.nope_rows, p.dtype) &&
                       rows_aligned16(p.rope, p.rope_rows, p.dtype) &&
                       rows_aligned16(p.out, p.out_rows, p.dtype) && p.nope_bytes % 16 == 0 &&
                       p.rope_bytes % 16 == 0;
  if (aligned) return launch_concat<uint4>(p, stream);
  size_of(p.dtype) == 4 ? launch_concat<uint32_t>(p, stream) : launch_concat<uint16_t>(p, stream);
}

}  // namespace vllm_kernels::cuda
