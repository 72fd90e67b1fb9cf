// swap_blocks: copies pages between two tensors, each on the GPU or on the host, with
// cudaMemcpyAsync or one cudaMemcpyBatchAsync. swap_blocks_batch: the same between addresses. There
// is no kernel, and so no early read. copy_blocks.cu copies within a cache.
#include <vector>

#include "cuda/base/launch.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

// All copies of one call: copy i moves bytes[i] from from[i] to to[i].
struct Copies {
  const char* op;
  std::vector<void*> to = {};
  std::vector<const void*> from = {};
  std::vector<size_t> bytes = {};
  bool in_order = false;          // a copy may read what an earlier one writes
  bool any_source_order = false;  // sources may be read before earlier work of the stream
};

// Merges pairs into one copy where source and destination pages both are consecutive.
Copies join(const SwapBlocksParams& p) {
  const BlockCopy& copy = p.copy;
  const bool joinable =
      !p.one_tensor && copy.from_stride == p.block_bytes && copy.to_stride == p.block_bytes;
  Copies copies{.op = "swap_blocks", .in_order = p.one_tensor};
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

cudaMemoryType memory_of(const char* op, const void* pointer) {
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, pointer), op);
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
bool takes_batch(const Copies& copies, cudaStream_t stream) {
  if (copies.in_order || stream == nullptr || stream == cudaStreamLegacy) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), copies.op);
  return status == cudaStreamCaptureStatusNone;
}

// Issues all copies in one call. Returns false where the runtime or the driver lacks that call. The
// first copy stands for all: one call's sources are alike, and so are its destinations.
bool copy_batch(Copies& copies, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  if (copies.to.size() < 2 || !takes_batch(copies, stream)) return false;
  const cudaMemoryType from = memory_of(copies.op, copies.from[0]),
                       to = memory_of(copies.op, copies.to[0]);
  if (!can_wait(from) || !can_wait(to)) return false;
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder =
      copies.any_source_order ? cudaMemcpySrcAccessOrderAny : cudaMemcpySrcAccessOrderStream;
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

void copy_all(Copies& copies, Stream stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (copy_batch(copies, stream)) return;
  for (size_t i = 0; i < copies.to.size(); ++i) {
    check(cudaMemcpyAsync(copies.to[i], copies.from[i], copies.bytes[i], cudaMemcpyDefault, stream),
          copies.op);
  }
}

}  // namespace

void launch(const SwapBlocksParams& p, Stream stream) {
  Copies copies = join(p);
  copy_all(copies, stream);
}

void launch(const SwapBlocksBatchParams& p, Stream stream) {
  Copies copies{.op = "swap_blocks_batch", .any_source_order = p.any_source_order};
  for (int64_t i = 0; i < p.num_copies; ++i) {
    if (p.bytes[i] == 0) continue;
    copies.to.push_back(reinterpret_cast<void*>(p.to[i]));
    copies.from.push_back(reinterpret_cast<const void*>(p.from[i]));
    copies.bytes.push_back(static_cast<size_t>(p.bytes[i]));
  }
  copy_all(copies, stream);
}

}  // namespace vllm_kernels::cuda
