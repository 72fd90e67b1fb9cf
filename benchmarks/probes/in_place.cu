// What moving the bytes of fused_add_rms_norm takes, and nothing else: two arrays of T rows of 4096
// bf16, read and written in place, by dependent launches of a graph over rotated buffers.
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a benchmarks/probes/in_place.cu
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

constexpr int kRowPacks = 4096 * 2 / 16;

// kPacks packs of 16 bytes of each array a thread, neighbouring threads on neighbouring packs.
template <int kThreads, int kPacks, bool kPrefetch>
__global__ void __launch_bounds__(kThreads) in_place(uint4* x, uint4* r, uint32_t packs) {
  asm volatile("griddepcontrol.launch_dependents;");
  const uint32_t first = blockIdx.x * (kThreads * kPacks) + threadIdx.x;
  if (kPrefetch && threadIdx.x % 2 == 0) {
    for (int i = 0; i < kPacks; ++i) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(x + first + i * kThreads));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(r + first + i * kThreads));
    }
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  uint4 a[kPacks], b[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const uint32_t at = first + i * kThreads;
    if (at < packs) a[i] = x[at], b[i] = r[at];
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const uint32_t at = first + i * kThreads;
    if (at >= packs) continue;
    b[i].x ^= a[i].x, a[i].y ^= b[i].y;
    r[at] = b[i];
    x[at] = a[i];
  }
}

template <int kThreads, int kPacks, bool kPrefetch>
void time(uint4* memory, int tokens, int sets) {
  const uint32_t packs = tokens * kRowPacks;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  cudaStreamCreate(&stream);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  for (int i = 0; i < sets; ++i) {
    cudaLaunchAttribute attribute{.id = cudaLaunchAttributeProgrammaticStreamSerialization};
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = (packs + kThreads * kPacks - 1) / (kThreads * kPacks);
    config.blockDim = kThreads;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    uint4* x = memory + size_t{2} * packs * i;
    cudaLaunchKernelEx(&config, in_place<kThreads, kPacks, kPrefetch>, x, x + packs, packs);
  }
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&ready, graph, 0);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 22; ++i) {
    cudaEventRecord(begin, stream);
    cudaGraphLaunch(ready, stream);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 1) times.push_back(ms * 1e3f / sets);
  }
  std::sort(times.begin(), times.end());
  const double bytes = 4.0 * 16 * packs;
  printf("T %4d  %4d threads  %d packs%s  %7.2f us  %5.0f GB/s  %s\n", tokens, kThreads, kPacks,
         kPrefetch ? "  prefetch" : "          ", times[times.size() / 2],
         bytes / times[times.size() / 2] / 1e3, cudaGetErrorString(cudaGetLastError()));
}

int main() {
  uint4* memory;
  cudaMalloc(&memory, size_t{1} << 30);
  cudaMemset(memory, 1, size_t{1} << 30);
  for (const int tokens : {16, 256, 4096}) {
    // As many sets of buffers as the kit's small.py takes.
    const int sets = std::clamp(int(256e6 / (4.0 * 16 * tokens * kRowPacks)), 2, 96);
    time<128, 1, false>(memory, tokens, sets);
    time<256, 1, false>(memory, tokens, sets);
    time<512, 1, false>(memory, tokens, sets);
    time<1024, 1, false>(memory, tokens, sets);
    time<128, 2, false>(memory, tokens, sets);
    time<256, 2, false>(memory, tokens, sets);
    time<512, 2, false>(memory, tokens, sets);
    time<128, 4, false>(memory, tokens, sets);
    time<256, 1, true>(memory, tokens, sets);
    time<512, 1, true>(memory, tokens, sets);
    time<256, 2, true>(memory, tokens, sets);
  }
}
