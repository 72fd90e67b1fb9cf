// apply_token_bitmask_, apply_repetition_penalties, append_token_counts and spec_verify
// (ops/sampling/sample.h).
//   bitmask, penalties  a thread per token, CTAs over (tokens, rows); only changed logits are
//                       written
//   counts              a CTA per row looks through the row's list
//   spec_verify         a CTA per sequence. Every thread follows the chain; the CTA draws where the
//                       chain ends, from integer weights in index order
// Nothing is read before the PDL wait.
#include "cuda/launchers.h"
#include "cuda/sampling/row_load.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Tokens in x, rows in y, which may be fewer than the rows.
dim3 token_grid(const char* op, const LogitRows& logits) {
  constexpr int64_t kMaxGridY = 65535;
  return dim3(grid_size(op, ceil_div(logits.vocab_size, kThreads)),
              static_cast<unsigned>(std::min(logits.num_rows, kMaxGridY)));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    token_bitmask_kernel(const __grid_constant__ TokenBitmaskParams p) {
  launch_dependents();
  wait_for_primary_kernel();
  const int token = blockIdx.x * kThreads + threadIdx.x;
  if (token >= p.logits.vocab_size) return;
  for (int64_t row = blockIdx.y; row < p.logits.num_rows; row += gridDim.y) {
    if (p.bitmask.allows(p.bitmask.of(row), token)) continue;
    static_cast<T*>(p.out)[row * p.logits.stride + token] = from_float<T>(-INFINITY);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    repetition_penalties_kernel(const __grid_constant__ RepetitionPenaltiesParams p) {
  launch_dependents();
  wait_for_primary_kernel();
  const int token = blockIdx.x * kThreads + threadIdx.x;
  if (token >= p.logits.vocab_size) return;
  for (int64_t row = blockIdx.y; row < p.logits.num_rows; row += gridDim.y) {
    const bool seen = p.prompt_mask[row * p.prompt_stride + token] != 0 ||
                      p.output_mask[row * p.output_stride + token] != 0;
    if (!seen) continue;
    T& logit = static_cast<T*>(p.out)[row * p.logits.stride + token];
    logit = from_float<T>(Penalties{p.penalties[row], 0.0f, 0.0f}.apply(to_float(logit), 0));
  }
}

__global__ void __launch_bounds__(kThreads)
    append_token_counts_kernel(const __grid_constant__ AppendTokenCountsParams p) {
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t row = blockIdx.x;
  const AppendTokenCountsParams::Row list = p.of(row);
  int32_t *tokens = p.tokens + list.begin, *counts = p.counts + list.begin;
  bool is_found = false;
  if (list.token >= 0) {
    for (int i = threadIdx.x; i < list.length; i += kThreads) {
      if (tokens[i] != list.token) continue;
      ++counts[i];
      is_found = true;
    }
  }
  is_found = __syncthreads_or(is_found);  // all have read the row
  if (threadIdx.x != 0) return;
  if (list.token >= 0 && !is_found && list.length < list.room) {
    tokens[list.length] = list.token;
    counts[list.length] = 1;
    p.lengths[row] = list.length + 1;
  }
  p.finish(row);
}

// Writes the token where the cumulated weight passes `random` of the sum, of one CTA.
template <typename WeightOf>
__device__ __forceinline__ void draw_token(int vocab_size, uint64_t random, int64_t* token,
                                           const WeightOf& weight_of) {
  __shared__ uint64_t warp_sums[kRowWarps];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int chunk =
      static_cast<int>((int64_t{vocab_size} + kRowThreads - 1) / kRowThreads * kWarpSize);
  const int64_t begin = int64_t{warp} * chunk;
  const int64_t end = min(begin + chunk, int64_t{vocab_size});
  uint64_t sum = 0;
  for (int64_t i = begin + lane; i < end; i += kWarpSize) sum += weight_of(i);
  sum = warp_total(sum);
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  uint64_t before = 0, all = 0;
  for (int i = 0; i < kRowWarps; ++i) {
    if (i < warp) before += warp_sums[i];
    all += warp_sums[i];
  }
  const uint64_t target = high_product(all, random);
  if (all == 0 && threadIdx.x == 0) *token = 0;
  if (target < before || target >= before + sum) return;
  for (int64_t i = begin; i < end; i += kWarpSize) {
    const uint64_t mine = i + lane < end ? weight_of(i + lane) : 0;
    const uint64_t upto = before + inclusive_sum(mine);
    const uint32_t past = __ballot_sync(0xffffffffu, upto > target);
    if (past != 0) {
      if (lane == 0) *token = i + __ffs(past) - 1;
      return;
    }
    before = __shfl_sync(0xffffffffu, upto, kWarpSize - 1);
  }
}

__global__ void __launch_bounds__(kRowThreads)
    spec_verify_kernel(const __grid_constant__ SpecVerifyParams p) {
  launch_dependents();
  wait_for_primary_kernel();
  const SpecChain chain(p, blockIdx.x);
  const int accepted = chain.accepted();
  int64_t* tokens = p.tokens + int64_t{blockIdx.x} * (p.num_draft + 1);
  if (threadIdx.x == 0) p.accepted[blockIdx.x] = accepted;
  for (int i = threadIdx.x; i <= p.num_draft; i += kRowThreads) {
    if (i != accepted) tokens[i] = i < accepted ? chain.draft[i] : -1;
  }
  if (p.target_tokens != nullptr) {
    if (threadIdx.x == 0) tokens[accepted] = chain.target[accepted];
    return;
  }
  const SpecResidual residual(p, blockIdx.x, accepted);
  uint64_t any = 0;
  for (int i = threadIdx.x; i < p.vocab_size; i += kRowThreads) any |= residual.weight(i);
  const bool is_empty = !__syncthreads_or(any != 0);
  const uint64_t random = chain.random(accepted);
  draw_token(p.vocab_size, random, tokens + accepted,
             [&](int64_t i) { return is_empty ? residual.target_weight(i) : residual.weight(i); });
}

}  // namespace

void launch(const TokenBitmaskParams& p, Stream stream) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    launch_kernel("apply_token_bitmask_", token_bitmask_kernel<decltype(tag)>,
                  token_grid("apply_token_bitmask_", p.logits), dim3(kThreads), 0, stream, p);
  });
}

void launch(const RepetitionPenaltiesParams& p, Stream stream) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    launch_kernel("apply_repetition_penalties", repetition_penalties_kernel<decltype(tag)>,
                  token_grid("apply_repetition_penalties", p.logits), dim3(kThreads), 0, stream, p);
  });
}

void launch(const AppendTokenCountsParams& p, Stream stream) {
  launch_kernel("append_token_counts", append_token_counts_kernel,
                dim3(grid_size("append_token_counts", p.num_rows)), dim3(kThreads), 0, stream, p);
}

void launch(const SpecVerifyParams& p, Stream stream) {
  launch_kernel("spec_verify", spec_verify_kernel, dim3(grid_size("spec_verify", p.num_seqs)),
                dim3(kRowThreads), 0, stream, p);
}

}  // namespace vllm_kernels::cuda
