// Copies the pages of a decode batch to shared memory and computes nothing: what is left of
// paged_attention when only memory, and the chain of waits that no kernel of one launch can do
// without, take time. Compiled and called by benchmarks/decode_floor.py.
#include <cuda_runtime.h>

#include <cstdint>

constexpr int kWarps = 8, kMaxStages = 8;
constexpr int kLookUp = 1;   // page indices are read before the predecessor has ended
constexpr int kMerge = 2;    // pieces of a segment write partial results; the last one sums them
constexpr int kDynamic = 4;  // warps take 32 pages at a time, in order, as they get ready

struct Floor {
  const char *key, *value;
  const int32_t* pages;  // [count] block * KV heads + head, segment by segment
  int32_t count;
  int32_t page_bytes;  // of K, and of V
  int32_t stages;      // of a warp's ring
  int32_t items;       // of equal length; a segment has `pieces` of them
  int32_t pieces;
  int32_t rows;  // of 128 floats that a piece writes
  int32_t flags;
  float4* partial;     // [items][rows][32]
  uint32_t* counters;  // [1 + segments], zero
  float4* out;         // [segments][rows][32]
};

namespace {

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ void copy(uint32_t to, const char* from, int bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__global__ void __launch_bounds__(kWarps * 32, 1) floor_kernel(const __grid_constant__ Floor f) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barriers[kWarps * kMaxStages];
  __shared__ bool is_last;
  asm volatile("griddepcontrol.launch_dependents;");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = shared_address(shared) + warp * f.stages * 2 * f.page_bytes;
  const uint32_t barrier = shared_address(&barriers[warp * kMaxStages]);
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  if (lane == 0) {
    for (int stage = 0; stage < f.stages; ++stage) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier + stage * 8) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  const bool dynamic = f.flags & kDynamic;
  const int item = blockIdx.x;
  const int64_t count = f.count;
  const int first = dynamic ? 0 : item < f.items ? count * item / f.items + warp : f.count;
  const int end = dynamic ? f.count : item < f.items ? count * (item + 1) / f.items : f.count;
  const int step = dynamic ? 1 : kWarps;
  int chunk = dynamic ? blockIdx.x * kWarps + warp : 0, next_chunk = 0, in_chunk = 0;
  int32_t page = -1;  // lane's, of the chunk of 32
  const auto look_up = [&] {
    const int at = first + (chunk * 32 + lane) * step;
    page = at < end ? __ldcg(&f.pages[at]) : -1;
    in_chunk = 0;
  };
  const auto ask = [&] {
    if (!dynamic) {
      next_chunk = chunk + 1;
    } else if (lane == 0) {
      const uint32_t chunks = (f.count + 31) / 32, warps = gridDim.x * kWarps;
      next_chunk = chunks > warps ? warps + atomicInc(f.counters, chunks - 1) : chunks;
    }
  };
  int fill_stage = 0;
  const auto fill = [&] {
    if (in_chunk == 32) {
      chunk = __shfl_sync(0xffffffffu, next_chunk, 0);
      look_up();
      if (__shfl_sync(0xffffffffu, page, 0) >= 0) ask();
    }
    const int64_t index = __shfl_sync(0xffffffffu, page, in_chunk);
    if (index < 0) return false;
    ++in_chunk;
    if (lane == 0) {
      const uint32_t to = ring + fill_stage * 2 * f.page_bytes, full = barrier + fill_stage * 8;
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full),
                   "r"(2 * f.page_bytes)
                   : "memory");
      copy(to, f.key + index * f.page_bytes, f.page_bytes, full, policy);
      copy(to + f.page_bytes, f.value + index * f.page_bytes, f.page_bytes, full, policy);
    }
    if (++fill_stage == f.stages) fill_stage = 0;
    return true;
  };

  if (!(f.flags & kLookUp)) wait_for_predecessor();
  look_up();
  if (f.flags & kLookUp) wait_for_predecessor();
  if (__shfl_sync(0xffffffffu, page, 0) >= 0) ask();
  int filled = 0;
  while (filled < f.stages && fill()) ++filled;
  for (int i = 0, stage = 0, parity = 0; i < filled; ++i) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT%=:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra WAIT%=;\n}" ::"r"(
            barrier + stage * 8),
        "r"(parity)
        : "memory");
    if (fill()) ++filled;
    if (++stage == f.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __syncthreads();
  if (dynamic || item >= f.items) return;
  const int vectors = f.rows * 32, segment = item / f.pieces;
  const bool merges = f.flags & kMerge && f.pieces > 1;
  float4* to = merges ? f.partial + int64_t{item} * vectors : f.out + int64_t{segment} * vectors;
  for (int i = threadIdx.x; i < vectors; i += kWarps * 32) {
    to[i] = reinterpret_cast<const float4*>(shared)[i % 512];
  }
  if (!merges) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(&f.counters[1 + segment]), "r"(f.pieces - 1)
                 : "memory");
    is_last = before == f.pieces - 1;
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = threadIdx.x; i < vectors; i += kWarps * 32) {
    float4 sum = {};
    for (int first_piece = 0; first_piece < f.pieces; first_piece += 16) {
      float4 piece[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int64_t of = segment * f.pieces + min(first_piece + j, f.pieces - 1);
        piece[j] = __ldcg(&f.partial[of * vectors + i]);
      }
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float weight = first_piece + j < f.pieces ? 1.0f : 0.0f;
        sum.x += weight * piece[j].x;
        sum.y += weight * piece[j].y;
        sum.z += weight * piece[j].z;
        sum.w += weight * piece[j].w;
      }
    }
    f.out[int64_t{segment} * vectors + i] = sum;
  }
}

}  // namespace

extern "C" int decode_floor(const Floor* f, int blocks, void* stream) {
  const int bytes = kWarps * f->stages * 2 * f->page_bytes;
  static int allowed = 0;
  if (bytes > allowed) {
    cudaFuncSetAttribute(floor_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    allowed = bytes;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kWarps * 32);
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute dependent[1];
  dependent[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = dependent;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, floor_kernel, *f);
}
