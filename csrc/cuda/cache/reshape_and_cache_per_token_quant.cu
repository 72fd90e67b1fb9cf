// reshape_and_cache_per_token_quant: writes key and value into int8 or int4 caches of any layout.
// Each (token, KV head) row gets its own scale, and with int4 a zero.
//
//   quantize_rows_kernel       grid (tokens / blockDim.y, KV head), block (chunks of 16 values of a
//                              head, tokens); 16-byte loads
//   quantize_elements_kernel   grid: tokens; a row a warp; any layout, alignment and size
//
// Nothing is read before the PDL wait. ops/reshape_and_cache_per_token_quant.h has the contract,
// duplicate_slots.cuh the rule for duplicate slots.
#include "ops/reshape_and_cache_per_token_quant.h"

#include <algorithm>
#include <bit>

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/int4.cuh"
#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/quant.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/base/types.cuh"
#include "cuda/cache/duplicate_slots.cuh"
#include "cuda/cache/heuristics.h"
#include "cuda/cache/kv_writer.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

using Params = ReshapeAndCachePerTokenQuantParams;

struct TokenQuantWrite : CacheWrite {
  float* key_scales;
  float* value_scales;
  int64_t key_scales_block_stride;
  int64_t key_scales_head_stride;
  int64_t value_scales_block_stride;
  int64_t value_scales_head_stride;
  float* key_zeros;
  float* value_zeros;

  explicit TokenQuantWrite(const Params& p)
      : CacheWrite(p.write),
        key_scales(p.key_scales),
        value_scales(p.value_scales),
        key_scales_block_stride(p.key_scales_block_stride),
        key_scales_head_stride(p.key_scales_head_stride),
        value_scales_block_stride(p.value_scales_block_stride),
        value_scales_head_stride(p.value_scales_head_stride),
        key_zeros(p.key_zeros),
        value_zeros(p.value_zeros) {}
};

constexpr int kMaxTokens = 32;    // of a CTA
constexpr int kMaxThreads = 512;  // of a CTA
constexpr int kWidth = 16;        // values that a thread quantizes
template <typename Cache>
constexpr int kStored = kWidth / kValuesOf<Cache>;  // elements of the cache that they become

template <typename T, int kVectors>
__device__ __forceinline__ void upcast_all(const Elements16<T> (&vecs)[kVectors],
                                           float (&values)[kWidth]) {
  constexpr int kLoadWidth = kVecWidth<T>;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float loaded[kLoadWidth];
    upcast(bits_as<Vec16<T>>(vecs[i]), loaded);
#pragma unroll
    for (int j = 0; j < kLoadWidth; ++j) values[i * kLoadWidth + j] = loaded[j];
  }
}

// int8: quantizes a row, given the bits of its largest magnitude.
class RowScale {
 public:
  float scale;  // as stored

  __device__ __forceinline__ explicit RowScale(uint32_t largest_bits) {
    scale = __fdiv_rn(__uint_as_float(largest_bits), 127.0f);
    // A power of two. It scales values and divisor into the range in which quotient() can correct
    // its result.
    factor_ = scale < 0x1p-100f ? 0x1p100f : scale > 0x1p100f ? 0x1p-64f : 1.0f;
    divisor_ = scale > 0.0f ? scale * factor_ : 1.0f;
    inverse_ = __frcp_rn(divisor_);
    finite_ = scale < __int_as_float(0x7f800000);  // false for NaN, too
  }

  // round_to_nearest_even(x / scale) of 16 elements.
  template <typename T, int kVectors>
  __device__ __forceinline__ Elements16<int8_t> quantize(
      const Elements16<T> (&vecs)[kVectors]) const {
    float values[kWidth];
    upcast_all(vecs, values);
    if (factor_ != 1.0f) {
#pragma unroll
      for (float& value : values) value *= factor_;
    }
#pragma unroll
    for (float& value : values) value = quotient(value, divisor_, inverse_);
    // A denormal scale has few significant bits: quotients can leave int8's range.
    if (scale < 0x1p-126f) {
#pragma unroll
      for (float& value : values) value = fminf(fmaxf(value, -128.0f), 127.0f);
    }
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const uint32_t bytes = low_bytes4(values[i], values[i + 1], values[i + 2], values[i + 3]);
      words[i / 4] = finite_ ? bytes : 0;
    }
    Elements16<int8_t> result;
    memcpy(&result, words, sizeof(result));
    return result;
  }

  template <typename T>
  __device__ __forceinline__ int8_t quantize(T x) const {
    const float value = quotient(to_float(x) * factor_, divisor_, inverse_);
    return finite_ ? from_float<int8_t>(value) : 0;
  }

 private:
  float factor_, divisor_, inverse_;
  bool finite_;
};

// The smallest and the largest value, NaN if any is NaN.
struct Extent {
  float low = INFINITY, high = -INFINITY;

  __device__ __forceinline__ void add(const Extent& other) {
    low = min_or_nan(low, other.low);
    high = max_or_nan(high, other.high);
  }
  // Over groups of `lanes` neighbouring lanes, a power of two. All lanes of the warp call it.
  __device__ __forceinline__ Extent of_lanes(int lanes) const {
    Extent all = *this;
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      all.add({.low = __shfl_xor_sync(0xffffffffu, all.low, distance),
               .high = __shfl_xor_sync(0xffffffffu, all.high, distance)});
    }
    return all;
  }
};

// int4: quantizes a row, given its smallest and its largest value.
class RowRange {
 public:
  float scale, zero;  // as stored

  __device__ __forceinline__ explicit RowRange(const Extent& row) : low_(row.low) {
    const float range = __fsub_rn(row.high, row.low);
    const bool finite = range < INFINITY;  // false for NaN, too
    scale = finite ? __fdiv_rn(range, 15.0f) : NAN;
    zero = __fadd_rn(low_, __fmul_rn(8.0f, scale));
    varies_ = scale >= 0x1p-100f;
    if (finite && !varies_) {
      scale = 0.0f;
      zero = low_;
    }
    inverse_ = __frcp_rn(scale);
  }

  // Values i and i + 8 become byte i.
  template <typename T, int kVectors>
  __device__ __forceinline__ Elements<ScaledInt4, 8> quantize(
      const Elements16<T> (&vecs)[kVectors]) const {
    float values[kWidth];
    upcast_all(vecs, values);
#pragma unroll
    for (float& value : values) value = steps(value);
    const auto four = [&](int i) {
      return low_bytes4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    };
    return bits_as<Elements<ScaledInt4, 8>>(uint2{four(0) | four(8) << 4, four(4) | four(12) << 4});
  }

  template <typename T>
  __device__ __forceinline__ ScaledInt4 quantize(T first, T second) const {
    const uint32_t bytes = low_bytes4(steps(to_float(first)), steps(to_float(second)), 0.0f, 0.0f);
    return {static_cast<uint8_t>(bytes | bytes >> 4)};
  }

 private:
  // The number n before it is rounded: 0 .. 15.
  __device__ __forceinline__ float steps(float x) const {
    return varies_ ? fminf(__fmul_rn(__fsub_rn(x, low_), inverse_), 15.0f) : 8.0f;
  }

  float low_, inverse_;
  bool varies_;
};

template <typename T, int kVectors>
__device__ __forceinline__ Extent extent_of(const Elements16<T> (&vecs)[kVectors]) {
  float values[kWidth];
  upcast_all(vecs, values);
  Extent extent;
#pragma unroll
  for (float value : values) extent.add({.low = value, .high = value});
  return extent;
}

template <typename T, int kVectors>
__device__ __forceinline__ uint32_t largest_of(const Elements16<T> (&vecs)[kVectors]) {
  uint32_t largest = 0;
#pragma unroll
  for (const Elements16<T>& vec : vecs) {
    largest = max(largest, magnitude_bits(bits_as<Vec16<T>>(vec)));
  }
  return largest;
}

// How a row is quantized, given 16 values of each of `lanes` lanes.
template <typename Cache, typename T, int kVectors>
__device__ __forceinline__ auto row_quantizer(const Elements16<T> (&vecs)[kVectors], int lanes) {
  if constexpr (kValuesOf<Cache> == 2) {
    return RowRange(extent_of(vecs).of_lanes(lanes));
  } else {
    return RowScale(lanes_max(largest_of(vecs), lanes));
  }
}

// Thread (x, y) quantizes chunk x (16 values) of K and V. int4: 8 values of the first half of the
// row, and those of the second half that share their bytes. The row is token y of the CTA, KV head
// blockIdx.y. blockDim.x is a power of two, so the threads of a row are lanes of one warp.
// kTransposed (layout vllm): V goes through shared memory. Where the own slots are an aligned run
// of consecutive slots, one store takes 8 tokens of a value. Otherwise neighbouring threads store
// neighbouring values of one token; each store costs a sector in that layout. kUsual: blockDim is
// (8, 16), known to the compiler.
template <typename T, typename Cache, bool kTransposed, bool kUsual>
__global__ void __launch_bounds__(kMaxThreads, sizeof(T) == 4 ? 1 : 2)
    quantize_rows_kernel(TokenQuantWrite p) {
  launch_dependents();
  wait_for_primary_kernel();
  constexpr int kVectors = kWidth / kVecWidth<T>, kChunk = kStored<Cache>;
  constexpr bool kIsInt4 = kValuesOf<Cache> == 2;
  extern __shared__ __align__(16) char tile_bytes[];
  __shared__ int32_t own_slots[kMaxTokens];
  __shared__ SlotFilter filter;
  constexpr uint32_t kWarp = 0xffffffffu;

  const int lanes = kUsual ? 8 : blockDim.x, tokens = kUsual ? 16 : blockDim.y;
  const int first = blockIdx.x * tokens;  // relative to this launch
  const int head = blockIdx.y;
  const int chunk = threadIdx.x, row = threadIdx.y;
  const int thread = row * lanes + chunk, lane = thread % 32;
  const int threads = lanes * tokens;
  const bool has_chunk = chunk * kChunk < p.head_size;

  // Clamped instead of branching, so that all loads of the prologue are in flight together.
  Elements16<T> k[kVectors], v[kVectors];
  {
    const int token = min(first + row, p.num_tokens - 1);
    const int d = min(chunk * kChunk, p.head_size - kChunk);
    const auto* key = reinterpret_cast<const Elements16<T>*>(
        stepped(stepped(static_cast<const T*>(p.key) + d, token, p.key_token), head, p.key_head));
    const auto* value = reinterpret_cast<const Elements16<T>*>(p.value_at<T>(token, head, d));
    const int half = p.head_size / kVecWidth<T>;  // int4: in vectors
    const auto at = [&](int i) {
      return kIsInt4 && i >= kVectors / 2 ? i - kVectors / 2 + half : i;
    };
#pragma unroll
    for (int i = 0; i < kVectors; ++i) k[i] = key[at(i)];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i] = value[at(i)];
  }
  // `tokens` is a power of two. Every warp reads all own slots and decides alone.
  const int slot_lane = lane & (tokens - 1);
  const int32_t lane_slot = slot_of(p, first + slot_lane);
  const int from = first + tokens + thread;
  LaterSlots<sizeof(T) == 4 ? 4 : 8> later;
  later.load(p, from, threads);
  const int32_t start = __shfl_sync(kWarp, lane_slot, 0);
  const bool run = __all_sync(kWarp, start >= 0 && lane_slot == start + slot_lane);
  if (thread < tokens) own_slots[thread] = lane_slot;
  // A lane without a chunk of its own holds the last chunk again. That changes no maximum.
  const auto k_row = row_quantizer<Cache>(k, lanes), v_row = row_quantizer<Cache>(v, lanes);
  uint32_t duplicates = 0;
  const OwnRange range{.start = start, .count = static_cast<uint32_t>(tokens)};
  if (!run || __syncthreads_or(duplicates_later(p, from, threads, later, range) != 0)) {
    if (thread < 32) filter.fill(lane, lane < tokens ? lane_slot : -1);
    __syncthreads();
    later.load(p, from, threads);
    const OwnFiltered own{.filter = &filter, .list = {.slots = own_slots, .end = tokens}};
    duplicates = duplicates_in_warp(lane, lane < tokens ? lane_slot : -1) |
                 find_duplicates<kMaxTokens>(p, from, threads, later, own);
  }

  const int pitch = (lanes + 1) * kChunk;  // row pitch of the tile; padded against bank conflicts
  auto* tile = reinterpret_cast<Cache*>(tile_bytes);
  const int32_t slot = own_slots[row];
  if (slot >= 0 && (duplicates >> row & 1) == 0) {
    const Slot at = p.place(slot);
    if (chunk == 0) {
      const int64_t of_key =
          at.block * p.key_scales_block_stride + head * p.key_scales_head_stride + at.token;
      const int64_t of_value =
          at.block * p.value_scales_block_stride + head * p.value_scales_head_stride + at.token;
      p.key_scales[of_key] = k_row.scale;
      p.value_scales[of_value] = v_row.scale;
      if constexpr (kIsInt4) {
        p.key_zeros[of_key] = k_row.zero;
        p.value_zeros[of_value] = v_row.zero;
      }
    }
    if (has_chunk) {
      Cache* key = stepped(p.key_page<Cache>(at.block, head), at.token, p.to_key_token);
      if constexpr (kIsInt4) {
        key = stepped(key, chunk / 2, p.to_key_chunk) + chunk % 2 * kChunk;
      } else {
        key = stepped(key, chunk, p.to_key_chunk);
      }
      *reinterpret_cast<Elements<Cache, kChunk>*>(key) = k_row.quantize(k);
      Cache* value = tile + row * pitch + chunk * kChunk;
      if constexpr (!kTransposed) {
        value = stepped(p.value_page<Cache>(at.block, head), at.token, p.to_value_token) +
                chunk * kChunk;
      }
      *reinterpret_cast<Elements<Cache, kChunk>*>(value) = v_row.quantize(v);
    }
  }
  if constexpr (kTransposed) {
    __syncthreads();
    const auto values_of = [&](Slot at) { return p.value_page<Cache>(at.block, head) + at.token; };
    if (run && duplicates == 0 && tokens % 8 == 0 && p.block_size % tokens == 0 &&
        start % tokens == 0) {
      Cache* values = values_of(p.place(own_slots[0]));
      const int stores = tokens / 8;  // stores of one value index: 1, 2 or 4
      const int shift = stores == 1 ? 0 : stores == 2 ? 1 : 2;
#pragma unroll 1
      for (int i = thread; i < p.head_size << shift; i += threads) {
        const int d = i >> shift, token = (i - (d << shift)) * 8;
        struct alignas(8) Tokens {
          Cache data[8];
        } gathered;
#pragma unroll
        for (int j = 0; j < 8; ++j) gathered.data[j] = tile[(token + j) * pitch + d];
        *reinterpret_cast<Tokens*>(stepped(values, d, p.to_value_dim) + token) = gathered;
      }
      return;
    }
#pragma unroll 1
    for (int r = thread / 32; r < tokens; r += threads / 32) {
      const int32_t to_slot = own_slots[r];
      if (to_slot < 0 || (duplicates >> r & 1)) continue;
      Cache* to = values_of(p.place(to_slot));
      for (int d = lane; d < p.head_size; d += 32)
        *stepped(to, d, p.to_value_dim) = tile[r * pitch + d];
    }
  }
}

// One token a CTA, one row a warp, one element of the cache a lane: any layout, alignment and size.
template <typename T, typename Cache>
__global__ void __launch_bounds__(256) quantize_elements_kernel(Params p) {
  launch_dependents();
  wait_for_primary_kernel();
  const ReshapeAndCacheParams& w = p.write;
  const PagedKv& kv = w.kv;
  const int first = blockIdx.x;
  const int32_t slot = slot_of(w, first);
  const int from = first + 1 + threadIdx.x;
  LaterSlots<4> later;
  later.load(w, from, blockDim.x);
  const OwnRange own{.start = slot, .count = slot >= 0};
  if (find_duplicates<1>(w, from, blockDim.x, later, own) != 0 || slot < 0) return;
  const int64_t block = slot / kv.block_size, token = slot % kv.block_size;
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < 2 * kv.num_kv_heads; row += blockDim.x / 32) {
    const int64_t head = row / 2;
    const bool is_key = row % 2 == 0;
    const T* x = is_key ? static_cast<const T*>(w.key) + first * w.key_token_stride +
                              head * w.key_head_stride
                        : static_cast<const T*>(w.value) + first * w.value_token_stride +
                              head * w.value_head_stride;
    auto* to = static_cast<Cache*>(is_key ? kv.key : kv.value);
    const auto element = [&](int d) -> Cache& {
      return to[is_key ? kv.key_offset(block, head, token, d)
                       : kv.value_offset(block, head, token, d)];
    };
    const auto store_scale = [&](float scale, [[maybe_unused]] float zero) {
      const int64_t at =
          is_key ? block * p.key_scales_block_stride + head * p.key_scales_head_stride + token
                 : block * p.value_scales_block_stride + head * p.value_scales_head_stride + token;
      (is_key ? p.key_scales : p.value_scales)[at] = scale;
      if constexpr (kValuesOf<Cache> == 2) (is_key ? p.key_zeros : p.value_zeros)[at] = zero;
    };
    if constexpr (kValuesOf<Cache> == 2) {
      Extent extent;
      for (int d = lane; d < 2 * kv.head_size; d += 32) {
        extent.add({.low = to_float(x[d]), .high = to_float(x[d])});
      }
      const RowRange range(extent.of_lanes(32));
      if (lane == 0) store_scale(range.scale, range.zero);
#pragma unroll 1  // unrolled, it spills on sm_120
      for (int d = lane; d < kv.head_size; d += 32) {
        element(d) = range.quantize(x[d], x[kv.head_size + d]);
      }
    } else {
      uint32_t largest = 0;
      for (int d = lane; d < kv.head_size; d += 32) {
        largest = max(largest, magnitude_bits(Vec<float, 1>{__float_as_uint(to_float(x[d]))}));
      }
      const RowScale scale(lanes_max(largest, 32));
      for (int d = lane; d < kv.head_size; d += 32) element(d) = scale.quantize(x[d]);
      if (lane == 0) store_scale(scale.scale, 0.0f);
    }
  }
}

// Whether every access of quantize_rows_kernel is aligned and its grid can be launched.
bool rows_aligned(const ReshapeAndCacheParams& w) {
  const PagedKv& kv = w.kv;
  const int64_t value_token = kv.layout == KvLayout::kVllm ? 0 : kv.value_token_stride;
  return kv.head_values() <= 32 * kWidth && CacheWrite::fits(w) && inputs_aligned(w) &&
         aligned16(kv.key) && aligned16(kv.value) &&
         multiples(kWidth,
                   {kv.head_size, kv.key_block_stride, kv.key_head_stride, kv.key_token_stride,
                    kv.value_block_stride, kv.value_head_stride, value_token}) &&
         kv.num_kv_heads <= 65535;
}

template <typename Cache>
void launch_once(const Params& p, Stream stream) {
  const ReshapeAndCacheParams& w = p.write;
  const PagedKv& kv = w.kv;
  dispatch_float(w.dtype, [&](auto model) {
    using T = decltype(model);
    if (!rows_aligned(w)) {
      launch_kernel("reshape_and_cache_per_token_quant", quantize_elements_kernel<T, Cache>,
                    dim3(static_cast<unsigned>(w.num_tokens)), dim3(256), 0, stream, p);
      return;
    }
    const int lanes =
        static_cast<int>(std::bit_ceil(static_cast<unsigned>(kv.head_values() / kWidth)));
    const bool transposed = kv.layout == KvLayout::kVllm;
    // Whole warps. For many tokens a CTA takes 16. In layout vllm it takes as many as divide a
    // page, so that it finds aligned runs of slots.
    const int warp_tokens = 32 / lanes;
    int tokens = warp_tokens;
    if (w.num_tokens > kFewQuantTokens) {
      const int run = !transposed || kv.block_size % 16 == 0 ? 16 : kv.block_size % 8 == 0 ? 8 : 1;
      tokens = std::max(run, warp_tokens);
    }
    const bool usual = lanes == 8 && tokens == 16;
    const auto kernel = transposed ? usual ? quantize_rows_kernel<T, Cache, true, true>
                                           : quantize_rows_kernel<T, Cache, true, false>
                        : usual    ? quantize_rows_kernel<T, Cache, false, true>
                                   : quantize_rows_kernel<T, Cache, false, false>;
    const int64_t tile_bytes = transposed ? int64_t{tokens} * (lanes + 1) * kStored<Cache> : 0;
    const dim3 grid(static_cast<unsigned>((w.num_tokens + tokens - 1) / tokens), kv.num_kv_heads);
    launch_kernel("reshape_and_cache_per_token_quant", kernel, grid, dim3(lanes, tokens),
                  tile_bytes, stream, TokenQuantWrite(p));
  });
}

}  // namespace

void launch(const Params& params, Stream stream) {
  Params slice = params;
  for (int64_t done = 0; done < params.write.num_tokens; done += kTokensPerLaunch) {
    slice.write = slice_of(params.write, done);
    params.write.kv.dtype == DType::kInt4x2 ? launch_once<ScaledInt4>(slice, stream)
                                            : launch_once<int8_t>(slice, stream);
  }
}

}  // namespace vllm_kernels::cuda
