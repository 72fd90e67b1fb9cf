// sample and top_k_top_p_mask_ (ops/sampling/sample.h), one launch: a cluster of CTAs per row.
//
//   grid      a cluster of 8 CTAs per row from sm_90 on, each with an eighth of the row in shared
//             memory; where that does not fit one CTA per row, with the row in global scratch
//   reads     the logits once. The bitmask and, where all tokens need it, the temperature are
//             applied on the way; bias and penalties, which are sparse, in shared memory
//   few       a small top-k: the first CTA gets a list of candidates (row_few.cuh; row_list.cuh
//             above 128, or where a list overflows) and finishes alone; the other CTAs leave
//   nucleus   without a top-k: counts bound where top-p ends, then the first CTA finishes with a
//             list of the tokens there (row_nucleus.cuh). If that list is too long: as below
//   threshold else top-k: radix rounds by count. min-p: one number. top-p, over what is left: two
//             rounds by weight in steps of the logit, then a list (row_list.cuh). If that list is
//             too long: radix rounds by weight
//   draw      weights of the kept tokens per warp, then the one warp that holds the random place
// Nothing is read before the PDL wait.
#include "cuda/base/prefetch.cuh"
#include "cuda/launchers.h"
#include "cuda/sampling/row_nucleus.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr uint32_t kAllTies = 0xffffffffu;

// Begins to bring a token count for each thread into shared memory. Of each list, as many entries
// more go into L2.
__device__ __forceinline__ void begin_changes(const SampleParams& p, int sample,
                                              SelectShared& shared) {
  const Changes changes = Changes::of(p, sample);
  const auto& [bias, counts] = changes;
  if (threadIdx.x == kWarpSize) shared.changes = changes;
  if (threadIdx.x == 2 * kWarpSize) shared.penalties = Penalties::read(p, sample);
  const auto prefetch = [](const auto& lists, int64_t i, int64_t end) {
    if (i >= end) return;
    prefetch_l2(lists.tokens + i);
    prefetch_l2(lists.values + i);
  };
  const int64_t i = counts.begin + threadIdx.x;
  if (i < counts.end) {
    copy4_async(shared_address(&shared.list.tokens[threadIdx.x]), p.counts.tokens + i);
    copy4_async(shared_address(&shared.list.ordered[threadIdx.x]), p.counts.values + i);
  }
  prefetch(p.counts, i + kRowThreads, counts.end);
  prefetch(p.bias, bias.begin + threadIdx.x, bias.end);
}

// Begins to bring the slice's words of a mask into L2.
__device__ __forceinline__ void prefetch_mask(const Bitmask& mask, const int32_t* words,
                                              const Slice& slice) {
  constexpr int kLine = 128 / sizeof(int32_t);
  const int at = slice.begin / 32 + static_cast<int>(threadIdx.x) * kLine;
  const int end = min((slice.begin + slice.size + 31) / 32, static_cast<int>(mask.num_words));
  if (words != nullptr && at < end) prefetch_l2(words + at);
}

// Begins to bring the slice into L2: the request, which tells how to load it, takes as long to
// read.
template <typename T>
__device__ __forceinline__ void prefetch_slice(const LogitRows& logits, int64_t row,
                                               const Slice& slice) {
  constexpr int kLine = 128 / sizeof(T);
  const T* from = static_cast<const T*>(logits.data) + row * logits.stride + slice.begin;
  for (int i = threadIdx.x * kLine; i < slice.size; i += kRowThreads * kLine) {
    prefetch_l2(from + i);
  }
}

// Adds the bias and the penalties to a slice, which other threads loaded. Thread i has loaded at
// most tops[i]. Marks it in shared.stale where that may no longer be right. logit_of(word of the
// slice), word_of(logit).
template <typename T, typename LogitOf, typename WordOf>
__device__ __forceinline__ void change_logits(const SampleParams& p, SelectShared& shared,
                                              const float* tops, const Slice& slice,
                                              const LogitOf& logit_of, const WordOf& word_of) {
  const auto change = [&](int32_t token, const auto& changed) {
    const int64_t offset = int64_t{token} - slice.begin;
    if (offset < 0 || offset >= slice.size) return;
    const int at = static_cast<int>(offset);
    const float before = logit_of(slice.ordered[at]), after = changed(before);
    slice.ordered[at] = word_of(after);
    const int loader = at / kVecWidth<T> % kRowThreads;
    const float top = tops[loader];
    if (before < top && after < top) return;
    atomicOr(&shared.stale[loader / kWarpSize], 1u << loader % kWarpSize);
  };
  const auto bias = shared.changes.bias;
  if (bias.begin < bias.end) {
#pragma unroll 1
    for (int64_t i = bias.begin + threadIdx.x; i < bias.end; i += kRowThreads) {
      const float value = p.bias.values[i];
      change(p.bias.tokens[i], [&](float logit) { return ScalarMath::add(logit, value); });
    }
    __syncthreads();
  }
  const auto counts = shared.changes.counts;
  const auto penalize = [&](int32_t token, int32_t count) {
    change(token, [&](float logit) { return shared.penalties.apply(logit, count); });
  };
  int64_t i = counts.begin + threadIdx.x;
  if (i < counts.end) {
    wait_all_copies();  // this thread's
    penalize(static_cast<int32_t>(shared.list.tokens[threadIdx.x]),
             static_cast<int32_t>(shared.list.ordered[threadIdx.x]));
  }
#pragma unroll 1
  for (i += kRowThreads; i < counts.end; i += kRowThreads) {
    penalize(p.counts.tokens[i], p.counts.values[i]);
  }
  __syncthreads();
}

// Whether change_logits() marked this thread.
__device__ __forceinline__ bool is_stale(const SelectShared& shared) {
  const int thread = opaque(threadIdx.x);  // keeps no address in registers
  return (shared.stale[thread / kWarpSize] >> thread % kWarpSize & 1) != 0;
}

// Loads the slice as ordered bits of the final logits. Returns the thread's highest token. Bias and
// penalties come before the temperature.
template <typename T>
__device__ __forceinline__ Highest load_row(const SampleParams& p, int sample,
                                            const SampleRow& request, bool aligned,
                                            const Slice& slice, SelectShared& shared) {
  const bool sparse = p.has_lists() && Changes::of(p, sample).any();
  const int32_t* words = p.bitmask.of(sample);
  const float temperature = request.temperature;
  const bool divides = temperature != 1.0f;
  Highest highest;
  load_slice<T>(
      p.logits, p.row_of(sample), aligned, slice, !request.greedy || sparse,
      [&](int token) { return p.bitmask.bits_from(words, token); },
      [&](float logit, bool allowed) {
        if (!allowed) logit = -INFINITY;
        if (divides && !sparse) logit = logit / temperature;
        return ordered_bits(logit);
      },
      [&](uint32_t ordered, int token) { highest.visit(ordered, token); });
  if (!sparse) return highest;
  // bins[0] is cleared for a count. No CTA sends to bins[1] before the next barrier of the cluster.
  auto* tops = reinterpret_cast<float*>(shared.bins[1].low);
  tops[threadIdx.x] = from_ordered_bits(highest.ordered);
  __syncthreads();
  change_logits<T>(
      p, shared, tops, slice, [](uint32_t ordered) { return from_ordered_bits(ordered); },
      [](float logit) { return ordered_bits(logit); });
  if (!divides && !is_stale(shared)) return highest;
  highest = {};
  for_each_own<T>(slice, [&](uint32_t ordered, int index) {
    if (index >= slice.size) return;
    if (divides) {
      ordered = ordered_bits(from_ordered_bits(ordered) / temperature);
      slice.ordered[index] = ordered;
    }
    highest.visit(ordered, slice.begin + index);
  });
  return highest;
}

// Loads the slice as bits of the logits that load_row() would divide by the temperature. Returns
// the thread's highest; NaN if one is NaN.
template <typename T>
__device__ __forceinline__ float load_undivided(const SampleParams& p, int sample, bool aligned,
                                                const Slice& slice, SelectShared& shared) {
  float highest =
      load_logits<T>(p.logits, p.row_of(sample), aligned, slice, {p.bitmask, p.bitmask.of(sample)});
  if (!p.has_lists()) return highest;
  // A faster CTA may already send its list to bins[1] of the first one.
  auto* tops = reinterpret_cast<float*>(shared.bins[0].low);
  tops[threadIdx.x] = highest;
  __syncthreads();
  if (!shared.changes.any()) return highest;
  change_logits<T>(
      p, shared, tops, slice, [](uint32_t word) { return bits_as<float>(word); },
      [](float logit) { return bits_as<uint32_t>(logit); });
  if (!is_stale(shared)) return highest;
  highest = -INFINITY;
  for_each_own<T>(slice,
                  [&](uint32_t word, int) { highest = max_or_nan(highest, bits_as<float>(word)); });
  return highest;
}

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

// The draw from a list. Calls found(token) in one thread.
template <typename Found>
__device__ __forceinline__ void draw_from_list(SelectShared& shared, int size,
                                               const SampleRow& request, float max, uint64_t random,
                                               const Found& found) {
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  const ListPlace place = place_in_list(shared.list, size);
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
  if (sum.before <= target && target < sum.before + weight) found(token_at[i]);
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

// Whether a list of the few highest tokens may suffice for a row. Enough threads must have a token,
// or all tokens must fit.
template <typename T, typename Cluster>
__device__ __forceinline__ bool wants_few(const SampleParams& p, const SampleRow& request) {
  const int vocab_size = p.logits.vocab_size;
  return p.tokens != nullptr && request.counts(vocab_size) && request.top_k <= kMaxFew &&
         request.temperature < INFINITY &&
         (vocab_size >= 2 * request.top_k * Cluster::kSize * kVecWidth<T> ||
          vocab_size <= Cluster::kSize * kFewRoom<Cluster>);
}

// Whether sample_nucleus() may draw from a row.
template <typename Cluster>
__device__ __forceinline__ bool wants_nucleus(const SampleParams& p, const SampleRow& request) {
  return Cluster::kSize > 1 && p.tokens != nullptr && !request.greedy &&
         !request.counts(p.logits.vocab_size) && request.temperature <= kMaxNucleusTemperature;
}

// Whether find_undivided() loads a row, which greedy ones are not.
template <typename T, typename Cluster>
__device__ __forceinline__ bool loads_undivided(const SampleParams& p, const SampleRow& request) {
  return wants_few<T, Cluster>(p, request) || wants_nucleus<Cluster>(p, request);
}

// What is known of a row before the draw.
struct FoundRow {
  int size = INT32_MAX;  // of the first CTA's list; above kRowThreads: there is none
  uint32_t highest = 0;  // ordered bits
  int token = -1;        // the first of the highest; -1: not known, with a list of find_undivided()
  bool drawn = false;    // by sample_nucleus()
};

// A row without a top-k, of which a token is drawn, or with a small one, which gets a list. Finds
// nothing if the lists do not suffice, or if the row is not finite.
template <typename T, typename Cluster>
__device__ __forceinline__ FoundRow find_undivided(const SampleParams& p, int sample,
                                                   const Slice& slice, bool aligned,
                                                   SelectShared& shared) {
  const float highest = load_undivided<T>(p, sample, aligned, slice, shared);
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
  send_few<T, Cluster>(shared, slice, highest, range);
  Cluster::sync();
  const SampleRow& request = shared.request;
  const Few few = few_of_row<Cluster>(shared);
  found.highest = quotient_of(few.highest, request.temperature);
  if (!few.fits || !is_finite_ordered(found.highest)) return found;
  found.size = 0;
  if (Cluster::rank() == 0) {
    found.size = list_few<Cluster>(shared, few, request.top_k, request.temperature);
  }
  return found;
}

// Any row of which find_undivided() found nothing. If it was tried, the slice has what it loaded.
// Some parameters are read again: two CTAs per SM leave 64 registers to a thread.
template <typename T, typename Cluster>
__device__ __forceinline__ FoundRow find_row(const SampleParams& p, int sample, bool greedy,
                                             const Slice& slice, bool aligned, SelectShared& shared,
                                             BinSets& sets) {
  SampleRow request = SampleRow::greedy_row(p.logits.vocab_size);
  if (!greedy) {
    clear(shared.bins[0]);
    prepare_list(shared);
    __syncthreads();
    request = shared.request;
  }
  const bool loaded = loads_undivided<T, Cluster>(p, request);
  Highest highest;
  if (loaded) {
    highest = divide_row<T>(slice, request.temperature);
  } else {
    highest = load_row<T>(p, sample, request, aligned, slice, shared);
  }
  const int top_k = greedy ? p.logits.vocab_size : shared.request.top_k;
  const bool lists = p.tokens != nullptr && top_k < p.logits.vocab_size && top_k <= kMaxListed;
  if (lists) count_highest(shared.bins[0], highest.ordered, 0, Radix{});
  if (!loaded) Cluster::wait();
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

// Returns whether other CTAs may still read this CTA's shared memory. It has then arrived at a last
// barrier of the cluster.
template <typename T, typename Cluster>
__device__ __forceinline__ bool sample_row(const SampleParams& p, int sample, const Slice& slice,
                                           bool aligned, SelectShared& shared) {
  Cluster::begin();
  prepare_list(shared);
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  if (i < kRowWarps) shared.stale[i] = 0;
  const SampleRow asked = SampleRow::read(p, sample);
  if (p.has_lists()) begin_changes(p, sample, shared);
  if (p.bitmask.words != nullptr) prefetch_mask(p.bitmask, p.bitmask.of(sample), slice);
  if (threadIdx.x == 0) shared.request = asked;
  BinSets sets;
  FoundRow found;
  if (loads_undivided<T, Cluster>(p, asked)) {
    found = find_undivided<T, Cluster>(p, sample, slice, aligned, shared);
    if (found.drawn) return true;
  }
  if (found.size > kRowThreads) {
    found = find_row<T, Cluster>(p, sample, asked.greedy, slice, aligned, shared, sets);
  }
  const SampleRow& request = shared.request;
  const bool is_first_cta = Cluster::rank() == 0;
  if (request.greedy || !is_finite_ordered(found.highest)) {
    if (is_first_cta && threadIdx.x == 0 && p.tokens != nullptr) p.tokens[sample] = found.token;
    if (found.size == INT32_MAX) return false;
    Cluster::arrive();
    return true;
  }
  const float max = from_ordered_bits(found.highest);
  if (found.size <= kRowThreads) {
    if (!is_first_cta) return false;
    if (found.token >= 0) Cluster::arrive();
    draw_from_list(shared, found.size, request, max, SampleRow::random(p, sample),
                   [&](uint32_t token) { p.tokens[sample] = token; });
    return found.token >= 0;
  }
  const Kept kept = choose<Cluster>(shared, sets, slice, request, p.logits.vocab_size, max);
  if (p.tokens == nullptr) {
    write_mask<T, Cluster>(p, p.row_of(sample), shared, slice, kept);
    return true;
  }
  draw<Cluster>(shared, slice, kept, max, SampleRow::random(p, sample),
                [&](int index) { p.tokens[sample] = slice.begin + index; });
  return true;
}

template <typename T, typename Cluster>
__device__ __forceinline__ void sample_cluster(const SampleParams& p, int tokens, bool aligned) {
  __shared__ SelectShared shared;
  launch_dependents();
  wait_for_primary_kernel();
  const int sample = blockIdx.x / Cluster::kSize;
  const int64_t row = p.row_of(sample);
  if (row < 0 || row >= p.logits.num_rows) {
    if (Cluster::rank() == 0 && threadIdx.x == 0 && p.tokens != nullptr) p.tokens[sample] = -1;
    return;
  }
  const Slice slice = slice_of<Cluster>(slice_memory<Cluster>(p.scratch, sample, tokens),
                                        p.logits.vocab_size, tokens);
  if constexpr (Cluster::kSize > 1) prefetch_slice<T>(p.logits, row, slice);
  if (sample_row<T, Cluster>(p, sample, slice, aligned, shared)) Cluster::wait();
}

template <typename T>
__global__ void VLLM_KERNELS_CLUSTER(kClusterSize) __launch_bounds__(kRowThreads, sm90a_or(2, 1))
    sample_cluster_kernel(const __grid_constant__ SampleParams p, int tokens, bool aligned) {
#if defined(VLLM_KERNELS_HAS_SM90)
  sample_cluster<T, RowCluster<kClusterSize>>(p, tokens, aligned);
#endif
}

// Without the 1, ptxas takes 64 registers and spills.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 1)
    sample_kernel(const __grid_constant__ SampleParams p, int tokens, bool aligned) {
  sample_cluster<T, RowCluster<1>>(p, tokens, aligned);
}

}  // namespace

int64_t sampling_scratch_bytes(const LogitRows& logits, int64_t rows) {
  if (uses_cluster(logits.vocab_size)) return 0;
  return rows * slice_tokens(logits.vocab_size, 1) * int64_t{sizeof(uint32_t)};
}

void launch(const SampleParams& p, Stream stream) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_clusters<sample_cluster_kernel<T>, sample_kernel<T>>(p.op, p, p.num_samples, stream);
  });
}

}  // namespace vllm_kernels::cuda
