// The per-stream workspace: allocation, zeroing, and how its memory is divided. No kernel is here.
#include "cuda/attention/common/workspace.h"

#include <map>
#include <mutex>
#include <utility>

#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {
namespace {

// Lets this thread allocate while one of its streams is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void* zeroed(int64_t bytes) {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "paged_attention: workspace");
  // Uses its own stream: the caller's may be under capture and must not be synchronized.
  cudaStream_t side = nullptr;
  check(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "paged_attention: workspace");
  check(cudaMemsetAsync(memory, 0, bytes, side), "paged_attention: workspace");
  check(cudaStreamSynchronize(side), "paged_attention: workspace");
  check(cudaStreamDestroy(side), "paged_attention: workspace");
  return memory;
}

}  // namespace

void* stream_workspace(void* stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, void*>, void*> owned;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  void*& memory = owned[{device, stream}];
  if (memory == nullptr) memory = zeroed(kPagedAttentionWorkspaceBytes);
  return memory;
}

DecodeWorkspace decode_workspace(void* memory, void* stream) {
  char* bytes = static_cast<char*>(memory == nullptr ? stream_workspace(stream) : memory);
  uint32_t* counters = reinterpret_cast<uint32_t*>(bytes);
  const auto take = [&](int64_t size) { return std::exchange(bytes, bytes + size); };
  take(kDecodeCounterBytes);
  const auto results = [&](int64_t stats_bytes, int64_t out_bytes) -> SplitPartials {
    float2* stats = reinterpret_cast<float2*>(take(stats_bytes));
    return {.stats = stats, .out = reinterpret_cast<float*>(take(out_bytes))};
  };
  const SplitPartials by_semaphore = results(kDecodeStatsBytes, kDecodeOutBytes);
  return {.next = counters,
          .semaphores = counters + 1,
          .by_semaphore = by_semaphore,
          .flagged = results(kFlaggedStatsBytes, kFlaggedOutBytes)};
}

}  // namespace vllm_kernels::cuda
