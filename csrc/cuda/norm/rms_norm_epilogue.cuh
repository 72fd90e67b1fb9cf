// RMS norms with another epilogue than rms_norm's, out [rows, hidden_size]: one kernel for every
// length and alignment. A CTA takes one row, or several rows of at most 32 Vecs.
// Early reads: none, only L2 prefetches before the PDL wait.
// An Epilogue (rms_norm_gain.cu, rms_norm_quant.cu) converts the normalized row to the result:
//   Out<T>            element type of the result
//   kWeighting        factor of the normalized row
//   prepare()         loads that do not depend on the row
//   kScaleOfRow       whether set_scale(row, magnitude, writes) is called before done()
//   done(...)         returns the Vec to store for a normalized and weighted Vec
#pragma once
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/quant.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/norm/rms_norm_rows.cuh"
#include "ops/rms_norm.h"

namespace vllm_kernels::cuda {

enum class Weighting { kNone, kWeight, kOnePlusWeight };

// Returns a Vec of the normalized and weighted row. The multiplication by the weight is in T, the
// one by Gemma's 1 + weight in float32.
template <Weighting kWeighting, typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> weighted(const Vec<T, kWidth>& x, float inverse,
                                                   const Vec<T, kWidth>& weight) {
  if constexpr (kWeighting == Weighting::kWeight) {
    return normed(x, inverse, weight);
  } else {
    float values[kWidth], weights[kWidth];
    upcast(x, values);
    if constexpr (kWeighting == Weighting::kOnePlusWeight) upcast(weight, weights);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[j] *= inverse;
      if constexpr (kWeighting == Weighting::kOnePlusWeight) values[j] *= 1.0f + weights[j];
    }
    return downcast<T>(values);
  }
}

// Row addresses of the kernel. blockDim.x threads share a row: up to 32 lanes of a warp (a power of
// two), or the whole CTA.
struct RmsNormEpilogueRows {
  RowOffsets out, input, residual;
  bool prefetch_early;
  explicit RmsNormEpilogueRows(const RmsNormParams& p)
      : out(p.out_rows),
        input(p.input_rows),
        residual(p.residual_rows),
        prefetch_early(prefetches_early(p)) {}
};

__device__ __forceinline__ float row_sum(float value) {
  return blockDim.x > kWarpSize ? block_sum(value) : lanes_sum(value, blockDim.x);
}

__device__ __forceinline__ uint32_t row_max(uint32_t value) {
  return blockDim.x > kWarpSize ? block_max(value) : lanes_max(value, blockDim.x);
}

// A tile of one row in registers, kVecs Vecs per thread.
template <typename T, bool kAligned, int kVecs>
struct RmsNormTile {
  static constexpr int kWidth = kVecWidth<T>;
  Vec16<T> x[kVecs], weight[kVecs];

  __device__ __forceinline__ static int index(int first, int v) {
    return first + v * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ static void load(Vec16<T> (&to)[kVecs], const T* row, int first,
                                              int num_vecs, int64_t size) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int i = index(first, v);
      to[v] = i < num_vecs ? load_vec<kAligned, kWidth>(row, i, size) : Vec16<T>{};
    }
  }
  // Adds the residual and stores the sum to it.
  __device__ __forceinline__ void add(T* residual, int first, int num_vecs, int64_t size) {
    Vec16<T> r[kVecs];
    load(r, residual, first, num_vecs, size);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int i = index(first, v);
      x[v] = x[v] + r[v];
      if (i < num_vecs) store_vec<kAligned>(residual, i, size, x[v]);
    }
  }
};

// kOneTile: the row is read once, into registers. A longer row is read again, tile by tile, in each
// pass (sum of squares, magnitude, store), mostly from the caches.
template <typename T, typename Epilogue, bool kAligned, int kVecs, bool kOneTile>
__global__ void __launch_bounds__(1024)
    rms_norm_epilogue_kernel(RmsNormParams p, RmsNormEpilogueRows rows, Epilogue epilogue) {
  launch_dependents();
  using Out = typename Epilogue::template Out<T>;
  constexpr int kWidth = kVecWidth<T>;
  constexpr bool kWeighted = Epilogue::kWeighting != Weighting::kNone;
  const uint32_t index = blockIdx.x * blockDim.y + threadIdx.y;
  const bool inside = index < p.input_rows.count;  // false past the last row, in the last CTA
  const uint32_t row = inside ? index : 0;
  const int64_t size = p.hidden_size;
  const int all_vecs = static_cast<int>((size + kWidth - 1) / kWidth);
  const int num_vecs = inside ? all_vecs : 0;
  const auto for_each_tile = [&](auto&& body) {
    if constexpr (kOneTile) {
      body(0);
    } else {
      for (int first = 0; first < all_vecs; first += kVecs * blockDim.x) body(first);
    }
  };
  const T* input = static_cast<const T*>(p.input) + rows.input.of(row);
  T* residual = static_cast<T*>(p.residual) + rows.residual.of(row);
  const T* weight = static_cast<const T*>(p.weight);
  Out* out = static_cast<Out*>(p.out) + rows.out.of(row);
  if (kAligned && kOneTile && rows.prefetch_early && blockDim.x > kWarpSize) {
    prefetch_row(input, p.residual == nullptr ? nullptr : residual, kWeighted ? weight : nullptr,
                 static_cast<uint32_t>(size * sizeof(T)));
  }
  wait_for_primary_kernel();

  RmsNormTile<T, kAligned, kVecs> tile;
  float square = 0.0f;
  for_each_tile([&](int first) {
    tile.load(tile.x, input, first, num_vecs, size);
    if constexpr (kOneTile && kWeighted) tile.load(tile.weight, weight, first, num_vecs, size);
    if (p.residual != nullptr) tile.add(residual, first, num_vecs, size);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) square += sum_of_squares(tile.x[v]);
  });
  epilogue.prepare();
  const float inverse = inverse_root(row_sum(square), __frcp_rn(p.hidden_size), p.epsilon);

  const T* sums = p.residual != nullptr ? residual : input;
  const auto norm = [&](int first) {
    if constexpr (!kOneTile) {
      tile.load(tile.x, sums, first, num_vecs, size);
      if constexpr (kWeighted) tile.load(tile.weight, weight, first, num_vecs, size);
    }
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      keep_packed(tile.x[v]);
      if constexpr (kWeighted) keep_packed(tile.weight[v]);
      tile.x[v] = weighted<Epilogue::kWeighting>(tile.x[v], inverse, tile.weight[v]);
    }
  };

  if constexpr (Epilogue::kScaleOfRow) {
    uint32_t magnitude = 0;
    for_each_tile([&](int first) {
      norm(first);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) magnitude = max(magnitude, magnitude_bits(tile.x[v]));
    });
    epilogue.set_scale(row, __uint_as_float(row_max(magnitude)), inside && threadIdx.x == 0);
  }
  for_each_tile([&](int first) {
    if constexpr (!Epilogue::kScaleOfRow || !kOneTile) norm(first);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int i = tile.index(first, v);
      const auto vec = epilogue.done(tile.x[v], row, i, i < num_vecs);
      if (i < num_vecs) store_vec<kAligned>(out, i, size, vec);
    }
  });
}

template <typename T, typename Epilogue>
void launch_epilogue(const char* op, const RmsNormParams& p, const Epilogue& epilogue,
                     Stream stream) {
  constexpr int kWidth = kVecWidth<T>;
  using Out = typename Epilogue::template Out<T>;
  const bool aligned = p.hidden_size % kWidth == 0 && aligned16(p.weight) &&
                       rows_aligned16(p.input, p.input_rows, p.dtype) &&
                       rows_aligned16(p.residual, p.residual_rows, p.dtype) &&
                       rows_aligned(p.out, p.out_rows, sizeof(Out), kWidth);

  const int64_t rows = grid_size(op, p.input_rows.count);  // the kernel uses 32-bit row indices
  const int64_t vecs = ceil_div(p.hidden_size, kWidth);
  unsigned threads = 1, rows_per_block = 1;
  if (vecs <= kWarpSize) {  // several rows per CTA, such as heads
    while (threads < vecs) threads *= 2;
    rows_per_block = 256 / threads;
  } else {  // few rows: one Vec per thread; many rows: two
    const int64_t wanted = rows < kManyRows ? vecs : ceil_div(vecs, 2);
    threads = static_cast<unsigned>(std::min<int64_t>((wanted + 31) / 32 * 32, 1024));
  }
  const auto blocks = static_cast<unsigned>(ceil_div(rows, rows_per_block));
  launch_kernel(op,
                !aligned              ? rms_norm_epilogue_kernel<T, Epilogue, false, 2, false>
                : vecs <= threads     ? rms_norm_epilogue_kernel<T, Epilogue, true, 1, true>
                : vecs <= 2 * threads ? rms_norm_epilogue_kernel<T, Epilogue, true, 2, true>
                                      : rms_norm_epilogue_kernel<T, Epilogue, true, 2, false>,
                dim3(blocks), dim3(threads, rows_per_block), 0, stream, p, RmsNormEpilogueRows(p),
                epilogue);
}

}  // namespace vllm_kernels::cuda
