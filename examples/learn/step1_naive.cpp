// Step 1 on a CPU: S, P and O one after the other, all in memory. The twin of step1_naive.cu.
#include <algorithm>
#include <cmath>

#include "attention.h"

namespace {

float dot(const float* x, const float* y, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// S[t] = scale * q . k_t
void scores(const Attention<float>& a, int seq, int head, float* s) {
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  for (int t = 0; t < a.seq_lens[seq]; ++t) {
    s[t] = a.scale * dot(a.query + query_row(a, seq, head),
                         a.key + contiguous_row(a, seq, kv_head, t), a.head_size);
  }
}

// P[t] = exp(S[t] - max) / sum
void softmax(const float* s, float* p, int len) {
  float max = -INFINITY, sum = 0;
  for (int t = 0; t < len; ++t) max = std::max(max, s[t]);
  for (int t = 0; t < len; ++t) sum += std::exp(s[t] - max);
  for (int t = 0; t < len; ++t) p[t] = std::exp(s[t] - max) / sum;
}

// O = sum of P[t] * v_t
void output(const Attention<float>& a, int seq, int head, const float* p) {
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  float* out = a.out + query_row(a, seq, head);
  std::fill_n(out, a.head_size, 0.0f);
  for (int t = 0; t < a.seq_lens[seq]; ++t) {
    const float* value = a.value + contiguous_row(a, seq, kv_head, t);
    for (int d = 0; d < a.head_size; ++d) out[d] += p[t] * value[d];
  }
}

}  // namespace

extern "C" int step1_naive(const Attention<float>* attention, void*) {
  const Attention<float>& a = *attention;
  const int64_t rows = int64_t{a.num_seqs} * a.num_heads;
  float* s = a.scratch;                     // [num_seqs][num_heads][max_len]
  float* p = a.scratch + rows * a.max_len;  // the same shape
  for (int64_t row = 0; row < rows; ++row) {
    const int seq = static_cast<int>(row / a.num_heads), head = static_cast<int>(row % a.num_heads);
    scores(a, seq, head, s + row * a.max_len);
    softmax(s + row * a.max_len, p + row * a.max_len, a.seq_lens[seq]);
    output(a, seq, head, p + row * a.max_len);
  }
  return 0;
}
