// swap_blocks: copies pages between two tensors, each on the GPU or on the host, with
// cudaMemcpyAsync or one cudaMemcpyBatchAsync. There is no kernel. copy_blocks.cu copies within a
// cache.
#include <vector>

#include "cuda/base/launch.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

// All copies of one swap: copy i moves bytes[i] from from[i] to to[i].
struct Copies {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;
};

// Merges pairs into one copy where source and destination pages both are consecutive.
Copies join(const SwapBlocksParams& p) {
  const BlockCopy& copy = p.copy;
  const bool joinable =
      !p.one_tensor && copy.from_stride == p.block_bytes && copy.to_stride == p.block_bytes;
  Copies copies;
  for (int64_t i = 0; i < p.num_pairs;) {
    const int64_t from = p.pairs[2 * i], to = p.pairs[2 * i + 1];
    int64_t count = 1;
    while (joinable && i + count < p.num_pairs && p.pairs[2 * (i + count)] == from + count &&
           p.pairs[2 * (i + count) + 1] == to + count) {
      ++count;
    }
    copies.to.push_back(copy.to + to * copy.to_stride);
    copies.from.push_back(copy.from + from * copy.from_stride);
    copies.bytes.push_back(static_cast<size_t>(count * p.block_bytes));
    i += count;
  }
  return copies;
}

cudaMemoryType memory_of(const void* pointer) {
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, pointer), "swap_blocks");
  return attributes.type;
}

// Whether a batch may copy from or to this memory: device memory or pinned host memory. A batch
// reads pageable memory when the stream reaches it, after the call has returned. A single
// cudaMemcpyAsync reads it before it returns.
bool can_wait(cudaMemoryType type) {
  return type == cudaMemoryTypeDevice || type == cudaMemoryTypeHost;
}

// Whether a batch is allowed. Its copies have no order among themselves, which overlapping tensors
// need. It cannot be captured into a graph. The legacy default stream accepts none.
bool takes_batch(const SwapBlocksParams& p, cudaStream_t stream) {
  if (p.one_tensor || stream == nullptr || stream == cudaStreamLegacy) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "swap_blocks");
  return status == cudaStreamCaptureStatusNone;
}

// Issues all copies in one call. Returns false where the runtime or the driver lacks that call.
bool copy_batch(const SwapBlocksParams& p, Copies& copies, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  if (copies.to.size() < 2 || !takes_batch(p, stream)) return false;
  const cudaMemoryType from = memory_of(p.copy.from), to = memory_of(p.copy.to);
  if (!can_wait(from) || !can_wait(to)) return false;
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  if (from != to) attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  // The attributes apply from this copy on.
  size_t first = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaMemcpyBatchAsync(copies.to.data(), copies.from.data(), copies.bytes.data(),
                           copies.to.size(), &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  const cudaError_t error = cudaMemcpyBatchAsync(
      copies.to.data(), const_cast<void**>(copies.from.data()), copies.bytes.data(),
      copies.to.size(), &attributes, &first, 1, &failed, stream);
#endif
  if (error == cudaSuccess) return true;
  // Clears the error. The single copies that follow report what is wrong, if anything is.
  cudaGetLastError();
#endif
  return false;
}

}  // namespace

void launch(const SwapBlocksParams& p, Stream stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  Copies copies = join(p);
  if (copy_batch(p, copies, stream)) return;
  for (size_t i = 0; i < copies.to.size(); ++i) {
    check(cudaMemcpyAsync(copies.to[i], copies.from[i], copies.bytes[i], cudaMemcpyDefault, stream),
          "swap_blocks");
  }
}

}  // namespace vllm_kernels::cuda
