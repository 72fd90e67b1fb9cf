// Layout vllm: multiplies a block of pages with H query heads, scores = K q, then out += V p. See
// cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/attention/decode_tiles.h"
#include "cpu/attention/epilogue.h"
#include "cpu/attention/page_lanes.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kMaxPrefetchSteps = kMaxHeadSize * sizeof(float) / 16;  // chunks of a head
#if defined(__AVX512F__)
constexpr int kAccumulators = 16;  // vectors: half of the registers
#else
constexpr int kAccumulators = 8;
#endif

// The order in which a loop prefetches a block's pages of K or V. The loop has `steps` steps, is
// run for several rounds, and prefetches `bytes` bytes a step. Neighbouring steps have different
// pages, so page walks and DRAM row activations overlap.
class PrefetchOrder {
 public:
  // count and steps are at least 1.
  PrefetchOrder(const char* const* pages, int count, int steps, int bytes)
      : steps_(steps), end_((count + steps - 1) / steps * steps), bytes_(bytes) {
    if (count < steps) bytes_ *= steps / count;
    for (int i = 0, page = 0, round = 0; i < end_; ++i) {
      from_[i] = pages[page] + round * bytes;
      if (++page == count) page = 0, ++round;
    }
  }

  const char* at(int step) const { return from_[begin_ + step] + offset_; }

  void next_round() {
    begin_ += steps_;
    if (begin_ < end_) return;
    begin_ = 0;
    offset_ += bytes_;
  }

 private:
  int steps_;
  int begin_ = 0;  // of this round, an index of from_
  int end_;
  int bytes_;
  int64_t offset_ = 0;
  const char* from_[kMaxPrefetchSteps + kMaxBlockPages];
};

// --- scores --------------------------------------------------------------------------------------

// The number of K vectors that are multiplied at once. It is limited by the registers for H heads,
// and to 8 tokens, because all must be in one page.
template <typename T, int H>
constexpr int key_vectors() {
  using Keys = KeyLanes<T>;
  int count = kAccumulators / H;
  if (count > Keys::kWidth) count = Keys::kWidth;
  if (count > kMinBlockSize / Keys::kTokens) count = kMinBlockSize / Keys::kTokens;
  return count;
}

// Packs the query of H heads as [chunk][operand][head][lane], the order of the inner loop.
//   rows: [H][values] floats, for K of head_size elements
template <typename T, int H>
inline void pack_query(const float* rows, int head_size, float* packed) {
  using Keys = KeyLanes<T>;
  for (int d = 0; d < head_size; d += Keys::kChunk) {
    for (int operand = 0; operand < Keys::kOperands; ++operand) {
      for (int head = 0; head < H; ++head, packed += Keys::kWidth) {
        const int values = head * kValues<T> + operand % kValues<T>;
        Keys::pack(rows + values * head_size + d, operand / kValues<T>, packed);
      }
    }
  }
}

// scores[head][token] = scale * q . k for the tokens of the block, rounded up to whole vectors.
// Scores past block.tokens are undefined. Prefetches the block's V.
//   packed: pack_query()'s; scores: [H][kMaxBlockTokens]
template <typename T, int H, bool prefetch>
inline void score_pages(const PageBlock& block, const float* packed, int head_size, int block_size,
                        float scale, float* scores) {
  using Keys = KeyLanes<T>;
  constexpr int kVectors = key_vectors<T, H>();
  constexpr int kStep = kVectors * Keys::kTokens;  // tokens at once
  constexpr int kPacked = Keys::kOperands * H * Keys::kWidth;
  static_assert(Keys::kWidth % kVectors == 0);
  const int chunks = head_size / Keys::kChunk;
  const int64_t chunk_stride = static_cast<int64_t>(block_size) * Keys::kChunk;
  const int shift = __builtin_ctz(block_size);
  constexpr int kFetchBytes = kStep * 16;
  PrefetchOrder order(block.value, block.pages, chunks, kFetchBytes);

  for (int first = 0; first < block.tokens; first += kLanes) {
    Vec sums[H][Keys::kWidth];
    for (int vector = 0; vector < Keys::kWidth; vector += kVectors) {
      const int token = first + vector * Keys::kTokens;
      const int page = token >> shift, slot = token & (block_size - 1);
      const T* key = reinterpret_cast<const T*>(block.key[page]) + slot * Keys::kChunk;
      const float* query = packed;
      Vec acc[H][kVectors] = {};
      for (int chunk = 0; chunk < chunks; ++chunk) {
        typename Keys::Operand operands[kVectors][Keys::kOperands];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
          Keys::load_operands(key + i * Keys::kTokens * Keys::kChunk, operands[i]);
        }
#pragma GCC unroll 4
        for (int operand = 0; operand < Keys::kOperands; ++operand) {
#pragma GCC unroll 4
          for (int head = 0; head < H; ++head) {
            const auto q = Keys::query(query + (operand * H + head) * Keys::kWidth);
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) {
              acc[head][i] = Keys::multiply_add(operands[i][operand], q, acc[head][i]);
            }
          }
        }
        if constexpr (prefetch) {  // one step at a time: a burst would wait for line fill buffers
          prefetch_span(order.at(chunk), kFetchBytes);
        }
        key += chunk_stride;
        query += kPacked;
      }
      order.next_round();
#pragma GCC unroll 4
      for (int head = 0; head < H; ++head) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) sums[head][vector + i] = acc[head][i];
      }
    }
    for (int head = 0; head < H; ++head) {
      store(scores + head * kMaxBlockTokens + first, sum_tokens<Keys::kWidth>(sums[head]) * scale);
    }
  }
}

// --- values --------------------------------------------------------------------------------------

// The addresses in V that a block's vectors are loaded from.
struct ValueRows {
  const char* rows[kMaxBlockTokens / 4];  // [loads][kPagesPerLoad]: dimension 0 of the tokens
  int64_t stride;                         // bytes from one dimension to the next
  int loads;                              // full ones
  const char* tail;                       // copy_tail()'s copy of the last load, or null
  int64_t tail_stride;
};

// Copies the last, partial load of every dimension and zeroes the tokens from `count` on. So unused
// slots have no influence, even if they hold NaNs.
template <typename T, int kPagesPerLoad>
inline void copy_tail(const char* const* rows, int64_t stride, int count, int head_size, char* to) {
  using Values = ValueLanes<T>;
  alignas(64) uint8_t mask[Values::kBytes];
  for (int i = 0; i < Values::kBytes; ++i) {
    mask[i] = i < count * static_cast<int>(sizeof(T)) ? 0xff : 0;
  }
  const auto keep = load_raw<Raw<Values::kBytes>>(mask);
  for (int d = 0; d < head_size; ++d) {
    store_raw(to + d * Values::kBytes,
              load_joined<Values::kBytes, kPagesPerLoad>(rows, d * stride) & keep);
  }
}

// out[d][head] = out[d][head] * rescale + sum over tokens of V[d][token] * p[head][token]. A vector
// of out is [H][kLanes / H]. Prefetches K of `ahead`. The values of an element are neighbours in
// `d`.
//   probs: [loads][kOperands][H] vectors of ValueLanes::pack(); rescale: in the lanes of out
//   ahead: the next block, or this one after the last
template <typename T, int H, int kPagesPerLoad, bool prefetch>
inline void add_values(const ValueRows& from, const typename ValueLanes<T>::Operand* probs,
                       Vec rescale, int values, const PageBlock& ahead, Vec* out) {
  using Values = ValueLanes<T>;
  using Operand = typename Values::Operand;
  constexpr int kDims = kLanes / H;
  const int dim_blocks = (values + kDims - 1) / kDims;
  // Of K, as many as of V.
  constexpr int kFetchBytes = kDims * Values::kBytes / kPagesPerLoad / kValues<T>;
  const int steps = from.loads > 0 ? from.loads * kPagesPerLoad : 1;
  PrefetchOrder order(ahead.key, ahead.pages, steps, kFetchBytes);

  for (int dim_block = 0; dim_block < dim_blocks; ++dim_block) {
    int64_t offset[kDims], tail_offset[kDims];
#pragma GCC unroll 16
    for (int i = 0; i < kDims; ++i) {
      int d = dim_block * kDims + i;
      if (H < 4 && d >= values) d = values - 1;  // a duplicate, not used
      offset[i] = d / kValues<T> * from.stride;
      tail_offset[i] = d / kValues<T> * from.tail_stride;
    }
    Vec acc[H][kDims] = {};
    const Operand* prob = probs;
    const auto add = [&](const auto& raw) {
      Operand operands[kDims][Values::kOperands];
#pragma GCC unroll 16
      for (int i = 0; i < kDims; ++i) {
        if constexpr (kValues<T> == 2) {
          const int first = kDims == 1 ? i : i / 2 * 2;  // an address that both values share
          Values::upcast(raw(first), (dim_block * kDims + i) % 2, operands[i]);
        } else {
          Values::upcast(raw(i), operands[i]);
        }
      }
#pragma GCC unroll 2
      for (int operand = 0; operand < Values::kOperands; ++operand) {
#pragma GCC unroll 4
        for (int head = 0; head < H; ++head) {
          const Operand p = prob[operand * H + head];
#pragma GCC unroll 16
          for (int i = 0; i < kDims; ++i) {
            acc[head][i] = Values::multiply_add(operands[i][operand], p, acc[head][i]);
          }
        }
      }
      prob += Values::kOperands * H;
    };
    for (int load = 0; load < from.loads; ++load) {
      if constexpr (prefetch) {
#pragma GCC unroll 4
        for (int i = 0; i < kPagesPerLoad; ++i) {
          prefetch_span(order.at(load * kPagesPerLoad + i), kFetchBytes);
        }
      }
      const char* const* rows = from.rows + load * kPagesPerLoad;
      add([&](int i) { return load_joined<Values::kBytes, kPagesPerLoad>(rows, offset[i]); });
    }
    order.next_round();
    if (from.tail != nullptr) {
      add([&](int i) { return load_joined<Values::kBytes, 1>(&from.tail, tail_offset[i]); });
    }
    out[dim_block] = fma(out[dim_block], rescale, sum_each(&acc[0][0]));
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
