// A ring of stages in shared memory that one warp owns: it fills and drains it alone, so no barrier
// between warps is needed and every warp keeps its own copies in flight. A stage is K, then V, of 16
// or 32 tokens of one KV head; an mbarrier a stage says when it is there.
//
// Where a page of one head is contiguous (layout vllm, up to 32 tokens), lane 0 copies it whole
// (cp.async.bulk, sm_90 on). Otherwise all lanes copy 16 bytes at a time.
#pragma once
#include "cuda/attention_tile.cuh"
#include "cuda/attention_work.cuh"

namespace vllm_kernels::cuda {

constexpr int kMaxRingStages = 8;

struct RingLayout {
  int stages;           // of a ring, 2 .. kMaxRingStages
  int value_offset;     // bytes from a stage's K to its V
  int stage_bytes;      // a multiple of 128
  int page_shift;       // log2 of the tokens of a page
  int pages_per_stage;  // where pages are copied whole: 1 or 2
  int page_bytes;       // the same: of K, of one page of one head
  int row_lanes;        // form kRows: lanes that copy one row, a power of two
  bool whole_pages;
};

// Where a warp fills next: what it needs of a WorkCursor at every stage, in registers.
struct FillPoint {
  int stage;             // of the segment
  int stages;            // of the segment
  int first_token;       // of the segment's stage 0
  int seq_len;
  const int32_t* table;  // the sequence's blocks
  int64_t key, value;    // bytes from block 0 to the KV head

  __device__ __forceinline__ void set(const PagedAttentionParams& p, int stage_shift,
                                      const WorkCursor& at) {
    const SequenceWork& work = at.sequence;
    const int bytes = size_of(p.kv.dtype);
    stage = at.stage;
    stages = work.stages;
    first_token = work.first_stage << stage_shift;
    seq_len = work.seq_len;
    table = p.block_tables + work.seq * p.block_table_stride;
    key = at.kv_head * p.kv.key_head_stride * bytes;
    value = at.kv_head * p.kv.value_head_stride * bytes;
  }
};

template <typename Cache, PageForm kForm>
class KvRing {
 public:
  __device__ __forceinline__ KvRing(const RingLayout& layout, uint32_t storage, uint64_t* barriers,
                                    uint32_t* present, int lane)
      : layout_(layout),
        storage_(storage),
        barriers_(shared_address(barriers)),
        present_(present),
        lane_(lane) {
    if (lane == 0) {
      for (int stage = 0; stage < layout.stages; ++stage) {
        barrier_init(barriers_ + stage * 8, bulk() ? 1 : 32);
      }
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    fence_barrier_init();
    policy_ = evict_first_policy();
#endif
    __syncwarp();
  }

  // Where the block of a stage's tokens stands, null where there is none. For pages of fewer than 16
  // tokens lane i (and i + 16) has that of the i-th token, otherwise all lanes have the same.
  __device__ __forceinline__ const int32_t* entry_of(int stage_shift, const FillPoint& at) const {
    const int shift = layout_.page_shift;
    const int token = at.first_token + (at.stage << stage_shift) + (shift < 4 ? lane_ & 15 : 0);
    return token < at.seq_len ? at.table + (token >> shift) : nullptr;
  }

  // Starts filling the next stage. All lanes call; the stage must have been released.
  __device__ __forceinline__ void fill(const PagedKv& kv, int stage_shift, const FillPoint& at,
                                       int32_t block) {
    const uint32_t stage = storage_ + fill_stage_ * layout_.stage_bytes;
    const uint32_t barrier = barriers_ + fill_stage_ * 8;
    const bool good = static_cast<uint32_t>(block) < static_cast<uint32_t>(kv.num_blocks);
    const uint32_t present = __ballot_sync(0xffffffffu, good);
    incomplete_ &= ~(1u << fill_stage_);
    if (present != 0xffffffffu) {
      incomplete_ |= 1u << fill_stage_;
      if (lane_ == 0) present_[fill_stage_] = present & 0xffffu;
    }
    const char* key = static_cast<const char*>(kv.key) + at.key;
    const char* value = static_cast<const char*>(kv.value) + at.value;
    const int first = at.first_token + (at.stage << stage_shift);
    if constexpr (kForm == PageForm::kRows) {
      copy_rows(kv, key, value, stage, first, block, present);
      barrier_arrive_copies(barrier);
    } else if (layout_.whole_pages) {
      copy_pages(kv, key, value, stage, barrier, block, present);
    } else {
      copy_part_of_page(kv, key, value, stage, first, block, present);
      barrier_arrive_copies(barrier);
    }
    if (++fill_stage_ == layout_.stages) fill_stage_ = 0;
  }

  // Waits for the oldest stage. key() and value() are its shared addresses; present() has a bit for
  // each of 16 tokens (sixteenths of a longer stage) whose page there is.
  __device__ __forceinline__ void wait() { barrier_wait(barriers_ + drain_stage_ * 8, parity_); }
  __device__ __forceinline__ uint32_t key() const {
    return storage_ + drain_stage_ * layout_.stage_bytes;
  }
  __device__ __forceinline__ uint32_t value() const { return key() + layout_.value_offset; }
  __device__ __forceinline__ uint32_t present() const {
    return incomplete_ >> drain_stage_ & 1 ? present_[drain_stage_] : 0xffffu;
  }

  // The oldest stage has been read by all lanes and may be filled again.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (++drain_stage_ == layout_.stages) {
      drain_stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  static constexpr int64_t kBytes = sizeof(Cache);

  __device__ __forceinline__ bool bulk() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return kForm == PageForm::kChunks && layout_.whole_pages;
#else
    return false;
#endif
  }

  __device__ __forceinline__ void copy_pages(const PagedKv& kv, const char* key, const char* value,
                                             uint32_t stage, uint32_t barrier, int32_t block,
                                             uint32_t present) {
    const int bytes = layout_.page_bytes;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (layout_.pages_per_stage == 1) {
      if (lane_ != 0) return;
      if ((present & 1) == 0) {
        barrier_expect(barrier, 0);
        return;
      }
      barrier_expect(barrier, 2 * bytes);
      bulk_copy(stage, key + block * kv.key_block_stride * kBytes, bytes, barrier, policy_);
      bulk_copy(stage + layout_.value_offset, value + block * kv.value_block_stride * kBytes, bytes,
                barrier, policy_);
      return;
    }
    const int32_t other = __shfl_sync(0xffffffffu, block, 8);
    if (lane_ != 0) return;
    const bool copies[2] = {(present & 1) != 0, (present >> 8 & 1) != 0};
    barrier_expect(barrier, 2 * bytes * (copies[0] + copies[1]));
#pragma unroll 1
    for (int page = 0; page < 2; ++page) {
      if (!copies[page]) continue;
      const int64_t id = page == 0 ? block : other;
      const uint32_t to = stage + page * bytes;
      bulk_copy(to, key + id * kv.key_block_stride * kBytes, bytes, barrier, policy_);
      bulk_copy(to + layout_.value_offset, value + id * kv.value_block_stride * kBytes, bytes,
                barrier, policy_);
    }
#else
    for (int page = 0; page < layout_.pages_per_stage; ++page) {
      const int64_t id = __shfl_sync(0xffffffffu, block, page * 8);
      if ((present >> (page * 8) & 1) == 0) continue;
      const char* from_key = key + id * kv.key_block_stride * kBytes;
      const char* from_value = value + id * kv.value_block_stride * kBytes;
      const uint32_t to = stage + page * bytes;
      for (int byte = lane_ * 16; byte < bytes; byte += 32 * 16) {
        copy16_async(to + byte, from_key + byte);
        copy16_async(to + layout_.value_offset + byte, from_value + byte);
      }
    }
    barrier_arrive_copies(barrier);
#endif
  }

  // 16 tokens of a longer page of layout vllm, as a page of 16 tokens.
  __device__ __forceinline__ void copy_part_of_page(const PagedKv& kv, const char* key,
                                                    const char* value, uint32_t stage, int first,
                                                    int32_t block, uint32_t present) {
    if ((present & 1) == 0) return;
    const int token = first & ((1 << layout_.page_shift) - 1);
    const char* from_key = key + block * kv.key_block_stride * kBytes + token * 16;
    const char* from_value = value + (block * kv.value_block_stride + token) * kBytes;
    const int chunks = kv.head_size * sizeof(Cache);  // 16-byte chunks of 16 tokens of K, and of V
#pragma unroll 2
    for (int i = lane_; i < chunks; i += 32) {
      copy16_async(stage + i * 16, from_key + i / 16 * kv.key_chunk_stride * kBytes + i % 16 * 16);
      const int d = i / static_cast<int>(kBytes), part = i % static_cast<int>(kBytes);
      copy16_async(stage + layout_.value_offset + i * 16,
                   from_value + d * kv.value_dim_stride * kBytes + part * 16);
    }
  }

  // 16 rows of K and of V: row_lanes lanes a row.
  __device__ __forceinline__ void copy_rows(const PagedKv& kv, const char* key, const char* value,
                                            uint32_t stage, int first, int32_t block,
                                            uint32_t present) {
    const int row_bytes = kv.head_size * static_cast<int>(kBytes);
    const int pitch = row_pitch(kv.head_size, kBytes);
    const int lanes = layout_.row_lanes;
    const int start = lane_ / lanes, rows = 32 / lanes, chunk = lane_ % lanes * 16;
    const uint32_t to = stage + start * pitch;
    if (layout_.page_shift >= 4) {
      if ((present & 1) == 0) return;
      const int token = (first & ((1 << layout_.page_shift) - 1)) + start;
      const int64_t key_step = rows * kv.key_token_stride * kBytes;
      const int64_t value_step = rows * kv.value_token_stride * kBytes;
      key += (block * kv.key_block_stride + token * kv.key_token_stride) * kBytes;
      value += (block * kv.value_block_stride + token * kv.value_token_stride) * kBytes;
#pragma unroll 1
      for (int byte = chunk; byte < row_bytes; byte += lanes * 16) {
        const char* from_key = key + byte;
        const char* from_value = value + byte;
        uint32_t to_key = to + byte;
#pragma unroll 4
        for (int row = start; row < 16; row += rows) {
          copy16_async(to_key, from_key);
          copy16_async(to_key + layout_.value_offset, from_value);
          from_key += key_step;
          from_value += value_step;
          to_key += rows * pitch;
        }
      }
      return;
    }
    const int mask = (1 << layout_.page_shift) - 1;
#pragma unroll 1
    for (int base = 0; base < 16; base += rows) {
      const int row = base + start;
      const int64_t id = __shfl_sync(0xffffffffu, block, row & 15);
      if (row >= 16 || (present >> row & 1) == 0) continue;
      const int token = first + row & mask;
      const char* from_key =
          key + (id * kv.key_block_stride + token * kv.key_token_stride) * kBytes;
      const char* from_value =
          value + (id * kv.value_block_stride + token * kv.value_token_stride) * kBytes;
      for (int byte = chunk; byte < row_bytes; byte += lanes * 16) {
        copy16_async(to + base * pitch + byte, from_key + byte);
        copy16_async(to + base * pitch + byte + layout_.value_offset, from_value + byte);
      }
    }
  }

  const RingLayout& layout_;
  uint32_t storage_;
  uint32_t barriers_;
  uint32_t* present_;
  int lane_;
  int fill_stage_ = 0;
  int drain_stage_ = 0;
  uint32_t parity_ = 0;
  uint32_t incomplete_ = 0;  // bit s: present_[s] says what there is of stage s
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t policy_;
#endif
};

}  // namespace vllm_kernels::cuda
