// Paged attention v1 and v2: the choice of kernel, and v2's merge of the partitions.
#include "ops/paged_attention.h"

#include "cuda/attention/mma/kernels.h"
#include "cuda/attention/simt/simt_kernel.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kReduceThreads = 128;

// One block a (sequence, head). out = sum of partitions weighted by their share of the softmax.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    paged_attention_reduce_kernel(PagedAttentionParams p) {
  extern __shared__ float reduce_shared[];  // [partitions] shares, then [threads][8] sums
  launch_dependents();
  wait_for_primary_kernel();
  const int seq = blockIdx.x / p.num_heads;
  const int64_t row = blockIdx.x;  // seq * num_heads + head
  const int partitions = (usable_seq_len(p, seq) + p.partition_size - 1) / p.partition_size;
  const float* row_maxima = p.max_logits + row * p.max_partitions;
  const float* sums = p.exp_sums + row * p.max_partitions;
  const T* partial = static_cast<const T*>(p.tmp_out) + row * p.max_partitions * p.kv.head_size;
  float* shares = reduce_shared;
  float* partial_sums = reduce_shared + p.max_partitions;

  float row_max = kRowMaxInit;
  for (int i = threadIdx.x; i < partitions; i += kReduceThreads)
    row_max = fmaxf(row_max, row_maxima[i]);
  row_max = block_max(row_max);
  float total = 0.0f;
  for (int i = threadIdx.x; i < partitions; i += kReduceThreads) {
    const float share = sums[i] * exp2_approx((row_maxima[i] - row_max) * kLog2E);
    shares[i] = share;
    total += share;
  }
  total = block_sum(total);  // its barrier also publishes shares
  const float scale = total == 0.0f ? 0.0f : 1.0f / total;

  // A group of threads covers the head in steps of 8 elements; the groups take turns on partitions.
  const int width = p.kv.head_size / 8;
  const int groups = kReduceThreads / width;
  const int group = threadIdx.x / width, d = threadIdx.x % width * 8;
  float sum[8] = {};
  if (group < groups) {
    for (int i = group; i < partitions; i += groups) {
      const float share = shares[i] * scale;
      if (share == 0.0f) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum[j] += share * to_float(partial[static_cast<int64_t>(i) * p.kv.head_size + d + j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) partial_sums[threadIdx.x * 8 + j] = sum[j];
  __syncthreads();
  if (group == 0) {
    for (int other = 1; other < groups; ++other) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += partial_sums[(other * width + threadIdx.x) * 8 + j];
    }
    T* out = static_cast<T*>(p.out) + row * p.kv.head_size + d;
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = from_float<T>(sum[j]);
  }
}

// Whether the tensor-core kernel can address this cache: whole pages of one head, 16-byte aligned.
bool fits_decode(const PagedAttentionParams& p) {
  const int element = size_of(p.kv.dtype);
  const auto aligned = [&](int64_t stride) { return stride * element % 16 == 0; };
  return p.dtype != DType::kFloat32 && !(element == 1 && p.kv.block_size < 16) &&
         aligned16(p.kv.key) && aligned16(p.kv.value) && aligned(p.kv.key_block_stride) &&
         aligned(p.kv.key_head_stride) && aligned(p.kv.value_block_stride) &&
         aligned(p.kv.value_head_stride) && reinterpret_cast<uintptr_t>(p.query) % 4 == 0 &&
         p.query_stride % 2 == 0;
}

}  // namespace

void paged_attention_mma(const PagedAttentionParams& p, Stream stream) {
  const bool half = p.dtype == DType::kFloat16;
  switch (p.kv.dtype) {
    case DType::kFp8E4M3:
      return half ? paged_attention_mma_f16_e4m3(p, stream)
                  : paged_attention_mma_bf16_e4m3(p, stream);
    case DType::kFp8E5M2:
      return half ? paged_attention_mma_f16_e5m2(p, stream)
                  : paged_attention_mma_bf16_e5m2(p, stream);
    default:
      return half ? paged_attention_mma_f16(p, stream) : paged_attention_mma_bf16(p, stream);
  }
}

void launch(const PagedAttentionParams& p, Stream stream) {
  if (fits_decode(p)) {
    paged_attention_mma(p, stream);
  } else {
    launch_paged_attention_simt<false>(p, stream);
  }
  if (p.partition_size == 0 || p.max_partitions == 1) return;
  const size_t shared = (size_t{1} * p.max_partitions + kReduceThreads * 8) * sizeof(float);
  const dim3 grid(grid_size("paged_attention_v2", int64_t{p.num_seqs} * p.num_heads));
  dispatch_float(p.dtype, [&](auto tag) {
    constexpr auto kKernel = paged_attention_reduce_kernel<decltype(tag)>;
    const int most = dynamic_shared_memory<kKernel>("paged_attention_v2");
    if (shared > static_cast<size_t>(most)) {
      throw std::runtime_error("paged_attention_v2: max_num_partitions = " +
                               std::to_string(p.max_partitions) + " is too large for the merge");
    }
    launch_kernel("paged_attention_v2", kKernel, grid, dim3(kReduceThreads), shared, stream, p);
  });
}

}  // namespace vllm_kernels::cuda
