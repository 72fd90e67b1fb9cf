// Converts token ids. The loop has no branch, so that the compiler vectorizes it.
#include "kv_cache/tokens.h"

namespace vllm_kernels::kv_cache {

bool to_int32(std::span<const int64_t> values, int32_t* tokens) noexcept {
  int64_t lost = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    tokens[i] = static_cast<int32_t>(values[i]);
    lost |= values[i] ^ tokens[i];
  }
  return lost == 0;
}

}  // namespace vllm_kernels::kv_cache
