// The products of one tile of pages with H query heads: scores = K q, then out += V weights.
#pragma once
#include "cpu/attention/decode_tiles.h"
#include "cpu/attention/epilogue.h"
#include "cpu/attention/page_lanes.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kMaxFetchSteps = kMaxHeadSize * sizeof(float) / 16;  // chunks of a head
#if defined(__AVX512F__)
constexpr int kAccumulators = 16;  // vectors; half of the registers
#else
constexpr int kAccumulators = 8;
#endif

// What a loop over `steps` steps, run round after round, fetches of a tile's pages of K or V: each
// step `bytes` bytes. Neighbouring steps fetch from different pages, so that address translations
// and rows of DRAM are opened side by side.
class FetchPlan {
 public:
  // count and steps are at least 1.
  FetchPlan(const char* const* pages, int count, int steps, int bytes)
      : steps_(steps), end_((count + steps - 1) / steps * steps), bytes_(bytes) {
    if (count < steps) bytes_ *= steps / count;
    for (int i = 0, page = 0, lap = 0; i < end_; ++i) {
      from_[i] = pages[page] + lap * bytes;
      if (++page == count) page = 0, ++lap;
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
  int begin_ = 0;  // of this round in from_
  int end_;
  int bytes_;
  int64_t offset_ = 0;
  const char* from_[kMaxFetchSteps + kMaxTilePages];
};

// --- scores --------------------------------------------------------------------------------------

// How many vectors of K are multiplied at once: as many as have registers for H heads, but never
// past 8 tokens, so that all lie in one page.
template <typename T, int H>
constexpr int key_vectors() {
  using Keys = KeyLanes<T>;
  int count = kAccumulators / H;
  if (count > Keys::kWidth) count = Keys::kWidth;
  if (count > kMinBlockSize / Keys::kTokens) count = kMinBlockSize / Keys::kTokens;
  return count;
}

// The query of H heads, [chunk][part][head][lane], so that the inner loop reads it in order.
//   rows: [H][head_size] floats
template <typename T, int H>
inline void pack_query(const float* rows, int head_size, float* packed) {
  using Keys = KeyLanes<T>;
  for (int d = 0; d < head_size; d += Keys::kChunk) {
    for (int part = 0; part < Keys::kParts; ++part) {
      for (int head = 0; head < H; ++head, packed += Keys::kWidth) {
        Keys::pack(rows + head * head_size + d, part, packed);
      }
    }
  }
}

// scores[head][token] = scale * q . k for the tokens of the tile, rounded up to whole vectors; what
// lies past tile.tokens is of no meaning. Asks for V's pages on the way.
//   packed: pack_query()'s; scores: [H][kTileTokens]
template <typename T, int H, bool prefetch>
inline void score_tile(const Tile& tile, const float* packed, int head_size, int block_size,
                       float scale, float* scores) {
  using Keys = KeyLanes<T>;
  constexpr int kVectors = key_vectors<T, H>();
  constexpr int kStep = kVectors * Keys::kTokens;  // tokens at once
  constexpr int kPacked = Keys::kParts * H * Keys::kWidth;
  static_assert(Keys::kWidth % kVectors == 0);
  const int chunks = head_size / Keys::kChunk;
  const int64_t chunk_stride = static_cast<int64_t>(block_size) * Keys::kChunk;
  const int shift = __builtin_ctz(block_size);
  constexpr int kFetchBytes = kStep * 16;
  FetchPlan plan(tile.value, tile.pages, chunks, kFetchBytes);

  for (int first = 0; first < tile.tokens; first += kLanes) {
    Vec sums[H][Keys::kWidth];
    for (int vector = 0; vector < Keys::kWidth; vector += kVectors) {
      const int token = first + vector * Keys::kTokens;
      const int page = token >> shift, slot = token & (block_size - 1);
      const T* key = reinterpret_cast<const T*>(tile.key[page]) + slot * Keys::kChunk;
      const float* query = packed;
      Vec acc[H][kVectors] = {};
      for (int chunk = 0; chunk < chunks; ++chunk) {
        typename Keys::Part parts[kVectors][Keys::kParts];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
          Keys::load_parts(key + i * Keys::kTokens * Keys::kChunk, parts[i]);
        }
#pragma GCC unroll 4
        for (int part = 0; part < Keys::kParts; ++part) {
#pragma GCC unroll 4
          for (int head = 0; head < H; ++head) {
            const auto q = Keys::query(query + (part * H + head) * Keys::kWidth);
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) {
              acc[head][i] = Keys::multiply_add(parts[i][part], q, acc[head][i]);
            }
          }
        }
        if constexpr (prefetch) {  // one at a time: a burst would wait for free line buffers
          prefetch_span(plan.at(chunk), kFetchBytes);
        }
        key += chunk_stride;
        query += kPacked;
      }
      plan.next_round();
#pragma GCC unroll 4
      for (int head = 0; head < H; ++head) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) sums[head][vector + i] = acc[head][i];
      }
    }
    for (int head = 0; head < H; ++head) {
      store(scores + head * kTileTokens + first, sum_tokens<Keys::kWidth>(sums[head]) * scale);
    }
  }
}

// --- values --------------------------------------------------------------------------------------

// The rows of V that a tile's vectors are loaded from.
struct ValueRows {
  const char* rows[kTileTokens / 4];  // [units][pieces]: dimension 0 of the tokens of a unit
  int64_t stride;                     // bytes from one dimension to the next
  int units;
  const char* tail;  // the last, partly used unit as a copy with zeros, or null
  int64_t tail_stride;
};

// Copies `count` tokens of every dimension and sets the rest of the unit to zero: whatever lies in
// unused slots has no influence, not even a NaN.
template <typename T, int kPieces>
inline void copy_tail(const char* const* rows, int64_t stride, int count, int head_size, char* to) {
  using Values = ValueLanes<T>;
  alignas(64) uint8_t mask[Values::kBytes];
  for (int i = 0; i < Values::kBytes; ++i) {
    mask[i] = i < count * static_cast<int>(sizeof(T)) ? 0xff : 0;
  }
  const auto keep = load_raw<Raw<Values::kBytes>>(mask);
  for (int d = 0; d < head_size; ++d) {
    store_raw(to + d * Values::kBytes,
              load_joined<Values::kBytes, kPieces>(rows, d * stride) & keep);
  }
}

// out[d][head] = out * factor + sum over tokens of V[d][token] * weights[head][token], in blocks of
// kLanes / H dimensions: one vector of out is [H][kLanes / H]. Asks for the next tile's K on the
// way.
//   ahead: the next tile, or this one at the end; weights: [units][kParts][H] vectors,
//   ValueLanes::pack()ed; factor: lanes as in out
template <typename T, int H, int kPieces, bool prefetch>
inline void add_values(const ValueRows& from, const typename ValueLanes<T>::Part* weights,
                       Vec factor, int head_size, const Tile& ahead, Vec* out) {
  using Values = ValueLanes<T>;
  using Part = typename Values::Part;
  constexpr int kDims = kLanes / H;
  const int blocks = (head_size + kDims - 1) / kDims;
  constexpr int kFetchBytes = kDims * Values::kBytes / kPieces;  // of K, as many as of V
  const int steps = from.units > 0 ? from.units * kPieces : 1;
  FetchPlan plan(ahead.key, ahead.pages, steps, kFetchBytes);

  for (int block = 0; block < blocks; ++block) {
    int64_t offset[kDims], tail_offset[kDims];
#pragma GCC unroll 16
    for (int i = 0; i < kDims; ++i) {
      int d = block * kDims + i;
      if (H < 4 && d >= head_size) d = head_size - 1;  // read again, and not used
      offset[i] = d * from.stride;
      tail_offset[i] = d * from.tail_stride;
    }
    Vec acc[H][kDims] = {};
    const Part* weight = weights;
    const auto add = [&](const auto& raw) {
      Part parts[kDims][Values::kParts];
#pragma GCC unroll 16
      for (int i = 0; i < kDims; ++i) Values::widen(raw(i), parts[i]);
#pragma GCC unroll 2
      for (int part = 0; part < Values::kParts; ++part) {
#pragma GCC unroll 4
        for (int head = 0; head < H; ++head) {
          const Part w = weight[part * H + head];
#pragma GCC unroll 16
          for (int i = 0; i < kDims; ++i) {
            acc[head][i] = Values::multiply_add(parts[i][part], w, acc[head][i]);
          }
        }
      }
      weight += Values::kParts * H;
    };
    for (int unit = 0; unit < from.units; ++unit) {
      if constexpr (prefetch) {
#pragma GCC unroll 4
        for (int i = 0; i < kPieces; ++i) {
          prefetch_span(plan.at(unit * kPieces + i), kFetchBytes);
        }
      }
      const char* const* rows = from.rows + unit * kPieces;
      add([&](int i) { return load_joined<Values::kBytes, kPieces>(rows, offset[i]); });
    }
    plan.next_round();
    if (from.tail != nullptr) {
      add([&](int i) { return load_joined<Values::kBytes, 1>(&from.tail, tail_offset[i]); });
    }
    out[block] = fma(out[block], factor, sum_each(&acc[0][0]));
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
