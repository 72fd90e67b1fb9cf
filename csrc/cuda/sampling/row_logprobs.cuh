// Log-probabilities of a row: of one token, and of the highest ones in order. The first CTA sorts a
// list of the highest (row_few.cuh; where that does not suffice, row_list.cuh or a selection by
// count).
#pragma once
#include "cuda/sampling/row_few.cuh"

namespace vllm_kernels::cuda {

// ln(sum of e^(x - max)) or that sum, from weights.
__device__ __forceinline__ float log_of_sum(uint64_t weights) {
  return log_of(__ull2float_rn(weights), 40);
}

__device__ __forceinline__ float logprob_of(float logit, float max, float log_sum) {
  return ScalarMath::add(ScalarMath::add(ScalarMath::add(logit, 0.0f), -max), -log_sum);
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

// The first CTA writes the `num_top` highest tokens of its list. `place` is that of this thread's.
__device__ __forceinline__ void write_top(const TokenLogprobsParams& p, int64_t sample, int size,
                                          const ListPlace& place, int num_top, float max,
                                          float log_sum) {
  float* logprobs = p.logprobs + sample * (1 + p.num_top) + 1;
  int64_t* ids = p.ids + sample * (1 + p.num_top) + 1;
  const int i = threadIdx.x;
  if (i >= num_top && i < p.num_top) {
    logprobs[i] = -INFINITY;
    ids[i] = -1;
  }
  if (i >= size || place.by_logit >= num_top) return;
  logprobs[place.by_logit] = logprob_of(from_ordered_bits(place.ordered), max, log_sum);
  ids[place.by_logit] = place.token;
}
static_assert(kMaxTopLogprobs <= kMaxListed);

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
  const int thread = opaque(threadIdx.x);  // keeps no address in registers
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
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

__device__ __forceinline__ void write_token(const TokenLogprobsParams& p, int64_t sample,
                                            int64_t token, float logprob) {
  p.logprobs[sample * (1 + p.num_top)] = logprob;
  p.ids[sample * (1 + p.num_top)] = token;
}

// A row, or a token, that is none. One CTA writes it.
__device__ __forceinline__ void write_no_logprobs(const TokenLogprobsParams& p, int64_t sample) {
  for (int i = threadIdx.x; i <= p.num_top; i += kRowThreads) {
    p.logprobs[sample * (1 + p.num_top) + i] = NAN;
    p.ids[sample * (1 + p.num_top) + i] = -1;
  }
  if (threadIdx.x == 0) p.ranks[sample] = 0;
}

// Loads a row and writes its log-probabilities. Others may not read this CTA's shared memory any
// more. `token` is in the row.
template <typename T, typename Cluster>
__device__ __forceinline__ void logprobs_of_row(const TokenLogprobsParams& p, int64_t sample,
                                                int64_t row, int64_t token, const Slice& slice,
                                                bool aligned, SelectShared& shared) {
  const int num_top = min(p.num_top, p.logits.vocab_size);
  Cluster::begin();
  prepare_list(shared);
  if (threadIdx.x == 0) shared.request = {1.0f, false, num_top, 1.0f, 0.0f};
  const float logit = to_float(static_cast<const T*>(p.logits.data)[row * p.logits.stride + token]);
  VisitNone visit;
  const float highest = load_logits<T>(p.logits, row, aligned, slice, {{}, nullptr}, visit);
  Cluster::wait();
  const HighestRange range = range_of_highest(shared, ordered_bits(highest));
  if (num_top > 0) {
    send_few<T, Cluster>(shared, slice, highest, range, num_top, [](int) {});
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
  if (Cluster::rank() == 0 && threadIdx.x == 0) {
    write_token(p, sample, token, logprob_of(logit, max, log_sum));
    p.ranks[sample] = sums.rank;
  }
  if (num_top == 0) return;
  const int size = suffices ? list_few<Cluster>(shared, few, num_top, 1.0f)
                            : list_many<T, Cluster>(shared, slice, max, num_top);
  if (Cluster::rank() == 0) {
    write_top(p, sample, size, place_in_list(shared.list, size), num_top, max, log_sum);
  }
  if (!suffices) Cluster::sync();  // others may still read this CTA's shared memory
}

// --- without a second look at the row ------------------------------------------------------------

// A base that e^(logit - base) is finite for, without NaN if all logits are -inf.
__device__ __forceinline__ float base_of_powers(float highest) {
  return fmaxf(highest, -FLT_MAX);
}
__device__ __forceinline__ float power(float difference) {
  return exp2_approx(difference * kLog2E);
}

// Adds up e^(logit - base) over the tokens of a thread while load_logits() loads them. Their
// highest is not known before the end, so the base is the highest of the first Vec.
struct OwnPowers {
  static constexpr bool kVisits = true;
  static constexpr float kNoBase = INFINITY, kMaxDifference = 16.0f;
  float base = kNoBase, sum = 0.0f;

  template <int kWidth>
  __device__ __forceinline__ void operator()(const float (&logits)[kWidth], float highest) {
    if (base == kNoBase) base = base_of_powers(highest);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += power(logits[i] - base);
  }
  // The sum of e^(logit - highest), where `highest` is that of the thread's tokens.
  template <typename T>
  __device__ __forceinline__ float relative_to(const Slice& slice, float highest) const {
    const float new_base = base_of_powers(highest);
    if (highest - base > kMaxDifference) {  // rounding of large differences would show
      float again = 0.0f;
      for_each_own<T>(slice,
                      [&](uint32_t word, int) { again += power(bits_as<float>(word) - new_base); });
      return again;
    }
    return sum == 0.0f ? 0.0f : sum * power(base - new_base);
  }
};

// Adds up the threads' sums per warp, relative to the CTA's highest logit. Results: shared.equal.
__device__ __forceinline__ void sum_powers(SelectShared& shared, float sum, float highest,
                                           uint32_t highest_of_cta) {
  const float base = base_of_powers(from_ordered_bits(highest_of_cta));
  sum = warp_sum(sum * power(base_of_powers(highest) - base));
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  if (i % kWarpSize == 0) shared.equal[i / kWarpSize] = bits_as<uint32_t>(sum);
}

// Sends the CTA's sum to another CTA.
template <typename Cluster>
__device__ __forceinline__ void send_powers(SelectShared& shared, int rank) {
  const auto* sums = reinterpret_cast<const float2*>(shared.equal);
  float2 sum = sums[0];
#pragma unroll
  for (int i = 1; i < kRowWarps / 2; ++i) {
    sum.x += sums[i].x;
    sum.y += sums[i].y;
  }
  *Cluster::peer(&shared.powers[Cluster::rank()], rank) = sum.x + sum.y;
}

// In the first CTA: shared.log_sum = ln(sum of e^(logit - max)) over the row, behind the next
// barrier. A warp that has no token of the list does it.
template <typename Cluster>
__device__ __forceinline__ void add_powers(SelectShared& shared, float max) {
  const int thread = opaque(threadIdx.x);  // keeps no address in registers
  if (thread < kRowThreads - kWarpSize) return;
  float sum = 0.0f;
#pragma unroll
  for (int rank = 0; rank < Cluster::kSize; ++rank) {
    sum += shared.powers[rank] * power(from_ordered_bits(shared.few[rank].highest) - max);
  }
  if (thread == kRowThreads - 1) shared.log_sum = log_of(sum);
}

// In the first CTA: how many logits reach that of a token among the highest, all of which were
// sent.
template <typename Cluster>
__device__ __forceinline__ int rank_of(SelectShared& shared, uint32_t ordered) {
  const uint64_t* keys = few_keys(shared);
  int reached = 0;
#pragma unroll 1
  for (int first = 0; first < Cluster::kSize * kFewRoom<Cluster>; first += kRowThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int in_list = i % kFewRoom<Cluster>;
    reached += __syncthreads_count(in_list < shared.few[i / kFewRoom<Cluster>].size &&
                                   ordered_of(keys[i]) >= ordered);
  }
  return reached;
}

}  // namespace vllm_kernels::cuda
