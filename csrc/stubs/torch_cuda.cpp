// Stands in for libtorch_cuda.so at link time, so that the CUDA library builds against a CPU build
// of torch. It is never installed: the loader finds torch's own library under the same SONAME.
#include <cstdint>

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t, void**) {
  return 1;
}
