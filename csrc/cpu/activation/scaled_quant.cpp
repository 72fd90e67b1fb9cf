// scaled_fp8_quant and scaled_int8_quant (ops/scaled_quant.h): out [rows, width] in 8 bits. With
// one scale for the tensor a task is a range of chunks, with one per row it is a range of rows.
// The scale of the tensor takes two launches if it is computed.
#include "ops/scaled_quant.h"

#include "cpu/activation/activation_rows.h"
#include "cpu/base/quant.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// round(value * inverse) + zero_point, saturated to int8.
struct Shift {
  Vec inverse, zero_point;
  Shift(float inverse, int32_t zero_point)
      : inverse(splat(inverse)), zero_point(splat(static_cast<float>(zero_point))) {}
  Vec operator()(Vec value) const {
    const Vec product = value * inverse;
    const Vec number = select(product == product, product, Vec{});
    const Vec low = splat(-128.0f) - zero_point, high = splat(127.0f) - zero_point;
    const Vec magic = splat(0x1.8p23f);  // adding it rounds to an integer
    return (maximum(minimum(number, high), low) + magic) - magic + zero_point;
  }
};

struct Multiply {
  Vec factor;
  explicit Multiply(float factor) : factor(splat(factor)) {}
  Vec operator()(Vec value) const { return value * factor; }
};

template <typename Q, typename T, typename Quantizer>
void store_range(void* out, const T* input, const Quantizer& quantizer, int64_t n) {
  Q* to = static_cast<Q*>(out);
  for_each_vector(0, n, [&](int64_t i, auto count) {
    store(to + i, quantizer(load(input + i, count)), count);
  });
}

template <typename T>
float magnitude_of(const T* input, int64_t n) {
  return largest_magnitude(0, n, [&](int64_t i, auto count) { return load(input + i, count); });
}

float e4m3_scale(float magnitude) {
  return at_least(magnitude / largest_of(DType::kFp8E4M3), min_scale_of(DType::kFp8E4M3));
}

// --- the scale of the tensor

// Chunks of the tensor; a split is a range of them.
int64_t num_chunks(const ScaledQuantParams& p) {
  return p.input_rows.count * ceil_div(p.width, kChunk);
}

Loop magnitudes_loop(const TensorMagnitudesParams&) {
  return {.count = kMagnitudeSplits};
}

void run_magnitudes(const TensorMagnitudesParams& params, int64_t begin, int64_t end) {
  const ScaledQuantParams& p = params.quant;
  const int64_t chunks = num_chunks(p);
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t split = begin; split < end; ++split) {
      uint32_t largest = 0;
      const auto add = [&](int64_t row, int64_t first, int64_t n) {
        const T* input = static_cast<const T*>(p.input) + p.input_rows.offset(row) + first;
        const float magnitude = magnitude_of(input, n);
        uint32_t bits;
        std::memcpy(&bits, &magnitude, sizeof(bits));
        largest = bits > largest ? bits : largest;
      };
      for_each_chunk(p.width, chunks * split / kMagnitudeSplits,
                     chunks * (split + 1) / kMagnitudeSplits, add);
      params.magnitudes[split] = largest;
    }
  });
}

float tensor_scale(const ScaledQuantParams& p) {
  if (p.tensor_scale == nullptr) return *p.quant.scale;
  uint32_t largest = 0;
  for (int split = 0; split < kMagnitudeSplits; ++split) {
    largest = p.magnitudes[split] > largest ? p.magnitudes[split] : largest;
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof(magnitude));
  return e4m3_scale(magnitude);
}

template <typename T>
void quant_chunk(const ScaledQuantParams& p, char* out, const T* input, float scale, int64_t n) {
  if (p.quant.dtype != DType::kInt8) {
    store_range<Fp8E4M3>(out, input, MultiplyByInverse(scale), n);
  } else if (p.zero_point == nullptr) {
    store_range<Int8>(out, input, DivideByScale(scale), n);
  } else {
    store_range<Int8>(out, input, Shift(1.0f / scale, *p.zero_point), n);
  }
}

// --- one scale per row

// Without NaNs. A row of NaNs has low > high.
template <typename T>
Int8Scale shifted_scale(const T* input, int64_t n, float magnitude) {
  Vec low = splat(__builtin_inff()), high = -low;
  const auto add = [&](Vec value) {
    low = minimum(value, low);
    high = maximum(value, high);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(load(input + i));
  for (; i < n; ++i) add(splat(load(input + i, 1)[0]));
  return int8_scale(-largest(-low), largest(high), magnitude);
}

template <typename T>
void quant_row(const ScaledQuantParams& p, char* out, const T* input, int64_t row) {
  const QuantParams& q = p.quant;
  const float magnitude = magnitude_of(input, p.width);
  if (q.dtype != DType::kInt8) {
    const float bound = q.upper_bound == nullptr ? __builtin_inff() : *q.upper_bound;
    q.scales[row] = e4m3_scale(at_most(magnitude, bound));
    return store_range<Fp8E4M3>(out, input, DivideByScale(q.scales[row]), p.width);
  }
  if (p.zero_points == nullptr) {
    const Int8Scale scale = int8_scale(magnitude);
    q.scales[row] = scale.scale;
    return store_range<Int8>(out, input, Multiply(scale.inverse), p.width);
  }
  const Int8Scale scale = shifted_scale(input, p.width, magnitude);
  q.scales[row] = scale.scale;
  p.zero_points[row] = scale.zero_point;
  store_range<Int8>(out, input, Shift(scale.inverse, scale.zero_point), p.width);
}

Loop loop_of(const ScaledQuantParams& p) {
  const int64_t rows = p.input_rows.count;
  if (p.quant.scale_of == ScaleOf::kTensor) return chunk_loop(rows, p.width, p.dtype);
  return {.count = rows, .per_task = rows_per_task(3 * p.width * size_of(p.dtype))};
}

void run(const ScaledQuantParams& p, int64_t begin, int64_t end) {
  char* out = static_cast<char*>(p.out);
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* input = static_cast<const T*>(p.input);
    if (p.quant.scale_of == ScaleOf::kRow) {
      for (int64_t row = begin; row < end; ++row) {
        quant_row(p, out + p.out_rows.offset(row), input + p.input_rows.offset(row), row);
      }
      return;
    }
    const float scale = tensor_scale(p);
    if (begin == 0 && p.tensor_scale != nullptr) *p.tensor_scale = scale;
    for_each_chunk(p.width, begin, end, [&](int64_t row, int64_t first, int64_t n) {
      quant_chunk(p, out + p.out_rows.offset(row) + first, input + p.input_rows.offset(row) + first,
                  scale, n);
    });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(ScaledQuantParams, loop_of, run)
VLLM_KERNELS_CPU_KERNEL(TensorMagnitudesParams, magnitudes_loop, run_magnitudes)

}  // namespace vllm_kernels::cpu
