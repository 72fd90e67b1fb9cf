// sparq_attention (ops/pages/sparq_attention.h) before its attention, one launch: approximate
// scores of all tokens, then the best units.
//
//   grid     (chunks of a row's tokens, rows); a row is a sequence and a KV head
//   query    each CTA chooses the chunks of K, and adds up the weights of the query group
//   scores   a lane has a token and reads its chosen components by 16 bytes. In layout vllm the
//            lanes of a page read one run. In the others two accesses share a sector of 32 bytes. A
//            warp has whole units, so their highest scores go to scratch, as ordered bits
//   choice   the row's last CTA, as in select_pages
//   mean     if asked for, the lanes do the same again for each query head, from L1, and the last
//            CTA adds up the weights of kept units and of the others
//
// b8 x 32k, 32/8 heads of 128, bf16, r = 32, pages of 16: 2.1 million (token, head) pairs of 64
// bytes are 134 MB, 31 us at 4.34 TB/s; a kernel that only reads them takes 41 (small_ops/pages.md
// of docs/lab). A pair is 32 products, 67 million in all. 132 SMs need 26 to 35 KB in flight each;
// two CTAs of 512 lanes with 4 accesses have up to 64 KB. Each page's score is 4 more bytes. A row
// within its budget reads no K. Nothing is read before the PDL wait.
#include "ops/pages/sparq_attention.h"

#include <algorithm>

#include "cuda/attention/common/workspace.h"
#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/upcast.cuh"
#include "cuda/launchers.h"
#include "cuda/pages/choose_pages.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kAccessesAtOnce = 4;  // accesses in flight a lane
constexpr int kMaxChunkSteps = 16;
constexpr int kCtasPerSm = 2;

// One row, and what a CTA knows of it. Pointers are computed where they are used: two CTAs an SM
// leave 64 registers a thread.
struct SparqRow {
  const SparqParams& p;
  int row, seq, head;         // head: of KV
  int length = 0, units = 0;  // once read

  __device__ __forceinline__ SparqRow(const SparqParams& p, int row) : p(p), row(row) {
    seq = row / p.units.num_kv_heads;
    head = row - seq * p.units.num_kv_heads;
  }
  __device__ __forceinline__ void read_length() {
    length = static_cast<int>(p.units.length_of(seq));
    units = (length + p.units.block_size - 1) >> (__ffs(p.units.block_size) - 1);
  }
  __device__ __forceinline__ int64_t query_start() const {
    return seq * p.units.query_seq_stride + int64_t{head} * p.group() * p.units.head_size;
  }
  __device__ __forceinline__ const int32_t* ids() const {
    return p.units.block_tables + seq * p.units.block_tables_stride;
  }
  __device__ __forceinline__ uint32_t* scores() const {
    return p.units.scores + row * p.units.score_words();
  }
  __device__ __forceinline__ float* lse(int query_head) const {  // of units
    return p.unit_lse + (int64_t{row} * p.group() + query_head) * p.units.score_words();
  }
  __device__ __forceinline__ int64_t sum(int query_head) const {  // of kept_lse and rest_lse
    return query_head * p.units.num_rows() + row;
  }
  __device__ __forceinline__ int32_t entry(int unit) const { return p.entry_of(ids(), head, unit); }
  __device__ __forceinline__ void keep(int number, int32_t entry) const {
    p.units.tables[int64_t{row} * p.units.budget + number] = entry;
  }
};

// In shared memory.
struct SparqQuery {
  alignas(16) float weights[kMaxSparqHeadSize];  // of the chosen components, in their order
  alignas(16) int offsets[kMaxSparqChunks];      // of the accesses, in elements
  alignas(16) float sums[kMaxSparqChunks + 4];   // of chunks; below 0: none
  int chunks[kMaxSparqChunks];                   // the chosen ones
  float factors[1];                              // [group], then the query group [group, head_size]

  __device__ __forceinline__ float* rows(int group) { return factors + group; }
  __device__ __forceinline__ const float* rows(int group) const { return factors + group; }
};

// Component i of the query group's rows, which lie one behind the other; NaN as 0.
__device__ __forceinline__ float query_at(const SparqParams& p, const SparqRow& row, int i) {
  const SelectPagesParams& u = p.units;
  const int64_t at = row.query_start() + i;
  float q;
  if (u.dtype == DType::kFloat16) {
    q = to_float(static_cast<const Half*>(u.query)[at]);
  } else if (u.dtype == DType::kBFloat16) {
    q = to_float(static_cast<const BFloat16*>(u.query)[at]);
  } else {
    q = static_cast<const float*>(u.query)[at];
  }
  return q == q ? q : 0.0f;
}

// Brings the query group into shared memory.
__device__ __forceinline__ void load_query(const SparqParams& p, const SparqRow& row,
                                           SparqQuery& query) {
  const int group = p.group();
#pragma unroll 1
  for (int i = threadIdx.x; i < group * p.units.head_size; i += kRowThreads) {
    query.rows(group)[i] = query_at(p, row, i);
  }
}

// Whether chunk i of `count` has one of the `wanted` largest sums, of equal ones the first.
__device__ __forceinline__ bool is_chosen(const SparqQuery& query, int count, int i, int wanted) {
  const float mine = query.sums[i];
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 4) {
    for_each_of(*reinterpret_cast<const uint4*>(query.sums + first), [&](uint32_t bits, int j) {
      const float sum = bits_as<float>(bits);
      before += sum > mine || (sum == mine && first + j < i) ? 1 : 0;
    });
  }
  return before < wanted;
}

// Chooses the chunks, and finds the factor of each query head.
__device__ __forceinline__ void choose_chunks(const SparqParams& p, const SparqRow& row,
                                              SparqQuery& query) {
  const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int size = p.units.head_size, group = p.group();
  const int chunk_bits = __ffs(p.chunk) - 1, count = size >> chunk_bits;
  const float* rows = query.rows(group);
  if (thread < 4) query.sums[count + thread] = -1.0f;
  if (thread < kMaxSparqHeadSize) {  // whole warps; the lanes of a chunk are neighbours
    float sum = 0.0f;
#pragma unroll 1
    for (int at = thread; thread < size && at < group * size; at += size) sum += fabsf(rows[at]);
#pragma unroll 1
    for (int distance = p.chunk / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (thread < size && thread % p.chunk == 0) query.sums[thread >> chunk_bits] = sum;
  }
  __syncthreads();
  uint64_t chosen = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += kWarpSize) {
    const int chunk = first + lane;
    const bool mine = chunk < count && is_chosen(query, count, chunk, p.num_chunks);
    chosen |= uint64_t{__ballot_sync(0xffffffffu, mine)} << first;
  }
  if (thread < count && chosen >> thread & 1) {
    const int number = __popcll(chosen & ((uint64_t{1} << thread) - 1)), vectors = p.vectors();
    const int64_t offset = p.chunk_offset(thread);
    query.chunks[number] = thread;
    query.offsets[number * vectors] = static_cast<int>(offset);
    query.offsets[number * vectors + vectors - 1] =
        static_cast<int>(offset + (vectors - 1) * p.kv.x);
  }
  const bool is_scaled = size_of(p.kv.dtype) == 1 && p.kv.k_scale != nullptr;
  const float scale = is_scaled ? p.scale * p.kv.k_scale[row.head * p.kv.scale_stride] : p.scale;
#pragma unroll 1
  for (int head = warp; head < group; head += kRowWarps) {
    float norm = 0.0f, chosen_norm = 0.0f;
#pragma unroll 1
    for (int d = lane; d < size; d += kWarpSize) {
      const float q = fabsf(rows[head * size + d]);
      norm += q;
      if (chosen >> (d >> chunk_bits) & 1) chosen_norm += q;
    }
    norm = warp_sum(norm);
    chosen_norm = warp_sum(chosen_norm);
    if (lane == 0)
      query.factors[head] = chosen_norm > 0.0f ? scale * sqrtf(norm / chosen_norm) : scale;
  }
}

// weights become those of query heads [begin, end) of the group, added up.
__device__ __forceinline__ void set_weights(const SparqParams& p, int begin, int end,
                                            SparqQuery& query) {
  __syncthreads();  // all have read the weights before, and written the factors
  const int i = threadIdx.x, size = p.units.head_size;
  if (i < p.num_chunks * p.chunk) {
    const int number = i >> (__ffs(p.chunk) - 1);
    const float* rows = query.rows(p.group()) + (query.chunks[number] - number) * p.chunk + i;
    float sum = 0.0f;
#pragma unroll 1
    for (int head = begin; head < end; ++head) {
      sum = fmaf(query.factors[head], rows[head * size], sum);
    }
    query.weights[i] = sum;
  }
  __syncthreads();
}

// As opaque(), for a distance.
__device__ __forceinline__ int64_t opaque(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// 16 bytes of K, or the same by elements.
template <bool kAligned, typename C>
__device__ __forceinline__ uint4 load_16_bytes(const C* from) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const uint4*>(from);
  } else {
    Elements16<C> loaded;
#pragma unroll
    for (int i = 0; i < kVecWidth<C>; ++i) loaded[i] = from[i];
    return bits_as<uint4>(loaded);
  }
}

// The sum of products of a word's elements with weights.
template <typename C>
__device__ __forceinline__ float multiply_add(uint32_t word, const float* weights, float sum) {
  if constexpr (sizeof(C) == 4) {
    return fmaf(bits_as<float>(word), weights[0], sum);
  } else if constexpr (sizeof(C) == 2) {
    float pair[2];
    upcast(Vec<C, 2>{{word}}, pair);
    return fmaf(pair[1], weights[1], fmaf(pair[0], weights[0], sum));
  } else {
    uint32_t halves[2];
    upcast4<C>(word, halves[0], halves[1]);
    sum = multiply_add<Half>(halves[0], weights, sum);
    return multiply_add<Half>(halves[1], weights + 2, sum);
  }
}

// The product of one token's chosen components with the weights. `key` is its component 0.
template <typename C, bool kAligned>
__device__ __forceinline__ float score_token(const SparqQuery& query, const C* key, int accesses) {
  constexpr int kWidth = kVecWidth<C>;
  static_assert(kAccessesAtOnce == 4);  // offsets are read four at a time
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < accesses; first += kAccessesAtOnce) {
    uint4 loaded[kAccessesAtOnce];
    for_each_of(reinterpret_cast<const uint4*>(query.offsets)[first / 4],
                [&](uint32_t offset, int j) {
                  if (first + j < accesses) {
                    loaded[j] = load_16_bytes<kAligned>(key + static_cast<int>(offset));
                  }
                });
#pragma unroll
    for (int j = 0; j < kAccessesAtOnce; ++j) {
      if (first + j >= accesses) continue;
      const float* weights = query.weights + (first + j) * kWidth;
      sum = multiply_add<C>(loaded[j].x, weights, sum);
      sum = multiply_add<C>(loaded[j].y, weights + kWidth / 4, sum);
      sum = multiply_add<C>(loaded[j].z, weights + kWidth / 2, sum);
      sum = multiply_add<C>(loaded[j].w, weights + kWidth / 4 * 3, sum);
    }
  }
  return sum;
}

// The highest score of some tokens, and with kLse the sum of exp(score - highest).
struct UnitScore {
  float highest = -INFINITY, sum = 0.0f;
  bool good = true;  // the block

  __device__ __forceinline__ float lse() const { return highest + logf(sum); }
  template <bool kLse>
  __device__ __forceinline__ void add(float other, float other_sum) {
    const float top = fmaxf(highest, other);  // leaves out NaN
    if constexpr (kLse) {
      const float shift = top == -INFINITY ? 0.0f : top;
      sum = sum * expf(highest - shift) + other_sum * expf(other - shift);
    }
    highest = top;
  }
  // Adds the same of the other lanes in a group of `lanes`.
  template <bool kLse>
  __device__ __forceinline__ void add_lanes(int lanes) {
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, highest, distance);
      const float other_sum = kLse ? __shfl_xor_sync(0xffffffffu, sum, distance) : 0.0f;
      add<kLse>(other, other_sum);
    }
  }
};

// Scores of the units of tokens [begin, end), whole spans but for the row's end. A span is the
// longer one of a unit and 32 tokens. store(unit, score) is called by one lane a unit.
template <typename C, bool kAligned, bool kLse, typename Store>
__device__ __forceinline__ void score_units(const SparqParams& p, const SparqRow& row, int begin,
                                            int end, const SparqQuery& query, const Store& store) {
  const PagedKv& kv = p.kv;
  const int lane = threadIdx.x % kWarpSize, unit = p.units.block_size;
  const int span = max(unit, kWarpSize), lanes = min(unit, kWarpSize);
  const int unit_bits = __ffs(unit) - 1, accesses = p.num_chunks * p.vectors();
  const C* keys = static_cast<const C*>(kv.key) + opaque(row.head * kv.key_head_stride);
  const int32_t* ids = p.units.block_tables + opaque(row.seq * p.units.block_tables_stride);
  const auto id_of = [&](int token) {
    return token < end ? p.block_of(ids, token >> unit_bits) : -1;
  };
  // A warp's next 32 tokens: their ids are requested while those before are scored.
  int first = begin + threadIdx.x / kWarpSize * span;
  int id = id_of(first + lane);
  UnitScore score;
#pragma unroll 1
  while (first < end) {
    const bool ends_span = ((first + kWarpSize) & (span - 1)) == 0;
    const int next = first + kWarpSize + (ends_span ? (kRowWarps - 1) * span : 0);
    const int next_id = id_of(next + lane), token = first + lane;
    const bool good = id >= 0 && id < kv.num_blocks;
    if (token < end && good) {
      const int in_block = token & ((unit << p.unit_shift) - 1);
      const C* key = keys + id * kv.key_block_stride + in_block * kv.key_token_stride;
      score.template add<kLse>(score_token<C, kAligned>(query, key, accesses), 1.0f);
    }
    __syncwarp();
    if (ends_span || next >= end) {
      score.template add_lanes<kLse>(lanes);
      score.good = good;
      if ((lane & (lanes - 1)) == 0 && token < end) store(token >> unit_bits, score);
      score = {};
    }
    first = next;
    id = next_id;
  }
}

// The log-sum-exp of the approximate scores of kept units and of the others, from the marks 1 and
// 0.
__device__ __forceinline__ void store_weights(const SparqParams& p, const SparqRow& row) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int head = threadIdx.x / kWarpSize; head < p.group(); head += kRowWarps) {
    const float* lse = row.lse(head);
    UnitScore kept, rest;
#pragma unroll 1
    for (int unit = lane; unit < row.units; unit += kWarpSize) {
      row.scores()[unit] != 0 ? kept.add<true>(lse[unit], 1.0f) : rest.add<true>(lse[unit], 1.0f);
    }
    kept.add_lanes<true>(kWarpSize);
    rest.add_lanes<true>(kWarpSize);
    if (lane == 0) {
      p.kept_lse[row.sum(head)] = kept.lse();
      p.rest_lse[row.sum(head)] = rest.lse();
    }
  }
}

// The result of a row whose units are all kept.
__device__ __forceinline__ void keep_all(const SparqParams& p, const SparqRow& row) {
  if (threadIdx.x == 0) p.lens[row.row] = row.length;
#pragma unroll 1
  for (int i = threadIdx.x; i < row.units; i += kRowThreads) row.keep(i, row.entry(i));
  const int64_t first = int64_t{row.row} * p.units.budget;
#pragma unroll 1
  for (int i = row.units + threadIdx.x; i < p.units.budget; i += kRowThreads) {
    p.units.tables[first + i] = 0;
  }
  if (p.kept_lse == nullptr) return;
  for (int head = threadIdx.x; head < p.group(); head += kRowThreads) {
    p.kept_lse[row.sum(head)] = 0.0f;
    p.rest_lse[row.sum(head)] = -INFINITY;
  }
}

template <typename C, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, kAligned ? sm90a_or(kCtasPerSm, 1) : 1)
    sparq_attention_kernel(const __grid_constant__ SparqParams p, int first_row, int chunk_tokens,
                           uint32_t* counters) {
  // SparqQuery, then what the selection needs.
  extern __shared__ __align__(16) char sparq_shared[];
  launch_dependents();
  const SelectPagesParams& u = p.units;
  SparqRow row(p, first_row + blockIdx.y);
  auto& query = *reinterpret_cast<SparqQuery*>(sparq_shared);
  wait_for_primary_kernel();
  prefetch_rows(u.query, size_of(u.dtype), row.query_start(), p.group() * u.head_size);
  row.read_length();
  if (row.units <= u.budget) {
    if (blockIdx.x == 0) keep_all(p, row);
    return;
  }
  const int64_t begin = int64_t{blockIdx.x} * chunk_tokens;
  if (begin >= row.length) return;
  const int first = static_cast<int>(begin), end = min(row.length - first, chunk_tokens) + first;
  load_query(p, row, query);
  __syncthreads();
  choose_chunks(p, row, query);
  set_weights(p, 0, p.group(), query);
  score_units<C, kAligned, false>(p, row, first, end, query, [&](int unit, const UnitScore& score) {
    const uint32_t order = score.good ? u.order_of(score.highest) : SelectPagesParams::kBadBlock;
    row.scores()[unit] = u.always_kept(unit, row.units) ? SelectPagesParams::kAlwaysKept : order;
  });
  if (p.unit_lse != nullptr) {
#pragma unroll 1
    for (int head = 0; head < p.group(); ++head) {
      set_weights(p, head, head + 1, query);
      score_units<C, kAligned, true>(
          p, row, first, end, query,
          [&](int unit, const UnitScore& score) { row.lse(head)[unit] = score.lse(); });
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.lens[row.row] = u.kept_length(row.length, row.units);
  const int ctas = (row.length - 1) / chunk_tokens + 1;
  if (!comes_last(counters + blockIdx.y, ctas)) return;
  choose_pages<false>(
      row.scores(), row.units, u.budget, *reinterpret_cast<ChoiceShared*>(sparq_shared),
      [&](int unit) { return row.entry(unit); },
      [&](int unit, int number, int32_t entry) {
        if (number >= 0) row.keep(number, entry);
        if (p.kept_lse != nullptr) row.scores()[unit] = number >= 0 ? 1 : 0;
      });
  if (p.kept_lse == nullptr) return;
  __syncthreads();
  store_weights(p, row);
}

template <typename C, bool kAligned>
void launch_rows(const SparqParams& p, Stream stream) {
  const SelectPagesParams& u = p.units;
  const int64_t rows = u.num_rows(), tokens = int64_t{u.max_pages} * u.block_size;
  const int64_t slots = int64_t{kCtasPerSm} * current_device_model().num_sms;
  const int64_t step = int64_t{kRowWarps} * std::max(u.block_size, kWarpSize);
  const int64_t steps = ceil_div(ceil_div(rows * tokens, slots), step);
  const int64_t chunk = step * std::clamp<int64_t>(steps, 1, kMaxChunkSteps);
  const int64_t bytes = std::max<int64_t>(
      sizeof(SparqQuery) + sizeof(float) * p.group() * (1 + u.head_size), sizeof(ChoiceShared));
  const int limit = dynamic_shared_memory<sparq_attention_kernel<C, kAligned>>("sparq_attention");
  if (bytes > limit) {
    throw std::runtime_error("sparq_attention: too many query heads a KV head: " +
                             std::to_string(p.group()));
  }
  const unsigned chunks =
      grid_size("sparq_attention", std::max<int64_t>(ceil_div(tokens, chunk), 1));
  uint32_t* counters = decode_workspace(nullptr, stream).semaphores;
  for (int64_t first = 0; first < rows; first += kMaxDecodeSlots) {
    const int64_t count = std::min<int64_t>(rows - first, kMaxDecodeSlots);
    launch_kernel("sparq_attention", sparq_attention_kernel<C, kAligned>,
                  dim3(chunks, static_cast<unsigned>(count)), dim3(kRowThreads), bytes, stream, p,
                  static_cast<int>(first), static_cast<int>(chunk), counters);
  }
}

}  // namespace

void launch(const SparqParams& p, Stream stream) {
  const PagedKv& kv = p.kv;
  const auto of_type = [&](auto stored) {
    using C = decltype(stored);
    const bool aligned =
        aligned16(kv.key) && multiples(kVecWidth<C>, {kv.key_block_stride, kv.key_head_stride,
                                                      kv.key_token_stride, kv.key_chunk_stride});
    aligned ? launch_rows<C, true>(p, stream) : launch_rows<C, false>(p, stream);
  };
  if (size_of(kv.dtype) == 1) {
    dispatch_8_bit(kv.dtype, of_type);
  } else {
    dispatch_float(kv.dtype, of_type);
  }
}

}  // namespace vllm_kernels::cuda
