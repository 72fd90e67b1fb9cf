// A ring of stages in shared memory that one warp owns: it fills and drains it alone, so no barrier
// between warps is needed and every warp keeps its own copies in flight. A stage is K, then V, of 16
// or 32 tokens of one KV head; an mbarrier a stage says when it is there.
//
// sm_90 on: bulk copies of whole pages of one head (layout vllm, up to 32 tokens) or of one row of K
// or V a lane (layouts NHD and HND). Otherwise all lanes copy 16 bytes at a time.
#pragma once
#include "cuda/attention_tile.cuh"
#include "cuda/attention_work.cuh"

namespace vllm_kernels::cuda {

constexpr int kMaxRingStages = 8;

struct RingLayout {
  int stages;        // of a ring, 2 .. kMaxRingStages
  int value_offset;  // bytes from a stage's K to its V
  int stage_bytes;   // a multiple of 128
  int page_shift;    // log2 of the tokens of a page
  int split_shift;   // log2 of the pages of a stage
  int page_bytes;    // form kChunks: of K, of one page of one head, as a stage holds it
  bool whole_pages;  // form kChunks: pages are copied whole
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
#pragma unroll 1
      for (int stage = 0; stage < layout.stages; ++stage) {
        barrier_init(barriers_ + stage * 8, bulk() ? 1 : 32);
      }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      fence_barrier_init();
#endif
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    policy_ = evict_first_policy();
#endif
    __syncwarp();
  }

  // Stages first, first + step, ... (`count` of them) of a sequence come next.
  __device__ __forceinline__ void start(const PagedAttentionParams& p, int stage_shift,
                                        const WorkItem& item, int first, int step, int count) {
    const int bytes = sizeof(Cache);
    seq_len_ = item.sequence.seq_len;
    table_ = p.block_tables + item.seq * p.block_table_stride;
    key_ = static_cast<const char*>(p.kv.key) + item.kv_head * p.kv.key_head_stride * bytes;
    value_ = static_cast<const char*>(p.kv.value) + item.kv_head * p.kv.value_head_stride * bytes;
    first_token_ = first << stage_shift;
    token_step_ = step << stage_shift;
    to_fill_ = count;
    next_page_ = 0;
    load_blocks();
  }

  // Starts filling the next stage, if there is one. All lanes; the stage must have been released.
  __device__ __forceinline__ void fill(const PagedKv& kv) {
    if (to_fill_ == 0) return;
    --to_fill_;
    if (next_page_ == 32) load_blocks();
    const uint32_t stage = storage_ + fill_stage_ * layout_.stage_bytes;
    const uint32_t barrier = barriers_ + fill_stage_ * 8;
    const int pages = 1 << layout_.split_shift;
    if constexpr (kForm == PageForm::kRows) {
      const int row = lane_ & 15;
      const int32_t block =
          __shfl_sync(0xffffffffu, blocks_, next_page_ + (row >> layout_.page_shift & pages - 1));
      const bool good = is_block(kv, block) && first_token_ + row < seq_len_;
      note_present(__ballot_sync(0xffffffffu, good), 0xffffffffu);
      copy_rows(kv, stage, barrier, block, good);
    } else {
      const int page = lane_ & pages - 1;
      const int32_t block = __shfl_sync(0xffffffffu, blocks_, next_page_ + page);
      const bool good = is_block(kv, block) && first_token_ + (page << layout_.page_shift) < seq_len_;
      const uint32_t present = __ballot_sync(0xffffffffu, good);
      note_present(pages == 1 ? present : (present & 1) * 0xff + (present >> 1 & 1) * 0xff00,
                   0xffffu);
      if (layout_.whole_pages) {
        copy_pages(kv, stage, barrier, block, present, pages);
      } else {
        if (good) copy_part_of_page(kv, stage, block);
        barrier_arrive_copies(barrier);
      }
    }
    next_page_ += pages;
    first_token_ += token_step_;
    if (++fill_stage_ == layout_.stages) fill_stage_ = 0;
  }

  // Waits for the oldest stage. key() and value() are its shared addresses; present() has a bit for
  // each of 16 tokens whose page there is (all alike for a stage of 32 tokens).
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
    return kForm == PageForm::kRows || layout_.whole_pages;
#else
    return false;
#endif
  }

  static __device__ __forceinline__ bool is_block(const PagedKv& kv, int32_t block) {
    return static_cast<uint32_t>(block) < static_cast<uint32_t>(kv.num_blocks);
  }

  // Lane l: the block of the l-th page from here on.
  __device__ __forceinline__ void load_blocks() {
    next_page_ = 0;
    const int shift = layout_.split_shift;
    const int token = first_token_ + (lane_ >> shift) * token_step_ +
                      ((lane_ & (1 << shift) - 1) << layout_.page_shift);
    blocks_ = token < seq_len_ ? table_[token >> layout_.page_shift] : -1;
  }

  __device__ __forceinline__ void note_present(uint32_t present, uint32_t all) {
    incomplete_ &= ~(1u << fill_stage_);
    if ((present & all) != all) {
      incomplete_ |= 1u << fill_stage_;
      if (lane_ == 0) present_[fill_stage_] = present & 0xffffu;
    }
  }

  __device__ __forceinline__ void copy_pages(const PagedKv& kv, uint32_t stage, uint32_t barrier,
                                             int32_t block, uint32_t present, int pages) {
    const int bytes = layout_.page_bytes;
    const char* key = key_ + block * kv.key_block_stride * kBytes;
    const char* value = value_ + block * kv.value_block_stride * kBytes;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t copied = present & (1u << pages) - 1;
    if (lane_ == 0) barrier_expect(barrier, 2 * bytes * __popc(copied));
    if (copied >> lane_ & 1) {
      const uint32_t to = stage + lane_ * bytes;
      bulk_copy(to, key, bytes, barrier, policy_);
      bulk_copy(to + layout_.value_offset, value, bytes, barrier, policy_);
    }
#else
    // Lanes of a page copy it together.
    const int page = lane_ & pages - 1;
    const uint32_t to = stage + page * bytes;
    if (present >> page & 1) {
      for (int byte = lane_ / pages * 16; byte < bytes; byte += 32 / pages * 16) {
        copy16_async(to + byte, key + byte);
        copy16_async(to + layout_.value_offset + byte, value + byte);
      }
    }
    barrier_arrive_copies(barrier);
#endif
  }

  // Lanes 0 .. 15 a row of K each, lanes 16 .. 31 one of V.
  __device__ __forceinline__ void copy_rows(const PagedKv& kv, uint32_t stage, uint32_t barrier,
                                            int32_t block, bool good) {
    const bool is_value = lane_ >= 16;
    const int row = lane_ & 15, bytes = kv.head_size * static_cast<int>(kBytes);
    const int token = first_token_ + row & (1 << layout_.page_shift) - 1;
    const int64_t block_stride = is_value ? kv.value_block_stride : kv.key_block_stride;
    const int64_t token_stride = is_value ? kv.value_token_stride : kv.key_token_stride;
    const char* from =
        (is_value ? value_ : key_) + (block * block_stride + token * token_stride) * kBytes;
    const uint32_t to = stage + (is_value ? layout_.value_offset : 0) +
                        row * row_pitch(kv.head_size, static_cast<int>(kBytes));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t copied = __ballot_sync(0xffffffffu, good);
    if (lane_ == 0) barrier_expect(barrier, bytes * __popc(copied));
    if (good) bulk_copy(to, from, bytes, barrier, policy_);
#else
    if (good) {
      for (int byte = 0; byte < bytes; byte += 16) copy16_async(to + byte, from + byte);
    }
    barrier_arrive_copies(barrier);
#endif
  }

  // 16 tokens of a longer page of layout vllm, as a page of 16 tokens.
  __device__ __forceinline__ void copy_part_of_page(const PagedKv& kv, uint32_t stage,
                                                    int32_t block) {
    const int token = first_token_ & (1 << layout_.page_shift) - 1;
    const char* key = key_ + block * kv.key_block_stride * kBytes + token * 16;
    const char* value = value_ + (block * kv.value_block_stride + token) * kBytes;
    const int chunks = kv.head_size * sizeof(Cache);  // 16-byte chunks of 16 tokens of K, and of V
#pragma unroll 2
    for (int i = lane_; i < chunks; i += 32) {
      copy16_async(stage + i * 16, key + i / 16 * kv.key_chunk_stride * kBytes + i % 16 * 16);
      const int d = i / static_cast<int>(kBytes), part = i % static_cast<int>(kBytes);
      copy16_async(stage + layout_.value_offset + i * 16,
                   value + d * kv.value_dim_stride * kBytes + part * 16);
    }
  }

  const RingLayout& layout_;
  uint32_t storage_;
  uint32_t barriers_;
  uint32_t* present_;
  int lane_;
  // where it fills from
  const int32_t* table_;  // the sequence's blocks
  const char* key_;       // block 0 of the KV head
  const char* value_;
  int seq_len_;
  int first_token_;  // of the next stage
  int token_step_;   // to the one after it
  int to_fill_;      // stages
  int next_page_;    // in blocks_ of the lanes
  int32_t blocks_;
  // the ring
  int fill_stage_ = 0;
  int drain_stage_ = 0;
  uint32_t parity_ = 0;
  uint32_t incomplete_ = 0;  // bit s: present_[s] says what there is of stage s
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t policy_;
#endif
};

}  // namespace vllm_kernels::cuda
