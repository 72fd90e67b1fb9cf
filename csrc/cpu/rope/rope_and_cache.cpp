// rope_and_cache and fused_qk_norm_rope: bias, norm and RoPE of projected heads. rope_and_cache
// also writes keys and values to the cache.
//   query, key, value [num_tokens, heads, head_size]; slot_mapping [num_slots], -1: skip
// Query tasks are ranges of tokens. Key and value tasks are a few heads of all tokens. They
// keep the order of the tokens, so the last token of a slot wins.
#include "ops/rope_and_cache.h"

#include <cstring>

#include "cpu/base/dispatch.h"
#include "cpu/cache/cache_rows.h"
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
Loop loop_of(const RopeAndCacheParams& p) {
  return {.count = query_tasks(p) + ceil_div(p.key.count, heads_per_task(p)) +
                   ceil_div(p.value.count, heads_per_task(p))};
}

template <typename T>
T* head_of(const ProjectedHeads& heads, int64_t token, int64_t head) {
  return static_cast<T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
}

// Adds the bias, normalizes, and rotates the head if `cosines` is given.
template <typename T, typename Cosine>
void prepare(T* row, const ProjectedHeads& heads, int64_t head, const RopeAndCacheParams& p,
             const Cosine* cosines) {
  const int64_t n = p.head_size;
  if (heads.bias != nullptr) {
    const T* bias = static_cast<const T*>(heads.bias) + head * n;
    map_elements(row, n, [](Vec x, Vec b) { return x + b; }, row, bias);
  }
  if (heads.weight != nullptr) {
    const float inverse = inverse_root(mean_square<false>(row, row, n), p.epsilon);
    normalize_row(row, row, static_cast<const T*>(heads.weight), n, inverse);
  }
  if (cosines != nullptr) rotate_head(row, cosines, p.rotary_size / 2, p.is_neox);
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
        const HeadSlot at = {slot / p.kv.block_size, head, slot % p.kv.block_size};
        write_row(cache_row<C>(p.kv, is_key, at), row, p.head_size, scale_of(p.kv, is_key, head));
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

void run(const RopeAndCacheParams& p, int64_t first, int64_t last) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      dispatch_float(p.cos_sin_dtype, [&](auto cosine) {
        const Runner<T, decltype(stored), decltype(cosine)> runner{p};
        for (int64_t task = first; task < last; ++task) runner.run(task);
      });
    });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(RopeAndCacheParams, loop_of, run)

}  // namespace vllm_kernels::cpu
