// Step 2 on a CPU: one pass with the online softmax, without S and P. The twin of step2_online.cu.
#include "online_softmax.h"

extern "C" int step2_online(const Attention<float>* attention, void*) {
  const Attention<float>& a = *attention;
  for (int seq = 0; seq < a.num_seqs; ++seq) {
    for (int head = 0; head < a.num_heads; ++head) {
      const int kv_head = head / (a.num_heads / a.num_kv_heads);
      attend_online(a, seq, head, [&](int t) { return contiguous_row(a, seq, kv_head, t); });
    }
  }
  return 0;
}
