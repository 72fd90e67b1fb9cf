// rms_norm and fused_add_rms_norm, out [rows, hidden_size]; ops/rms_norm.h has the formula.
// Three kernels; launch_rows() below chooses:
//   rms_norm_kernel        one CTA per row, the row in registers: 1, 2 or 4 16-byte Vecs per thread
//   rms_norm_short_kernel  rows of at most 32 Vecs (heads): several rows per CTA, a Vec per lane
//   rms_norm_long_kernel   one CTA per row, any length and alignment, two passes over the row
// Early reads: none, only L2 prefetches before the PDL wait (rms_norm_rows.cuh).
// Norms with another epilogue (8-bit results, other gains) are in rms_norm_epilogue.cuh.
#include "ops/rms_norm.h"

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/launchers.h"
#include "cuda/norm/heuristics.h"
#include "cuda/norm/rms_norm_rows.cuh"

namespace vllm_kernels::cuda {
namespace {

struct RmsNormRows {
  RowOffsets out, input, residual;
  float inverse_size;  // 1 / hidden_size
  bool prefetch_early;
  explicit RmsNormRows(const RmsNormParams& p)
      : out(p.out_rows),
        input(p.input_rows),
        residual(p.residual_rows),
        inverse_size(1.0f / static_cast<float>(p.hidden_size)),
        prefetch_early(prefetches_early(p)) {}
};

// The arrays of one row, as Vecs. `out` may alias `input`, so neither may be read through the
// read-only cache.
template <typename T, int kWidth>
struct Row {
  Vec<T, kWidth>* out;
  const Vec<T, kWidth>* input;
  Vec<T, kWidth>* residual;
  const Vec<T, kWidth>* weight;

  __device__ __forceinline__ Row(const RmsNormParams& p, const RmsNormRows& rows, uint32_t row) {
    out = reinterpret_cast<Vec<T, kWidth>*>(static_cast<T*>(p.out) + rows.out.of(row));
    input = reinterpret_cast<const Vec<T, kWidth>*>(static_cast<const T*>(p.input) +
                                                    rows.input.of(row));
    residual =
        reinterpret_cast<Vec<T, kWidth>*>(static_cast<T*>(p.residual) + rows.residual.of(row));
    weight = static_cast<const Vec<T, kWidth>*>(p.weight);
  }
};

// Loads kVecs Vecs per thread of the tile that starts at Vec `first` of the row. With kAdd it adds
// the residual, rounds, and stores the sum to the residual. Vecs past the row's end are zero.
template <bool kAdd, int kVecs, typename T, int kWidth>
__device__ __forceinline__ void load_tile(Vec<T, kWidth> (&x)[kVecs], const Row<T, kWidth>& row,
                                          int first, int num_vecs) {
  Vec<T, kWidth> r[kAdd ? kVecs : 1];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int i = first + v * blockDim.x + threadIdx.x;
    x[v] = i < num_vecs ? row.input[i] : Vec<T, kWidth>{};
    if constexpr (kAdd) r[v] = i < num_vecs ? row.residual[i] : Vec<T, kWidth>{};
  }
  if constexpr (kAdd) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int i = first + v * blockDim.x + threadIdx.x;
      x[v] = x[v] + r[v];
      if (i < num_vecs) row.residual[i] = x[v];
    }
  }
}

// __launch_bounds__ of rms_norm_kernel: threads of the widest CTA, and resident CTAs per SM of that
// size.
template <int kVectors>
constexpr int kMaxThreads = kVectors == 1   ? 1024
                            : kVectors == 2 ? 512
                                            : 896;  // float16 would spill with 1024
template <int kVectors>
constexpr int kMinBlocks = kVectors == 2 ? 3 : 1;

// One CTA per row. The row is read once, into registers: kVectors 16-byte Vecs per thread.
template <typename T, bool kAdd, int kVectors>
__global__ void __launch_bounds__(kMaxThreads<kVectors>, kMinBlocks<kVectors>)
    rms_norm_kernel(RmsNormParams p, RmsNormRows rows) {
  launch_dependents();
  constexpr int kWidth = kVecWidth<T>;
  const int num_vectors = static_cast<int>(p.hidden_size) / kWidth;
  const Row<T, kWidth> row(p, rows, blockIdx.x);
  if (rows.prefetch_early) {
    prefetch_row(row.input, kAdd ? row.residual : nullptr, row.weight,
                 static_cast<uint32_t>(p.hidden_size * sizeof(T)));
  }
  wait_for_primary_kernel();
  Vec<T, kWidth> x[kVectors], weight[kVectors];
  const auto load_weight = [&] {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = v * blockDim.x + threadIdx.x;
      weight[v] = i < num_vectors ? row.weight[i] : Vec<T, kWidth>{};
    }
  };
  if constexpr (kVectors == 1)
    load_weight();  // with more Vecs, more CTAs are a better use of registers
  load_tile<kAdd>(x, row, 0, num_vectors);

  float square = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    square += sum_of_squares(x[v]);
    keep_packed(x[v]);
  }
  const float inverse = inverse_root(block_sum(square), rows.inverse_size, p.epsilon);
  if constexpr (kVectors > 1) load_weight();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = v * blockDim.x + threadIdx.x;
    if (i < num_vectors) row.out[i] = normed(x[v], inverse, weight[v]);
  }
}

// Rows of at most 32 Vecs, such as heads. `lanes` neighbouring lanes (a power of two) share a row,
// one Vec each.
template <typename T, bool kAdd>
__global__ void __launch_bounds__(256)
    rms_norm_short_kernel(RmsNormParams p, RmsNormRows rows, int lanes) {
  launch_dependents();
  wait_for_primary_kernel();
  constexpr int kWidth = kVecWidth<T>;
  const uint32_t index = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
  const int i = threadIdx.x % lanes;
  const bool inside = index < p.input_rows.count && i * kWidth < p.hidden_size;
  const Row<T, kWidth> row(p, rows, inside ? index : 0);

  Vec<T, kWidth> x{}, weight{};
  if (inside) {
    x = row.input[i];
    weight = row.weight[i];
    if constexpr (kAdd) {
      x = x + row.residual[i];
      row.residual[i] = x;
    }
  }
  const float square = lanes_sum(sum_of_squares(x), lanes);
  if (inside) row.out[i] = normed(x, inverse_root(square, rows.inverse_size, p.epsilon), weight);
}

// One CTA per row of any length, and with kWidth 1 of any alignment. It makes two passes over tiles
// of 4 Vecs per thread; caches serve most reads of the second pass.
template <typename T, bool kAdd, int kWidth>
__global__ void __launch_bounds__(1024) rms_norm_long_kernel(RmsNormParams p, RmsNormRows rows) {
  launch_dependents();
  wait_for_primary_kernel();
  constexpr int kVecs = 4;
  const int num_vecs = static_cast<int>(p.hidden_size / kWidth);
  const int tile = kVecs * blockDim.x;
  const Row<T, kWidth> row(p, rows, blockIdx.x);
  Vec<T, kWidth> x[kVecs];
  float square = 0.0f;
  for (int first = 0; first < num_vecs; first += tile) {
    load_tile<kAdd>(x, row, first, num_vecs);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) square += sum_of_squares(x[v]);
  }
  const float inverse = inverse_root(block_sum(square), rows.inverse_size, p.epsilon);
  const auto* sums = kAdd ? row.residual : row.input;
  for (int first = 0; first < num_vecs; first += tile) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int i = first + v * blockDim.x + threadIdx.x;
      x[v] = i < num_vecs ? sums[i] : Vec<T, kWidth>{};
    }
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int i = first + v * blockDim.x + threadIdx.x;
      if (i < num_vecs) row.out[i] = normed(x[v], inverse, row.weight[i]);
    }
  }
}

template <typename T, bool kAdd>
void launch_rows(const RmsNormParams& p, Stream stream) {
  const char* op = kAdd ? "fused_add_rms_norm" : "rms_norm";
  const int64_t rows = grid_size(op, p.input_rows.count);  // the kernels use 32-bit row indices
  const auto run = [&](auto kernel, int64_t blocks, int64_t threads, auto... more) {
    launch_kernel(op, kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0,
                  stream, p, RmsNormRows(p), more...);
  };

  constexpr int kWidth = kVecWidth<T>;
  const bool aligned = p.hidden_size % kWidth == 0 && aligned16(p.weight) &&
                       rows_aligned16(p.input, p.input_rows, p.dtype) &&
                       rows_aligned16(p.out, p.out_rows, p.dtype) &&
                       rows_aligned16(p.residual, p.residual_rows, p.dtype);
  if (!aligned) {
    return run(rms_norm_long_kernel<T, kAdd, 1>, rows, p.hidden_size >= 1024 ? 1024 : 256);
  }

  // The CTA's shape follows from the number of Vecs per row. Few rows: wide CTAs, where each thread
  // loads one Vec per array. They are widest where an SM gets at most one row. Many rows: two loads
  // in flight per thread and array.
  const int64_t vectors = p.hidden_size / kWidth;
  const auto run_with = [&](auto kernel, int64_t per_thread) {
    const int64_t threads = (vectors + per_thread - 1) / per_thread;
    run(kernel, rows, (threads + 31) / 32 * 32);
  };
  if (vectors <= 32) {
    int lanes = 1;
    while (lanes < vectors) lanes *= 2;
    const int64_t rows_per_block = 256 / lanes;
    return run(rms_norm_short_kernel<T, kAdd>, ceil_div(rows, rows_per_block), 256, lanes);
  }
  const int64_t widest =
      rows <= current_device_model().num_sms ? kMaxThreads<1> : kThreadsOfSharedSm;
  if (rows < kManyRows && vectors <= widest) return run_with(rms_norm_kernel<T, kAdd, 1>, 1);
  if (vectors <= 2 * kMaxThreads<2>) return run_with(rms_norm_kernel<T, kAdd, 2>, 2);
  if (vectors <= 4 * kMaxThreads<4>) return run_with(rms_norm_kernel<T, kAdd, 4>, 4);
  run(rms_norm_long_kernel<T, kAdd, kWidth>, rows, 1024);
}

}  // namespace

void launch(const RmsNormParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.residual == nullptr) {
      launch_rows<T, false>(p, stream);
    } else {
      launch_rows<T, true>(p, stream);
    }
  });
}

}  // namespace vllm_kernels::cuda
