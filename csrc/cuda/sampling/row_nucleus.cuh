// A draw from the nucleus (the top-p set) of a row, or from all its tokens. The slice holds logits
// as they are: load_logits() (row_load.cuh).
//
//   highest  every CTA learns the row's highest logit
//   count    logits become quotients by the temperature. Each CTA counts them in bins of their
//            difference from the highest one
//   border   each CTA weighs an eighth of the bins over the cluster. These weights bound where the
//            last kept token is
//   weigh    exact weights, once per token. Each warp has a sum of all and one of the tokens above
//            the border. Each CTA lists its tokens of the border
//   draw     the first CTA finds the last kept token in the lists. Then it finds the warp that
//            holds the random place, and the token in it
//
// Bounds. k is kBinsPerUnit. A token of bin b differs from the highest by -(b - 1/2) / k to
// -(b + 1/2) / k. It counts as e^(-b / k), which is right within a factor of e^(1 / 2k). Let P be
// the counted weight above a place, R the rest and S their sum. Then P : R is right within a factor
// of e^(1/k). A token is surely kept if P with its own bin has (1 - p) P e^(1/k) <= p R. This is
// P <= S p / ((1 - p) e^(1/k) + p). It is surely not kept if P without its own bin has
// (1 - p) P >= p R e^(1/k). This is P >= S p e^(1/k) / (1 - p + p e^(1/k)).
// float32 errors are below 5.4e-6 of a weight, of which P : R sees half. Rounding of 2^18 weights
// to integers adds less than 2^-21 of S. kMargin is more than both.
#pragma once
#include "cuda/sampling/row_few.cuh"

namespace vllm_kernels::cuda {

// 8191 bins are 28.003 units. Weights are 0 from 27.8 on.
constexpr float kBinsPerUnit = 292.5f;
constexpr int kNucleusBins = 8192;
constexpr int kGroupBins = kNucleusBins / kRowThreads;  // neighbouring bins of a thread
constexpr float kUnitOfBin = 1 / kBinsPerUnit;
constexpr float kBinRatio = 0.99658704f;  // e^(-1 / kBinsPerUnit)
constexpr float kMargin = 0x1p-17f;
static_assert(sizeof(SelectShared::bins) == kNucleusBins * sizeof(uint32_t));

// Above these, other code takes the row: divide() would need care.
constexpr float kMaxNucleusTemperature = 0x1p30f, kMaxNucleusLogit = 0x1p100f;

// Most tokens in the list of a CTA and in those of a row.
constexpr int kCtaBorder = kRowThreads;
constexpr int kRowBorder = sizeof(Bins) / sizeof(uint64_t);
static_assert(sizeof(List::ordered) + sizeof(List::tokens) == kCtaBorder * sizeof(uint64_t));

__device__ __forceinline__ uint32_t* nucleus_bins(SelectShared& shared) {
  return reinterpret_cast<uint32_t*>(shared.bins);
}
// Sums of a thread's bins over the cluster, and later this CTA's list of the border.
__device__ __forceinline__ uint64_t* nucleus_words(SelectShared& shared) {
  return reinterpret_cast<uint64_t*>(&shared.list);
}

// What max_key() is, in 50 bits.
constexpr int kTokenBits = 18;
constexpr uint32_t kLastToken = (1u << kTokenBits) - 1;
static_assert(kMaxVocab <= 1 << kTokenBits);
__device__ __forceinline__ uint64_t border_key(uint32_t ordered, uint32_t token) {
  return uint64_t{ordered} << kTokenBits | (kLastToken - token);
}
__device__ __forceinline__ uint64_t border_weight(uint64_t key, float max) {
  return weight_of(static_cast<uint32_t>(key >> kTokenBits), max);
}

// --- counts --------------------------------------------------------------------------------------

// Division by the temperature.
struct Quotients {
  float temperature, reciprocal;
  float cut;  // quotients below it become -inf

  // The quotient rounded as IEEE 754 has it, for |x| of at least 2^-90 (Markstein 1990). Each step
  // adds the quotient of the exact remainder. NaN if it overflows.
  __device__ __forceinline__ float divide(float x) const {
    using M = ScalarMath;
    const float near = M::multiply(x, reciprocal);
    const float nearer = M::fused(M::fused(-near, temperature, x), reciprocal, near);
    return M::fused(M::fused(-nearer, temperature, x), reciprocal, nearer);
  }
  __device__ __forceinline__ bool change() const { return temperature != 1.0f || cut > -FLT_MAX; }
  // Divides a Vec of the slice.
  __device__ __forceinline__ void apply(float (&x)[4], float* vec) const {
    bool tiny = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) tiny |= fabsf(x[i]) < 0x1p-90f;
    if (tiny) {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) vec[i] = vec[i] / temperature;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = tiny ? vec[i] : divide(x[i]);
      if (!(x[i] >= cut)) x[i] = -INFINITY;
    }
    *reinterpret_cast<float4*>(vec) = make_float4(x[0], x[1], x[2], x[3]);
  }
};

// The bin of a token's difference from the highest. It is in the low bits of a float from 2 on,
// whose exponent the shift to bytes leaves out.
__device__ __forceinline__ uint32_t* bin_of(uint32_t* bins, float difference) {
  constexpr float kLowest = (1 - kNucleusBins) / kBinsPerUnit, kUnit = kBinsPerUnit * 0x1p-22f;
  const float number = ScalarMath::fused(fmaxf(difference, kLowest), -kUnit, 2.0f);
  return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(bins) +
                                     (bits_as<uint32_t>(number) << 2));
}

// Makes logits quotients. counts: adds 1 to the bin of each.
__device__ __forceinline__ void divide_and_count(uint32_t* bins, const Slice& slice,
                                                 const Quotients& quotients, float max,
                                                 bool counts) {
  const bool changes = quotients.change();
#pragma unroll 1
  for (int i = threadIdx.x; i < slice.num_vecs(); i += kRowThreads) {
    auto* vec = reinterpret_cast<float*>(slice.ordered) + 4 * i;
    const float4 loaded = *reinterpret_cast<const float4*>(vec);
    float x[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    if (changes) quotients.apply(x, vec);
    if (!counts) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) atomicAdd(bin_of(bins, x[j] - max), 1u);
  }
}

// --- border --------------------------------------------------------------------------------------

// The weight that the border counts for a token of a bin.
__device__ __forceinline__ float weight_of_bin(int bin) {
  return exp2_approx(static_cast<float>(bin) * (-kLog2E * kUnitOfBin)) * kWeightOne;
}

// The counted weight of the thread's bins over the cluster. Each CTA adds up a share and sends it
// to all, as in sum_quads().
template <typename Cluster>
__device__ __forceinline__ uint64_t sum_group(SelectShared& shared) {
  constexpr int kCtas = Cluster::kSize;
  const int peer = threadIdx.x % kCtas;
  const int group = Cluster::rank() * (kRowThreads / kCtas) + threadIdx.x / kCtas;
  const auto* counts = reinterpret_cast<const uint4*>(Cluster::peer(nucleus_bins(shared), peer)) +
                       group * (kGroupBins / 4);
  float weight = 0.0f;  // in weights of the first bin
#pragma unroll
  for (int i = kGroupBins / 4 - 1; i >= 0; --i) {
    const uint4 quad = counts[i];
    for (uint32_t count : {quad.w, quad.z, quad.y, quad.x}) {
      weight = ScalarMath::fused(weight, kBinRatio, static_cast<float>(count));
    }
  }
  uint64_t sum = static_cast<uint64_t>(weight * weight_of_bin(group * kGroupBins));
#pragma unroll
  for (int distance = kCtas / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  Cluster::peer(nucleus_words(shared), peer)[group] = sum;
  Cluster::sync();
  return nucleus_words(shared)[opaque(threadIdx.x)];
}

// Finds the first bin up to which the weights exceed `limit`, and writes (bin + shift) * unit. The
// one warp whose groups hold it looks, a lane per bin. `mine` is the weight of this thread's group,
// `before` that of the groups before it.
template <typename Cluster>
__device__ __forceinline__ void find_bin(SelectShared& shared, uint64_t before, uint64_t mine,
                                         uint64_t limit, float shift, float unit, float* found) {
  constexpr uint32_t kAll = 0xffffffffu;
  const uint32_t holder = __ballot_sync(kAll, before <= limit && limit < before + mine);
  if (holder == 0) return;
  const int lane = threadIdx.x % kWarpSize, of_group = __ffs(holder) - 1;
  const int first = (static_cast<int>(threadIdx.x) - lane + of_group) * kGroupBins;
  uint64_t weight = 0;
  if (lane < kGroupBins) {
    uint32_t count = 0;
#pragma unroll
    for (int rank = 0; rank < Cluster::kSize; ++rank) {
      count += Cluster::peer(nucleus_bins(shared), rank)[first + lane];
    }
    weight = static_cast<uint64_t>(static_cast<float>(count) * weight_of_bin(first + lane));
  }
  const uint64_t upto = __shfl_sync(kAll, before, of_group) + inclusive_sum(weight);
  // Rounding may leave the last bin a little short.
  const uint32_t past = __ballot_sync(kAll, upto > limit || lane == kGroupBins - 1);
  if (lane == 0) *found = (static_cast<float>(first + __ffs(past) - 1) + shift) * unit;
}

// Finds the border behind a barrier, when all CTAs have counted.
template <typename Cluster>
__device__ __forceinline__ void find_border(SelectShared& shared, float top_p) {
  constexpr float kFactor = 1 / kBinRatio;
  // They round towards a longer list.
  constexpr float kKeptUnit = -kUnitOfBin * (1 - 0x1p-20f);
  constexpr float kListedUnit = -kUnitOfBin * (1 + 0x1p-20f);
  if (threadIdx.x == 0) shared.border.listed = kNucleusBins * kListedUnit;
  Cluster::sync();
  const uint64_t mine = sum_group<Cluster>(shared);
  const BlockSum sum = block_sum(shared, mine);
  const float p = fmaxf(top_p, 0.0f), rest = 1.0f - p;
  const float kept = p / (rest * kFactor + p) - kMargin;
  const float listed = p * kFactor / (rest + p * kFactor) + kMargin;
  find_bin<Cluster>(shared, sum.before, mine, high_product(sum.all, fixed_point(kept)), -0.5f,
                    kKeptUnit, &shared.border.kept);
  if (listed < 1.0f) {
    find_bin<Cluster>(shared, sum.before, mine, high_product(sum.all, fixed_point(listed)), 0.5f,
                      kListedUnit, &shared.border.listed);
  }
  __syncthreads();
}

// --- exact weights -------------------------------------------------------------------------------

// Adds up the exact weights of this warp's chunk: of all tokens, and of those above the border. It
// also lists the tokens of the border. Behind a barrier the cluster may read the sums, and every
// CTA knows the sizes of all lists.
template <typename Cluster>
__device__ __forceinline__ void weigh(SelectShared& shared, const Slice& slice) {
  const Border border = shared.border;
  const int thread = opaque(threadIdx.x);  // keeps no address in registers
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  const auto is_listed = [&](float difference) {
    return difference < border.kept && difference >= border.listed;
  };
  const auto [first, last] = slice.chunk(warp);
  uint64_t all = 0, above = 0;
#pragma unroll 1
  for (int i = first + lane; i < last; i += kWarpSize) {
    const uint4 vec = slice.vec(i);
    bool lists = false;
    for_each_of(vec, [&](uint32_t word, int) {
      const float difference = bits_as<float>(word) - border.max;
      const uint64_t weight = weight_of_difference(difference);
      all += weight;
      if (difference >= border.kept) above += weight;
      lists |= is_listed(difference);
    });
    if (!lists) continue;
    for_each_of(vec, [&](uint32_t word, int j) {
      if (!is_listed(bits_as<float>(word) - border.max)) return;
      const int at = atomicAdd(&shared.list.sizes[0], 1);
      const uint32_t token = slice.begin + 4 * i + j;
      if (at < kCtaBorder) {
        nucleus_words(shared)[at] = border_key(ordered_bits(bits_as<float>(word)), token);
      }
    });
  }
  all = warp_total(all);
  above = warp_total(above);
  if (lane == 0) {
    shared.warp_sums[warp] = all;
    shared.above[warp] = above;
  }
  __syncthreads();
  if (threadIdx.x >= Cluster::kSize) return;
  Cluster::peer(&shared.few[Cluster::rank()], static_cast<int>(threadIdx.x))->size =
      shared.list.sizes[0];
}

// --- the first CTA -------------------------------------------------------------------------------

// Copies the lists of all CTAs to bins[0]. Returns their size.
template <typename Cluster>
__device__ __forceinline__ int gather_border(SelectShared& shared) {
  auto* keys = reinterpret_cast<uint64_t*>(&shared.bins[0]);
  const int size = few_of_row<Cluster>(shared).size;
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += kRowThreads) {
    int at = i, rank = 0;
    for (; at >= shared.few[rank].size; ++rank) at -= shared.few[rank].size;
    keys[i] = Cluster::peer(nucleus_words(shared), rank)[at];
  }
  return size;
}

// Tokens of the border of at least `key` are kept. `weight` is what they weigh.
struct Edge {
  uint64_t key, weight;
};

// The edge where the weights of the border reach `rest`. Each round splits a range of keys into one
// per thread. It ends where that with the edge has but one token.
__device__ __forceinline__ Edge find_edge(SelectShared& shared, int size, uint64_t rest) {
  const Border border = shared.border;
  if (rest == 0) return {~uint64_t{0}, 0};
  constexpr int kRangeBits = 9;
  static_assert(1 << kRangeBits == kRowThreads);
  const auto* keys = reinterpret_cast<const uint64_t*>(&shared.bins[0]);
  Bins& ranges = shared.bins[1];
  const int range = opaque(threadIdx.x);  // keeps no address in registers
  // A difference is rounded, so these are ends of the exact ones.
  uint64_t low =
      border_key(ordered_bits(__fadd_rd(border.max, border.listed * (1 + 0x1p-20f))), kLastToken);
  const uint64_t high = border_key(ordered_bits(__fadd_ru(border.max, border.kept)), 0);
  int bits = 64 - __clzll(static_cast<int64_t>(high - low));
  uint64_t lightest = weight_of_difference(border.listed);
  lightest -= (lightest >> 20) + (lightest > 0);
  uint64_t left = rest;
#pragma unroll 1
  do {
    const int shift = bits > kRangeBits ? bits - kRangeBits : 0;
    ranges.low[range] = ranges.high[range] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += kRowThreads) {
      const uint64_t offset = keys[i] - low;
      if (offset >> bits != 0) continue;
      add_weight(ranges, kRowThreads - 1 - static_cast<uint32_t>(offset >> shift),
                 border_weight(keys[i], shared.border.max));
    }
    __syncthreads();
    const uint64_t mine = uint64_t{ranges.high[range]} << 32 | ranges.low[range];
    const BlockSum sum = block_sum(shared, mine);
    if (sum.before < left && left <= sum.before + mine) {
      shared.bin = kRowThreads - 1 - range;
      shared.before = sum.before;
      shared.inside = mine;
    }
    __syncthreads();
    low += uint64_t{shared.bin} << shift;
    left -= shared.before;
    bits = shift;
  } while (bits > 0 && shared.inside >= 2 * lightest);
  return {low, rest - left + shared.inside};
}

// The slice of another CTA, from that of the first.
template <typename Cluster>
__device__ __forceinline__ Slice peer_slice(const Slice& first, int vocab_size, int rank) {
  const int begin = min(rank * first.size, vocab_size);
  return {Cluster::peer(first.ordered, rank), begin, min(first.size, vocab_size - begin)};
}

// Adds the kept tokens of the border to the sums of their warps. Returns that of the warp whose
// number in the cluster is this thread's; 0 for other threads.
template <typename Cluster>
__device__ __forceinline__ uint64_t sum_of_warp(SelectShared& shared, const Slice& slice,
                                                int vocab_size, int size, uint64_t edge) {
  constexpr int kWarps = Cluster::kSize * kRowWarps;
  const auto* keys = reinterpret_cast<const uint64_t*>(&shared.bins[0]);
  Bins& sums = shared.bins[1];
  const int mine = opaque(threadIdx.x);  // keeps no address in registers
  __syncthreads();                       // find_edge() used these bins
  if (mine < kWarps) sums.low[mine] = sums.high[mine] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += kRowThreads) {
    if (keys[i] < edge) continue;
    const int token =
        static_cast<int>(kLastToken - static_cast<uint32_t>(keys[i]) % (1u << kTokenBits));
    const int rank = token / slice.size;
    const Slice theirs = peer_slice<Cluster>(slice, vocab_size, rank);
    const int warp = (token - theirs.begin) / 4 / theirs.chunk_vecs();
    add_weight(sums, rank * kRowWarps + warp, border_weight(keys[i], shared.border.max));
  }
  __syncthreads();
  if (mine >= kWarps) return 0;
  return Cluster::peer(&shared, mine / kRowWarps)->above[mine % kRowWarps] +
         (uint64_t{sums.high[mine]} << 32 | sums.low[mine]);
}

// In the first CTA, behind the barrier after weigh(): draws a token and calls found(token) in one
// thread. Arrives at the cluster's next barrier when it has read the others' memory.
template <typename Cluster, typename Random, typename Found>
__device__ __forceinline__ void draw_from_nucleus(SelectShared& shared, const Slice& slice,
                                                  int vocab_size, const Random& random,
                                                  const Found& found) {
  uint64_t all = 0, above = 0;
  for_each_warp_of_cluster<Cluster>(shared, [&](const SelectShared& theirs, int warp, int) {
    all += theirs.warp_sums[warp];
    above += theirs.above[warp];
  });
  all = warp_total(all);
  above = warp_total(above);
  const int size = gather_border<Cluster>(shared);
  const Edge edge = find_edge(shared, size, top_p_limit(shared.request.top_p, all) - above);
  const uint64_t target = high_product(above + edge.weight, random());
  const uint64_t mine = sum_of_warp<Cluster>(shared, slice, vocab_size, size, edge.key);
  const uint64_t before = block_sum(shared, mine).before;
  if (before <= target && target < before + mine) {
    shared.bin = opaque(threadIdx.x);
    shared.before = before;
  }
  __syncthreads();
  const int warp = static_cast<int>(shared.bin);
  const Slice theirs = peer_slice<Cluster>(slice, vocab_size, warp / kRowWarps);
  const auto [first, last] = theirs.chunk(warp % kRowWarps);
  static_assert(kMaxVocab <= int64_t{4} * kRowThreads * Cluster::kSize * kRowWarps);
  const int at = first + opaque(threadIdx.x);  // so chunks have at most a Vec per thread
  const Border border = shared.border;
  uint64_t weights[4] = {};
  if (at < last) {
    for_each_of(theirs.vec(at), [&](uint32_t word, int i) {
      const float x = bits_as<float>(word), difference = x - border.max;
      const bool listed = difference >= border.listed &&
                          border_key(ordered_bits(x), theirs.begin + 4 * at + i) >= edge.key;
      if (difference >= border.kept || listed) weights[i] = weight_of_difference(difference);
    });
  }
  Cluster::arrive();
  const uint64_t of_vec = weights[0] + weights[1] + weights[2] + weights[3];
  uint64_t upto = shared.before + block_sum(shared, of_vec).before;
  if (target < upto || target >= upto + of_vec) return;
  int i = 0;
#pragma unroll
  for (; i < 3; ++i) {
    upto += weights[i];
    if (upto > target) break;
  }
  found(theirs.begin + 4 * at + i);
}

// Draws a token of a row, of which `highest` are the ordered bits of the CTA's highest logit. Every
// CTA of the cluster must have begun. Returns false if other code must take the row: the slice then
// has logits that shared.request.temperature divides. Returns true behind the arrival at a last
// barrier.
template <typename Cluster, typename Random, typename Found>
__device__ __forceinline__ bool sample_nucleus(SelectShared& shared, const Slice& slice,
                                               int vocab_size, uint32_t highest,
                                               const Random& random, const Found& found) {
  const SampleRow& request = shared.request;
  const bool counts = request.top_p < 1.0f;
  if (threadIdx.x < Cluster::kSize) {
    Cluster::peer(&shared.few[Cluster::rank()], static_cast<int>(threadIdx.x))->highest = highest;
  }
  if (counts) {
    clear(shared.bins[0]);
    clear(shared.bins[1]);
  }
  Cluster::sync();
  const float temperature = request.temperature;
  const float max =
      from_ordered_bits(quotient_of(few_of_row<Cluster>(shared).highest, temperature));
  if (!(fabsf(max) < kMaxNucleusLogit)) return false;
  // Without min-p the cut's bits are 0, which are NaN.
  const float cut = fmaxf(from_ordered_bits(request.min_p_cut(max)), -FLT_MAX);
  const Quotients quotients{temperature, 1.0f / temperature, cut};
  if (threadIdx.x == 0) shared.border = {max, -INFINITY, -INFINITY};
  divide_and_count(nucleus_bins(shared), slice, quotients, max, counts);
  if (counts) {
    find_border<Cluster>(shared, request.top_p);
  } else {
    __syncthreads();
  }
  if (threadIdx.x == 0) shared.request.temperature = 1.0f;
  weigh<Cluster>(shared, slice);
  Cluster::sync();
  bool fits = few_of_row<Cluster>(shared).size <= kRowBorder;
#pragma unroll
  for (int rank = 0; rank < Cluster::kSize; ++rank) fits &= shared.few[rank].size <= kCtaBorder;
  if (!fits) return false;
  if (Cluster::rank() == 0) {
    draw_from_nucleus<Cluster>(shared, slice, vocab_size, random, found);
  } else {
    Cluster::arrive();
  }
  return true;
}

}  // namespace vllm_kernels::cuda
