// scaled_fp8_quant and scaled_int8_quant (ops/scaled_quant.h): out [rows, width] in 8 bits.
//   scale of the tensor, given    a CTA takes one chunk of one row
//   scale of the tensor, computed two small kernels before that one: zero, then maximum
//   scale per row                 a CTA takes one row, or several rows of at most 32 Vecs
// There are no early reads.
#include "ops/scaled_quant.h"

#include "cuda/activation/activate.cuh"
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/quant.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

// saturate(round(value * inverse) + zero_point)
template <int kWidth>
__device__ __forceinline__ Vec<int8_t, kWidth> shifted(const float (&values)[kWidth], float inverse,
                                                       int32_t zero_point) {
  int32_t integers[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    asm("add.sat.s32 %0, %1, %2;"
        : "=r"(integers[i])
        : "r"(__float2int_rn(values[i] * inverse)), "r"(zero_point));
  }
  Vec<int8_t, kWidth> vec;
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) {
    const int32_t* four = integers + 4 * i;
    vec.words[i] = saturate4_int8(four[0], four[1], four[2], four[3]);
  }
  return vec;
}

// --- the scale of the tensor -------------------------------------------------------------------

struct E4M3OfTensor {
  using Out = Fp8E4M3;
  MultiplyByInverse<Fp8E4M3> quantizer;

  __device__ __forceinline__ explicit E4M3OfTensor(const ScaledQuantParams& p)
      : quantizer(MultiplyByInverse<Fp8E4M3>::of(*p.quant.scale)) {}
  template <int kWidth>
  __device__ __forceinline__ Vec<Out, kWidth> quantized(float (&values)[kWidth]) const {
    return quantizer.quantized(values);
  }
};

struct Int8OfTensor {
  using Out = int8_t;
  Divisor divisor;

  __device__ __forceinline__ explicit Int8OfTensor(const ScaledQuantParams& p)
      : divisor(Divisor::of(*p.quant.scale)) {}
  template <int kWidth>
  __device__ __forceinline__ Vec<Out, kWidth> quantized(float (&values)[kWidth]) const {
#pragma unroll
    for (float& value : values) value = divisor.divide(value);
    return quantize8<Out>(values);
  }
};

struct ShiftedOfTensor {
  using Out = int8_t;
  float inverse;
  int32_t zero_point;

  __device__ __forceinline__ explicit ShiftedOfTensor(const ScaledQuantParams& p) {
    inverse = 1.0f / *p.quant.scale;
    zero_point = *p.zero_point;
  }
  template <int kWidth>
  __device__ __forceinline__ Vec<Out, kWidth> quantized(float (&values)[kWidth]) const {
    return shifted(values, inverse, zero_point);
  }
};

// The chunk of a CTA: kVecs * blockDim.x Vecs of one row. `chunks` divides by `per_row`.
struct Chunks {
  RowOffsets input, out;
  FastDivisor chunks;
  int per_row;

  Chunks(const ScaledQuantParams& p, int64_t per_row)
      : input(p.input_rows), out(p.out_rows), chunks(per_row), per_row(static_cast<int>(per_row)) {}
  __device__ __forceinline__ uint32_t row() const { return chunks.divide(blockIdx.x); }
  template <int kVecs>
  __device__ __forceinline__ int64_t first(uint32_t row) const {
    return int64_t{blockIdx.x - row * per_row} * (kVecs * blockDim.x) + threadIdx.x;
  }
};

// Vecs first, first + step, ... of a row; those past its end are zero.
template <bool kAligned, typename T, int kVecs>
__device__ __forceinline__ void load_vecs(Vec16<T> (&x)[kVecs], const T* row, int64_t first,
                                          int64_t step, int64_t width) {
  constexpr int kWidth = kVecWidth<T>;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int64_t i = first + v * step;
    x[v] = i * kWidth < width ? load_vec<kAligned, kWidth>(row, i, width) : Vec16<T>{};
  }
}

template <bool kAligned, typename T, int kVecs, typename Quantizer>
__device__ __forceinline__ void store_vecs(typename Quantizer::Out* row, const Vec16<T> (&x)[kVecs],
                                           const Quantizer& quantizer, int64_t first, int64_t step,
                                           int64_t width) {
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int64_t i = first + v * step;
    if (i * kVecWidth<T> >= width) continue;
    float values[kVecWidth<T>];
    upcast(x[v], values);
    store_vec<kAligned>(row, i, width, quantizer.quantized(values));
  }
}

template <typename T, typename Quantizer, bool kAligned, int kVecs>
__global__ void __launch_bounds__(256) quant_tensor_kernel(ScaledQuantParams p, Chunks chunks) {
  launch_dependents();
  wait_for_primary_kernel();
  const uint32_t row = chunks.row();
  const int64_t first = chunks.first<kVecs>(row);
  Vec16<T> x[kVecs];
  load_vecs<kAligned>(x, static_cast<const T*>(p.input) + chunks.input.of(row), first, blockDim.x,
                      p.width);
  auto* out = static_cast<typename Quantizer::Out*>(p.out) + chunks.out.of(row);
  store_vecs<kAligned>(out, x, Quantizer(p), first, blockDim.x, p.width);
}

__global__ void zero_scale_kernel(float* scale) {
  launch_dependents();
  wait_for_primary_kernel();
  *scale = 0.0f;
}

// Raises *tensor_scale to the scale of each chunk. Scales grow with the magnitude, and bits of
// positive floats compare like their values.
template <typename T, bool kAligned, int kVecs>
__global__ void __launch_bounds__(256) tensor_scale_kernel(ScaledQuantParams p, Chunks chunks) {
  launch_dependents();
  wait_for_primary_kernel();
  const uint32_t row = chunks.row();
  Vec16<T> x[kVecs];
  load_vecs<kAligned>(x, static_cast<const T*>(p.input) + chunks.input.of(row),
                      chunks.first<kVecs>(row), blockDim.x, p.width);
  uint32_t magnitude = 0;
#pragma unroll
  for (const Vec16<T>& vec : x) magnitude = max(magnitude, magnitude_bits(vec));
  magnitude = block_max(magnitude);
  if (threadIdx.x != 0) return;
  const float of_chunk = __uint_as_float(magnitude);
  const auto scale =
      __float_as_uint(ComputedScale<Fp8E4M3>::of(of_chunk, INFINITY).scale) & 0x7fffffffu;
  auto* largest = reinterpret_cast<uint32_t*>(p.tensor_scale);
  // Most chunks need no atomic: they would all wait for one address.
  if (scale > *const_cast<volatile uint32_t*>(largest)) atomicMax(largest, scale);
}

// Vecs of a thread: several if every SM still gets eight CTAs.
constexpr int kVecsOfMany = 4;

// Calls body(Constant<kVecs>{}, Constant<kAligned>{}).
template <typename T, typename Body>
void with_chunks(const ScaledQuantParams& p, bool aligned, Body&& body) {
  const int64_t vecs = ceil_div(p.width, kVecWidth<T>) * p.input_rows.count;
  if (!aligned) return body(Constant<1>{}, Constant<0>{});
  if (vecs >= int64_t{8 * 256 * kVecsOfMany} * current_device_model().num_sms) {
    return body(Constant<kVecsOfMany>{}, Constant<1>{});
  }
  body(Constant<1>{}, Constant<1>{});
}

template <typename T, int kVecs>
void launch_chunks(const ScaledQuantParams& p, void (*kernel)(ScaledQuantParams, Chunks),
                   Stream stream) {
  const RowChunks chunks(p.input_rows.count, ceil_div(ceil_div(p.width, kVecWidth<T>), kVecs));
  launch_kernel(p.op, kernel, grid_size(p.op, p.input_rows.count * chunks.per_row), chunks.threads,
                0, stream, p, Chunks(p, chunks.per_row));
}

template <typename T, typename Quantizer>
void launch_tensor(const ScaledQuantParams& p, bool aligned, Stream stream) {
  with_chunks<T>(p, aligned, [&](auto vecs, auto is_aligned) {
    launch_chunks<T, vecs>(p, quant_tensor_kernel<T, Quantizer, is_aligned, vecs>, stream);
  });
}

template <typename T>
void launch_computed_tensor(const ScaledQuantParams& p, bool aligned, Stream stream) {
  launch_kernel(p.op, zero_scale_kernel, 1, 1, 0, stream, p.tensor_scale);
  with_chunks<T>(p, aligned, [&](auto vecs, auto is_aligned) {
    launch_chunks<T, vecs>(p, tensor_scale_kernel<T, is_aligned, vecs>, stream);
  });
  launch_tensor<T, E4M3OfTensor>(p, aligned, stream);
}

// --- one scale per row -------------------------------------------------------------------------

// Integers that compare like the floats, but for NaNs.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// What a scale of a row depends on. `maxima` are combined over the threads of the row.
template <bool kShifted>
struct RowMaxima {
  static constexpr int kCount = 1;
  uint32_t maxima[kCount] = {};  // the magnitude, as bits

  template <typename T, int kWidth>
  __device__ __forceinline__ void add(const Vec<T, kWidth>& vec, int64_t /*left*/) {
    maxima[0] = max(maxima[0], magnitude_bits(vec));
  }
  __device__ __forceinline__ void finish() {}
  __device__ __forceinline__ float magnitude() const { return __uint_as_float(maxima[0]); }
};

template <>
struct RowMaxima<true> {
  static constexpr int kCount = 3;
  uint32_t maxima[kCount] = {};  // also: high, and the negative of low, as ordered integers
  float low = INFINITY, high = -INFINITY;

  // The first `left` elements.
  template <typename T, int kWidth>
  __device__ __forceinline__ void add(const Vec<T, kWidth>& vec, int64_t left) {
    maxima[0] = max(maxima[0], magnitude_bits(vec));
    float values[kWidth];
    upcast(vec, values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i >= left) continue;
      low = fminf(low, values[i]);
      high = fmaxf(high, values[i]);
    }
  }
  __device__ __forceinline__ void finish() {
    maxima[1] = ordered(high);
    maxima[2] = ordered(-low);
  }
  __device__ __forceinline__ Int8Scale scale() const {
    return int8_scale(-from_ordered(maxima[2]), from_ordered(maxima[1]),
                      __uint_as_float(maxima[0]));
  }
};

struct E4M3OfRow {
  using Out = Fp8E4M3;
  using Maxima = RowMaxima<false>;
  ComputedScale<Fp8E4M3> computed;

  __device__ __forceinline__ E4M3OfRow(const Maxima& of, const ScaledQuantParams& p)
      : computed(ComputedScale<Fp8E4M3>::of(
            of.magnitude(), p.quant.upper_bound == nullptr ? INFINITY : *p.quant.upper_bound)) {}
  __device__ __forceinline__ void store(const ScaledQuantParams& p, uint32_t row) const {
    p.quant.scales[row] = computed.scale;
  }
  template <int kWidth>
  __device__ __forceinline__ Vec<Out, kWidth> quantized(float (&values)[kWidth]) const {
    return computed.quantizer.quantized(values);
  }
};

template <bool kShifted>
struct Int8OfRow {
  using Out = int8_t;
  using Maxima = RowMaxima<kShifted>;
  Int8Scale computed;

  __device__ __forceinline__ Int8OfRow(const Maxima& of, const ScaledQuantParams&) {
    if constexpr (kShifted) {
      computed = of.scale();
    } else {
      computed = int8_scale(of.magnitude());
    }
  }
  __device__ __forceinline__ void store(const ScaledQuantParams& p, uint32_t row) const {
    p.quant.scales[row] = computed.scale;
    if constexpr (kShifted) p.zero_points[row] = computed.zero_point;
  }
  template <int kWidth>
  __device__ __forceinline__ Vec<Out, kWidth> quantized(float (&values)[kWidth]) const {
    if constexpr (kShifted) return shifted(values, computed.inverse, computed.zero_point);
    return MultiplyByInverse<Out>{computed.inverse}.quantized(values);
  }
};

// Returns maxima over the blockDim.x threads of a row to all of them: up to 32 lanes of a warp (a
// power of two), or the whole CTA. A kernel may call it only once.
template <int kCount>
__device__ __forceinline__ void row_max(uint32_t (&values)[kCount]) {
  __shared__ uint32_t partial[kCount][kWarpSize];
  if (blockDim.x <= kWarpSize) {
#pragma unroll
    for (uint32_t& value : values) value = lanes_max(value, blockDim.x);
    return;
  }
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = __reduce_max_sync(0xffffffffu, values[i]);
    if (lane == 0) partial[i][warp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t value = lane < blockDim.x / kWarpSize ? partial[i][lane] : 0;
    values[i] = __reduce_max_sync(0xffffffffu, value);
  }
}

struct QuantRows {
  RowOffsets input, out;
  explicit QuantRows(const ScaledQuantParams& p) : input(p.input_rows), out(p.out_rows) {}
};

// kOneTile: the row is read once, into registers. A longer row is read twice.
template <typename T, typename Quantizer, bool kAligned, int kVecs, bool kOneTile>
__global__ void __launch_bounds__(1024) quant_rows_kernel(ScaledQuantParams p, QuantRows rows) {
  launch_dependents();
  wait_for_primary_kernel();
  const uint32_t index = blockIdx.x * blockDim.y + threadIdx.y;
  const bool inside = index < p.input_rows.count;  // false past the last row, in the last CTA
  const uint32_t row = inside ? index : 0;
  const int64_t width = inside ? p.width : 0;
  const int64_t tile = kVecs * blockDim.x;
  const T* input = static_cast<const T*>(p.input) + rows.input.of(row);

  Vec16<T> x[kVecs];
  typename Quantizer::Maxima maxima;
  for (int64_t first = threadIdx.x; first * kVecWidth<T> < width; first += tile) {
    load_vecs<kAligned>(x, input, first, blockDim.x, width);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int64_t left = width - (first + v * blockDim.x) * kVecWidth<T>;
      if (left > 0) maxima.add(x[v], kAligned ? kVecWidth<T> : left);
    }
    if constexpr (kOneTile) break;
  }
  maxima.finish();
  row_max(maxima.maxima);
  const Quantizer quantizer(maxima, p);
  if (inside && threadIdx.x == 0) quantizer.store(p, row);
  auto* out = static_cast<typename Quantizer::Out*>(p.out) + rows.out.of(row);
  for (int64_t first = threadIdx.x; first * kVecWidth<T> < width; first += tile) {
    if constexpr (!kOneTile) load_vecs<kAligned>(x, input, first, blockDim.x, width);
    store_vecs<kAligned>(out, x, quantizer, first, blockDim.x, width);
    if constexpr (kOneTile) break;
  }
}

template <typename T, typename Quantizer>
void launch_rows(const ScaledQuantParams& p, bool aligned, Stream stream) {
  const int64_t rows = grid_size(p.op, p.input_rows.count);
  const int64_t vecs = ceil_div(p.width, kVecWidth<T>);
  unsigned threads = 1, rows_per_block = 1;
  if (vecs <= kWarpSize) {  // several rows per CTA
    while (threads < vecs) threads *= 2;
    rows_per_block = 256 / threads;
  } else {  // few rows: one Vec per thread; many rows: four
    const bool few = rows < int64_t{4} * current_device_model().num_sms;
    const int64_t wanted = few ? vecs : ceil_div(vecs, kVecsOfMany);
    threads = static_cast<unsigned>(std::min<int64_t>(ceil_div(wanted, 32) * 32, 1024));
  }
  launch_kernel(p.op,
                !aligned          ? quant_rows_kernel<T, Quantizer, false, 1, false>
                : vecs <= threads ? quant_rows_kernel<T, Quantizer, true, 1, true>
                : vecs <= kVecsOfMany * threads
                    ? quant_rows_kernel<T, Quantizer, true, kVecsOfMany, true>
                    : quant_rows_kernel<T, Quantizer, true, kVecsOfMany, false>,
                static_cast<unsigned>(ceil_div(rows, rows_per_block)),
                dim3(threads, rows_per_block), 0, stream, p, QuantRows(p));
}

}  // namespace

void launch(const ScaledQuantParams& p, Stream stream) {
  const bool is_int8 = p.quant.dtype == DType::kInt8;
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kWidth = kVecWidth<T>;
    const bool aligned = p.width % kWidth == 0 && rows_aligned16(p.input, p.input_rows, p.dtype) &&
                         rows_aligned(p.out, p.out_rows, 1, kWidth);
    if (p.quant.scale_of == ScaleOf::kTensor) {
      if (p.tensor_scale != nullptr) return launch_computed_tensor<T>(p, aligned, stream);
      if (!is_int8) return launch_tensor<T, E4M3OfTensor>(p, aligned, stream);
      if (p.zero_point == nullptr) return launch_tensor<T, Int8OfTensor>(p, aligned, stream);
      return launch_tensor<T, ShiftedOfTensor>(p, aligned, stream);
    }
    if (!is_int8) return launch_rows<T, E4M3OfRow>(p, aligned, stream);
    if (p.zero_points == nullptr) return launch_rows<T, Int8OfRow<false>>(p, aligned, stream);
    launch_rows<T, Int8OfRow<true>>(p, aligned, stream);
  });
}

}  // namespace vllm_kernels::cuda
