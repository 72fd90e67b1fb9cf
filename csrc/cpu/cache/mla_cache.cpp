// The cache of multi-head latent attention (MLA).
//   concat_and_cache_mla                    [kv_c | k_pe] of new tokens to their slots
//   cp_gather_and_upconvert_fp8_kv_cache    entries of format ds_mla to rows
//   concat_mla_q                            [nope | rope] of queries to one tensor
// ops/mla_cache.h has the format ds_mla: a latent of fp8 tiles with a scale each, then the rope
// part.
#include "ops/mla_cache.h"

#include "cpu/base/dispatch.h"
#include "cpu/cache/cache_rows.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kLatentSections = kDsMlaLatent / kDsMlaTile;

template <typename T>
float max_magnitude(const T* row, int64_t n) {  // n: a multiple of kLanes; ignores NaN
  Vec magnitude{};
  for (int64_t i = 0; i < n; i += kLanes) {
    magnitude = maximum(as_float(as_bits(load(row + i)) & 0x7fffffffu), magnitude);
  }
  return largest(magnitude);
}

// --- concat_and_cache_mla: a task is a section of every entry of ds_mla, or a range of elements of
// every entry. It keeps the order of the tokens, so the last token of a slot wins.

// A section of an entry of ds_mla is a tile of the latent with its scale. Section kLatentSections
// is the rope part.
template <typename T>
void write_ds_mla(char* entry, const T* kv_c, const T* k_pe, int64_t section) {
  if (section == kLatentSections) {
    auto* rope = reinterpret_cast<BFloat16*>(entry + kDsMlaRopeStart);
    return convert(rope, k_pe, kDsMlaRope, 1.0f);
  }
  const T* x = kv_c + section * kDsMlaTile;
  float scale = max_magnitude(x, kDsMlaTile) / 448.0f;
  if (scale < kDsMlaSmallestScale) scale = kDsMlaSmallestScale;
  convert(reinterpret_cast<Fp8E4M3*>(entry + section * kDsMlaTile), x, kDsMlaTile, scale);
  std::memcpy(entry + kDsMlaScales + section * sizeof(float), &scale, sizeof(float));
}

int64_t num_chunks(const ConcatAndCacheMlaParams& p) {
  return ceil_div(p.num_tokens * (p.kv_lora_rank + p.pe_dim) * size_of(p.dtype), 4 * kTaskBytes);
}

// Elements of a chunk, whole vectors.
int64_t chunk_elements(const ConcatAndCacheMlaParams& p) {
  return ceil_div(ceil_div(p.kv_lora_rank + p.pe_dim, num_chunks(p)), 64) * 64;
}

Loop loop_of(const ConcatAndCacheMlaParams& p) {
  if (p.ds_mla) return {.count = kLatentSections + 1};
  return {.count = p.kv_lora_rank + p.pe_dim, .per_task = chunk_elements(p)};
}

template <typename T>
const T* row_of(const void* rows, int64_t stride, int64_t token) {
  return static_cast<const T*>(rows) + token * stride;
}

// Writes elements [begin, end) of an entry.
template <typename T, typename C>
void write_chunk(const ConcatAndCacheMlaParams& p, C* entry, int64_t token, int64_t begin,
                 int64_t end) {
  const int64_t rank = p.kv_lora_rank;
  const float scale = sizeof(C) == sizeof(T) ? 1.0f : *p.scale;
  if (begin < rank) {
    convert(entry + begin, row_of<T>(p.kv_c, p.kv_c_stride, token) + begin,
            (end < rank ? end : rank) - begin, scale);
  }
  if (end > rank) {
    const int64_t from = begin > rank ? begin : rank;
    convert(entry + from, row_of<T>(p.k_pe, p.k_pe_stride, token) + from - rank, end - from, scale);
  }
}

// Elements [begin, end) of all entries, or sections of ds_mla.
template <typename T>
void run_as(const ConcatAndCacheMlaParams& p, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int32_t slot = p.usable(p.slot_mapping[t]);
    if (slot < 0) continue;
    const int64_t at = slot / p.block_size * p.block_stride + slot % p.block_size * p.token_stride;
    if (p.ds_mla) {
      for (int64_t section = begin; section < end; ++section) {
        write_ds_mla(static_cast<char*>(p.cache) + at, row_of<T>(p.kv_c, p.kv_c_stride, t),
                     row_of<T>(p.k_pe, p.k_pe_stride, t), section);
      }
      continue;
    }
    dispatch_cache<T>(p.cache_dtype, [&](auto stored) {
      using C = decltype(stored);
      write_chunk<T, C>(p, static_cast<C*>(p.cache) + at, t, begin, end);
    });
  }
}

void run(const ConcatAndCacheMlaParams& p, int64_t begin, int64_t end) {
  dispatch_float(p.dtype, [&](auto model) { run_as<decltype(model)>(p, begin, end); });
}

// --- cp_gather_and_upconvert_fp8_kv_cache: a task is a sequence

template <typename T>
void read_ds_mla(T* row, const char* entry) {
  for (int tile = 0; tile < kDsMlaLatent / kDsMlaTile; ++tile) {
    float scale;
    std::memcpy(&scale, entry + kDsMlaScales + tile * sizeof(float), sizeof(float));
    const auto* x = reinterpret_cast<const Fp8E4M3*>(entry + tile * kDsMlaTile);
    convert(row + tile * kDsMlaTile, x, kDsMlaTile, scale);
  }
  const auto* rope = reinterpret_cast<const BFloat16*>(entry + kDsMlaRopeStart);
  convert(row + kDsMlaLatent, rope, kDsMlaRope, 1.0f);
}

Loop upconvert_loop(const UpconvertMlaParams& p) {
  return {.count = p.num_seqs};
}

void run_upconvert(const UpconvertMlaParams& p, int64_t begin, int64_t end) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    for (int64_t seq = begin; seq < end; ++seq) {
      for (int64_t i = 0; i < p.seq_lens[seq]; ++i) {
        const int64_t at = p.workspace_starts[seq] + i;
        T* row = static_cast<T*>(p.rows) + at * p.row_stride;
        const char* entry = p.entry(seq, i);
        if (at >= 0 && at < p.num_rows && entry != nullptr) read_ds_mla(row, entry);
      }
    }
  });
}

// --- concat_mla_q

Loop concat_loop(const ConcatMlaQParams& p) {
  return {.count = p.out_rows.count, .per_task = rows_per_task(2 * (p.nope_bytes + p.rope_bytes))};
}

void run_concat(const ConcatMlaQParams& p, int64_t first, int64_t last) {
  const int64_t size = size_of(p.dtype);
  for (int64_t row = first; row < last; ++row) {
    char* out = static_cast<char*>(p.out) + p.out_rows.offset(row) * size;
    // An empty part has a null pointer, which memcpy does not allow even for 0 bytes.
    if (p.nope_bytes > 0) {
      std::memcpy(out, static_cast<const char*>(p.nope) + p.nope_rows.offset(row) * size,
                  p.nope_bytes);
    }
    if (p.rope_bytes > 0) {
      std::memcpy(out + p.nope_bytes,
                  static_cast<const char*>(p.rope) + p.rope_rows.offset(row) * size, p.rope_bytes);
    }
  }
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(ConcatAndCacheMlaParams, loop_of, run)
VLLM_KERNELS_CPU_KERNEL(UpconvertMlaParams, upconvert_loop, run_upconvert)
VLLM_KERNELS_CPU_KERNEL(ConcatMlaQParams, concat_loop, run_concat)

}  // namespace vllm_kernels::cpu
