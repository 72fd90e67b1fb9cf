// Thresholds and draws on a row of ordered bits (ops/sampling/sampling_math.h) that a cluster of
// CTAs holds.
//
// Each CTA has a slice: neighbouring tokens, in shared memory or in its own part of global memory.
// Selection takes three radix rounds of 11, 11 and 10 bits. In a round each CTA adds its tokens to
// 2048 bins, by count or by weight. Behind a barrier each CTA adds up an eighth of the bins over
// the cluster and sends the sums to all. Behind a second one every CTA finds the border bin: the
// same one everywhere. Two sets of bins alternate, so the next round may clear one while others
// still read the other. Sums are integers, so their order does not matter.
#pragma once
#include "cuda/base/ptx.cuh"
#include "cuda/sampling/row_cluster.cuh"
#include "ops/sampling/sample.h"

namespace vllm_kernels::cuda {

// Low and high words of 64-bit sums. Shared memory has no 64-bit addition.
struct Bins {
  alignas(16) uint32_t low[kRadixBins];
  alignas(16) uint32_t high[kRadixBins];
};

// The highest tokens of a row, in the first CTA and in any order (row_list.cuh). Before that, in
// row_changes.cuh, tokens that have a penalty and, in `ordered`, their counts.
struct List {
  alignas(16) uint32_t ordered[kRowThreads];
  alignas(16) uint32_t tokens[kRowThreads];
  // Tokens found for top-k with one radix round, with two, and for top-p. May exceed kRowThreads.
  // Before these, row_few.cuh counts those of a CTA and those of the row in the first two, and
  // row_nucleus.cuh those of the border of a CTA in the first. Its words are then in this memory.
  int sizes[3];
};

// What a CTA tells the others of its own list (row_few.cuh, row_nucleus.cuh).
struct FewOfCta {
  int size;
  uint32_t highest;   // ordered bits of its highest logit
  uint32_t quotient;  // ordered bits of a quotient that `count` of its tokens reach; 0: none
};

// Differences from the highest logit of a row (row_nucleus.cuh): tokens of at least `kept` are
// kept, and those below it of at least `listed` may be.
struct Border {
  float max;  // the highest logit
  float kept, listed;
};

struct SelectShared {
  Bins bins[2];
  List list;
  FewOfCta few[kClusterSize];
  float powers[kClusterSize];  // with few: sums of e^(logit - highest) (row_logprobs.cuh)
  float log_sum;               // of the row, in the first CTA
  // Of sample(). Reading them in global memory where they are used would take longer.
  SampleRow request;
  Changes changes;
  Penalties penalties;
  uint32_t stale[kRowWarps];        // per warp: threads whose highest logit may have changed
  uint64_t cta_keys[kClusterSize];  // the highest key of each CTA
  uint64_t warp_keys[kRowWarps];
  uint64_t warp_sums[kRowWarps];
  // Per warp: weights or number of tokens above the threshold. row_list.cuh parks a sum in [0].
  uint64_t above[kRowWarps];
  alignas(8) uint32_t equal[kRowWarps];  // per warp: number of tokens equal to it
  Border border;
  // the border bin of a round
  uint32_t bin;
  uint64_t before, inside;
  int list_begin;  // place of this CTA's tokens in the list
};

// A CTA's tokens as ordered bits, padded with 0, which is below every logit, to a multiple of 4; or
// the bits of logits, padded with -inf (load_logits()).
struct Slice {
  uint32_t* ordered;
  int begin;  // token of the first
  int size;

  __device__ int num_vecs() const { return (size + 3) / 4; }
  __device__ uint4 vec(int i) const { return reinterpret_cast<const uint4*>(ordered)[i]; }
  // Each warp has a chunk of neighbouring Vecs.
  __device__ int chunk_vecs() const {
    return (num_vecs() + kRowWarps * kWarpSize - 1) / (kRowWarps * kWarpSize) * kWarpSize;
  }
  struct Chunk {
    int first, last;  // Vecs [first, last)
  };
  __device__ Chunk chunk(int warp) const {
    const int first = warp * chunk_vecs();
    return {first, min(first + chunk_vecs(), num_vecs())};
  }
};

template <typename Body>
__device__ __forceinline__ void for_each_of(uint4 vec, const Body& body) {
  body(vec.x, 0);
  body(vec.y, 1);
  body(vec.z, 2);
  body(vec.w, 3);
}

// body(ordered bits) for all tokens of the slice, in any order.
template <typename Body>
__device__ __forceinline__ void for_each_token(const Slice& slice, const Body& body) {
#pragma unroll 1
  for (int i = threadIdx.x; i < slice.num_vecs(); i += kRowThreads) {
    for_each_of(slice.vec(i), [&](uint32_t ordered, int) { body(ordered); });
  }
}

// body(vec, index of the Vec) for the chunk of this warp, in order. Past the end the Vec is 0. All
// lanes call it together.
template <typename Body>
__device__ __forceinline__ void for_each_of_chunk(const Slice& slice, const Body& body) {
  const int lane = threadIdx.x % kWarpSize;
  const auto [first, last] = slice.chunk(threadIdx.x / kWarpSize);
#pragma unroll 1
  for (int i = first; i < last; i += kWarpSize) {
    const int mine = i + lane;
    if (!body(mine < last ? slice.vec(mine) : make_uint4(0, 0, 0, 0), mine)) return;
  }
}

__device__ __forceinline__ void clear(Bins& bins) {
  auto* quads = reinterpret_cast<uint4*>(&bins);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Bins) / 16); i += kRowThreads) {
    quads[i] = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void add_weight(Bins& bins, uint32_t bin, uint64_t weight) {
  const uint32_t low = static_cast<uint32_t>(weight);
  const uint32_t old = atomicAdd(&bins.low[bin], low);
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + (old + low < low ? 1 : 0);
  if (high != 0) atomicAdd(&bins.high[bin], high);
}

// This thread's share of a sum over the CTA.
struct BlockSum {
  uint64_t before, all;  // the sum of the threads before it, and of all
};
__device__ __forceinline__ BlockSum block_sum(SelectShared& shared, uint64_t mine) {
  const uint64_t upto = inclusive_sum(mine);
  // opaque() keeps no address in registers.
  const int warp = opaque(threadIdx.x) / kWarpSize;
  __syncthreads();  // all have read the last call's sums
  if (threadIdx.x % kWarpSize == kWarpSize - 1) shared.warp_sums[warp] = upto;
  __syncthreads();
  BlockSum sum{upto - mine, 0};
#pragma unroll
  for (int i = 0; i < kRowWarps; ++i) {
    if (i < warp) sum.before += shared.warp_sums[i];
    sum.all += shared.warp_sums[i];
  }
  return sum;
}

// What a radix selection has found so far. After round 2, `prefix` is the threshold, `before` the
// count or weight above it, `inside` that of the tokens equal to it.
struct Radix {
  uint32_t prefix = 0;
  uint64_t before = 0;
  uint64_t inside = 0;
};

// Which of the two sets of bins is the current one.
struct BinSets {
  int current = 0;
};

template <bool kWeights>
__device__ __forceinline__ void fill_bins(Bins& bins, const Slice& slice, int round,
                                          const Radix& found, uint32_t lowest, float max) {
  const int shift = radix_shift(round);
  const uint32_t mask = (1u << radix_bits(round)) - 1;
  for_each_token(slice, [&](uint32_t ordered) {
    if (ordered < lowest || !in_radix_prefix(ordered, found.prefix, round)) return;
    const uint32_t bin = ordered >> shift & mask;
    if constexpr (kWeights) {
      const uint64_t weight = weight_of(ordered, max);
      if (weight != 0) add_weight(bins, bin, weight);
    } else {
      atomicAdd(&bins.low[bin], 1u);
    }
  });
}

// Four bins of a CTA. Quads have the order of falling values: quad 0 has bins 2047 to 2044.
constexpr int kQuads = kRadixBins / 4;
static_assert(kQuads == kRowThreads);
template <bool kWeights>
__device__ __forceinline__ void read_quad(const Bins& bins, int quad, uint64_t (&sums)[4]) {
  const int at = kQuads - 1 - quad;
  for_each_of(reinterpret_cast<const uint4*>(bins.low)[at],
              [&](uint32_t word, int i) { sums[3 - i] = word; });
  if constexpr (kWeights) {
    for_each_of(reinterpret_cast<const uint4*>(bins.high)[at],
                [&](uint32_t word, int i) { sums[3 - i] += uint64_t{word} << 32; });
  }
}

// The sum of each quad over the cluster: thread i gets quad i. A CTA adds up its share of the quads
// and sends the sums to all. If each CTA read all bins of all others, that traffic would take more
// time than the rest of a round.
template <typename Cluster, bool kWeights>
__device__ __forceinline__ uint64_t sum_quads(SelectShared& shared, const BinSets& sets) {
  constexpr int kCtas = Cluster::kSize;
  const int peer = threadIdx.x % kCtas;
  const int quad = Cluster::rank() * (kQuads / kCtas) + threadIdx.x / kCtas;
  uint64_t sums[4];
  read_quad<kWeights>(*Cluster::peer(&shared.bins[sets.current], peer), quad, sums);
  uint64_t sum = sums[0] + sums[1] + sums[2] + sums[3];
  if constexpr (kCtas == 1) return sum;
#pragma unroll
  for (int distance = kCtas / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  // The last round's bins, which nobody reads any more.
  auto* quads = reinterpret_cast<uint64_t*>(shared.bins[sets.current ^ 1].low);
  Cluster::peer(quads, peer)[quad] = sum;
  Cluster::sync();
  return quads[opaque(threadIdx.x)];
}

// One radix round: finds the bin where the cumulated count or weight, from the highest value down,
// reaches target_of(the sum of all bins, round). The current bins were filled before.
template <typename Cluster, bool kWeights, typename TargetOf>
__device__ __forceinline__ void finish_round(SelectShared& shared, BinSets& sets, int round,
                                             Radix& found, const TargetOf& target_of) {
  Cluster::sync();
  const uint64_t mine = sum_quads<Cluster, kWeights>(shared, sets);
  const BlockSum sum = block_sum(shared, mine);
  const uint64_t target = target_of(sum.all, round) - found.before;
  const uint32_t border =
      __ballot_sync(0xffffffffu, sum.before < target && target <= sum.before + mine);
  if (border != 0) {  // in one warp, whose lanes read the quad of a CTA each
    const int lane = threadIdx.x % kWarpSize, of_quad = __ffs(border) - 1;
    uint64_t sums[4] = {};
    if (lane < Cluster::kSize) {
      read_quad<kWeights>(*Cluster::peer(&shared.bins[sets.current], lane),
                          static_cast<int>(threadIdx.x) - lane + of_quad, sums);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = warp_total(sums[i]);
    uint64_t before = __shfl_sync(0xffffffffu, sum.before, of_quad);
    if (lane == of_quad) {
      int bin = kRadixBins - 1 - 4 * opaque(threadIdx.x);
      uint64_t inside = sums[0];
#pragma unroll
      for (int i = 1; i < 4; ++i) {
        if (before + inside >= target) break;
        before += inside;
        inside = sums[i];
        --bin;
      }
      shared.bin = static_cast<uint32_t>(bin);
      shared.before = before;
      shared.inside = inside;
    }
  }
  sets.current ^= 1;
  clear(shared.bins[sets.current]);
  __syncthreads();
  found.prefix |= shared.bin << radix_shift(round);
  found.before += shared.before;
  found.inside = shared.inside;
}

// Runs the rounds. Only tokens of at least `lowest` count.
template <typename Cluster, bool kWeights, typename TargetOf>
__device__ __forceinline__ void select(SelectShared& shared, BinSets& sets, const Slice& slice,
                                       uint32_t lowest, float max, Radix& found,
                                       const TargetOf& target_of) {
#pragma unroll 1
  for (int round = 0; round < kRadixRounds; ++round) {
    fill_bins<kWeights>(shared.bins[sets.current], slice, round, found, lowest, max);
    finish_round<Cluster, kWeights>(shared, sets, round, found, target_of);
  }
}

// --- tokens in index order -----------------------------------------------------------------------

// Sums over the tokens before this warp's chunk, of the chunk, and of the row.
struct KeptSums {
  uint64_t above_before = 0, above = 0, above_all = 0;  // counts or weights above the threshold
  uint32_t equal_before = 0, equal = 0, equal_all = 0;  // numbers of tokens equal to it
};

// body(a CTA's shared memory, a warp of it, the warp's number in the cluster) for all warps of the
// cluster, divided among the lanes of this warp.
template <typename Cluster, typename Body>
__device__ __forceinline__ void for_each_warp_of_cluster(SelectShared& shared, const Body& body) {
#pragma unroll
  for (int first = 0; first < Cluster::kSize * kRowWarps; first += kWarpSize) {
    const int number = first + static_cast<int>(threadIdx.x % kWarpSize);
    if (number >= Cluster::kSize * kRowWarps) break;
    body(*Cluster::peer(&shared, number / kRowWarps), number % kRowWarps, number);
  }
}

template <typename Cluster, bool kWeights>
__device__ __forceinline__ KeptSums kept_sums(SelectShared& shared, const Slice& slice,
                                              uint32_t threshold, float max) {
  KeptSums sums;
  for_each_of_chunk(slice, [&](uint4 vec, int) {
    for_each_of(vec, [&](uint32_t ordered, int) {
      if (ordered > threshold) sums.above += kWeights ? weight_of(ordered, max) : 1;
      if (ordered == threshold) ++sums.equal;
    });
    return true;
  });
  sums.above = warp_total(sums.above);
  sums.equal = warp_total(sums.equal);
  const int thread = opaque(threadIdx.x);  // keeps no address in registers
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  if (lane == 0) {
    shared.above[warp] = sums.above;
    shared.equal[warp] = sums.equal;
  }
  Cluster::sync();
  const int mine = Cluster::rank() * kRowWarps + warp;
  const auto add = [&](const SelectShared& theirs, int chunk, int number) {
    const uint64_t above = theirs.above[chunk];
    const uint32_t equal = theirs.equal[chunk];
    sums.above_all += above;
    sums.equal_all += equal;
    if (number < mine) {
      sums.above_before += above;
      sums.equal_before += equal;
    }
  };
  for_each_warp_of_cluster<Cluster>(shared, add);
  sums.above_all = warp_total(sums.above_all);
  sums.equal_all = warp_total(sums.equal_all);
  sums.above_before = warp_total(sums.above_before);
  sums.equal_before = warp_total(sums.equal_before);
  return sums;
}

__device__ __forceinline__ uint32_t number_kept(uint32_t equal, uint32_t ties) {
  return min(equal, ties);
}

// body(index in the slice, ordered bits, its number among the kept tokens of the row, or -1 if it
// is not kept) for the chunk of this warp. `sums` are counts. With kOnlyKept tokens that are not
// kept may be left out.
template <bool kOnlyKept, typename Body>
__device__ __forceinline__ void for_each_kept(const Slice& slice, const Kept& kept,
                                              const KeptSums& sums, const Body& body) {
  uint64_t above_before = sums.above_before;
  uint32_t equal_before = sums.equal_before;
  for_each_of_chunk(slice, [&](uint4 vec, int index) {
    uint32_t above = 0, equal = 0;
    for_each_of(vec, [&](uint32_t ordered, int) {
      above += ordered > kept.threshold;
      equal += ordered == kept.threshold;
    });
    // Most Vecs have no kept token.
    if (kOnlyKept && !__any_sync(0xffffffffu, (above | equal) != 0)) return true;
    const uint32_t both = inclusive_sum(above << 16 | equal);
    uint64_t above_at = above_before + ((both >> 16) - above);
    uint32_t equal_at = equal_before + ((both & 0xffffu) - equal);
    for_each_of(vec, [&](uint32_t ordered, int i) {
      const bool is_equal = ordered == kept.threshold;
      const bool is_kept = ordered > kept.threshold || (is_equal && equal_at < kept.ties);
      const int64_t number = above_at + number_kept(equal_at, kept.ties);
      body(4 * index + i, ordered, is_kept ? static_cast<int>(number) : -1);
      above_at += ordered > kept.threshold;
      equal_at += is_equal;
    });
    const uint32_t all = __shfl_sync(0xffffffffu, both, kWarpSize - 1);
    above_before += all >> 16;
    equal_before += all & 0xffffu;
    return true;
  });
}

// Inverse of the cumulated weights of the kept tokens in index order. Calls found(index in the
// slice) in one lane of the cluster. Arrives at the cluster's next barrier before the search, which
// reads no other CTA's memory.
template <typename Cluster, typename Found>
__device__ __forceinline__ void draw(SelectShared& shared, const Slice& slice, const Kept& kept,
                                     float max, uint64_t random, const Found& found) {
  const KeptSums sums = kept_sums<Cluster, true>(shared, slice, kept.threshold, max);
  Cluster::arrive();
  const uint64_t tie_weight = kept.ties > 0 ? weight_of(kept.threshold, max) : 0;
  const uint64_t total = sums.above_all + number_kept(sums.equal_all, kept.ties) * tie_weight;
  const uint64_t target = high_product(total, random);
  uint64_t before = sums.above_before + number_kept(sums.equal_before, kept.ties) * tie_weight;
  const uint32_t chunk_ties = number_kept(sums.equal_before + sums.equal, kept.ties) -
                              number_kept(sums.equal_before, kept.ties);
  if (target < before || target >= before + sums.above + chunk_ties * tie_weight) return;
  uint32_t equal_before = sums.equal_before;
  const int lane = threadIdx.x % kWarpSize;
  for_each_of_chunk(slice, [&](uint4 vec, int index) {
    uint32_t equal = 0;
    for_each_of(vec, [&](uint32_t ordered, int) { equal += ordered == kept.threshold; });
    const uint32_t equal_upto = inclusive_sum(equal);
    uint32_t equal_at = equal_before + equal_upto - equal;
    uint64_t weights[4];
    for_each_of(vec, [&](uint32_t ordered, int i) {
      weights[i] = ordered > kept.threshold ? weight_of(ordered, max) : 0;
      if (ordered == kept.threshold) weights[i] = equal_at++ < kept.ties ? tie_weight : 0;
    });
    const uint64_t mine = weights[0] + weights[1] + weights[2] + weights[3];
    const uint64_t upto = before + inclusive_sum(mine);
    const uint32_t past = __ballot_sync(0xffffffffu, upto > target);
    if (past != 0) {
      if (lane == __ffs(past) - 1) {
        uint64_t at = upto - mine;
        int i = 0;
#pragma unroll
        for (; i < 3; ++i) {
          at += weights[i];
          if (at > target) break;
        }
        found(4 * index + i);
      }
      return false;
    }
    before = __shfl_sync(0xffffffffu, upto, kWarpSize - 1);
    equal_before += __shfl_sync(0xffffffffu, equal_upto, kWarpSize - 1);
    return true;
  });
}

// --- the highest logit ---------------------------------------------------------------------------

// Ordered bits and token in one number: of equal logits the first token is the highest.
__device__ __forceinline__ uint64_t max_key(uint32_t ordered, int token) {
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}
__device__ __forceinline__ uint32_t ordered_of(uint64_t key) {
  return static_cast<uint32_t>(key >> 32);
}
__device__ __forceinline__ int token_of(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

// Sends the CTA's highest key to every CTA of the cluster, all of which must have begun. Behind the
// next Cluster::sync(), row_max_key() is that of the row.
template <typename Cluster>
__device__ __forceinline__ void post_max_key(SelectShared& shared, uint64_t key) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    key = max(key, __shfl_xor_sync(0xffffffffu, key, distance));
  }
  const int thread = opaque(threadIdx.x);  // keeps no address in registers
  if (thread % kWarpSize == 0) shared.warp_keys[thread / kWarpSize] = key;
  __syncthreads();
  if (threadIdx.x >= Cluster::kSize) return;
#pragma unroll
  for (int i = 0; i < kRowWarps; ++i) key = max(key, shared.warp_keys[i]);
  *Cluster::peer(&shared.cta_keys[Cluster::rank()], static_cast<int>(threadIdx.x)) = key;
}
template <typename Cluster>
__device__ __forceinline__ uint64_t row_max_key(const SelectShared& shared) {
  uint64_t key = 0;
#pragma unroll
  for (int rank = 0; rank < Cluster::kSize; ++rank) key = max(key, shared.cta_keys[rank]);
  return key;
}

}  // namespace vllm_kernels::cuda
