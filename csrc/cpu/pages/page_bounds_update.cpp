// page_bounds_update (ops/pages/page_bounds_update.h), two kernels:
//   names   one task: finds the slot of each page that says how far it is filled
//   update  a task is a range of slots; it computes the pages that its slots name so
#include "ops/pages/page_bounds_update.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

Loop names_loop(const PageNamesParams&) {
  return {.count = 1};
}

void run_names(const PageNamesParams& names, int64_t, int64_t) {
  const PageBoundsUpdateParams& p = names.update;
  const auto for_each_slot = [&](const auto& body) {
    for (int32_t i = 0; i < p.num_slots; ++i) {
      const int32_t slot = p.usable(p.slot_mapping[i]);
      if (slot >= 0) body(i, slot, p.last_names[slot / p.kv.block_size]);
    }
  };
  for_each_slot([&](int32_t, int32_t, int32_t& name) { name = -1; });
  for_each_slot([&](int32_t i, int32_t slot, int32_t& name) {
    if (name < 0 || slot >= p.slot_mapping[name]) name = i;
  });
}

// --- update

Loop update_loop(const PageBoundsUpdateParams& p) {
  const int64_t elements = int64_t{p.kv.num_kv_heads} * p.kv.head_size;
  return {.count = p.num_slots, .per_task = rows_per_task(2 * elements * size_of(p.kv.dtype))};
}

struct Bounds {
  Vec low = splat(__builtin_inff()), high = splat(-__builtin_inff());
  VecInt nans = {};

  void add(Vec value) {
    low = minimum(value, low);  // keep theirs for NaN
    high = maximum(value, high);
    nans |= (VecInt)(value != value);
  }
  // Joins lanes that are a multiple of `period` apart.
  void join_lanes(int64_t period) {
    for (int64_t distance = period; distance < kLanes; distance *= 2) {
      low = minimum(low, rotated(low, distance));
      high = maximum(high, rotated(high, distance));
      nans |= (VecInt)as_bits(rotated(as_float(nans), distance));
    }
  }

 private:
  static Vec rotated(Vec value, int64_t distance) {
    float twice[2 * kLanes];
    store_raw(twice, value);
    store_raw(twice + kLanes, value);
    return load(twice + distance);
  }
};

// Rounded to T, towards -inf for the minimum, else towards +inf. Moves a result of rounding to
// nearest that is on the wrong side to the next number.
template <typename T, typename Count>
inline void store_outwards(T* to, Vec value, bool is_low, Count count) {
  T nearest[kLanes];
  store(nearest, value);
  const Vec stored = load(nearest);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (is_low ? !(stored[lane] > value[lane]) : !(stored[lane] < value[lane])) continue;
    const bool negative = (nearest[lane].bits & 0x8000) != 0;
    nearest[lane].bits += negative == is_low ? 1 : -1;
  }
  if constexpr (std::is_same_v<Count, WholeVector>) {
    std::memcpy(to, nearest, sizeof(nearest));
  } else {
    std::memcpy(to, nearest, count * sizeof(T));
  }
}

// One head of a page: `low` and `high` get components of K in tokens [0, tokens).
template <typename T, typename C>
struct HeadBounds {
  const PagedKv& kv;
  const C* keys;
  int64_t tokens;
  float scale;
  T *low, *high;

  template <typename Count>
  void store_bounds(int64_t at, const Bounds& bounds, Count count) const {
    const Vec nan = splat(__builtin_nanf("")), factor = splat(scale);
    const auto put = [&](T* to, Vec value, bool is_low) {
      if constexpr (sizeof(C) == 1) value *= factor;
      value = select(bounds.nans, nan, value);
      if constexpr (sizeof(C) == 1 && sizeof(T) == 2) {
        store_outwards(to, value, is_low, count);
      } else {
        store(to, value, count);
      }
    };
    put(low + at, bounds.low, true);
    put(high + at, bounds.high, false);
  }

  // Runs of `run` components, tokens apart.
  void by_rows(int64_t run) const {
    for (int64_t start = 0; start < kv.head_size; start += run) {
      const C* from = keys + start / kv.x * kv.key_chunk_stride;
      for_each_vector(0, run, [&](int64_t i, auto count) {
        Bounds bounds;
        for (int64_t t = 0; t < tokens; ++t) {
          bounds.add(load(from + t * kv.key_token_stride + i, count));
        }
        store_bounds(start + i, bounds, count);
      });
    }
  }

  // Layout vllm, x < kLanes: a vector has several tokens, which lie side by side.
  void by_chunks() const {
    const int64_t x = kv.x, size = tokens * x;
    for (int64_t start = 0; start < kv.head_size; start += x) {
      const C* from = keys + start / x * kv.key_chunk_stride;
      Bounds bounds;
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) bounds.add(load(from + i));
      if (i < size) {  // fewer tokens: the last one fills the vector
        C some[kLanes];
        constexpr size_t kChunk = sizeof(some) < 16 ? sizeof(some) : 16;  // 16: x elements
        for (int64_t j = 0; j < kLanes; j += x) {
          std::memcpy(some + j, from + (i + j < size ? i + j : size - x), kChunk);
        }
        bounds.add(load(some));
      }
      bounds.join_lanes(x);
      store_bounds(start, bounds, x);
    }
  }
};

template <typename T, typename C>
void update_page(const PageBoundsUpdateParams& p, int64_t page, int64_t tokens) {
  const PagedKv& kv = p.kv;
  for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
    T* low = static_cast<T*>(p.bounds) + page * p.block_stride + 2 * head * kv.head_size;
    const C* keys = static_cast<const C*>(kv.key) + kv.key_offset(page, head, 0, 0);
    const HeadBounds<T, C> bounds{.kv = kv,
                                  .keys = keys,
                                  .tokens = tokens,
                                  .scale = scale_of(kv, true, head),
                                  .low = low,
                                  .high = low + kv.head_size};
    if (kv.layout != KvLayout::kVllm) {
      bounds.by_rows(kv.head_size);
    } else if (kv.x < kLanes) {
      bounds.by_chunks();
    } else {
      bounds.by_rows(kv.x);
    }
  }
}

void run_update(const PageBoundsUpdateParams& p, int64_t first, int64_t last) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      for (int64_t i = first; i < last; ++i) {
        const int32_t slot = p.usable(p.slot_mapping[i]);
        if (slot < 0) continue;
        const int32_t page = slot / p.kv.block_size;
        if (p.last_names[page] != i) continue;
        update_page<T, decltype(stored)>(p, page, slot - page * p.kv.block_size + 1);
      }
    });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(PageNamesParams, names_loop, run_names)
VLLM_KERNELS_CPU_KERNEL(PageBoundsUpdateParams, update_loop, run_update)

}  // namespace vllm_kernels::cpu
