// A draw from a row that a cluster of CTAs holds.
//
//   few        a small top-k: the first CTA gets a list of candidates (row_few.cuh; row_list.cuh
//              above 128, or where a list overflows) and finishes alone; the other CTAs leave
//   nucleus    without a top-k: counts bound where top-p ends, then the first CTA finishes with a
//              list of the tokens there (row_nucleus.cuh). If that list is too long: as below
//   threshold  else top-k: radix rounds by count. min-p: one number. top-p, over what is left: two
//              rounds by weight in steps of the logit, then a list (row_list.cuh). If that list is
//              too long: radix rounds by weight
//   draw       weights of the kept tokens per warp, then the one warp that holds the random place
//   logprobs   raw logits whose list suffices need no second look (row_logprobs.cuh)
#pragma once
#include <type_traits>

#include "cuda/launchers.h"
#include "cuda/sampling/row_changes.cuh"
#include "cuda/sampling/row_logprobs.cuh"
#include "cuda/sampling/row_nucleus.cuh"

namespace vllm_kernels::cuda {

constexpr uint32_t kAllTies = 0xffffffffu;

// The kept tokens.
template <typename Cluster>
__device__ __forceinline__ Kept choose(SelectShared& shared, BinSets& sets, const Slice& slice,
                                       const SampleRow& request, int vocab_size, float max) {
  Kept kept{0, 0};
  uint64_t left_out = 0;  // tokens equal to the threshold that are not kept
  if (request.top_k < vocab_size) {
    const uint64_t top_k = request.top_k;
    Radix found;
    select<Cluster, false>(shared, sets, slice, 1, max, found,
                           [&](uint64_t, int) { return top_k; });
    kept = {found.prefix, static_cast<uint32_t>(top_k - found.before)};
    left_out = found.inside - kept.ties;
  }
  const uint32_t cut = request.min_p_cut(max);
  if (cut > kept.threshold) {
    kept = {cut, kAllTies};
    left_out = 0;
  }
  if (request.top_p >= 1.0f) return kept;
  const uint64_t unkept = left_out > 0 ? left_out * weight_of(kept.threshold, max) : 0;
  uint64_t limit = 0;
  Radix weights;
  const uint32_t lowest = kept.threshold > 0 ? kept.threshold : 1;
  const auto limit_of = [&](uint64_t all, int round) {
    if (round == 0) limit = top_p_limit(request.top_p, all - unkept);
    return limit;
  };
  if (!select_by_steps<Cluster>(shared, sets, slice, lowest, max, weights, limit_of)) {
    weights = Radix{};
    select<Cluster, true>(shared, sets, slice, lowest, max, weights, limit_of);
  }
  uint32_t ties = number_to_reach(limit - weights.before, weight_of(weights.prefix, max));
  if (weights.prefix == kept.threshold && ties > kept.ties) ties = kept.ties;
  return {weights.prefix, ties};
}

// The draw from a list of `size` tokens, `place` of this thread's. Calls found(token, its place in
// index order) in one thread.
template <typename Found>
__device__ __forceinline__ void draw_from_list(SelectShared& shared, int size,
                                               const ListPlace& place, const SampleRow& request,
                                               float max, uint64_t random, const Found& found) {
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  auto* by_logit = reinterpret_cast<uint64_t*>(shared.bins[0].low);
  uint32_t* token_at = shared.bins[0].low + 2 * kRowThreads;
  auto* by_token = reinterpret_cast<uint64_t*>(shared.bins[0].high);
  uint64_t weight = 0;
  if (i < size && place.by_logit < request.top_k && place.ordered >= request.min_p_cut(max)) {
    weight = weight_of(place.ordered, max);
  }
  if (request.top_p < 1.0f) {
    if (i < size) by_logit[place.by_logit] = weight;
    __syncthreads();
    const BlockSum sum = block_sum(shared, i < size ? by_logit[i] : 0);
    if (i < size) by_logit[i] = sum.before;
    __syncthreads();
    if (i < size && by_logit[place.by_logit] >= top_p_limit(request.top_p, sum.all)) weight = 0;
  }
  if (i < size) {
    by_token[place.by_token] = weight;
    token_at[place.by_token] = place.token;
  }
  __syncthreads();
  weight = i < size ? by_token[i] : 0;
  const BlockSum sum = block_sum(shared, weight);
  const uint64_t target = high_product(sum.all, random);
  if (sum.before <= target && target < sum.before + weight) found(token_at[i], i);
}

// Arrives at the cluster's next barrier before it writes.
template <typename T, typename Cluster>
__device__ __forceinline__ void write_mask(const SampleParams& p, int64_t row, SelectShared& shared,
                                           const Slice& slice, const Kept& kept) {
  if (kept.threshold == 0) return Cluster::arrive();  // all tokens are kept
  const KeptSums sums = kept_sums<Cluster, false>(shared, slice, kept.threshold, 0.0f);
  Cluster::arrive();
  T* masked = static_cast<T*>(p.masked) + row * p.logits.stride + slice.begin;
  for_each_kept<false>(slice, kept, sums, [&](int index, uint32_t, int number) {
    if (number < 0 && index < slice.size) masked[index] = from_float<T>(-INFINITY);
  });
}

template <typename Params>
constexpr bool kHasLogprobs = std::is_same_v<Params, SampleLogprobsParams>;

// The number of tokens that row_few.cuh lists for a row with a top-k. For log-probabilities one
// more than is wanted: see draw_with_logprobs().
template <typename Params>
__device__ __forceinline__ int num_listed(const Params& p, const SampleRow& request) {
  if constexpr (kHasLogprobs<Params>) return max(request.top_k, p.logprobs.num_top) + 1;
  return request.top_k;
}

// Whether a list of the few highest tokens may suffice for a row. Enough threads must have a token,
// or all tokens must fit.
template <typename T, typename Cluster, typename Params>
__device__ __forceinline__ bool wants_few(const Params& p, const SampleRow& request) {
  const int vocab_size = p.logits.vocab_size, count = num_listed(p, request);
  return p.tokens != nullptr && request.counts(vocab_size) && count <= kMaxFew &&
         request.temperature < INFINITY &&
         (vocab_size >= 2 * count * Cluster::kSize * kVecWidth<T> ||
          vocab_size <= Cluster::kSize * kFewRoom<Cluster>);
}

// Whether sample_nucleus() may draw from a row.
template <typename Cluster>
__device__ __forceinline__ bool wants_nucleus(const SampleParams& p, const SampleRow& request) {
  return Cluster::kSize > 1 && p.tokens != nullptr && !request.greedy &&
         !request.counts(p.logits.vocab_size) && request.temperature <= kMaxNucleusTemperature;
}

// Whether find_undivided() loads a row, which greedy ones are not.
template <typename T, typename Cluster, typename Params>
__device__ __forceinline__ bool loads_undivided(const Params& p, const SampleRow& request) {
  return wants_few<T, Cluster>(p, request) || wants_nucleus<Cluster>(p, request);
}

// What is known of a row before the draw.
struct FoundRow {
  int size = INT32_MAX;  // of the first CTA's list; above kRowThreads: there is none
  uint32_t highest = 0;  // ordered bits
  int token = -1;        // the first of the highest; -1: not known, with a list of find_undivided()
  bool drawn = false;    // by sample_nucleus()
  // The first CTA's list has logits as they are, and enough of them for all log-probabilities.
  bool has_logprobs = false;
};

// Whether a row has a mask, bias or penalties.
__device__ __forceinline__ bool is_changed(const SampleParams& p, int sample,
                                           const SelectShared& shared) {
  return p.bitmask.of(sample) != nullptr || (p.has_lists() && shared.changes.any());
}

// A row without a top-k, of which a token is drawn, or with a small one, which gets a list. Finds
// nothing if the lists do not suffice, or if the row is not finite. `counts`: whether the row has a
// top-k.
template <typename T, typename Cluster, typename Params>
__device__ __forceinline__ FoundRow find_undivided(const Params& p, int sample, bool counts,
                                                   const Slice& slice, bool aligned,
                                                   SelectShared& shared) {
  std::conditional_t<kHasLogprobs<Params>, OwnPowers, VisitNone> own;
  const float highest = load_undivided<T>(p, sample, aligned, slice, shared, own);
  // Log-probabilities come from the list of a row that is not changed.
  const bool lists_logprobs = kHasLogprobs<Params> && counts && !is_changed(p, sample, shared);
  float powers = 0.0f;
  if constexpr (kHasLogprobs<Params>) {
    if (lists_logprobs) powers = own.template relative_to<T>(slice, highest);
  }
  Cluster::wait();
  const HighestRange range = range_of_highest(shared, ordered_bits(highest));
  FoundRow found;
  if constexpr (Cluster::kSize > 1) {
    if (!shared.request.counts(p.logits.vocab_size)) {
      found.drawn = sample_nucleus<Cluster>(
          shared, slice, p.logits.vocab_size, range.highest,
          [&] { return SampleRow::random(p, sample); },
          [&](int token) { p.tokens[sample] = token; });
      return found;
    }
  }
  const SampleRow& request = shared.request;
  if constexpr (kHasLogprobs<Params>) sum_powers(shared, powers, highest, range.highest);
  const int count = lists_logprobs ? num_listed(p, request) : request.top_k;
  send_few<T, Cluster>(shared, slice, highest, range, count, [&](int rank) {
    if constexpr (kHasLogprobs<Params>) send_powers<Cluster>(shared, rank);
  });
  Cluster::sync();
  const Few few = few_of_row<Cluster>(shared);
  found.highest = quotient_of(few.highest, request.temperature);
  if (!few.fits || !is_finite_ordered(found.highest)) return found;
  found.size = 0;
  if constexpr (kHasLogprobs<Params>) {
    found.has_logprobs = lists_logprobs && few.size >= min(p.logprobs.num_top, p.logits.vocab_size);
  }
  if (Cluster::rank() > 0) return found;
  if (found.has_logprobs) {
    Few undivided = few;
    undivided.quotient = ordered_bits(lowest_with_quotient(few.quotient, request.temperature));
    found.size = list_few<Cluster>(shared, undivided, num_listed(p, request), 1.0f);
  } else {
    found.size = list_few<Cluster>(shared, few, request.top_k, request.temperature);
  }
  return found;
}

// In the first CTA, whose list has the highest logits: makes place.ordered a quotient. Returns
// whether the places then still are right, and the list has all tokens of the top-k. They are not
// where several logits have one quotient.
__device__ __forceinline__ bool divide_place(SelectShared& shared, int size, bool has_all,
                                             ListPlace& place) {
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  uint32_t* sorted = shared.bins[0].low;
  const uint32_t logit = place.ordered;
  if (i < size) sorted[place.by_logit] = logit;
  __syncthreads();
  const SampleRow& request = shared.request;
  bool is_wrong = false;
  if (i < size) {
    place.ordered = quotient_of(logit, request.temperature);
    const uint32_t before = sorted[max(place.by_logit - 1, 0)];
    is_wrong = before != logit && quotient_of(before, request.temperature) == place.ordered;
    const bool is_last = place.by_logit == request.top_k - 1 && logit == sorted[size - 1];
    is_wrong |= is_last && !has_all;
  }
  return __syncthreads_count(is_wrong) == 0;
}

// In the first CTA, whose list has the highest logits: the draw and the log-probabilities.
template <typename T, typename Cluster>
__device__ __forceinline__ void draw_with_logprobs(const SampleLogprobsParams& p, int sample,
                                                   SelectShared& shared, int size, float max) {
  const Few few = few_of_row<Cluster>(shared);
  const float highest = from_ordered_bits(few.highest);
  const bool has_all = size == few.size;
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  const ListPlace listed = place_in_list(shared.list, size);
  uint32_t* logits = shared.bins[0].high + 2 * kRowThreads;  // in index order
  if (i < size) logits[listed.by_token] = listed.ordered;
  add_powers<Cluster>(shared, highest);
  ListPlace place = listed;
  const float temperature = shared.request.temperature;
  const bool fits = temperature == 1.0f || divide_place(shared, size, has_all, place);
  int drawn_from = size;
  if (!fits) {
    if (i == 0) shared.list.sizes[1] = 0;
    __syncthreads();
    drawn_from = list_few<Cluster>(shared, few, shared.request.top_k, temperature);
    place = place_in_list(shared.list, drawn_from);
  }
  draw_from_list(shared, drawn_from, place, shared.request, max, SampleRow::random(p, sample),
                 [&](uint32_t token, int at) {
                   const T* row =
                       static_cast<const T*>(p.logits.data) + p.row_of(sample) * p.logits.stride;
                   p.tokens[sample] = token;
                   shared.bin = token;
                   shared.before = fits ? logits[at] : ordered_bits(to_float(row[token]));
                 });
  __syncthreads();
  const uint32_t logit = static_cast<uint32_t>(shared.before);
  int rank = __syncthreads_count(i < size && listed.ordered >= logit);
  // Equal logits may be outside of the list.
  if (!fits || (rank == size && !has_all)) rank = rank_of<Cluster>(shared, logit);
  const float log_sum = shared.log_sum;
  write_top(p.logprobs, sample, size, listed, min(p.logprobs.num_top, p.logits.vocab_size), highest,
            log_sum);
  if (i > 0) return;
  p.logprobs.ranks[sample] = rank;
  write_token(p.logprobs, sample, shared.bin,
              logprob_of(from_ordered_bits(logit), highest, log_sum));
}

// Any row of which find_undivided() found nothing. If it was tried, the slice has what it loaded.
// Some parameters are read again: two CTAs per SM leave 64 registers to a thread.
template <typename T, typename Cluster, typename Params>
__device__ __forceinline__ FoundRow find_row(const Params& p, int sample, bool greedy,
                                             const Slice& slice, bool aligned, SelectShared& shared,
                                             BinSets& sets) {
  SampleRow request = SampleRow::greedy_row(p.logits.vocab_size);
  if (!greedy) {
    __syncthreads();  // racecheck sees no order of this CTA's accesses in a cluster's barrier
    clear(shared.bins[0]);
    prepare_list(shared);
    __syncthreads();
    request = shared.request;
  }
  Highest highest;
  if (loads_undivided<T, Cluster>(p, request)) {
    highest = divide_row<T>(slice, request.temperature);
  } else {
    constexpr bool kMayBeGreedy = !kHasLogprobs<Params>;
    highest = load_row<T, kMayBeGreedy>(p, sample, request, aligned, slice, shared);
    Cluster::wait();
  }
  // Greedy rows, of which there are none with log-probabilities, did not wait for the shared one.
  const int top_k = kHasLogprobs<Params> ? shared.request.top_k : request.top_k;
  const bool lists = p.tokens != nullptr && top_k < p.logits.vocab_size && top_k <= kMaxListed;
  if (lists) count_highest(shared.bins[0], highest.ordered, 0, Radix{});
  post_max_key<Cluster>(shared, highest.key());
  FoundRow found;
  if (lists) {
    found.size = list_highest<T, Cluster>(shared, sets, slice, highest.ordered, top_k);
  } else {
    Cluster::sync();
  }
  const uint64_t key = row_max_key<Cluster>(shared);
  found.highest = ordered_of(key);
  found.token = token_of(key);
  return found;
}

struct RowEnd {
  // Others may still read this CTA's shared memory: it has arrived at a last barrier of the
  // cluster.
  bool arrived;
  bool has_logprobs;  // the same in all CTAs
};
template <typename T, typename Cluster, typename Params>
__device__ __forceinline__ RowEnd sample_row(const Params& p, int sample, const Slice& slice,
                                             bool aligned, SelectShared& shared) {
  Cluster::begin();
  prepare_list(shared);
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  if (i < kRowWarps) shared.stale[i] = 0;
  SampleRow asked = SampleRow::read(p, sample);
  // With log-probabilities a greedy row is one with a top-k of 1.
  if (kHasLogprobs<Params> && asked.greedy) asked = {1.0f, false, 1, 1.0f, 0.0f};
  if (p.has_lists()) begin_changes(p, sample, shared);
  if (p.bitmask.words != nullptr) prefetch_mask(p.bitmask, p.bitmask.of(sample), slice);
  if (threadIdx.x == 0) shared.request = asked;
  BinSets sets;
  FoundRow found;
  if (loads_undivided<T, Cluster>(p, asked)) {
    found = find_undivided<T, Cluster>(p, sample, asked.counts(p.logits.vocab_size), slice, aligned,
                                       shared);
    if (found.drawn) return {true, false};
  }
  if (found.size > kRowThreads) {
    found = find_row<T, Cluster>(p, sample, asked.greedy, slice, aligned, shared, sets);
  }
  const SampleRow& request = shared.request;
  const bool is_first_cta = Cluster::rank() == 0;
  if (request.greedy || !is_finite_ordered(found.highest)) {
    if (is_first_cta && threadIdx.x == 0 && p.tokens != nullptr) p.tokens[sample] = found.token;
    if (found.size == INT32_MAX) return {false, false};
    Cluster::arrive();
    return {true, false};
  }
  const float max = from_ordered_bits(found.highest);
  if (found.size <= kRowThreads) {
    if (!is_first_cta) return {false, found.has_logprobs};
    if constexpr (kHasLogprobs<Params>) {
      if (found.has_logprobs) {
        draw_with_logprobs<T, Cluster>(p, sample, shared, found.size, max);
        return {false, true};
      }
    }
    // Others may still read this CTA's list. With log-probabilities none of them has left.
    const bool arrives = found.token >= 0 && !kHasLogprobs<Params>;
    if (arrives) Cluster::arrive();
    draw_from_list(shared, found.size, place_in_list(shared.list, found.size), request, max,
                   SampleRow::random(p, sample),
                   [&](uint32_t token, int) { p.tokens[sample] = token; });
    return {arrives, false};
  }
  const Kept kept = choose<Cluster>(shared, sets, slice, request, p.logits.vocab_size, max);
  if (p.tokens == nullptr) {
    write_mask<T, Cluster>(p, p.row_of(sample), shared, slice, kept);
    return {true, false};
  }
  draw<Cluster>(shared, slice, kept, max, SampleRow::random(p, sample),
                [&](int index) { p.tokens[sample] = slice.begin + index; });
  return {true, false};
}

template <typename T, typename Cluster, typename Params>
__device__ __forceinline__ void sample_cluster(const Params& p, int tokens, bool aligned) {
  __shared__ SelectShared shared;
  launch_dependents();
  wait_for_primary_kernel();
  const int sample = blockIdx.x / Cluster::kSize;
  const int64_t row = p.row_of(sample);
  if (row < 0 || row >= p.logits.num_rows) {  // a contained row
    if (Cluster::rank() > 0 || p.tokens == nullptr) return;
    if (threadIdx.x == 0) p.tokens[sample] = -1;
    if constexpr (kHasLogprobs<Params>) write_no_logprobs(p.logprobs, sample);
    return;
  }
  const Slice slice = slice_of<Cluster>(slice_memory<Cluster>(p.scratch, sample, tokens),
                                        p.logits.vocab_size, tokens);
  if constexpr (Cluster::kSize > 1) prefetch_slice<T>(p.logits, row, slice);
  const RowEnd end = sample_row<T, Cluster>(p, sample, slice, aligned, shared);
  if (end.arrived) Cluster::wait();
  if constexpr (kHasLogprobs<Params>) {
    if (end.has_logprobs) return;
    Cluster::sync();  // the token is there, and nobody reads this CTA's shared memory
    __syncthreads();  // racecheck sees no order of this CTA's accesses in a cluster's barrier
    logprobs_of_row<T, Cluster>(p.logprobs, sample, row, p.tokens[sample], slice, aligned, shared);
  }
}

}  // namespace vllm_kernels::cuda
