// Encodes TMA tensor maps with the driver, and remembers them. No kernel is here.
#include "cuda/attention/common/tensor_maps.h"

#include <stdexcept>
#include <string>

#include "cuda/base/launch.cuh"
#include "cuda/base/remembered.h"

namespace vllm_kernels::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
  return reinterpret_cast<Encode>(function);
}

CUtensorMap encode(const TensorMapKey& key) {
  static const Encode encode = find_encode();
  constexpr cuuint32_t kSteps[] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, key.rank, const_cast<void*>(key.base), key.sizes,
             key.strides, key.box, kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             static_cast<CUtensorMapSwizzle>(key.swizzle),
             static_cast<CUtensorMapL2promotion>(key.promotion), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("paged_attention: no tensor map for the cache, CUDA error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace

// 512 maps, 128 KiB a thread: K and V of 80 layers, each decoded and prefilled.
CUtensorMap tensor_map(const TensorMapKey& key) {
  static thread_local Remembered<TensorMapKey, CUtensorMap, 128, 4> maps;
  return maps.of(key, encode);
}

}  // namespace vllm_kernels::cuda
