// What mma.sync reaches on a GPU beside what attention does around it: products alone, operands
// from shared memory by ldmatrix, and multiplications of floats between the products.
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -Icsrc \
//     -gencode=arch=compute_90a,code=sm_90a benchmarks/probes/mma_sync.cu
#include <algorithm>
#include <cstdio>

#include "cuda/ptx.cuh"

using namespace vllm_kernels::cuda;

constexpr int kSums = 16;       // independent accumulators of a warp
constexpr int kTurn = 32;       // products of a turn
constexpr int kShared = 65536;  // bytes of a block

// kLoads: of 4 matrices, for kTurn products. kFloats: multiplications a product.
template <int kLoads, int kFloats>
__global__ void __launch_bounds__(128, 2) probe(float* out, long long* cycles, int turns) {
  extern __shared__ __align__(128) char memory[];
  const auto number = [](uint32_t i) { return 0x3f803f80u ^ (i * 2654435761u & 0x80ff80ffu); };
  for (int i = threadIdx.x; i < kShared / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(memory)[i] = number(i);
  }
  __syncthreads();
  float sums[kSums][4] = {}, floats[8];
  uint32_t a[2][4], b[4];
  for (int i = 0; i < 8; ++i) {
    a[i / 4][i % 4] = number(threadIdx.x * 8 + i);
    floats[i] = static_cast<float>(threadIdx.x + i);
  }
  for (int i = 0; i < 4; ++i) b[i] = number(threadIdx.x + 4096 * i);
  const uint32_t rows = shared_address(memory) + threadIdx.x % 32 * 16;
  const long long start = clock64();
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      if (kLoads > 0 && i % (kTurn / std::max(1, kLoads)) == 0) {
        load_matrices(b, rows + i * 512 + turn % 4 * 16384);
      }
      mma_m16n8k16<__nv_bfloat16>(sums[i % kSums], a[i / 2 % 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
#pragma unroll
      for (int j = 0; j < kFloats; ++j) {
        float& x = floats[(i * kFloats + j) % 8];
        x = fmaf(x, 1.0001f, 0.5f);
      }
    }
  }
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
  float sum = 0.0f;
  for (auto& x : sums) sum += x[0] + x[3];
  for (float x : floats) sum += x;
  if (sum == 1.2345f) *out = sum;
}

template <int kLoads, int kFloats>
void run(int warps, float* out, long long* cycles) {
  constexpr int kTurns = 20000;
  const auto kernel = probe<kLoads, kFloats>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float best = 1e9f, took = 0.0f;
  for (int i = 0; i < 4; ++i) {
    cudaEventRecord(begin);
    kernel<<<multiprocessors * warps, 128, kShared>>>(out, cycles, kTurns);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&took, begin, end);
    best = std::min(best, took);
  }
  long long first = 0;
  cudaMemcpy(&first, cycles, sizeof(first), cudaMemcpyDeviceToHost);
  const double products = double{kTurns} * kTurn * warps;  // of a scheduler
  printf(
      "%d warps a scheduler, %.2f ldmatrix.x4 and %d FFMA a product: %.1f TFLOP/s, %.2f cycles\n",
      warps, double{kLoads} / kTurn, kFloats, products * 4 * multiprocessors * 4096 / best / 1e9,
      first / products);
}

int main() {
  float* out;
  long long* cycles;
  cudaMalloc(&out, sizeof(*out));
  cudaMalloc(&cycles, 1024 * sizeof(*cycles));
  run<0, 0>(2, out, cycles);
  run<0, 0>(1, out, cycles);
  run<8, 0>(2, out, cycles);
  run<8, 0>(1, out, cycles);
  run<16, 0>(2, out, cycles);
  run<8, 1>(2, out, cycles);
  run<8, 2>(2, out, cycles);
  run<8, 4>(2, out, cycles);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
