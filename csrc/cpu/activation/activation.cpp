#include "ops/activation.h"

#include "cpu/base/dispatch.h"
#include "cpu/base/vec_math.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

template <Activation kActivation>
inline Vec activate(Vec x) {
  const Vec one = splat(1.0f);
  if constexpr (kActivation == Activation::kSilu) {
    return x / (one + exp(-x));
  } else if constexpr (kActivation == Activation::kGelu) {
    return x * normal_cdf(x);
  } else if constexpr (kActivation == Activation::kGeluQuick) {
    return x / (one + exp(x * splat(-1.702f)));
  } else {
    // (1 + tanh(a)) / 2 = 1 / (1 + e^(-2a)), which does not cancel where a is far below 0.
    const Vec minus_2a = x * fma(x * x, splat(-0.0713548163f), splat(-1.59576912f));
    return x / (one + exp(minus_2a));
  }
}

// Activated, rounded and, where there is a second factor, multiplied.
template <Activation kActivation, bool kGated, typename T>
inline Vec result(Vec gate, Vec up) {
  const Vec value = activate<kActivation>(gate);
  return kGated ? round_to<T>(value) * up : value;
}

template <Activation kActivation, bool kGated, typename T>
void activate_row(T* out, const T* gate, const T* up, int64_t n) {
  constexpr auto of = result<kActivation, kGated, T>;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const VecPair x = load_pair(gate + i);
    const VecPair y = kGated ? load_pair(up + i) : VecPair{};
    store_pair(out + i, {of(x.a, y.a), of(x.b, y.b)});
  }
  for (; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    const Vec y = kGated ? load_partial(up + i, count) : Vec{};
    store_partial(out + i, of(load_partial(gate + i, count), y), count);
  }
}

// A piece is up to kPiece elements of one row; a task is as many pieces as make up its traffic.
constexpr int64_t kPiece = 4096;

struct Pieces {
  int64_t per_row;
  int64_t count;
  int64_t per_task;
  explicit Pieces(const ActivationParams& p) {
    per_row = ceil_div(p.width, kPiece);
    count = per_row * p.input_rows.count;
    const int64_t elements = p.width < kPiece ? p.width : kPiece;
    per_task = rows_per_task(3 * elements * size_of(p.dtype));
  }
};

int64_t num_tasks(const ActivationParams& p) {
  const Pieces pieces(p);
  return ceil_div(pieces.count, pieces.per_task);
}

template <Activation kActivation, typename T>
void run_pieces(const ActivationParams& p, const Pieces& pieces, int64_t begin, int64_t end) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / pieces.per_row;
    const int64_t first = piece % pieces.per_row * kPiece;
    const int64_t n = p.width - first < kPiece ? p.width - first : kPiece;
    const int64_t from = p.input_rows.offset(row) + first;
    T* out = static_cast<T*>(p.out) + p.out_rows.offset(row) + first;
    const T* gate = static_cast<const T*>(p.gate) + from;
    if (p.up == nullptr) {
      activate_row<kActivation, false, T>(out, gate, nullptr, n);
    } else {
      activate_row<kActivation, true, T>(out, gate, static_cast<const T*>(p.up) + from, n);
    }
  }
}

void run(const ActivationParams& p, int64_t begin, int64_t end) {
  const Pieces pieces(p);
  begin *= pieces.per_task;
  end = end * pieces.per_task < pieces.count ? end * pieces.per_task : pieces.count;
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    switch (p.activation) {
      case Activation::kSilu:
        return run_pieces<Activation::kSilu, T>(p, pieces, begin, end);
      case Activation::kGelu:
        return run_pieces<Activation::kGelu, T>(p, pieces, begin, end);
      case Activation::kGeluTanh:
        return run_pieces<Activation::kGeluTanh, T>(p, pieces, begin, end);
      case Activation::kGeluQuick:
        return run_pieces<Activation::kGeluQuick, T>(p, pieces, begin, end);
    }
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::ActivationParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
