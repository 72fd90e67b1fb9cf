// page_bounds_update (ops/pages/page_bounds_update.h), one launch.
//
//   grid     (groups of slots, shares of a page's accesses)
//   names    a slot says how far its page is filled if no slot of the call is higher in the page,
//            and no equal one comes later. Slots of its group decide for most, and none is above
//            the last slot of a page. The rest are compared with all slots of the call. So one CTA
//            of each share writes a page, or several CTAs write the same bits to a full one.
//   bounds   a thread has one access of K, 16 bytes or an element, of tokens 0 to the named one
//
// A decode step of 8 sequences, 8 KV heads of 128, bf16, pages of 16 reads 8 x 8.5 tokens of 2 KB
// on average, 139 KB, and writes 33 KB: latency decides. Nothing is read before the PDL wait.
#include "ops/pages/page_bounds_update.h"

#include <algorithm>

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kGroup = 16;       // slots of a CTA where there are many
constexpr int kFewSlots = 1024;  // up to so many, a CTA has one slot
constexpr int kSlotsAtOnce = 8;  // a thread loads so many before it compares them
constexpr int kTokensAtOnce = 8;

struct BoundsShape {
  int group;  // slots of a CTA
  FastDivisor by_block_size;
  FastDivisor by_head;  // accesses of a head
  int per_head;
};

// Rounds towards -inf, or towards +inf.
template <bool kDown, typename T>
__device__ __forceinline__ T round_outwards(float x) {
  if constexpr (std::is_same_v<T, Half>) {
    return kDown ? __float2half_rd(x) : __float2half_ru(x);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return kDown ? __float2bfloat16_rd(x) : __float2bfloat16_ru(x);
  } else {
    return x;
  }
}

// A slot of the call, and where its page ends.
struct Named {
  int32_t slot, index, page_end;

  // Whether another slot of the call, -1 for a skipped one, speaks for the page instead.
  __device__ __forceinline__ bool yields_to(int32_t other, int32_t other_index) const {
    return other >= slot && other < page_end && (other > slot || other_index > index);
  }
};

__device__ __forceinline__ Named named(const PageBoundsUpdateParams& p, const BoundsShape& shape,
                                       int32_t slot, int32_t index) {
  const int32_t page = slot < 0 ? 0 : shape.by_block_size.divide(slot);
  return {slot, index, (page + 1) * p.kv.block_size};
}

// A mask of the slots of this CTA, `own`, that speak for their pages. All threads call it.
__device__ __forceinline__ uint32_t naming_slots(const PageBoundsUpdateParams& p,
                                                 const BoundsShape& shape, int first,
                                                 const Named (&own)[kGroup]) {
  __shared__ uint32_t candidates, yielding;
  const int thread = threadIdx.x, lane = threadIdx.x % kWarpSize;
  if (thread < kWarpSize) {
    bool speaks = lane < shape.group && own[lane % kGroup].slot >= 0;
    for (int i = 0; i < shape.group; ++i) {
      speaks = speaks && !own[lane % kGroup].yields_to(own[i].slot, own[i].index);
    }
    const uint32_t mask = __ballot_sync(0xffffffffu, speaks);
    if (lane == 0) {
      candidates = mask;
      yielding = 0;
    }
  }
  __syncthreads();
  const uint32_t mask = candidates;
  uint32_t open = 0;  // of pages that are not full
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const int i = __ffs(left) - 1;
    if (own[i].slot + 1 != own[i].page_end) open |= 1u << i;
  }
  if (open == 0) return mask;  // all threads
  uint32_t found = 0;
#pragma unroll 1
  for (int base = thread; base < p.num_slots; base += kSlotsAtOnce * kThreads) {
    int64_t others[kSlotsAtOnce];
#pragma unroll
    for (int j = 0; j < kSlotsAtOnce; ++j) {
      const int i = base + j * kThreads;
      others[j] = i < p.num_slots ? p.slot_mapping[i] : -1;
    }
#pragma unroll
    for (int j = 0; j < kSlotsAtOnce; ++j) {
      const int32_t other = p.usable(others[j]);
#pragma unroll 1
      for (uint32_t left = open; left != 0; left &= left - 1) {
        const int i = __ffs(left) - 1;
        if (own[i].yields_to(other, base + j * kThreads)) found |= 1u << i;
      }
    }
  }
  found = __reduce_or_sync(0xffffffffu, found);
  if (lane == 0 && found != 0) atomicOr(&yielding, found);
  __syncthreads();
  return mask & ~yielding;
}

// The bounds of `kWidth` components of one head over `tokens` tokens, from `keys` on.
template <typename T, typename C, int kWidth>
__device__ __forceinline__ void update_components(const PagedKv& kv, const C* keys, int tokens,
                                                  float scale, T* low_out, T* high_out) {
  float low[kWidth], high[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    low[i] = INFINITY;
    high[i] = -INFINITY;
  }
#pragma unroll 1
  for (int first = 0; first < tokens; first += kTokensAtOnce) {
    Elements<C, kWidth> loaded[kTokensAtOnce];
#pragma unroll
    for (int j = 0; j < kTokensAtOnce; ++j) {
      const int token = min(first + j, tokens - 1);  // the last one again changes nothing
      loaded[j] = *reinterpret_cast<const Elements<C, kWidth>*>(keys + token * kv.key_token_stride);
    }
#pragma unroll
    for (int j = 0; j < kTokensAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float x = to_float(loaded[j][i]);
        low[i] = min_or_nan(low[i], x);
        high[i] = max_or_nan(high[i], x);
      }
    }
  }
  constexpr int kStore = kWidth < kVecWidth<T> ? kWidth : kVecWidth<T>;
#pragma unroll
  for (int i = 0; i < kWidth; i += kStore) {
    Elements<T, kStore> lows, highs;
#pragma unroll
    for (int j = 0; j < kStore; ++j) {
      lows[j] = round_outwards<true, T>(kIs8Bit<C> ? low[i + j] * scale : low[i + j]);
      highs[j] = round_outwards<false, T>(kIs8Bit<C> ? high[i + j] * scale : high[i + j]);
    }
    *reinterpret_cast<Elements<T, kStore>*>(low_out + i) = lows;
    *reinterpret_cast<Elements<T, kStore>*>(high_out + i) = highs;
  }
}

template <typename T, typename C, int kWidth>
__global__ void __launch_bounds__(kThreads)
    page_bounds_update_kernel(const __grid_constant__ PageBoundsUpdateParams p, BoundsShape shape) {
  launch_dependents();
  wait_for_primary_kernel();
  __shared__ Named own[kGroup];
  const int first = blockIdx.x * shape.group, thread = threadIdx.x;
  if (thread < kGroup) {
    const bool inside = thread < shape.group && first + thread < p.num_slots;
    const int32_t slot = inside ? p.usable(p.slot_mapping[first + thread]) : -1;
    own[thread] = named(p, shape, slot, first + thread);
  }
  __syncthreads();
  const PagedKv& kv = p.kv;
  const int shift = __ffs(kv.x) - 1, accesses = kv.num_kv_heads * shape.per_head;
#pragma unroll 1
  for (uint32_t left = naming_slots(p, shape, first, own); left != 0; left &= left - 1) {
    const int32_t slot = own[__ffs(left) - 1].slot;
    const int32_t page = shape.by_block_size.divide(slot);
    const int tokens = slot - page * kv.block_size + 1;
#pragma unroll 1
    for (int i = blockIdx.y * kThreads + thread; i < accesses; i += gridDim.y * kThreads) {
      const int head = shape.by_head.divide(i), d = (i - head * shape.per_head) * kWidth;
      const C* keys = static_cast<const C*>(kv.key) + page * kv.key_block_stride +
                      head * kv.key_head_stride + (d >> shift) * kv.key_chunk_stride +
                      (d & (kv.x - 1));
      const float scale =
          kIs8Bit<C> && kv.k_scale != nullptr ? kv.k_scale[head * kv.scale_stride] : 1.0f;
      T* low =
          static_cast<T*>(p.bounds) + page * p.block_stride + int64_t{2} * head * kv.head_size + d;
      update_components<T, C, kWidth>(kv, keys, tokens, scale, low, low + kv.head_size);
    }
  }
}

// Whether K and bounds can be accessed by 16 bytes.
bool aligned(const PageBoundsUpdateParams& p) {
  const PagedKv& kv = p.kv;
  const int64_t elements = 16 / size_of(p.dtype);
  return aligned16(kv.key) && aligned16(p.bounds) && p.block_stride % elements == 0 &&
         multiples(kv.x, {kv.key_block_stride, kv.key_head_stride, kv.key_token_stride,
                          kv.key_chunk_stride, kv.head_size});
}

template <typename T, typename C, int kWidth>
void launch_width(const PageBoundsUpdateParams& p, Stream stream) {
  const int per_head = p.kv.head_size / kWidth;
  const int64_t accesses = int64_t{p.kv.num_kv_heads} * per_head;
  const BoundsShape shape{.group = p.num_slots <= kFewSlots ? 1 : kGroup,
                          .by_block_size = FastDivisor(p.kv.block_size),
                          .by_head = FastDivisor(per_head),
                          .per_head = per_head};
  const dim3 grid(grid_size("page_bounds_update", ceil_div(p.num_slots, shape.group)),
                  static_cast<unsigned>(std::min<int64_t>(ceil_div(accesses, kThreads), 16)));
  launch_kernel("page_bounds_update", page_bounds_update_kernel<T, C, kWidth>, grid, dim3(kThreads),
                0, stream, p, shape);
}

}  // namespace

void launch(const PageBoundsUpdateParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      aligned(p) ? launch_width<T, C, kVecWidth<C>>(p, stream) : launch_width<T, C, 1>(p, stream);
    });
  });
}

}  // namespace vllm_kernels::cuda
