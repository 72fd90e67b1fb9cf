// Binding of page_bounds_update: bounds [num_blocks, num_kv_heads, 2, head_size] of the pages that
// slot_mapping names. ops/pages/page_bounds_update.h has the rules.
#include "ops/pages/page_bounds_update.h"

#include "torch_ops/base/allocate.h"
#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/cache/paged_kv.h"
#include "torch_ops/pages/bounds.h"

namespace vllm_kernels {
namespace {

#if defined(VLLM_KERNELS_DEVICE_CUDA)

void launch_update(const PageBoundsUpdateParams& params, const Tensor& on) {
  launch(params, on);
}

#else

void launch_update(PageBoundsUpdateParams params, const Tensor& on) {
  if (on.is_meta()) return;
  const Tensor names = empty({&params.kv.num_blocks, 1}, aoti_torch_dtype_int32(), on);
  params.last_names = static_cast<int32_t*>(names.data());
  launch(PageNamesParams{params}, on);
  launch(params, on);
}

#endif

void page_bounds_update(const Tensor& bounds, const Tensor& key_cache, const Tensor& slot_mapping,
                        const std::optional<Tensor>& k_scale, const Text& layout) {
  Expect expect("page_bounds_update");
  CacheSizes sizes;
  Argument b = read_bounds(expect, bounds, sizes);
  b.floating().written();
  const KvLayout kv_layout = cache_layout(expect, layout);
  Argument kc = expect.tensor("key_cache", key_cache).cache_of(b);
  PagedKv kv = key_pages(kc, kc.dtype(), kv_layout, sizes, "bounds");
  const Argument slots =
      expect.tensor("slot_mapping", slot_mapping).int64().rank(1, 1).inner_contiguous();
  Arguments read(kc, slots);
  set_scales(expect, kv, k_scale, std::nullopt, read);
  const int64_t num_slots = count_slots(kc, kv.num_blocks, kv.block_size);
  const int32_t count = int32_size(slots, "slots", slots.numel());
  expect.apart({b}, read);
  if (count == 0 || b.numel() == 0) return;
  check_index(expect, slots, {.noun = "a slot", .high = num_slots, .skip = true});
  launch_update({.bounds = b.mutable_data(),
                 .block_stride = b.stride(0),
                 .kv = kv,
                 .slot_mapping = slots.as<const int64_t>(),
                 .num_slots = count,
                 .dtype = b.dtype()},
                bounds);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("page_bounds_update", TORCH_BOX(&vllm_kernels::page_bounds_update));
}
