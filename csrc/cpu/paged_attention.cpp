#include "ops/paged_attention.h"

#include <cmath>

#include "cpu/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

float value_of(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::kFloat16:
      return load_partial(static_cast<const Half*>(data) + i, 1)[0];
    case DType::kBFloat16:
      return load_partial(static_cast<const BFloat16*>(data) + i, 1)[0];
    case DType::kFp8E4M3: {
      const int bits = static_cast<const uint8_t*>(data)[i], e = bits >> 3 & 15, m = bits & 7;
      const float v = (bits & 127) == 127 ? NAN
                      : e == 0            ? std::ldexp(static_cast<float>(m), -9)
                                          : std::ldexp(8.0f + m, e - 10);
      return bits & 128 ? -v : v;
    }
    case DType::kFp8E5M2: {
      const Half half{static_cast<uint16_t>(static_cast<const uint8_t*>(data)[i] << 8)};
      return load_partial(&half, 1)[0];
    }
    default:
      return static_cast<const float*>(data)[i];
  }
}

void set_value(DType dtype, void* data, int64_t i, float value) {
  dispatch_float(dtype, [&](auto tag) {
    store_partial(static_cast<decltype(tag)*>(data) + i, splat(value), 1);
  });
}

int64_t num_tasks(const PagedAttentionParams& p) {
  return static_cast<int64_t>(p.num_seqs) * p.num_heads;
}

void run(const PagedAttentionParams& p, int64_t begin, int64_t end) {
  const int head_size = p.kv.head_size;
  const bool scaled = size_of(p.kv.dtype) == 1;
  const float k_scale = scaled && p.kv.k_scale ? *p.kv.k_scale : 1.0f;
  const float v_scale = scaled && p.kv.v_scale ? *p.kv.v_scale : 1.0f;
  for (int64_t row = begin; row < end; ++row) {
    const int seq = static_cast<int>(row / p.num_heads), head = static_cast<int>(row % p.num_heads);
    const int kv_head = head / (p.num_heads / p.kv.num_kv_heads);
    const int length = usable_seq_len(p, seq);
    const int offset = p.sparse.head_offset(head, kv_head, p.num_heads, p.kv.num_kv_heads);
    const int span = p.partition_size ? p.partition_size : (length > 0 ? length : 1);
    float out[256] = {}, all_max = -1e30f, all_sum = 0.0f;
    for (int first = 0, part = 0; first < length; first += span, ++part) {
      float acc[256] = {}, maximum = -1e30f, sum = 0.0f;
      for (int t = first; t < length && t < first + span; ++t) {
        const int64_t block = p.block_tables[seq * p.block_table_stride + t / p.kv.block_size];
        if (block < 0 || block >= p.kv.num_blocks) continue;
        if (p.sparse.on() && !p.sparse.sees(t, length, offset)) continue;
        const int slot = t % p.kv.block_size;
        float logit = 0.0f;
        for (int d = 0; d < head_size; ++d) {
          logit += value_of(p.dtype, p.query, seq * p.query_stride + head * head_size + d) *
                   value_of(p.kv.dtype, p.kv.key, p.kv.key_offset(block, kv_head, slot, d));
        }
        logit *= p.scale * k_scale;
        if (p.alibi_slopes) logit += p.alibi_slopes[head] * static_cast<float>(t - length + 1);
        const float updated = logit > maximum ? logit : maximum;
        const float factor = std::exp(maximum - updated), weight = std::exp(logit - updated);
        maximum = updated;
        sum = sum * factor + weight;
        for (int d = 0; d < head_size; ++d) {
          acc[d] = acc[d] * factor +
                   weight * v_scale *
                       value_of(p.kv.dtype, p.kv.value, p.kv.value_offset(block, kv_head, slot, d));
        }
      }
      if (p.partition_size) {
        const int64_t at = row * p.max_partitions + part;
        p.exp_sums[at] = sum;
        p.max_logits[at] = maximum;
        for (int d = 0; d < head_size; ++d) {
          set_value(p.dtype, p.tmp_out, at * head_size + d, sum > 0 ? acc[d] / sum : 0.0f);
        }
      }
      const float updated = maximum > all_max ? maximum : all_max;
      const float old_factor = std::exp(all_max - updated), new_factor = std::exp(maximum - updated);
      all_max = updated;
      all_sum = all_sum * old_factor + sum * new_factor;
      for (int d = 0; d < head_size; ++d) out[d] = out[d] * old_factor + acc[d] * new_factor;
    }
    for (int d = 0; d < head_size; ++d) {
      set_value(p.dtype, p.out, row * head_size + d, all_sum == 0.0f ? 0.0f : out[d] / all_sum);
    }
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::PagedAttentionParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
