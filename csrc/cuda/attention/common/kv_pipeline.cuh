// KvPipeline: a pipeline of stages in shared memory that brings in K and V of one KV head, or of
// several in form kLines. A stage holds V, then K, of 16 to 64 tokens. A "full" mbarrier per stage
// signals that its copies have landed.
//
// Not kShared: one warp owns the pipeline and is both its producer and its consumer. No barrier
// between warps is needed, and every warp keeps its own copies in flight.
// kShared: a consumer of several warps shares a pipeline. One warp produces, and all of the
// consumer's warps read. An "empty" mbarrier per stage signals that all have released it.
//
// Copies, sm_90 and later:
//   kPackedPages   bulk copies of full pages of one head
//   kPlainRows     bulk copies of full pages of one head, or TMA boxes of full rows
//   kSwizzledRows  TMA boxes of up to 64 rows of 128 bytes; pages of one token: by lanes, as below
//   kPackedBoxes   TMA boxes of 16 or 32 tokens
//   kLines         TMA boxes of 16 tokens of all its heads
// Older GPUs: all lanes copy 16 bytes at a time (cp.async). On sm_90 this also holds for
// kSwizzledRows with rows of less than 128 bytes or pages of one token, unless kShared.
// kv_smem_layout.cuh has the layouts of a stage.
//
// Caches with a scale a token: lanes copy the scales of a stage, 16 bytes each (cp.async). They lie
// behind the pipeline's stages: those of a stage's keys, then of its values. int4: then the zeros.
//
// Early reads, before the PDL wait: look_up_speculative() reads the block table, and prefetch()
// fetches pages into L2. No page is read before the wait, unless PagedAttentionParams::kv_ready
// promises that pages, tables and lengths are written.
#pragma once
#include "cuda/attention/common/kv_pipeline_layout.cuh"
#include "cuda/attention/common/token_scales.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/prefetch.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Whether a stage consists of full pages, as prefetch_page() needs.
template <KvForm kForm, int kTokens>
__device__ __forceinline__ bool may_prefetch(const PipelineLayout& layout) {
  return kForm != KvForm::kPackedBoxes && layout.page_shift <= kStageShift<kTokens>;
}

// Prefetches K and V of one page of one head into L2. All lanes of the warp call it.
template <typename Cache, KvForm kForm>
__device__ __forceinline__ void prefetch_page(const PagedKv& kv, const PipelineLayout& layout,
                                              const char* key, const char* value, int lane) {
  if (is_whole(kForm) && !(kForm == KvForm::kPlainRows && layout.uses_tma_boxes)) {
#pragma unroll 1
    for (int byte = lane * 128; byte < layout.page_bytes; byte += 32 * 128) {
      prefetch_l2(key + byte);
      prefetch_l2(value + byte);
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < layout.columns << layout.page_shift; i += 32) {
      const int64_t token = i & (1 << layout.page_shift) - 1;
      const int byte = (i >> layout.page_shift) * kColumnBytes;
      prefetch_l2(key + token * kv.key_token_stride * sizeof(Cache) + byte);
      prefetch_l2(value + token * kv.value_token_stride * sizeof(Cache) + byte);
    }
  }
}

// kTokens: tokens of a stage, 16, 32 or 64.
template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm, bool kShared>
class KvPipeline {
 public:
  using Bits = TokenBits<kTokens>;  // one bit per token of a stage
  // 8-byte words of shared memory: the full barriers, the empty barriers if kShared, then each
  // stage's mask of present tokens.
  static constexpr int kBarriers = kShared ? 2 * kMaxPipelineStages : kMaxPipelineStages;
  static constexpr int kWords = kBarriers + kMaxPipelineStages * sizeof(Bits) / 8;
  static constexpr bool kScaled = kHasTokenScales<Cache>;

  // Bytes of a pipeline in shared memory.
  static __device__ __forceinline__ int bytes(const PipelineLayout& layout) {
    return pipeline_bytes(layout.stages, layout.stage_bytes, kTokens, kScaleArrays<Cache>);
  }

  // `barrier_words`: kWords in shared memory. `is_producer`: whether this warp produces; only
  // kShared uses it.
  __device__ __forceinline__ KvPipeline(const PipelineLayout& layout, const KvTensorMaps& maps,
                                        uint32_t stages_address, uint32_t barrier_words,
                                        bool is_producer, int lane)
      : layout_(layout),
        maps_(maps),
        stages_address_(opaque(stages_address)),
        barriers_(opaque(barrier_words)),
        lane_(lane),
        is_producer_(is_producer) {
#if defined(VLLM_KERNELS_HAS_SM90)
    policy_ = evict_first_policy();
#endif
  }

  // One thread calls this before any warp uses the pipeline.
  static __device__ __forceinline__ void init(const PipelineLayout& layout,
                                              const KvTensorMaps& maps, uint32_t barrier_words,
                                              int consumer_warps) {
#pragma unroll 1
    for (int stage = 0; stage < layout.stages; ++stage) {
      const int copiers = bulk(layout) ? (kScaled ? 33 : 1) : kShared ? 33 : 32;
      barrier_init(barrier_words + stage * 8, copiers);
      if constexpr (kShared)
        barrier_init(barrier_words + (kMaxPipelineStages + stage) * 8,
                     consumer_warps * kWarpArrivals);
    }
#if defined(VLLM_KERNELS_HAS_SM90)
    fence_barrier_init();
    if (kForm == KvForm::kPlainRows ? layout.uses_tma_boxes : !is_whole(kForm)) {
      prefetch_tensor_map(&maps.key);
      prefetch_tensor_map(&maps.value);
    }
#endif
  }

  // The next stages to produce: `first`, first + step, ... (`count` of them) of a sequence. A
  // look_up() must follow.
  __device__ __forceinline__ void set_source(const PagedAttentionParams& p, int stage_shift,
                                             int seq, int seq_len, int kv_head, int first, int step,
                                             int count) {
    seq_len_ = seq_len;
    table_ = p.block_tables + seq * p.block_table_stride;
    kv_head_ = kv_head;
    key_ = in_16_bytes(p.kv.key) + static_cast<uint64_t>(kv_head_) * layout_.key_head;
    value_ = in_16_bytes(p.kv.value) + static_cast<uint64_t>(kv_head_) * layout_.value_head;
    first_token_ = first << stage_shift;
    token_step_ = step << stage_shift;
    to_produce_ = !kShared || is_producer_ ? count : 0;
  }

  // Lane l reads the id of the l-th page from the next stage on; -1 past the sequence's end.
  __device__ __forceinline__ void look_up() {
    next_page_ = 0;
    const int token = token_of_lane();
    blocks_ = token < seq_len_ ? table_[token >> layout_.page_shift] : -1;
  }

  // Speculative look_up(), before the primary kernel has ended. Returns the address to validate.
  __device__ __forceinline__ const int32_t* look_up_speculative() {
    next_page_ = 0;
    const int token = token_of_lane();
    const int32_t* at = token < seq_len_ ? &table_[token >> layout_.page_shift] : nullptr;
    blocks_ = at != nullptr ? __ldcg(at) : -1;
    return at;
  }

  // Prefetches the pages of the first `stages` stages into L2. It does so only if many more stages
  // follow (kPrefetchLength), or if the CTA has `time`. The pages are not read, so this may precede
  // the end of the primary kernel.
  __device__ __forceinline__ void prefetch(const PagedKv& kv, int stages, bool time) const {
    if (!may_prefetch<kForm, kTokens>(layout_)) return;
    if (!time && to_produce_ < kPrefetchLength * stages) return;
#pragma unroll 1
    for (int i = 0; i < min(stages, to_produce_) << layout_.pages_shift; ++i) {
      const uint32_t block = __shfl_sync(0xffffffffu, blocks_, i);
      if (block >= kv.num_blocks) continue;
      prefetch_page<Cache, kForm>(kv, layout_, key_page(block), value_page(block), lane_);
    }
  }

  // A lane's share of the copies of several stages: K and V of a page; in form kSwizzledRows, one
  // column of K or of V.
  struct Copies {
    int stages;      // 0: nothing is prepared
    bool is_active;  // whether this lane copies
    uint32_t key_to, value_to, barrier;
    const char *key, *value;
    int column, line, block;
  };
  // Produces up to `stages` stages of an unused pipeline in two steps. prepare_copies() does all
  // that may precede the end of the primary kernel, and start_copies() issues the copies. From
  // prepare_copies() on the pipeline counts these stages as produced. It leaves producer_phase_ as
  // it is: only kShared pipelines use that, and they prepare nothing. All lanes call it, after
  // look_up_speculative().
  __device__ __forceinline__ Copies prepare_copies(const PagedKv& kv, int stages) {
    Copies copies = {.stages = 0};
    if constexpr (kForm == KvForm::kPackedBoxes || kShared) return copies;
#if defined(VLLM_KERNELS_HAS_SM90)
    if (!bulk(layout_)) return copies;
    constexpr bool kWhole = is_whole(kForm);
    const int shift = layout_.pages_shift;
    const int stage = layout_.lane_divisor.divide(lane_);
    const int of_stage = lane_ - stage * layout_.copy_lanes;
    const int page = (kWhole ? of_stage : of_stage >> 1) & (1 << shift) - 1;
    const int count = min(min(stages, to_produce_), layout_.copy_stages);
    const bool is_active = stage < count;
    // In place of a page past the sequence's end, the stage's first page is copied again. Nobody
    // sees its tokens there, and such a stage needs no code of its own.
    const int token = first_token_ + stage * token_step_ + (page << layout_.page_shift);
    const int32_t block =
        __shfl_sync(0xffffffffu, blocks_, (stage << shift) + (token < seq_len_ ? page : 0));
    const bool is_valid = static_cast<uint32_t>(block) < static_cast<uint32_t>(kv.num_blocks);
    if (__any_sync(0xffffffffu, is_active && !is_valid))
      return copies;  // produce() handles absent pages
    copies.stages = count;
    copies.is_active = is_active;
    copies.barrier = barriers_ + stage * 8;
    copies.value_to = stages_address_ + stage * layout_.stage_bytes;
    copies.key_to = copies.value_to + layout_.key_offset;
    uint32_t bytes = 2 * layout_.page_bytes;
    if constexpr (kWhole) {
      copies.value_to += page * layout_.page_bytes;
      copies.key_to += page * layout_.page_stride;
      copies.key = key_page(block);
      copies.value = value_page(block);
      if constexpr (kForm == KvForm::kPlainRows) {
        const int token = first_token_ + stage * token_step_;
        copies.key += skipped_bytes(token);
        copies.value += skipped_bytes(token);
        copies.line = line_of(token);
        copies.block = block;
      }
    } else {
      bytes = box_bytes() * 2 * layout_.columns;
      copies.column = of_stage >> 1 >> shift;
      copies.line = line_of(first_token_ + stage * token_step_);
      copies.block = block;
      const uint32_t at = copies.column * kColumnStride<kTokens> + page * box_bytes();
      copies.value_to += at;
      copies.key_to += at;
    }
    if (is_active && of_stage == 0) barrier_expect(copies.barrier, bytes << shift);
    to_produce_ -= count;
    next_page_ = count << shift;
    first_token_ += count * token_step_;
    producer_stage_ = count < layout_.stages ? count : 0;
#endif
    return copies;
  }
  __device__ __forceinline__ void start_copies(const PagedAttentionParams& p,
                                               const Copies& copies) const {
#if defined(VLLM_KERNELS_HAS_SM90)
    if constexpr (kScaled) {
#pragma unroll 1
      for (int stage = 0; stage < copies.stages; ++stage) {
        copy_scales(p, stage, stage << layout_.pages_shift,
                    first_token_ + (stage - copies.stages) * token_step_);
        barrier_arrive_copies(barriers_ + stage * 8);
      }
    }
    if (!copies.is_active) return;
    if constexpr (is_whole(kForm)) {
      copy_page(copies.key_to, copies.value_to, copies.key, copies.value, copies.line, copies.block,
                copies.barrier);
    } else if constexpr (kForm == KvForm::kSwizzledRows) {
      const bool is_value = lane_ & 1;
      tma_copy_box(is_value ? copies.value_to : copies.key_to, is_value ? &maps_.value : &maps_.key,
                   copies.column * (kColumnBytes / 2), copies.line, kv_head_, copies.block,
                   copies.barrier, policy_);
    }
#endif
  }

  // Starts the copies of the next stage, if there is one. All lanes. Not kShared: the stage must
  // have been released.
  __device__ __forceinline__ bool produce(const PagedAttentionParams& p) {
    if (to_produce_ == 0) return false;
    const PagedKv& kv = p.kv;
    --to_produce_;
    if constexpr (kShared) barrier_wait(empty_barrier(producer_stage_), producer_phase_);
    if (next_page_ == 32) look_up();
    const uint32_t stage = stages_address_ + producer_stage_ * layout_.stage_bytes;
    const uint32_t barrier = barriers_ + producer_stage_ * 8;
    const int pages = 1 << layout_.pages_shift;
    // Lanes to pages: lane l has page l. kSwizzledRows by boxes: K, V of page 0, K, V of page 1,
    // ... kPackedBoxes: K, V of box 0, K, V of box 1, ...
    const int first_shift = is_whole(kForm)                  ? 0
                            : kForm == KvForm::kSwizzledRows ? bulk(layout_)
                                                             : box_shift() + 1;
    const int page = lane_ >> first_shift & pages - 1;
    const int32_t block = __shfl_sync(0xffffffffu, blocks_, next_page_ + page);
    const bool is_valid = static_cast<uint32_t>(block) < static_cast<uint32_t>(kv.num_blocks);
    const uint32_t lanes = __ballot_sync(0xffffffffu, is_valid);
    const uint32_t stage_bit = 1u << producer_stage_;
    incomplete_ &= ~stage_bit;
    if (kShared || lanes != 0xffffffffu) {
      incomplete_ |= stage_bit;
      Bits present = kAllTokens<kTokens>;
      if (lanes != 0xffffffffu) {
        present = 0;
        const int page_tokens = min(1 << layout_.page_shift, kTokens);
#pragma unroll 1
        for (int i = 0; i < pages; ++i) {
          if (lanes >> (i << first_shift) & 1) {
            present |= (kAllTokens<kTokens> >> (kTokens - page_tokens)) << i * page_tokens;
          }
        }
      }
      if (lane_ == 0) store_shared(present_of(producer_stage_), present);
    }
    if constexpr (kScaled) {
      copy_scales(p, producer_stage_, next_page_, first_token_);
      if (bulk(layout_)) barrier_arrive_copies(barrier);
    }
    if constexpr (is_whole(kForm)) {
      copy_pages(kv, stage, barrier, page, pages, block, is_valid, lanes);
    } else if constexpr (kForm == KvForm::kSwizzledRows) {
      copy_rows(kv, stage, barrier, page, block, is_valid);
    } else {
      copy_boxes(kv, stage, barrier, block, is_valid);
    }
    next_page_ += pages;
    first_token_ += token_step_;
    // A stage of single tokens needs ids of its own. They arrive while the warp multiplies.
    if (kForm == KvForm::kSwizzledRows && !bulk(layout_) && next_page_ == 32) look_up();
    if (++producer_stage_ == layout_.stages) {
      producer_stage_ = 0;
      producer_phase_ ^= 1;
    }
    return true;
  }

  // Waits for the oldest stage. key() and value() are its shared addresses. present() has a bit set
  // for each token whose page is valid.
  __device__ __forceinline__ void consumer_wait() {
    barrier_wait(barriers_ + consumer_stage_ * 8, consumer_phase_);
  }
  __device__ __forceinline__ uint32_t key() const { return value() + layout_.key_offset; }
  __device__ __forceinline__ uint32_t value() const {
    return stages_address_ + consumer_stage_ * layout_.stage_bytes;
  }
  // Its scales: those of K, then those of V. int4: then the zeros of both.
  __device__ __forceinline__ uint32_t scales() const { return scales_of(consumer_stage_); }
  __device__ __forceinline__ Bits present() const {
    return kShared || incomplete_ >> consumer_stage_ & 1
               ? load_shared<Bits>(present_of(consumer_stage_))
               : kAllTokens<kTokens>;
  }

  // All lanes: whether the speculative page ids were right. `block`: this lane's id, read again.
  __device__ __forceinline__ bool validate(int32_t block) const {
    return __all_sync(0xffffffffu, block == blocks_);
  }

  // Waits for the oldest `stages` stages and drops them.
  __device__ __forceinline__ void discard(int stages) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      consumer_wait();
      consumer_release();
    }
  }

  // All lanes have read the oldest stage, so it may be produced again.
  __device__ __forceinline__ void consumer_release() {
    if constexpr (kShared) {
      barrier_arrive_warp(empty_barrier(consumer_stage_), lane_);
    } else {
      __syncwarp();
    }
    if (++consumer_stage_ == layout_.stages) {
      consumer_stage_ = 0;
      consumer_phase_ ^= 1;
    }
  }

 private:
  static constexpr int64_t kBytes = sizeof(Cache);

  static __device__ __forceinline__ bool bulk(const PipelineLayout& layout) {
#if defined(VLLM_KERNELS_HAS_SM90)
    return kShared || kForm != KvForm::kSwizzledRows || !layout.by_lanes;
#else
    return false;
#endif
  }

  // Form kSwizzledRows: bytes of a box. A box is one column of K or V. It covers a page, or the
  // stage's share of a longer page.
  __device__ __forceinline__ uint32_t box_bytes() const {
    return kColumnBytes << min(layout_.page_shift, kStageShift<kTokens>) - line_shift();
  }
  // Forms kSwizzledRows and kPlainRows: the line of its page at which a token begins.
  __device__ __forceinline__ int line_of(int token) const {
    return (token & (1 << layout_.page_shift) - 1) >> line_shift();
  }
  __device__ __forceinline__ int line_shift() const {
    return kMayPairRows<Cache, kMaxHeadSize, kForm> ? layout_.line_shift : 0;
  }
  // Form kPlainRows: bytes of a head's page before `token`, where a stage begins inside of the
  // page.
  __device__ __forceinline__ int skipped_bytes(int token) const {
    return (token & (1 << layout_.page_shift) - 1) * kMaxHeadSize * static_cast<int>(kBytes);
  }
  // Forms kPackedBoxes and kLines: log2 of the boxes of a page, or of a stage where that is
  // shorter.
  __device__ __forceinline__ int box_shift() const {
    return min(layout_.page_shift, kStageShift<kTokens>) -
           kStageShift<kTokensOfBox<Cache, kTokens, kForm>>;
  }
  __device__ __forceinline__ uint32_t empty_barrier(int stage) const {
    return barriers_ + (kMaxPipelineStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t present_of(int stage) const {
    return barriers_ + kBarriers * 8 + stage * sizeof(Bits);
  }
  __device__ __forceinline__ uint32_t scales_of(int stage) const {
    return stages_address_ + layout_.stages * layout_.stage_bytes +
           stage * token_scale_bytes(kTokens, kScaleArrays<Cache>);
  }
  // In kv_pipeline_copies.cuh.
  __device__ __forceinline__ void copy_scales(const PagedAttentionParams& p, int stage, int page,
                                              int first) const;
  __device__ __forceinline__ void copy_pages(const PagedKv& kv, uint32_t stage, uint32_t barrier,
                                             int page, int pages, int32_t block, bool is_valid,
                                             uint32_t lanes);
  __device__ __forceinline__ void copy_rows(const PagedKv& kv, uint32_t stage, uint32_t barrier,
                                            int page, int32_t block, bool is_valid);
  __device__ __forceinline__ void copy_single_tokens(uint32_t stage, int32_t block, bool is_valid);
  __device__ __forceinline__ void copy_chunks(const PagedKv& kv, uint32_t stage, uint32_t barrier,
                                              int32_t block, bool is_valid);
  __device__ __forceinline__ void copy_boxes(const PagedKv& kv, uint32_t stage, uint32_t barrier,
                                             int32_t block, bool is_valid);

  // All lanes call this after their 16-byte copies.
  __device__ __forceinline__ void arrive_copies(uint32_t barrier) const {
    barrier_arrive_copies(barrier);
    if (kShared && lane_ == 0) barrier_arrive(barrier);  // the stage's present mask is written
  }

  static __device__ __forceinline__ uint64_t in_16_bytes(const void* pointer) {
    return reinterpret_cast<uint64_t>(pointer) >> 4;
  }
  __device__ __forceinline__ const char* key_page(uint32_t block) const {
    return reinterpret_cast<const char*>(key_ + static_cast<uint64_t>(block) * layout_.key_block
                                         << 4);
  }
  __device__ __forceinline__ const char* value_page(uint32_t block) const {
    return reinterpret_cast<const char*>(value_ + static_cast<uint64_t>(block) * layout_.value_block
                                         << 4);
  }

  // The first token of lane l's page (see look_up()).
  __device__ __forceinline__ int token_of_lane() const {
    const int shift = layout_.pages_shift;
    return first_token_ + (lane_ >> shift) * token_step_ +
           ((lane_ & (1 << shift) - 1) << layout_.page_shift);
  }

#if defined(VLLM_KERNELS_HAS_SM90)
  // One lane copies K and V of one page of a head. Of a page longer than a stage, it copies the
  // stage's share, from `line` on.
  __device__ __forceinline__ void copy_page(uint32_t key_to, uint32_t value_to, const char* key,
                                            const char* value, int line, int block,
                                            uint32_t barrier) const {
    if (kForm == KvForm::kPlainRows && layout_.uses_tma_boxes) {
      tma_copy_box(key_to, &maps_.key, 0, line, kv_head_, block, barrier, policy_);
      tma_copy_box(value_to, &maps_.value, 0, line, kv_head_, block, barrier, policy_);
    } else {
      bulk_copy(key_to, key, layout_.page_bytes, barrier, policy_);
      bulk_copy(value_to, value, layout_.page_bytes, barrier, policy_);
    }
  }
#endif

  const PipelineLayout& layout_;
  const KvTensorMaps& maps_;
  uint32_t stages_address_;
  uint32_t barriers_;
  int lane_;
  bool is_producer_;
  // The producer's source.
  const int32_t* table_;  // the sequence's row of block_tables
  uint64_t key_, value_;  // K and V of page 0 of this KV head, in units of 16 bytes
  int kv_head_;
  int seq_len_;
  int first_token_;  // of the next stage to produce
  int token_step_;   // tokens from one stage to the next
  int to_produce_;   // stages left
  int next_page_;    // lane of blocks_ that has the next stage's first page
  int32_t blocks_;
  // The pipeline's state.
  int producer_stage_ = 0;
  int consumer_stage_ = 0;
  uint32_t consumer_phase_ = 0;
  uint32_t producer_phase_ = 1;  // a wait on a new barrier with parity 1 returns at once
  uint32_t incomplete_ = 0;      // bit s: stage s may have absent tokens; read present_of(s)
#if defined(VLLM_KERNELS_HAS_SM90)
  uint64_t policy_;
#endif
};

}  // namespace vllm_kernels::cuda

#include "cuda/attention/common/kv_pipeline_copies.cuh"
