// Brings a row into a cluster for a sample: its mask, bias and penalties are applied on the way or
// in shared memory.
#pragma once
#include "cuda/base/prefetch.cuh"
#include "cuda/sampling/row_load.cuh"

namespace vllm_kernels::cuda {

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
// penalties come before the temperature. Rows that may be greedy do not wait for shared.changes.
template <typename T, bool kMayBeGreedy>
__device__ __forceinline__ Highest load_row(const SampleParams& p, int sample,
                                            const SampleRow& request, bool aligned,
                                            const Slice& slice, SelectShared& shared) {
  const bool sparse = p.has_lists() && Changes::of(p, sample).any();
  const int32_t* words = p.bitmask.of(sample);
  const float temperature = request.temperature;
  const bool divides = temperature != 1.0f;
  Highest highest;
  load_slice<T>(
      p.logits, p.row_of(sample), aligned, slice, !kMayBeGreedy || !request.greedy || sparse,
      [&](int token) { return p.bitmask.bits_from(words, token); },
      [&](float logit, bool allowed) {
        if (!allowed) logit = -INFINITY;
        if (divides && !sparse) logit = logit / temperature;
        return ordered_bits(logit);
      },
      [&](uint32_t ordered, int token) { highest.visit(ordered, token); });
  if (kMayBeGreedy ? !sparse : !p.has_lists() || !shared.changes.any()) return highest;
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
// the thread's highest; NaN if one is NaN. visit: see load_logits().
template <typename T, typename Visit>
__device__ __forceinline__ float load_undivided(const SampleParams& p, int sample, bool aligned,
                                                const Slice& slice, SelectShared& shared,
                                                Visit& visit) {
  float highest = load_logits<T>(p.logits, p.row_of(sample), aligned, slice,
                                 {p.bitmask, p.bitmask.of(sample)}, visit);
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

}  // namespace vllm_kernels::cuda
