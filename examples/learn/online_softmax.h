// The online softmax of one query head, on a CPU: it sees each key and value once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention.h"

// Attends to tokens 0 to len. row_of(t) is the offset of token t in the keys and values.
template <typename RowOf>
void attend_online(const Attention<float>& a, int seq, int head, const RowOf& row_of) {
  const float* query = a.query + query_row(a, seq, head);
  float* out = a.out + query_row(a, seq, head);  // the sum of p * v so far, not divided
  float max = -INFINITY, sum = 0;
  std::fill_n(out, a.head_size, 0.0f);
  for (int t = 0; t < a.seq_lens[seq]; ++t) {
    const int64_t row = row_of(t);
    float score = 0;
    for (int d = 0; d < a.head_size; ++d) score += query[d] * a.key[row + d];
    score *= a.scale;
    const float new_max = std::max(max, score);
    const float factor = std::exp(max - new_max);  // 1 where the maximum stays; first: exp(-inf)
    const float p = std::exp(score - new_max);
    sum = sum * factor + p;
    for (int d = 0; d < a.head_size; ++d) out[d] = out[d] * factor + p * a.value[row + d];
    max = new_max;
  }
  for (int d = 0; d < a.head_size; ++d) out[d] = sum > 0 ? out[d] / sum : 0;
}
