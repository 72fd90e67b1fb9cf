// FusedNewToken: what fused_decode_attention adds to the decode kernel
// (attention/decode/decode_kernel.cuh).
//
// A work tile's query rows come from the QKV projection, qkv [num_seqs, (num_heads + 2 *
// num_kv_heads) * head_size]. They get bias, norm and rotation on their way to shared memory. The
// sequence's new token is not read from its page, because this same launch writes it. Instead it is
// one more partial of the work tile that has the sequence's last tokens. The CTA of that tile also
// stores the token's key and value in the cache.
//
// Early reads, before the PDL wait: positions, with a 16-bit cache.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/decode/tile_scheduler.cuh"
#include "cuda/attention/decode/warp_mma.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/rope/rope_rows.cuh"
#include "ops/fused_decode_attention.h"

namespace vllm_kernels::cuda {

// Elements of a Vec. A work tile has few rows, so more lanes with less work each are faster.
constexpr int kNewTokenWidth = 4;

// log2 of the lanes that hold a row: each has up to two times kNewTokenWidth elements.
inline int new_token_lane_shift(int head_size) {
  int shift = 0;
  while (2 * kNewTokenWidth << shift < head_size) ++shift;
  return shift;
}

struct NewTokenParams {
  RopeAndCacheParams rope;
  FastDivisor block_size;
  int lane_shift;  // log2 of the lanes that hold a row
};

// Buffers for three work tiles, as in the decode kernel. When a tile is prepared, some threads may
// still combine the tile two before it.
template <int kMaxHeadSize>
struct NewTokenMemory {
  static constexpr int kPitch = kMaxHeadSize + 8;  // the rows of a load hit different banks
  alignas(16) uint16_t query[kMaxNewTokenRows][kPitch];
  alignas(16) float key[kMaxHeadSize];       // as the cache stores it, without k_scale
  alignas(16) float value[3][kMaxHeadSize];  // the same, without v_scale
  float score[3][kMaxNewTokenRows];          // of the new token, log2 units
  bool counts[3];                            // whether the new token is a partial of this tile
};

// A work tile has one query token and up to kMaxNewTokenRows query rows, one per head. If it has
// the sequence's last tokens, its key and value are two more rows, after the query rows.
// 2^lane_shift adjacent lanes hold a row.
template <typename Cache, int kMaxHeadSize>
class FusedNewToken {
 public:
  static constexpr bool kAny = true;
  using Memory = NewTokenMemory<kMaxHeadSize>;

  __device__ __forceinline__ FusedNewToken(const NewTokenParams& new_token, Memory& memory)
      : new_token_(new_token), memory_(memory) {}

  // Sets the work tile that comes next. `speculative`: it was found before the primary kernel has
  // ended; then the position is read speculatively, too.
  __device__ __forceinline__ void aim(const WorkTile& work_tile, int group, bool speculative) {
    if constexpr (!kEarly) return;
    const RopeAndCacheParams& rope = new_token_.rope;
    set_row(work_tile, group);
    speculative_ = speculative && kind_ < kValue && rope.cos_sin_dtype == rope.dtype
                       ? in_range(__ldcg(&rope.positions[work_tile.seq]))
                       : -1;
  }

  // Issues all loads of this lane's row. After the PDL wait.
  __device__ __forceinline__ void load(const PagedAttentionParams& p) {
    if constexpr (kEarly) load_row(p);
  }

  // Prepares the rows of the current work tile in shared memory. All threads of the CTA. `side`:
  // index of its buffers, in the order 0, 1, 2, 0, ...
  __device__ __forceinline__ void prepare(const PagedAttentionParams& p, const ScoreCap& cap,
                                          const WorkTile& work_tile, int group, int side) {
    if constexpr (std::is_same_v<Cache, BFloat16>) {
      prepare_of<BFloat16>(p, cap, work_tile, group, side);
    } else if constexpr (std::is_same_v<Cache, Half>) {
      prepare_of<Half>(p, cap, work_tile, group, side);
    } else if (p.dtype == DType::kBFloat16) {
      prepare_of<BFloat16>(p, cap, work_tile, group, side);
    } else {
      prepare_of<Half>(p, cap, work_tile, group, side);
    }
  }

  // Query row `row` of the current work tile, 16-bit elements.
  __device__ __forceinline__ const void* query_row(int row) const { return memory_.query[row]; }
  __device__ __forceinline__ bool counts(int side) const { return memory_.counts[side]; }
  __device__ __forceinline__ float score(int side, int row) const {
    return memory_.score[side][row];
  }
  // 4 dimensions of the new token's value, from `d` on.
  __device__ __forceinline__ float4 value(int side, int d) const {
    return *reinterpret_cast<const float4*>(&memory_.value[side][d]);
  }

 private:
  // Whether rows are loaded ahead. 8-bit kernels have no registers left for that.
  static constexpr bool kEarly = sizeof(Cache) == 2;

  enum Kind { kQuery, kKey, kValue, kNone };
  using VecPairs = HeadVecPairs<kNewTokenWidth, 1>;
  template <typename T>
  using Row = HeadVecs<T, kNewTokenWidth, 1>;

  __device__ __forceinline__ int own_row() const { return threadIdx.x >> new_token_.lane_shift; }
  __device__ __forceinline__ int lanes() const { return 1 << new_token_.lane_shift; }
  __device__ __forceinline__ VecPairs vec_pairs_of_lane() const {
    return VecPairs(new_token_.rope.head_size, kind_ == kValue ? 0 : new_token_.rope.rotary_size,
                    new_token_.rope.is_neox, threadIdx.x & lanes() - 1, lanes(), kind_ != kNone);
  }
  __device__ __forceinline__ int64_t num_slots() const {
    return new_token_.rope.kv.num_blocks * new_token_.rope.kv.block_size;
  }
  // -1 for an invalid position.
  __device__ __forceinline__ int in_range(int64_t position) const {
    return position >= 0 && position < new_token_.rope.max_position ? static_cast<int>(position)
                                                                    : -1;
  }

  // Sets which row of the work tile this lane works on.
  __device__ __forceinline__ void set_row(const WorkTile& work_tile, int group) {
    token_ = work_tile.seq;
    seq_len_ = work_tile.sequence.seq_len;
    stores_ = work_tile.split == work_tile.num_splits - 1;
    const int row = own_row();
    const int rows = stores_ ? group + 2 : group;
    kind_ = row >= rows ? kNone : row < group ? kQuery : row == group ? kKey : kValue;
    head_ = kind_ == kQuery ? work_tile.kv_head * group + row : work_tile.kv_head;
  }
  __device__ __forceinline__ const ProjectedHeads& heads() const {
    const RopeAndCacheParams& rope = new_token_.rope;
    return kind_ == kValue ? rope.value : kind_ == kKey ? rope.key : rope.query;
  }

  // Clears the row's registers, so that they are not kept from before a late load_row().
  __device__ __forceinline__ void forget() {
    speculative_ = -1;
    position_ = -1;
    x_[0] = x_[1] = cosines_ = sines_ = {};
    slot_ = -1;
    last_block_ = -1;
  }

  __device__ __forceinline__ void load_row(const PagedAttentionParams& p) {
    const RopeAndCacheParams& rope = new_token_.rope;
    if (stores_ && token_ < rope.num_slots) slot_ = rope.slot_mapping[token_];
    if (kind_ == kNone) return;
    const auto vec_pairs = vec_pairs_of_lane();
    const ProjectedHeads& own = heads();
    const auto* row = static_cast<const uint16_t*>(own.data) + token_ * own.token_stride +
                      head_ * own.head_stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (vec_pairs.offset[0][i] >= 0) {
        x_[i] = __ldcg(reinterpret_cast<const uint2*>(row + vec_pairs.offset[0][i]));
      }
    }
    if (kind_ < kValue) position_ = __ldcg(&rope.positions[token_]);
    if (speculative_ >= 0) load_angles(vec_pairs, speculative_);
    if (kind_ == kKey && seq_len_ > 0) {
      const int page = new_token_.block_size.divide(seq_len_ - 1);
      last_block_ = p.block_tables[token_ * p.block_table_stride + page];
    }
  }

  // Loads cos and sin if they have the model's dtype. Others are loaded in prepare_row().
  __device__ __forceinline__ void load_angles(const VecPairs& vec_pairs, int position) {
    const RopeAndCacheParams& rope = new_token_.rope;
    if (vec_pairs.pair[0] < 0) return;
    const auto* first = static_cast<const uint16_t*>(rope.cos_sin_cache) +
                        position * rope.cos_sin_stride + vec_pairs.pair[0];
    cosines_ = __ldcg(reinterpret_cast<const uint2*>(first));
    sines_ = __ldcg(reinterpret_cast<const uint2*>(first + rope.rotary_size / 2));
  }

  template <typename T>
  __device__ __forceinline__ void prepare_of(const PagedAttentionParams& p, const ScoreCap& cap,
                                             const WorkTile& work_tile, int group, int side) {
    set_row(work_tile, group);  // again, which costs less than registers in between
    if constexpr (!kEarly) {
      forget();
      load_row(p);
    }
    if (!stores_ && threadIdx.x == 0) memory_.counts[side] = false;
    const int rows = stores_ ? group + 2 : group;
    const bool has_rows = (threadIdx.x & ~31) >> new_token_.lane_shift < rows;  // this warp
    if (has_rows) {
      if (new_token_.rope.cos_sin_dtype == DType::kFloat32) {
        prepare_row<T, float>(p, side);
      } else {
        prepare_row<T, T>(p, side);
      }
    }
    __syncthreads();
    if (!stores_) return;
    set_scores<T>(p, cap, work_tile, group, side);
    if (has_rows) store_row<T>(work_tile);
  }

  // Prepares this lane's row and stores it in shared memory. Whole warps call it.
  template <typename T, typename A>
  __device__ __forceinline__ void prepare_row(const PagedAttentionParams& p, int side) {
    const RopeAndCacheParams& rope = new_token_.rope;
    const auto vec_pairs = vec_pairs_of_lane();
    HeadAngles<A, kNewTokenWidth, 1> angles{};
    Row<T> x{};
    const int position = kind_ < kValue ? in_range(position_) : -1;
    if (position >= 0) {
      if constexpr (!std::is_same_v<A, T>) {
        angles.load(vec_pairs, rope.cos_sin_cache, rope.cos_sin_dtype,
                    position * rope.cos_sin_stride, rope.rotary_size / 2);
      } else if (position != speculative_) {
        load_angles(vec_pairs, position);
      }
    }
    memcpy(&x, x_, sizeof(x));
    if constexpr (std::is_same_v<A, T>) {
      memcpy(&angles.cosines, &cosines_, sizeof(cosines_));
      memcpy(&angles.sines, &sines_, sizeof(sines_));
    }
    const HeadRow<T> from(heads(), token_, head_);
    cuda::prepare(rope, from, vec_pairs, angles, lanes(), x);
    if (kind_ == kNone) return;
    if (kind_ == kQuery) {
      if (position < 0) x.load(vec_pairs, from.start);  // then the row stays unchanged
      x.store(vec_pairs, reinterpret_cast<T*>(memory_.query[own_row()]));
      return;
    }
    memcpy(x_, &x, sizeof(x));
    const Divisor scale = kind_ == kKey
                              ? divisor_of<Cache>(rope.kv.k_scale, rope.kv.scale_stride, head_)
                              : divisor_of<Cache>(rope.kv.v_scale, rope.kv.scale_stride, head_);
    float* copy = kind_ == kKey ? memory_.key : memory_.value[side];
    x.each(vec_pairs, [&](const Vec<T, kNewTokenWidth>& vec, int d) {
      float values[kNewTokenWidth];
      upcast(vec, values);
#pragma unroll
      for (int j = 0; j < kNewTokenWidth; ++j) {
        copy[d + j] = to_float(to_cache<Cache>(from_float<T>(values[j]), scale));
      }
    });
    if (kind_ == kKey && (threadIdx.x & lanes() - 1) == 0) {
      // The new token counts only if block table and length name it as the sequence's last token.
      const int last = seq_len_ - 1;
      const int in_page =
          last - static_cast<int>(new_token_.block_size.divide(last)) * p.kv.block_size;
      memory_.counts[side] = last >= 0 && slot_ >= 0 && slot_ < num_slots() && position >= 0 &&
                             slot_ == int64_t{last_block_} * p.kv.block_size + in_page;
    }
  }

  // Stores key and value in the cache. Whole warps call it.
  template <typename T>
  __device__ __forceinline__ void store_row(const WorkTile& work_tile) {
    const RopeAndCacheParams& rope = new_token_.rope;
    const SlotMapping slots{rope.slot_mapping, rope.num_slots, num_slots()};
    const int32_t slot = slots.usable(slot_);
    const bool duplicate = is_duplicate(slots, token_, slot, threadIdx.x % 32);
    const bool is_key = kind_ == kKey;
    if ((!is_key && kind_ != kValue) || slot < 0 || duplicate) return;
    if (is_key && in_range(position_) < 0) return;
    const CacheRow<Cache> to(rope.kv, is_key, head_,
                             place_of(slot, new_token_.block_size, rope.kv.block_size));
    Row<T> x;
    memcpy(&x, x_, sizeof(x));
    x.each(vec_pairs_of_lane(),
           [&](const Vec<T, kNewTokenWidth>& vec, int d) { to.store(to.round(vec), d); });
  }

  // Scores of the new token, one warp per query row.
  template <typename T>
  __device__ __forceinline__ void set_scores(const PagedAttentionParams& p, const ScoreCap& cap,
                                             const WorkTile& work_tile, int group, int side) {
    const int lane = threadIdx.x % 32;
    const float k_scale = sizeof(Cache) == 1 && p.kv.k_scale != nullptr
                              ? p.kv.k_scale[work_tile.kv_head * p.kv.scale_stride]
                              : 1.0f;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < group; row += blockDim.x / 32) {
      float sum = 0.0f;
      for (int d = lane * 4; d < p.kv.head_size; d += 128) {
        float query[4];
        upcast(*reinterpret_cast<const Vec<T, 4>*>(&memory_.query[row][d]), query);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += query[j] * memory_.key[d + j];
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        memory_.score[side][row] = adjusted_score(p, cap, work_tile.kv_head * group + row, 0,
                                                  sum * (p.scale * k_scale * kLog2E));
      }
    }
  }

  const NewTokenParams& new_token_;
  Memory& memory_;
  // Of the work tile that comes next:
  int token_;
  int seq_len_;
  bool stores_;           // whether it has, and stores, the new token
  Kind kind_ = kNone;     // of this lane's row
  int head_;              // of this lane's row
  int speculative_ = -1;  // speculative position; -1: none
  int64_t position_;      // from `positions`, unchecked
  uint2 x_[2] = {};       // this lane's Vecs of the row
  uint2 cosines_ = {};    // of speculative_, then of the position
  uint2 sines_ = {};
  int64_t slot_ = -1;        // from `slot_mapping`, unchecked
  int32_t last_block_ = -1;  // block of the sequence's last token, by its table
};

}  // namespace vllm_kernels::cuda
