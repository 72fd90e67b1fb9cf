#include "ops/reshape_and_cache.h"

#include <algorithm>

#include "cuda/fp8.cuh"
#include "cuda/launch.cuh"
#include "cuda/launchers.h"
#include "cuda/slots.cuh"
#include "cuda/types.cuh"
#include "cuda/write_rows.cuh"

namespace vllm_kernels::cuda {
namespace {

// Which of the tokens around a block's own are runs: kRun neighbours that fill an aligned part of a
// page. Bit w stands for token first - (kRun - 1) + w.
template <int kRun>
struct Runs {
  static constexpr int kWindow = 3 * kRun - 2;  // the own tokens, and a run's length either side
  uint64_t starts;                              // the first token of each run
  uint64_t inside;                              // all tokens of runs
  uint64_t named;                               // tokens that have a slot
};

// By one warp. `slots` is shared memory for kWindow + 1 of them.
template <int kRun>
__device__ Runs<kRun> find_runs(const ReshapeAndCacheParams& p, int32_t* slots, int first,
                                int lane) {
  constexpr int kWindow = Runs<kRun>::kWindow;
  for (int w = lane; w <= kWindow; w += 32) {
    const int token = first - (kRun - 1) + w;
    slots[w] =
        token >= 0 && token < p.num_tokens && w < kWindow ? p.usable(p.slot_mapping[token]) : -1;
  }
  __syncwarp();
  uint64_t follows = 0, aligned = 0, named = 0;  // follows: the next token has the next slot
#pragma unroll
  for (int base = 0; base < kWindow; base += 32) {
    const int w = base + lane;
    const int32_t slot = w < kWindow ? slots[w] : -1;
    const bool next = slot >= 0 && slots[w + 1] == slot + 1;
    follows |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, next)) << base;
    aligned |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, slot >= 0 && slot % kRun == 0))
               << base;
    named |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, slot >= 0)) << base;
  }
  // kRun - 1 tokens in a row, each followed by the next slot
  uint64_t chain = follows & follows >> 1;  // 2
  chain &= chain >> 2;                      // 4
  if (kRun == 16) chain &= chain >> 4;      // 8
  chain &= chain >> (kRun / 2 - 1);         // 7 or 15
  Runs<kRun> runs{.starts = chain & aligned, .inside = chain & aligned, .named = named};
#pragma unroll
  for (int reach = 1; reach < kRun; reach *= 2) runs.inside |= runs.inside << reach;
  return runs;
}

// What a block writes.
struct Plan {
  int run;           // the run's first token, counted from `first`; -1: none
  uint32_t singles;  // bit i: token first + i on its own
};

// Layout vllm. A block looks after kRun tokens and some heads, one after the other. A run is
// written by the block in which it begins (at most one does), K in 256-byte pieces, V transposed
// through shared memory and stored 16 bytes at a time; tokens outside of runs one by one, with
// neighbouring lanes on neighbouring values. blockDim = (lanes, kRun).
template <typename T, typename C, int kRun>
__global__ void __launch_bounds__(512, sizeof(T) == sizeof(C) ? 2 : 1)
    write_pages_kernel(ReshapeAndCacheParams p, int heads_per_block) {
  launch_dependents();
  wait_for_predecessor();
  constexpr int kWidth = kVectorWidth<C>;                // elements of 16 bytes of the cache
  constexpr int kParts = kWidth / kVectorWidth<T>;       // vectors of T they are made from
  constexpr int kStore = kWidth < kRun ? kWidth : kRun;  // tokens of one store of V
  extern __shared__ __align__(16) char tile_bytes[];
  __shared__ OwnSlots own;
  __shared__ Plan plan;
  __shared__ int32_t window[Runs<kRun>::kWindow + 1];

  const PagedKv& kv = p.kv;
  const int first_head = blockIdx.y * heads_per_block;
  const int end_head = min(first_head + heads_per_block, kv.num_kv_heads);
  const int first = blockIdx.x * kRun;  // within this launch
  const int row = threadIdx.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = kRun * blockDim.x;
  const int chunks = kv.head_size / kWidth;
  const int pitch = kv.head_size + kWidth;  // of the tile's rows: spreads a column over the banks
  C* tile = reinterpret_cast<C*>(tile_bytes);

  Vector<T> k[kParts], v[kParts];
  const auto fetch = [&](int64_t token, int head, int chunk) {
    const auto* key = reinterpret_cast<const Vector<T>*>(static_cast<const T*>(p.key) +
                                                         token * p.key_token_stride +
                                                         head * p.key_head_stride + chunk * kWidth);
    const auto* value = reinterpret_cast<const Vector<T>*>(
        static_cast<const T*>(p.value) + token * p.value_token_stride + head * p.value_head_stride +
        chunk * kWidth);
#pragma unroll
    for (int part = 0; part < kParts; ++part) k[part] = key[part];
#pragma unroll
    for (int part = 0; part < kParts; ++part) v[part] = value[part];
  };
  // The own tokens' first chunks are under way before anything is known of their slots.
  LaterSlots later;
  later.load(p, first + 1 + thread, threads);
  int fetched = first, fetched_head = first_head;
  if (threadIdx.x < chunks && first + row < p.num_tokens) {
    fetch(first + row, first_head, threadIdx.x);
  }
  const Divisor k_scale = kIsFp8<C> ? Divisor::of(*kv.k_scale) : Divisor{};
  const Divisor v_scale = kIsFp8<C> ? Divisor::of(*kv.v_scale) : Divisor{};

  if (thread < 32) {
    const Runs<kRun> runs = find_runs<kRun>(p, window, first, thread);
    const uint32_t starts = static_cast<uint32_t>(runs.starts >> (kRun - 1)) & ((1u << kRun) - 1);
    const uint32_t singles =
        static_cast<uint32_t>((runs.named & ~runs.inside) >> (kRun - 1)) & ((1u << kRun) - 1);
    const int run = starts == 0 ? -1 : __ffs(starts) - 1;
    if (thread == 0) plan = {.run = run, .singles = singles};
    const bool mine = (thread < kRun && (singles >> thread & 1)) ||
                      (run >= 0 && thread >= run && thread < run + kRun);
    put_own_slot(own, thread, mine ? window[kRun - 1 + thread] : -1);
  }
  __syncthreads();
  const uint32_t repeated = find_repeated(own, p, first, thread, threads, later);

  // Writes the tokens first + base + i for the bits i of `rows`.
  const auto write = [&](int head, int base, uint32_t rows, bool whole_run) {
    const int32_t slot = own.slot[base + row];
    for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
      if ((rows >> row & 1) == 0) break;
      if (fetched != first + base || fetched_head != head || chunk != threadIdx.x) {
        fetch(first + base + row, head, chunk);
      }
      const int64_t at =
          kv.key_offset(slot / kv.block_size, head, slot % kv.block_size, chunk * kWidth);
      *reinterpret_cast<Vector<C>*>(static_cast<C*>(kv.key) + at) = narrow<T, C>(k, k_scale);
      *reinterpret_cast<Vector<C>*>(tile + row * pitch + chunk * kWidth) = narrow<T, C>(v, v_scale);
    }
    // The next head's chunks travel while this one's values are stored.
    fetched = -1;
    if (head + 1 < end_head && chunks <= blockDim.x) {
      fetched = first + base;
      fetched_head = head + 1;
      if (threadIdx.x < chunks && (rows >> row & 1)) {
        fetch(first + base + row, head + 1, threadIdx.x);
      }
    }
    __syncthreads();
    if (whole_run) {
      constexpr int kStores = kRun / kStore;  // of one value index
      const int32_t start = own.slot[base];
      C* to = static_cast<C*>(kv.value) +
              kv.value_offset(start / kv.block_size, head, start % kv.block_size, 0);
      for (int i = thread; i < kv.head_size * kStores; i += threads) {
        const int d = i / kStores, token = i % kStores * kStore;
        struct alignas(kStore * sizeof(C)) Tokens {
          C data[kStore];
        } gathered;
#pragma unroll
        for (int j = 0; j < kStore; ++j) gathered.data[j] = tile[(token + j) * pitch + d];
        *reinterpret_cast<Tokens*>(to + d * kv.value_dim_stride + token) = gathered;
      }
      return;
    }
    for (int r = thread / 32; r < kRun; r += threads / 32) {  // a warp a token
      if ((rows >> r & 1) == 0) continue;
      const int32_t single = own.slot[base + r];
      C* to = static_cast<C*>(kv.value) +
              kv.value_offset(single / kv.block_size, head, single % kv.block_size, 0);
#pragma unroll 4
      for (int d = thread % 32; d < kv.head_size; d += 32) {
        to[d * kv.value_dim_stride] = tile[r * pitch + d];
      }
    }
  };
  const uint32_t singles = plan.singles & ~repeated;
  const uint32_t in_run = plan.run < 0 ? 0 : ~(repeated >> plan.run) & ((1u << kRun) - 1);
  bool tile_used = false;
#pragma unroll 1
  for (int step = 0; step < 2 * (end_head - first_head); ++step) {  // singles, run, singles, ...
    const bool run = step % 2 == 1;
    const uint32_t rows = run ? in_run : singles;
    if (rows == 0) continue;
    if (tile_used) __syncthreads();
    tile_used = true;
    write(first_head + step / 2, run ? plan.run : 0, rows, run && rows == (1u << kRun) - 1);
  }
}

// Layout vllm, few tokens: a block a token, K in 16-byte chunks, V with neighbouring threads on
// neighbouring values. V's values lie block_size elements apart, each in a sector of its own, so
// nothing is gained by more.
template <typename T, typename C>
__global__ void __launch_bounds__(256) write_tokens_kernel(ReshapeAndCacheParams p) {
  launch_dependents();
  wait_for_predecessor();
  constexpr int kWidth = kVectorWidth<C>;
  constexpr int kParts = kWidth / kVectorWidth<T>;
  __shared__ OwnSlots own;
  const PagedKv& kv = p.kv;
  const int token = blockIdx.x;
  LaterSlots later;
  later.load(p, token + 1 + threadIdx.x, blockDim.x);
  if (threadIdx.x < 32) {
    put_own_slot(own, threadIdx.x, threadIdx.x == 0 ? p.usable(p.slot_mapping[token]) : -1);
  }
  __syncthreads();
  if (find_repeated(own, p, token, threadIdx.x, blockDim.x, later) != 0) return;
  const int32_t slot = own.slot[0];
  if (slot < 0) return;
  const int block = slot / kv.block_size, at = slot % kv.block_size;
  const Divisor k_scale = kIsFp8<C> ? Divisor::of(*kv.k_scale) : Divisor{};
  const Divisor v_scale = kIsFp8<C> ? Divisor::of(*kv.v_scale) : Divisor{};
  const T* keys = static_cast<const T*>(p.key) + token * p.key_token_stride;
  const T* values = static_cast<const T*>(p.value) + token * p.value_token_stride;
#pragma unroll 4
  for (int i = threadIdx.x; i < kv.num_kv_heads * kv.head_size; i += blockDim.x) {
    const int head = i / kv.head_size, d = i % kv.head_size;
    const T value = values[head * p.value_head_stride + d];
    C& to = static_cast<C*>(kv.value)[kv.value_offset(block, head, at, d)];
    if constexpr (kIsFp8<C>) {
      to = from_float<C>(v_scale.divide(to_float(value)));
    } else {
      to = value;
    }
  }
  const int chunks = kv.head_size / kWidth;
  for (int i = threadIdx.x; i < kv.num_kv_heads * chunks; i += blockDim.x) {
    const int head = i / chunks, d = i % chunks * kWidth;
    Vector<T> parts[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      parts[part] = reinterpret_cast<const Vector<T>*>(keys + head * p.key_head_stride + d)[part];
    }
    C* to = static_cast<C*>(kv.key) + kv.key_offset(block, head, at, d);
    *reinterpret_cast<Vector<C>*>(to) = narrow<T, C>(parts, k_scale);
  }
}

constexpr int kFewTokens = 512;  // up to here a block a token is faster than gathering pages
constexpr int kMaxTileBytes = 48 * 1024;

int64_t bytes_of_tile(const PagedKv& kv, int run) {
  return int64_t{run} * (kv.head_size * size_of(kv.dtype) + 16);
}

template <int kRun>
void launch_pages(const ReshapeAndCacheParams& p, Stream stream) {
  const int chunks = p.kv.head_size / p.kv.x;
  constexpr int kStep = 32 / kRun;  // so that the threads are whole warps
  const int lanes = std::min(32, (chunks + kStep - 1) / kStep * kStep);
  // One head a block until the device is full a few times over; then several, so that fewer blocks
  // look for repetitions.
  const int64_t groups = (p.num_tokens + kRun - 1) / kRun;
  const int64_t full = 4 * current_device_info().multiprocessors;
  const int heads_per_block =
      static_cast<int>(std::clamp<int64_t>(groups * p.kv.num_kv_heads / full, 1, 8));
  const int head_groups = (p.kv.num_kv_heads + heads_per_block - 1) / heads_per_block;
  const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(head_groups));
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      launch_kernel(p.op(), write_pages_kernel<T, decltype(stored), kRun>, grid, dim3(lanes, kRun),
                    bytes_of_tile(p.kv, kRun), stream, p, heads_per_block);
    });
  });
}

// Every 16-byte access of the kernels above is aligned.
bool pages_aligned(const ReshapeAndCacheParams& p) {
  const PagedKv& kv = p.kv;
  return kv.block_size % 8 == 0 && kv.head_size % kv.x == 0 && inputs_aligned(p) &&
         aligned16(kv.key) && aligned16(kv.value) && kv.key_block_stride % kv.x == 0 &&
         kv.key_head_stride % kv.x == 0 && kv.value_block_stride % kv.x == 0 &&
         kv.value_head_stride % kv.x == 0 && bytes_of_tile(kv, 16) <= kMaxTileBytes &&
         kv.num_kv_heads <= 65535;
}

void launch_once(const ReshapeAndCacheParams& p, Stream stream) {
  if (p.kv.layout == KvLayout::kNHD) return launch_rows(p, stream);
  if (!pages_aligned(p)) return launch_elements(p, stream);
  if (p.num_tokens <= kFewTokens) {
    dispatch_float(p.dtype, [&](auto model) {
      using T = decltype(model);
      dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
        launch_kernel(p.op(), write_tokens_kernel<T, decltype(stored)>,
                      dim3(static_cast<unsigned>(p.num_tokens)), dim3(256), 0, stream, p);
      });
    });
    return;
  }
  p.kv.block_size % 16 == 0 ? launch_pages<16>(p, stream) : launch_pages<8>(p, stream);
}

}  // namespace

void launch(const ReshapeAndCacheParams& params, Stream stream) {
  ReshapeAndCacheParams part = params;
  const int64_t size = size_of(params.dtype);
  for (int64_t done = 0; done < params.num_tokens; done += kTokensPerLaunch) {
    part.num_tokens = std::min(kTokensPerLaunch, params.num_tokens - done);
    part.slot_mapping = params.slot_mapping + done;
    part.key = static_cast<const char*>(params.key) + done * params.key_token_stride * size;
    part.value = static_cast<const char*>(params.value) + done * params.value_token_stride * size;
    launch_once(part, stream);
  }
}

}  // namespace vllm_kernels::cuda
