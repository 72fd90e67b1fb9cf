#include "ops/mla_cache.h"

#include "cpu/base/dispatch.h"
#include "cpu/cache/write_row.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

template <typename T>
float largest_number(const T* row, int64_t n) {  // n: a multiple of kLanes; a NaN does not count
  Vec most{};
  for (int64_t i = 0; i < n; i += kLanes) {
    most = maximum(as_float(as_bits(load(row + i)) & 0x7fffffffu), most);
  }
  return largest(most);
}

constexpr int kTiles = kDsMlaLatent / kDsMlaTile;

// Part `part` of an entry of ds_mla: a tile of the latent with its scale, or (kTiles) the rope.
template <typename T>
void write_ds_mla(char* entry, const T* kv_c, const T* k_pe, int64_t part) {
  if (part == kTiles) {
    auto* rope = reinterpret_cast<BFloat16*>(entry + kDsMlaRopeStart);
    for (int i = 0; i < kDsMlaRope; i += kLanes) store(rope + i, load(k_pe + i));
    return;
  }
  const T* x = kv_c + part * kDsMlaTile;
  float scale = largest_number(x, kDsMlaTile) / 448.0f;
  if (scale < kDsMlaSmallestScale) scale = kDsMlaSmallestScale;
  convert(reinterpret_cast<Fp8E4M3*>(entry + part * kDsMlaTile), x, kDsMlaTile, scale);
  std::memcpy(entry + kDsMlaScales + part * sizeof(float), &scale, sizeof(float));
}

// A task is a part of the entries of all tokens, in their order: the last token of a slot wins.
int64_t pieces(const ConcatAndCacheMlaParams& p) {
  return ceil_div(p.num_tokens * (p.kv_lora_rank + p.pe_dim) * size_of(p.dtype), 4 * kTaskBytes);
}

// Elements of a piece, whole vectors.
int64_t piece_elements(const ConcatAndCacheMlaParams& p) {
  return ceil_div(ceil_div(p.kv_lora_rank + p.pe_dim, pieces(p)), 64) * 64;
}

int64_t num_tasks(const ConcatAndCacheMlaParams& p) {
  return p.ds_mla ? kTiles + 1 : ceil_div(p.kv_lora_rank + p.pe_dim, piece_elements(p));
}

template <typename T>
const T* row_of(const void* rows, int64_t stride, int64_t token) {
  return static_cast<const T*>(rows) + token * stride;
}

// The elements [begin, end) of an entry.
template <typename T, typename C>
void write_piece(const ConcatAndCacheMlaParams& p, C* entry, int64_t token, int64_t begin,
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

// Elements [begin, end), or parts of ds_mla.
template <typename T>
void run_as(const ConcatAndCacheMlaParams& p, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int32_t slot = p.usable(p.slot_mapping[t]);
    if (slot < 0) continue;
    const int64_t at = slot / p.block_size * p.block_stride + slot % p.block_size * p.token_stride;
    if (p.ds_mla) {
      for (int64_t part = begin; part < end; ++part) {
        write_ds_mla(static_cast<char*>(p.cache) + at, row_of<T>(p.kv_c, p.kv_c_stride, t),
                     row_of<T>(p.k_pe, p.k_pe_stride, t), part);
      }
      continue;
    }
    dispatch_cache<T>(p.cache_dtype, [&](auto stored) {
      using C = decltype(stored);
      write_piece<T, C>(p, static_cast<C*>(p.cache) + at, t, begin, end);
    });
  }
}

void run(const ConcatAndCacheMlaParams& p, int64_t begin, int64_t end) {
  const int64_t size = p.kv_lora_rank + p.pe_dim, step = p.ds_mla ? 1 : piece_elements(p);
  const int64_t last = p.ds_mla || end * step < size ? end * step : size;
  dispatch_float(p.dtype, [&](auto model) { run_as<decltype(model)>(p, begin * step, last); });
}

// --- cp_gather_and_upconvert_fp8_kv_cache: a task is a sequence

template <typename T>
void read_ds_mla(T* row, const char* entry) {
  for (int tile = 0; tile < kDsMlaLatent / kDsMlaTile; ++tile) {
    float scale;
    std::memcpy(&scale, entry + kDsMlaScales + tile * sizeof(float), sizeof(float));
    const auto* x = reinterpret_cast<const Fp8E4M3*>(entry + tile * kDsMlaTile);
    for (int i = 0; i < kDsMlaTile; i += kLanes) {
      store(row + tile * kDsMlaTile + i, load(x + i) * splat(scale));
    }
  }
  const auto* rope = reinterpret_cast<const BFloat16*>(entry + kDsMlaRopeStart);
  for (int i = 0; i < kDsMlaRope; i += kLanes) store(row + kDsMlaLatent + i, load(rope + i));
}

int64_t num_upconvert_tasks(const UpconvertMlaParams& p) {
  return p.num_seqs;
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

int64_t rows_of_task(const ConcatMlaQParams& p) {
  return rows_per_task(2 * (p.nope_bytes + p.rope_bytes));
}

int64_t num_concat_tasks(const ConcatMlaQParams& p) {
  return ceil_div(p.out_rows.count, rows_of_task(p));
}

void run_concat(const ConcatMlaQParams& p, int64_t begin, int64_t end) {
  const int64_t step = rows_of_task(p), size = size_of(p.dtype);
  const int64_t last = end * step < p.out_rows.count ? end * step : p.out_rows.count;
  for (int64_t row = begin * step; row < last; ++row) {
    char* out = static_cast<char*>(p.out) + p.out_rows.offset(row) * size;
    std::memcpy(out, static_cast<const char*>(p.nope) + p.nope_rows.offset(row) * size,
                p.nope_bytes);
    std::memcpy(out + p.nope_bytes,
                static_cast<const char*>(p.rope) + p.rope_rows.offset(row) * size, p.rope_bytes);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::ConcatAndCacheMlaParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
VLLM_KERNELS_CPU_KERNEL(vllm_kernels::UpconvertMlaParams, vllm_kernels::cpu::num_upconvert_tasks,
                        vllm_kernels::cpu::run_upconvert)
VLLM_KERNELS_CPU_KERNEL(vllm_kernels::ConcatMlaQParams, vllm_kernels::cpu::num_concat_tasks,
                        vllm_kernels::cpu::run_concat)
