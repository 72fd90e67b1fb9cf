// Token ids as the manager keeps them: int32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "export.h"

namespace vllm_kernels::kv_cache {

// Writes int64 ids as int32 [values.size()]. Returns false if an id does not fit.
VLLM_KERNELS_EXPORT bool to_int32(std::span<const int64_t> values, int32_t* tokens) noexcept;

}  // namespace vllm_kernels::kv_cache
