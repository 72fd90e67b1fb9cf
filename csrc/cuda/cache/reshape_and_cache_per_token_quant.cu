// reshape_and_cache_per_token_quant: writes key and value into int8 caches of any layout. Each
// (token, KV head) row gets its own scale = max |x| / 127.
//
//   quantize_rows_kernel       grid (tokens / blockDim.y, KV head), block (16-byte chunks of the
//                              cache in a head, tokens); 16-byte accesses
//   quantize_elements_kernel   grid: tokens; a row a warp; any layout, alignment and size
//
// Nothing is read before the PDL wait. ops/reshape_and_cache_per_token_quant.h has the contract,
// duplicate_slots.cuh the rule for duplicate slots.
#include "ops/reshape_and_cache_per_token_quant.h"

#include <algorithm>
#include <bit>

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/quant.cuh"
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

  explicit TokenQuantWrite(const Params& p)
      : CacheWrite(p.write),
        key_scales(p.key_scales),
        value_scales(p.value_scales),
        key_scales_block_stride(p.key_scales_block_stride),
        key_scales_head_stride(p.key_scales_head_stride),
        value_scales_block_stride(p.value_scales_block_stride),
        value_scales_head_stride(p.value_scales_head_stride) {}
};

constexpr int kMaxTokens = 32;    // of a CTA
constexpr int kMaxThreads = 512;  // of a CTA
constexpr int kWidth = kVecWidth<int8_t>;

// Quantizes a row, given the bits of its largest magnitude.
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
    constexpr int kLoadWidth = kVecWidth<T>;
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float loaded[kLoadWidth];
      upcast(bits_as<Vec16<T>>(vecs[i]), loaded);
#pragma unroll
      for (int j = 0; j < kLoadWidth; ++j) values[i * kLoadWidth + j] = loaded[j];
    }
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

template <typename T, int kVectors>
__device__ __forceinline__ uint32_t largest_of(const Elements16<T> (&vecs)[kVectors]) {
  uint32_t largest = 0;
#pragma unroll
  for (const Elements16<T>& vec : vecs) {
    largest = max(largest, magnitude_bits(bits_as<Vec16<T>>(vec)));
  }
  return largest;
}

// Thread (x, y) quantizes chunk x (16 elements) of K and V. The row is token y of the CTA, KV head
// blockIdx.y. blockDim.x is a power of two, so the threads of a row are lanes of one warp.
// kTransposed (layout vllm): V goes through shared memory. Where the own slots are an aligned run
// of consecutive slots, one store takes 8 tokens of a value. Otherwise neighbouring threads store
// neighbouring values of one token; each store costs a sector in that layout. kUsual: blockDim is
// (8, 16), known to the compiler.
template <typename T, bool kTransposed, bool kUsual>
__global__ void __launch_bounds__(kMaxThreads, sizeof(T) == 4 ? 1 : 2)
    quantize_rows_kernel(TokenQuantWrite p) {
  launch_dependents();
  wait_for_primary_kernel();
  constexpr int kVectors = kWidth / kVecWidth<T>;
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
  const bool has_chunk = chunk * kWidth < p.head_size;

  // Clamped instead of branching, so that all loads of the prologue are in flight together.
  Elements16<T> k[kVectors], v[kVectors];
  {
    const int token = min(first + row, p.num_tokens - 1);
    const int d = min(chunk * kWidth, p.head_size - kWidth);
    const auto* key = reinterpret_cast<const Elements16<T>*>(
        stepped(stepped(static_cast<const T*>(p.key) + d, token, p.key_token), head, p.key_head));
    const auto* value = reinterpret_cast<const Elements16<T>*>(p.value_at<T>(token, head, d));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) k[i] = key[i];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i] = value[i];
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
  const RowScale k_scale(lanes_max(largest_of(k), lanes));
  const RowScale v_scale(lanes_max(largest_of(v), lanes));
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

  const int pitch = (lanes + 1) * kWidth;  // row pitch of the tile; padded against bank conflicts
  auto* tile = reinterpret_cast<int8_t*>(tile_bytes);
  const int32_t slot = own_slots[row];
  if (slot >= 0 && (duplicates >> row & 1) == 0) {
    const Slot at = p.place(slot);
    if (chunk == 0) {
      p.key_scales[at.block * p.key_scales_block_stride + head * p.key_scales_head_stride +
                   at.token] = k_scale.scale;
      p.value_scales[at.block * p.value_scales_block_stride + head * p.value_scales_head_stride +
                     at.token] = v_scale.scale;
    }
    if (has_chunk) {
      int8_t* key = stepped(p.key_page<int8_t>(at.block, head), at.token, p.to_key_token);
      key = stepped(key, chunk, p.to_key_chunk);
      *reinterpret_cast<Elements16<int8_t>*>(key) = k_scale.quantize(k);
      int8_t* value = tile + row * pitch + chunk * kWidth;
      if constexpr (!kTransposed) {
        value = stepped(p.value_page<int8_t>(at.block, head), at.token, p.to_value_token) +
                chunk * kWidth;
      }
      *reinterpret_cast<Elements16<int8_t>*>(value) = v_scale.quantize(v);
    }
  }
  if constexpr (kTransposed) {
    __syncthreads();
    const auto values_of = [&](Slot at) { return p.value_page<int8_t>(at.block, head) + at.token; };
    if (run && duplicates == 0 && tokens % 8 == 0 && p.block_size % tokens == 0 &&
        start % tokens == 0) {
      int8_t* values = values_of(p.place(own_slots[0]));
      const int stores = tokens / 8;  // stores of one value index: 1, 2 or 4
      const int shift = stores == 1 ? 0 : stores == 2 ? 1 : 2;
#pragma unroll 1
      for (int i = thread; i < p.head_size << shift; i += threads) {
        const int d = i >> shift, token = (i - (d << shift)) * 8;
        struct alignas(8) Tokens {
          int8_t data[8];
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
      int8_t* to = values_of(p.place(to_slot));
      for (int d = lane; d < p.head_size; d += 32)
        *stepped(to, d, p.to_value_dim) = tile[r * pitch + d];
    }
  }
}

// One token a CTA, one row a warp, one element a lane: any layout, alignment and size.
template <typename T>
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
    uint32_t largest = 0;
    for (int d = lane; d < kv.head_size; d += 32) {
      largest = max(largest, magnitude_bits(Vec<float, 1>{__float_as_uint(to_float(x[d]))}));
    }
    const RowScale scale(lanes_max(largest, 32));
    int8_t* to = static_cast<int8_t*>(is_key ? kv.key : kv.value);
    for (int d = lane; d < kv.head_size; d += 32) {
      to[is_key ? kv.key_offset(block, head, token, d) : kv.value_offset(block, head, token, d)] =
          scale.quantize(x[d]);
    }
    if (lane == 0) {
      float* scales = is_key ? p.key_scales + block * p.key_scales_block_stride +
                                   head * p.key_scales_head_stride
                             : p.value_scales + block * p.value_scales_block_stride +
                                   head * p.value_scales_head_stride;
      scales[token] = scale.scale;
    }
  }
}

// Whether every 16-byte access of quantize_rows_kernel is aligned and its grid can be launched.
bool rows_aligned(const ReshapeAndCacheParams& w) {
  const PagedKv& kv = w.kv;
  const int64_t value_token = kv.layout == KvLayout::kVllm ? 0 : kv.value_token_stride;
  return kv.head_size <= 32 * kWidth && CacheWrite::fits(w) && inputs_aligned(w) &&
         aligned16(kv.key) && aligned16(kv.value) &&
         multiples(kWidth,
                   {kv.head_size, kv.key_block_stride, kv.key_head_stride, kv.key_token_stride,
                    kv.value_block_stride, kv.value_head_stride, value_token}) &&
         kv.num_kv_heads <= 65535;
}

void launch_once(const Params& p, Stream stream) {
  const ReshapeAndCacheParams& w = p.write;
  const PagedKv& kv = w.kv;
  dispatch_float(w.dtype, [&](auto model) {
    using T = decltype(model);
    if (!rows_aligned(w)) {
      launch_kernel("reshape_and_cache_per_token_quant", quantize_elements_kernel<T>,
                    dim3(static_cast<unsigned>(w.num_tokens)), dim3(256), 0, stream, p);
      return;
    }
    const int lanes = static_cast<int>(std::bit_ceil(static_cast<unsigned>(kv.head_size / kWidth)));
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
    const auto kernel = transposed ? usual ? quantize_rows_kernel<T, true, true>
                                           : quantize_rows_kernel<T, true, false>
                        : usual    ? quantize_rows_kernel<T, false, true>
                                   : quantize_rows_kernel<T, false, false>;
    const int64_t tile_bytes = transposed ? int64_t{tokens} * (lanes + 1) * kWidth : 0;
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
    launch_once(slice, stream);
  }
}

}  // namespace vllm_kernels::cuda
