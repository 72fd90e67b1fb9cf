// rope_and_cache and fused_qk_norm_rope: bias, norm and RoPE of projected heads. rope_and_cache
// also writes keys and values to the cache.
//   query, key, value [num_tokens, heads, head_size]; slot_mapping [num_slots], -1: skip
// Query tasks are ranges of tokens. Key and value tasks are a few heads of all tokens. They
// keep the order of the tokens, so the last token of a slot wins.
#include "ops/rope_and_cache.h"

#include <cstring>

#include "cpu/base/dispatch.h"
#include "cpu/cache/write_row.h"
#include "cpu/kernels.h"
#include "cpu/norm/rms_norm_rows.h"
#include "cpu/rope/rotate_pairs.h"

namespace vllm_kernels::cpu {
namespace {

// The tasks are in this order: query, key, value.
int64_t tokens_per_task(const RopeAndCacheParams& p) {
  return rows_per_task(2 * int64_t{p.query.count} * p.head_size * size_of(p.dtype));
}
int64_t heads_per_task(const RopeAndCacheParams& p) {
  return rows_per_task(2 * p.num_tokens * p.head_size * size_of(p.dtype));
}
int64_t query_tasks(const RopeAndCacheParams& p) {
  return p.query.count == 0 ? 0 : ceil_div(p.num_tokens, tokens_per_task(p));
}
int64_t num_tasks(const RopeAndCacheParams& p) {
  return query_tasks(p) + ceil_div(p.key.count, heads_per_task(p)) +
         ceil_div(p.value.count, heads_per_task(p));
}

template <typename T>
T* head_of(const ProjectedHeads& heads, int64_t token, int64_t head) {
  return static_cast<T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
}

// rms_norm of one head, in place.
template <typename T>
void norm_head(T* row, const T* weight, int64_t n, float epsilon) {
  const Vec scale = splat(inverse_root(mean_square<false>(row, row, n), epsilon));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    const Vec value = round_to<T>(load_partial(row + i, count) * scale);
    store_partial(row + i, value * load_partial(weight + i, count), count);
  }
}

// Adds the bias, normalizes, and rotates the head if `cosines` is given.
template <typename T, typename Cosine>
void prepare(T* row, const ProjectedHeads& heads, int64_t head, const RopeAndCacheParams& p,
             const Cosine* cosines) {
  const int64_t n = p.head_size;
  if (heads.bias != nullptr) {
    const T* bias = static_cast<const T*>(heads.bias) + head * n;
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t count = n - i < kLanes ? n - i : kLanes;
      store_partial(row + i, load_partial(row + i, count) + load_partial(bias + i, count), count);
    }
  }
  if (heads.weight != nullptr) {
    norm_head(row, static_cast<const T*>(heads.weight), n, p.epsilon);
  }
  if (cosines != nullptr) rotate_head(row, cosines, p.rotary_size / 2, p.is_neox);
}

// The address of a key or value head in the cache, and its layout.
template <typename C>
struct CacheRow {
  C* start;
  int64_t run;     // contiguous elements
  int64_t stride;  // elements from one run to the next
  float scale;
};

template <typename C>
CacheRow<C> cache_row(const PagedKv& kv, bool is_key, int32_t slot, int64_t head) {
  const int32_t block = slot / kv.block_size, token = slot % kv.block_size;
  const bool vllm = kv.layout == KvLayout::kVllm;
  const float* scales = is_key ? kv.k_scale : kv.v_scale;
  const float scale = scales == nullptr ? 1.0f : scales[head * kv.scale_stride];
  if (is_key) {
    return {static_cast<C*>(kv.key) + kv.key_offset(block, head, token, 0),
            vllm ? kv.x : kv.head_size, kv.key_chunk_stride, scale};
  }
  return {static_cast<C*>(kv.value) + kv.value_offset(block, head, token, 0),
          vllm ? 1 : kv.head_size, kv.value_dim_stride, scale};
}

template <typename T, typename C, typename Cosine>
struct Runner {
  const RopeAndCacheParams& p;

  const Cosine* cosines_of(int64_t token) const {  // the binding has checked the range
    return static_cast<const Cosine*>(p.cos_sin_cache) + p.positions[token] * p.cos_sin_stride;
  }

  void run_query(int64_t task) const {
    const int64_t first = task * tokens_per_task(p), end = first + tokens_per_task(p);
    for (int64_t token = first; token < (end < p.num_tokens ? end : p.num_tokens); ++token) {
      for (int64_t head = 0; head < p.query.count; ++head) {
        prepare(head_of<T>(p.query, token, head), p.query, head, p, cosines_of(token));
      }
    }
  }

  void run_heads(const ProjectedHeads& heads, bool is_key, int64_t task) const {
    const int64_t first = task * heads_per_task(p), end = first + heads_per_task(p);
    const int64_t tokens = !p.stores ? p.num_tokens : p.num_slots;
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t slot = !p.stores ? 0 : p.slot_mapping[token];
      if (slot < 0) continue;
      const Cosine* cosines = is_key ? cosines_of(token) : nullptr;
      for (int64_t head = first; head < (end < heads.count ? end : heads.count); ++head) {
        T* from = head_of<T>(heads, token, head);
        if (!p.stores) {
          prepare(from, heads, head, p, cosines);
          continue;
        }
        T row[kMaxRopeHeadSize];
        std::memcpy(row, from, p.head_size * sizeof(T));
        prepare(row, heads, head, p, cosines);
        const CacheRow<C> to = cache_row<C>(p.kv, is_key, static_cast<int32_t>(slot), head);
        write_row(to.start, to.run, to.stride, row, p.head_size, to.scale);
      }
    }
  }

  void run(int64_t task) const {
    const int64_t queries = query_tasks(p), keys = ceil_div(p.key.count, heads_per_task(p));
    if (task < queries) {
      run_query(task);
    } else if (task < queries + keys) {
      run_heads(p.key, true, task - queries);
    } else {
      run_heads(p.value, false, task - queries - keys);
    }
  }
};

void run(const RopeAndCacheParams& p, int64_t begin, int64_t end) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      dispatch_float(p.cos_sin_dtype, [&](auto cosine) {
        const Runner<T, decltype(stored), decltype(cosine)> runner{p};
        for (int64_t task = begin; task < end; ++task) runner.run(task);
      });
    });
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::RopeAndCacheParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
