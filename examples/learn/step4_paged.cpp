// Step 4 on a CPU: step 2, but a block table says where a token lies. The twin of step4_paged.cu.
#include "online_softmax.h"

extern "C" int step4_paged(const Attention<float>* attention, void*) {
  const Attention<float>& a = *attention;
  for (int seq = 0; seq < a.num_seqs; ++seq) {
    for (int head = 0; head < a.num_heads; ++head) {
      const int kv_head = head / (a.num_heads / a.num_kv_heads);
      attend_online(a, seq, head,
                    [&](int t) { return paged_row(a, seq, kv_head, t, a.page_size); });
    }
  }
  return 0;
}
