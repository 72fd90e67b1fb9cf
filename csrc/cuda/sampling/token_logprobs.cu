// token_logprobs and softmax (ops/sampling/sample.h). A cluster of CTAs per row holds it as in
// sample.cu and reads it once.
//   token_logprobs  the highest logit, the sum of weights, the rank of the token; with num_top the
//                   first CTA sorts a list of the highest (row_few.cuh; where that does not
//                   suffice, row_list.cuh or a selection by count)
//   softmax         the highest logit, the sum of weights, then the probabilities
// Nothing is read before the PDL wait.
#include "cuda/launchers.h"
#include "cuda/sampling/row_few.cuh"

namespace vllm_kernels::cuda {
namespace {

// ln(sum of e^(x - max)) or that sum, from weights.
__device__ __forceinline__ float log_of_sum(uint64_t weights) {
  return log_of(__ull2float_rn(weights), 40);
}

// Puts the `num_top` highest tokens into the first CTA's list, where list_highest() found too many.
template <typename Cluster>
__device__ __forceinline__ void list_selected(SelectShared& shared, BinSets& sets,
                                              const Slice& slice, float max, uint32_t num_top) {
  Radix found;
  select<Cluster, false>(shared, sets, slice, 1, max, found,
                         [&](uint64_t, int) { return uint64_t{num_top}; });
  const Kept kept{found.prefix, static_cast<uint32_t>(num_top - found.before)};
  const KeptSums sums = kept_sums<Cluster, false>(shared, slice, kept.threshold, 0.0f);
  List* list = Cluster::peer(&shared.list, 0);
  for_each_kept<true>(slice, kept, sums, [&](int index, uint32_t ordered, int number) {
    if (number < 0) return;
    list->ordered[number] = ordered;
    list->tokens[number] = static_cast<uint32_t>(slice.begin + index);
  });
  Cluster::sync();
}

// Lists at least `num_top` tokens where send_few() does not: few are above -inf, the row is not
// finite, or many are equal. The slice has logits as they are. Returns the size of the list.
template <typename T, typename Cluster>
__device__ __forceinline__ int list_many(SelectShared& shared, const Slice& slice, float max,
                                         int num_top) {
  BinSets sets;
  clear(shared.bins[0]);
  prepare_list(shared);
  __syncthreads();
  const Highest own = divide_row<T>(slice, 1.0f);
  count_highest(shared.bins[0], own.ordered, 0, Radix{});
  const int size = list_highest<T, Cluster>(shared, sets, slice, own.ordered, num_top);
  if (size <= kRowThreads) return size;
  list_selected<Cluster>(shared, sets, slice, max, num_top);
  return num_top;
}

// The first CTA writes the `num_top` highest tokens of its list.
__device__ __forceinline__ void write_top(const TokenLogprobsParams& p, int64_t sample, List& list,
                                          int size, int num_top, float max, float log_sum) {
  float* logprobs = p.logprobs + sample * (1 + p.num_top) + 1;
  int64_t* ids = p.ids + sample * (1 + p.num_top) + 1;
  const int i = threadIdx.x;
  if (i >= num_top && i < p.num_top) {
    logprobs[i] = -INFINITY;
    ids[i] = -1;
  }
  const ListPlace place = place_in_list(list, size);
  if (i >= size || place.by_logit >= num_top) return;
  logprobs[place.by_logit] =
      ScalarMath::add(ScalarMath::add(from_ordered_bits(place.ordered), -max), -log_sum);
  ids[place.by_logit] = place.token;
}
static_assert(kMaxTopLogprobs <= kMaxListed);

// The sum of all weights over the cluster. Others may still read this CTA's shared memory.
template <typename Cluster>
__device__ __forceinline__ uint64_t weight_of_row(SelectShared& shared, const Slice& slice,
                                                  float max) {
  uint64_t sum = 0;
  for_each_token(slice, [&](uint32_t ordered) {
    if (ordered != 0) sum += weight_of(ordered, max);
  });
  sum = warp_total(sum);
  if (threadIdx.x % kWarpSize == 0) shared.above[threadIdx.x / kWarpSize] = sum;
  Cluster::sync();
  sum = 0;
  for_each_warp_of_cluster<Cluster>(
      shared, [&](const SelectShared& theirs, int of_cta, int) { sum += theirs.above[of_cta]; });
  return warp_total(sum);
}

// Of a row, or of a CTA's part: the sum of weights, and the number of logits of at least `logit`;
// NaN is above all.
struct RowSums {
  uint64_t weights = 0;
  uint32_t rank = 0;
};
__device__ __forceinline__ RowSums sums_of_slice(SelectShared& shared, const Slice& slice,
                                                 float max, float logit) {
  RowSums sums;
  const bool is_nan = isnan(logit);
#pragma unroll 1
  for (int i = threadIdx.x; i < slice.num_vecs(); i += kRowThreads) {
    for_each_of(slice.vec(i), [&](uint32_t word, int j) {
      if (4 * i + j >= slice.size) return;
      const float x = bits_as<float>(word);
      sums.weights += weight_of_difference(ScalarMath::add(x, -max));
      sums.rank += is_nan ? isnan(x) : !(x < logit);
    });
  }
  sums.weights = warp_total(sums.weights);
  sums.rank = warp_total(sums.rank);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (lane == 0) {
    shared.above[warp] = sums.weights;
    shared.equal[warp] = sums.rank;
  }
  __syncthreads();
  return {warp_total(lane < kRowWarps ? shared.above[lane] : 0),
          warp_total(lane < kRowWarps ? shared.equal[lane] : 0)};
}

// Sends a CTA's sums to the first one, which has those of the row behind the next barrier.
template <typename Cluster>
__device__ __forceinline__ void send_sums(SelectShared& shared, const RowSums& sums) {
  if (threadIdx.x > 0) return;
  uint64_t* to = Cluster::peer(shared.warp_keys, 0) + Cluster::rank();
  to[0] = sums.weights;
  to[kClusterSize] = sums.rank;
}
template <typename Cluster>
__device__ __forceinline__ RowSums received_sums(const SelectShared& shared) {
  static_assert(2 * kClusterSize <= kRowWarps);
  RowSums sums;
#pragma unroll
  for (int rank = 0; rank < Cluster::kSize; ++rank) {
    sums.weights += shared.warp_keys[rank];
    sums.rank += static_cast<uint32_t>(shared.warp_keys[kClusterSize + rank]);
  }
  return sums;
}

template <typename T>
__device__ __forceinline__ Highest load_raw(const LogitRows& logits, int64_t row, bool aligned,
                                            const Slice& slice, float divisor) {
  Highest highest;
  load_slice<T>(
      logits, row, aligned, slice, true, [](int) { return 0xffffffffu; },
      [&](float logit, bool) { return ordered_bits(divisor == 1.0f ? logit : logit / divisor); },
      [&](uint32_t ordered, int token) { highest.visit(ordered, token); });
  return highest;
}

template <typename T, typename Cluster>
__device__ __forceinline__ void token_logprobs_cluster(const TokenLogprobsParams& p, int tokens,
                                                       bool aligned) {
  __shared__ SelectShared shared;
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t sample = blockIdx.x / Cluster::kSize;
  const int64_t row = p.row_of(sample), token = p.tokens[sample];
  const bool is_first = Cluster::rank() == 0 && threadIdx.x == 0;
  float* logprob = p.logprobs + sample * (1 + p.num_top);
  int64_t* id = p.ids + sample * (1 + p.num_top);
  const bool inside =
      row >= 0 && row < p.logits.num_rows && token >= 0 && token < p.logits.vocab_size;
  if (!inside) {  // a contained row
    for (int i = threadIdx.x; Cluster::rank() == 0 && i <= p.num_top; i += kRowThreads) {
      logprob[i] = NAN;
      id[i] = -1;
    }
    if (is_first) p.ranks[sample] = 0;
    return;
  }
  const Slice slice = slice_of<Cluster>(slice_memory<Cluster>(p.scratch, sample, tokens),
                                        p.logits.vocab_size, tokens);
  const int num_top = min(p.num_top, p.logits.vocab_size);
  Cluster::begin();
  prepare_list(shared);
  if (threadIdx.x == 0) shared.request = {1.0f, false, num_top, 1.0f, 0.0f};
  const float logit = to_float(static_cast<const T*>(p.logits.data)[row * p.logits.stride + token]);
  const float highest = load_logits<T>(p.logits, row, aligned, slice, {{}, nullptr});
  Cluster::wait();
  const HighestRange range = range_of_highest(shared, ordered_bits(highest));
  if (num_top > 0) {
    send_few<T, Cluster>(shared, slice, highest, range);
  } else if (threadIdx.x < Cluster::kSize) {
    *Cluster::peer(&shared.few[Cluster::rank()], static_cast<int>(threadIdx.x)) = {0, range.highest,
                                                                                   0};
  }
  Cluster::sync();
  const Few few = few_of_row<Cluster>(shared);
  const float max = from_ordered_bits(few.highest);
  send_sums<Cluster>(shared, sums_of_slice(shared, slice, max, logit));
  const bool suffices = few.fits && few.size >= num_top && is_finite_ordered(few.highest);
  Cluster::sync();
  if (suffices && Cluster::rank() > 0) return;
  const RowSums sums = received_sums<Cluster>(shared);
  const float log_sum = is_finite_ordered(few.highest) ? log_of_sum(sums.weights) : NAN;
  if (is_first) {
    const float difference = ScalarMath::add(ScalarMath::add(logit, 0.0f), -max);
    logprob[0] = ScalarMath::add(difference, -log_sum);
    id[0] = token;
    p.ranks[sample] = sums.rank;
  }
  if (num_top == 0) return;
  const int size = suffices ? list_few<Cluster>(shared, few, num_top, 1.0f)
                            : list_many<T, Cluster>(shared, slice, max, num_top);
  if (Cluster::rank() == 0) write_top(p, sample, shared.list, size, num_top, max, log_sum);
  if (!suffices) Cluster::sync();  // others may still read this CTA's shared memory
}

template <typename T, typename Cluster>
__device__ __forceinline__ void softmax_cluster(const SoftmaxParams& p, int tokens, bool aligned) {
  __shared__ SelectShared shared;
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t row = blockIdx.x / Cluster::kSize;
  const Slice slice =
      slice_of<Cluster>(slice_memory<Cluster>(p.scratch, row, tokens), p.logits.vocab_size, tokens);
  const float divisor = p.temperature == nullptr ? 1.0f : p.temperature[row];
  Cluster::begin();
  const Highest own = load_raw<T>(p.logits, row, aligned, slice, divisor);
  Cluster::wait();
  post_max_key<Cluster>(shared, own.key());
  Cluster::sync();
  const uint32_t highest = ordered_of(row_max_key<Cluster>(shared));
  const float max = from_ordered_bits(highest);
  const uint64_t weights = weight_of_row<Cluster>(shared, slice, max);
  Cluster::arrive();
  const float sum = is_finite_ordered(highest) ? __ull2float_rn(weights) * 0x1p-40f : NAN;
  float* out = p.out + row * p.out_stride + slice.begin;
  for (int i = threadIdx.x; i < slice.size; i += kRowThreads) {
    out[i] = probability(slice.ordered[i], max, sum);
  }
  Cluster::wait();  // others may still read this CTA's shared memory
}

#define VLLM_KERNELS_ROW_KERNELS(name, Params)                                                \
  template <typename T>                                                                       \
  __global__ void VLLM_KERNELS_CLUSTER(kClusterSize)                                          \
      __launch_bounds__(kRowThreads, sm90a_or(2, 1))                                          \
          name##_cluster_kernel(const __grid_constant__ Params p, int tokens, bool aligned) { \
    name##_cluster<T>(p, tokens, aligned);                                                    \
  }                                                                                           \
  template <typename T>                                                                       \
  __global__ void __launch_bounds__(kRowThreads, 1)                                           \
      name##_kernel(const __grid_constant__ Params p, int tokens, bool aligned) {             \
    name##_cluster<T, RowCluster<1>>(p, tokens, aligned);                                     \
  }

template <typename T>
__device__ __forceinline__ void token_logprobs_cluster(const TokenLogprobsParams& p, int tokens,
                                                       bool aligned) {
#if defined(VLLM_KERNELS_HAS_SM90)
  token_logprobs_cluster<T, RowCluster<kClusterSize>>(p, tokens, aligned);
#endif
}
template <typename T>
__device__ __forceinline__ void softmax_cluster(const SoftmaxParams& p, int tokens, bool aligned) {
#if defined(VLLM_KERNELS_HAS_SM90)
  softmax_cluster<T, RowCluster<kClusterSize>>(p, tokens, aligned);
#endif
}
VLLM_KERNELS_ROW_KERNELS(token_logprobs, TokenLogprobsParams)
VLLM_KERNELS_ROW_KERNELS(softmax, SoftmaxParams)

}  // namespace

void launch(const TokenLogprobsParams& p, Stream stream) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_clusters<token_logprobs_cluster_kernel<T>, token_logprobs_kernel<T>>(
        "token_logprobs", p, p.num_samples, stream);
  });
}

void launch(const SoftmaxParams& p, Stream stream) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_clusters<softmax_cluster_kernel<T>, softmax_kernel<T>>("softmax", p, p.logits.num_rows,
                                                                  stream);
  });
}

}  // namespace vllm_kernels::cuda
