// A ring of page stages in shared memory that one warp owns: it fills and drains it alone, so no
// barrier between warps is needed and every warp keeps its own copies in flight.
//
// From sm_90 on, lane 0 issues one bulk copy per page and the stage's mbarrier counts the bytes;
// before, all lanes issue 16-byte asynchronous copies.
#pragma once
#include "cuda/base/ptx.cuh"

namespace vllm_kernels::cuda {

constexpr int kMaxStages = 8;

// How a ring is laid out; the same for every warp of a launch.
struct RingShape {
  int stages;           // 2 .. kMaxStages
  int page_bytes;       // of K (and of V) of one page of one KV head, a multiple of 16
  int pages_per_stage;  // 1 or 2

  __host__ __device__ int stage_bytes() const { return 2 * pages_per_stage * page_bytes; }
};

class PageRing {
 public:
  // `storage`: stages * stage_bytes of this warp, 128-byte aligned. `barriers`: kMaxStages of it.
  __device__ PageRing(const RingShape& shape, uint32_t storage, uint64_t* barriers, int lane)
      : shape_(shape), storage_(storage), lane_(lane) {
#if defined(VLLM_KERNELS_HAS_SM90)
    barriers_ = shared_address(barriers);
    policy_ = evict_first_policy();
    if (lane == 0) {
      for (int stage = 0; stage < shape.stages; ++stage) barrier_init(barriers_ + stage * 8, 1);
      fence_barrier_init();
    }
    __syncwarp();
#endif
  }

  // Starts filling the next stage with the pages whose bit is set in `mask` (bit 0: the first).
  // Pages without a bit are not read. All lanes call; the stage must have been released.
  __device__ __forceinline__ void fill(const char* const (&key)[2], const char* const (&value)[2],
                                       uint32_t mask) {
    const uint32_t stage = storage_ + fill_stage_ * shape_.stage_bytes();
    masks_ = (masks_ & ~(3u << (2 * fill_stage_))) | (mask << (2 * fill_stage_));
#if defined(VLLM_KERNELS_HAS_SM90)
    if (lane_ == 0) {
      const uint32_t barrier = barriers_ + fill_stage_ * 8;
      barrier_expect(barrier, 2 * __popc(mask) * shape_.page_bytes);
#pragma unroll
      for (int page = 0; page < 2; ++page) {
        if (!(mask >> page & 1)) continue;
        bulk_copy(stage + page * shape_.page_bytes, key[page], shape_.page_bytes, barrier, policy_);
        bulk_copy(stage + (shape_.pages_per_stage + page) * shape_.page_bytes, value[page],
                  shape_.page_bytes, barrier, policy_);
      }
    }
#else
#pragma unroll
    for (int page = 0; page < 2; ++page) {
      if (!(mask >> page & 1)) continue;
      const uint32_t to_key = stage + page * shape_.page_bytes;
      const uint32_t to_value = stage + (shape_.pages_per_stage + page) * shape_.page_bytes;
      for (int byte = lane_ * 16; byte < shape_.page_bytes; byte += 32 * 16) {
        copy16_async(to_key + byte, key[page] + byte);
        copy16_async(to_value + byte, value[page] + byte);
      }
    }
    commit_copies();
#endif
    if (++fill_stage_ == shape_.stages) fill_stage_ = 0;
  }

  // Waits for the oldest stage. key() and value() are its shared addresses, mask() its pages.
  __device__ __forceinline__ void wait() {
#if defined(VLLM_KERNELS_HAS_SM90)
    barrier_wait(barriers_ + drain_stage_ * 8, parity_);
#else
    switch (shape_.stages) {  // one group a stage: all but the stages - 1 younger ones are here
      case 2:
        wait_copies<1>();
        break;
      case 3:
        wait_copies<2>();
        break;
      case 4:
        wait_copies<3>();
        break;
      case 5:
        wait_copies<4>();
        break;
      case 6:
        wait_copies<5>();
        break;
      case 7:
        wait_copies<6>();
        break;
      default:
        wait_copies<7>();
        break;
    }
    __syncwarp();
#endif
  }
  __device__ __forceinline__ uint32_t key() const {
    return storage_ + drain_stage_ * shape_.stage_bytes();
  }
  __device__ __forceinline__ uint32_t value() const {
    return key() + shape_.pages_per_stage * shape_.page_bytes;
  }
  __device__ __forceinline__ uint32_t mask() const { return masks_ >> (2 * drain_stage_) & 3u; }

  // The oldest stage has been read by all lanes and may be filled again.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (++drain_stage_ == shape_.stages) {
      drain_stage_ = 0;
      parity_ ^= 1;
    }
  }
  // Before sm_90 the count of groups must stay in step when there is nothing left to fill.
  __device__ __forceinline__ void fill_nothing() {
#if !defined(VLLM_KERNELS_HAS_SM90)
    commit_copies();
#endif
  }

 private:
  RingShape shape_;
  uint32_t storage_;
  int lane_;
  int fill_stage_ = 0;
  int drain_stage_ = 0;
  uint32_t parity_ = 0;
  uint32_t masks_ = 0;  // two bits a stage
#if defined(VLLM_KERNELS_HAS_SM90)
  uint32_t barriers_;
  uint64_t policy_;
#endif
};

}  // namespace vllm_kernels::cuda
