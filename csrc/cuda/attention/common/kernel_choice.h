// The answer of choose_kernel(): which attention kernel runs, and its launch shape. The constants
// here are shared by the choice (host, no CUDA) and by the kernels.
#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// How K and V of a stage lie in shared memory (kv_smem_layout.cuh draws each).
//   kPackedPages    whole pages of layout vllm, of up to 16 tokens
//   kPackedBoxes    16, 32 or 64 tokens of a longer page of layout vllm, a TMA box each
//   kSwizzledRows   rows of NHD and HND in columns of 128 bytes, TMA's 128-byte swizzle
//   kPlainRows      rows of NHD and HND as they lie in memory
//   kLines          rows of several KV heads of NHD, which fill lines of 128 bytes; 16 tokens a box
enum class KvForm { kPackedPages, kPackedBoxes, kSwizzledRows, kPlainRows, kLines };

enum class AttentionKernel {
  kSimt,         // simt/: no tensor cores
  kDecode,       // decode/decode_kernel.cuh: mma.sync, few query rows, sequences split over CTAs
  kDecodeWgmma,  // decode/decode_wgmma_kernel.cuh: Hopper, m_blocks of up to 64 rows
  kPrefillSm90,  // prefill/sm90/: wgmma and TMA, many query rows
  kPrefillSm80,  // prefill/sm80/: mma.sync and cp.async, many query rows
};

// Reasons why a faster kernel was not chosen, as bits.
enum Obstacle : uint32_t {
  kNoObstacle = 0,
  kFloat32 = 1 << 0,      // tensor cores: query of 16 bits
  kBlockSparse = 1 << 1,  // only the SIMT kernel has block-sparse patterns
  kSharedMemoryTooSmall = 1 << 2,
  kSmallPages = 1 << 3,             // tensor cores: pages of 8 tokens (8-bit vllm: 16), or of 1
  kEmptyCache = 1 << 4,             // num_blocks = 0
  kUnalignedCache = 1 << 5,         // base and strides of K and V: multiples of 16 bytes
  kUnalignedQuery = 1 << 6,         // decode: 4 bytes (8-bit cache: 8); prefill: 16 bytes
  kUnalignedOut = 1 << 7,           // decode: 8 bytes; prefill: 16 bytes
  kNotCausal = 1 << 8,              // decode: causal attention only
  kContiguousKeys = 1 << 9,         // decode: K and V in pages
  kScaleNotPositive = 1 << 10,      // prefill: scale > 0
  kFewRows = 1 << 11,               // prefill: too few query rows to fill the GPU
  kNoWgmma = 1 << 12,               // prefill sm90: code for sm_90a on an H100 or H200
  kPageSize = 1 << 13,              // prefill sm90: 16 tokens or more
  kCacheType = 1 << 14,             // prefill: cache of the query's dtype, or of 8 bits
  kSoftcapOrAlibiOn8Bit = 1 << 15,  // prefill sm90
  kHeadSizeOn8Bit = 1 << 16,        // prefill sm90: up to 192
  kLongSequences = 1 << 17,         // prefill sm80: 2^30 tokens
  kFixedSplit = 1 << 18,            // prefill: the batch may not choose the kernel
  kWgmmaHeadSize = 1 << 19,         // decode_wgmma: up to 128
  kFusedCache = 1 << 20,            // fused decode: float16, bfloat16 or e4m3, layout vllm
  kFusedPageSize = 1 << 21,         // fused decode: up to 16 tokens
  kFusedHeadSize = 1 << 22,         // fused decode: up to 128
  kFusedGroup = 1 << 23,            // fused decode: up to 8 query heads per KV head
  kUnalignedProjection = 1 << 24,   // fused decode: vectors of 16 bytes
  kTokenScales = 1 << 25,           // prefill sm80; sm90: int4; layout vllm, heads above 128
  kTreeMask = 1 << 26,              // prefill: no tree mask
  kWgmmaInt4 = 1 << 27,             // decode_wgmma: no int4
  kStripe = 1 << 28,                // prefill: whole sequences, no shards
};

// Grid and splits of the SIMT kernel.
struct SimtShape {
  int head_chunks;   // CTAs for the query heads of a KV head
  int max_splits;    // of a sequence
  int split_tokens;  // of a split, a multiple of 32
};

struct Grid {
  int64_t x = 0;
  int y = 1, z = 1;
};

struct KernelChoice {
  AttentionKernel kernel = AttentionKernel::kSimt;
  KvForm form = KvForm::kSwizzledRows;
  int padded_head_size = 0;    // of the instantiation, in values
  bool multi_warp = false;     // decode: several warps share a pipeline, each for some of the rows
  bool halves_stages = false;  // decode: stages of twice the tokens, which two warps share
  uint8_t kv_heads = 1;        // decode: of a work tile; the warps of a pipeline have one each
  int warps = 0;               // of a CTA
  int ctas_per_sm = 1;         // of the grid; decode may have CTAs of half an SM with 1, too
  int few_ctas = 0;            // decode: CTAs for which a small batch is split; 0: no such split
  int stages = 0;              // of a pipeline
  int consumer_shift = 0;      // decode: log2 of the warps that share a pipeline; halves_stages: 0
  int warp_shift = 0;          // decode: log2 of the query rows of a warp
  int combine_rows = 0;        // decode: rows of a warp that are combined at a time
  int shared_bytes = 0;        // dynamic
  Grid grid = {};
  SimtShape simt = {};
  uint32_t obstacles = kNoObstacle;

  int row_shift() const { return warp_shift + consumer_shift; }  // log2 of a work tile's rows
};

// One call: a launch, and a concurrent one for the sequences of few query tokens of a mixed batch.
struct AttentionChoice {
  KernelChoice main;
  bool has_concurrent_decode = false;
  KernelChoice concurrent_decode;
  int min_query_len = 1;  // sequences of fewer query tokens are the concurrent launch's
  // Prefill sm90: room for rows of K and V that are first gathered to contiguous keys of the
  // query's dtype; 0: K and V are read where they are.
  int64_t gathered_rows = 0;
  // The sequences may have more rows. A second launch reads the others' K and V where they are.
  bool gathers_some = false;
  // e4m3 queries. Not 0: both products have 8-bit operands, and V is first transposed, to scratch
  // memory with room for so many tokens of each head. K may be copied to such rows, too.
  int64_t fp8_rows = 0;
  bool copies_fp8_keys = false;
  // Prefill sm90: several CTAs may share the keys of a work tile (prefill/sm90/combine_splits.cuh).
  bool may_split = false;
  // A launch needs the queries in 16 bits.
  bool upcasts_query = false;
};

// The form in which prefill sm90 reads K and V where they lie.
inline KvForm prefill_form(const PagedKv& kv) {
  if (kv.layout != KvLayout::kVllm) return KvForm::kSwizzledRows;
  return kv.block_size > 16 && size_of(kv.dtype) > 1 ? KvForm::kPackedBoxes : KvForm::kPackedPages;
}

// Scratch of gather_keys(): K and V of `rows` rows, then the sequences' first rows. Heads are
// padded to 32 bytes: TMA is slow where rows begin within a sector.
inline int64_t gathered_head_stride(const PagedAttentionParams& p) {
  return (p.head_size() + 15) / 16 * 16;
}
inline int64_t gathered_tensor_bytes(const PagedAttentionParams& p, int64_t rows) {
  return rows * p.kv.num_kv_heads * gathered_head_stride(p) * size_of(p.dtype);
}
inline int64_t gather_bytes(const PagedAttentionParams& p, int64_t rows) {
  return rows == 0 ? 0 : 2 * gathered_tensor_bytes(p, rows) + int64_t{4} * (p.num_seqs + 3);
}

// Scratch of gather_fp8_keys() for `rows` rows of a KV head, in bytes: K from 0 on if it is copied,
// padded to 32 bytes a row, V^T, the first row of each sequence, their lengths, two scales a KV
// head. A sequence has a multiple of kFp8Rows rows.
constexpr int kFp8Rows = 128;
struct Fp8Scratch {
  int64_t key_bytes;  // of a row of K
  int64_t value, starts, lens, scales, total;

  Fp8Scratch(const PagedAttentionParams& p, int64_t rows, bool copies_keys)
      : key_bytes(copies_keys ? (p.head_size() + 31) / 32 * 32 : 0),
        value(rows * p.kv.num_kv_heads * key_bytes),
        starts(value + rows * p.kv.num_kv_heads * p.head_size()),
        lens(starts + int64_t{4} * (p.num_seqs + 1)),
        scales(lens + int64_t{4} * p.num_seqs),
        total(scales + int64_t{8} * p.kv.num_kv_heads) {}
};
// Scratch of a call: gathered keys, then from query_offset on the queries in 16 bits.
struct AttentionScratch {
  int64_t query_offset;
  int64_t total;
};
inline AttentionScratch attention_scratch(const PagedAttentionParams& p,
                                          const AttentionChoice& choice) {
  const int64_t keys = choice.fp8_rows > 0
                           ? Fp8Scratch(p, choice.fp8_rows, choice.copies_fp8_keys).total
                           : gather_bytes(p, choice.gathered_rows);
  const int64_t query_bytes = int64_t{p.num_tokens} * p.num_heads * p.head_size() * 2;
  const int64_t offset = (keys + 255) / 256 * 256;
  return {offset, choice.upcasts_query ? offset + query_bytes : keys};
}

// SIMT: query heads and warps of a CTA.
constexpr int kSimtHeads = 8, kSimtWarps = 4;
// Prefill sm90: 8-bit caches have heads up to this size.
constexpr int kMaxHeadSize8Bit = 192;
// Prefill sm90: 8-bit products have heads up to this size. Larger ones leave no registers for the
// output of a KV tile (sm90/mainloop.cuh).
constexpr int kMaxHeadSizeFp8 = 128;
// Prefill sm90: whether a cache with a scale a token is read where it lies. V of layout vllm needs
// 16 scales at once, and longer heads leave no registers for them.
constexpr bool takes_token_scales(KvForm form, int head_size) {
  return form == KvForm::kSwizzledRows || head_size <= 128;
}
// Prefill sm80: tokens of a sequence.
constexpr int64_t kMaxLength = int64_t{1} << 30;
// Fused decode: query heads of a KV head.
constexpr int kMaxNewTokenRows = 8;

// --- shapes that the choice and the kernels must agree on

constexpr int kColumnBytes = 128;  // of a row in forms kSwizzledRows and kLines
constexpr int kLineTokens = 16;    // of a box in form kLines
constexpr int kMaxPipelineStages = 8;

// Columns of a row.
constexpr int row_columns(int head_size, int element_bytes) {
  return (head_size * element_bytes + kColumnBytes - 1) / kColumnBytes;
}

// Whether the rows of a page of a head follow each other in memory: layout HND as allocated.
inline bool rows_are_contiguous(const PagedKv& kv) {
  return kv.key_token_stride == kv.head_size && kv.value_token_stride == kv.head_size;
}

// The cache with `heads` adjacent KV heads as one row. The number of heads stays: such a row may
// begin at any head.
inline PagedKv rows_of_heads(const PagedKv& kv, int heads) {
  PagedKv rows = kv;
  rows.head_size *= heads;
  return rows;
}

// Form kSwizzledRows: whether two contiguous rows may share a line of 128 bytes.
constexpr bool may_pair_rows(KvForm form, int padded_head_size, int element_bytes) {
  return form == KvForm::kSwizzledRows && padded_head_size * element_bytes == kColumnBytes / 2;
}

// Bytes of a pipeline stage: V, then K from key_offset on. line_shift is log2 of the rows that
// share a line of 128 bytes in form kSwizzledRows. stage_bytes(): padded_head_size is in elements
// of the cache.
struct StageBytes {
  int line_shift;
  int key_offset;
  int total;
};
inline StageBytes stage_bytes(const PagedKv& kv, KvForm form, int padded_head_size, int tokens,
                              int architecture) {
  const int element = size_of(kv.dtype);
  const int line_shift = may_pair_rows(form, padded_head_size, element) &&
                         kv.head_size == padded_head_size && rows_are_contiguous(kv) &&
                         kv.block_size > 1 && architecture >= 90;
  int offset = kv.head_size * element * tokens, key = padded_head_size * element * tokens;
  if (form == KvForm::kSwizzledRows) {
    offset = row_columns(kv.head_size, element) * tokens * kColumnBytes >> line_shift;
    key = row_columns(padded_head_size, element) * tokens * kColumnBytes >> line_shift;
  } else if (form == KvForm::kPlainRows) {
    offset = key;
  }
  // The mma also reads V past the head size. Those bytes are K of the same stage.
  return {
      .line_shift = line_shift, .key_offset = offset, .total = (offset + key + 127) / 128 * 128};
}

// Arrays of floats, one a token, that a stage has for a cache with a scale a token: the scales of
// its keys and of its values, then (int4) the zeros of both.
inline int scale_arrays(const PagedAttentionParams& p) {
  return p.token_scales.any() ? 2 * values_of(p.kv.dtype) : 0;
}
constexpr int token_scale_bytes(int tokens, int arrays) {
  return arrays * tokens * 4;
}
// Bytes of a pipeline: its stages of `stage` bytes, then their scales. It ends where the next
// pipeline's stages may begin.
constexpr int pipeline_bytes(int stages, int stage, int tokens, int arrays) {
  if (arrays == 0) return stages * stage;
  return (stages * (stage + token_scale_bytes(tokens, arrays)) + 1023) / 1024 * 1024;
}
// The stages of a pipeline of at most `bytes` bytes.
constexpr int stages_within(int bytes, int stage, int tokens, int arrays) {
  if (arrays == 0) return bytes / stage;
  return bytes / 1024 * 1024 / (stage + token_scale_bytes(tokens, arrays));
}

// Blocks of 8 query rows per warp. If several warps share a pipeline, as many as registers hold.
constexpr int decode_row_blocks(int padded_head_size, bool multi_warp) {
  return multi_warp && padded_head_size <= 128 ? 2 : 1;
}
// Tokens of a stage, up to heads of 128: 32 if K and V take at most 8 KiB, or several warps share
// it. Otherwise 16.
constexpr int decode_stage_tokens(int element_bytes, int padded_head_size, bool multi_warp) {
  return padded_head_size <= 128 && (multi_warp || element_bytes * padded_head_size <= 128) ? 32
                                                                                            : 16;
}
// Max threads of a CTA. 16 bits: 8 warps with pipelines of 3 pages. 8-bit pages have half the bytes
// and need more instructions, so 12 warps.
constexpr int decode_threads(int element_bytes, int padded_head_size, bool multi_warp) {
  return element_bytes == 1 && !multi_warp && padded_head_size <= 128 ? 384 : 256;
}
// The same in form kLines. (decode/lines.md, 160, 150 ragged sequences: 8 warps 383 us, 12 368.)
constexpr int lines_threads(int head_size) {
  return head_size == 160 ? 384 : decode_threads(1, head_size, false);
}
// Bytes of a row of a warp's partial in shared memory: floats, whose stores have no bank conflicts.
constexpr int partial_row_bytes(int head_size) {
  return ((head_size + 15) / 16 * 16 + 4) * 4;
}
// Bound on the static shared memory of the decode kernels, from ptxas for sm_90a.
// `shares_pipelines`: several warps share one, so stages have two barriers. `fused`: with the
// buffers of the new token. A launcher throws if a kernel has more and the call no longer fits.
constexpr int decode_static_smem(int element_bytes, int padded_head_size, bool shares_pipelines,
                                 bool fused) {
  const int own = shares_pipelines || decode_threads(element_bytes, padded_head_size, false) == 384
                      ? 3072
                      : 2048;
  return own + (fused ? padded_head_size <= 64 ? 2048 : 4096 : 0);
}

// decode_wgmma: consumer warpgroups of a CTA. Registers suffice for three up to 32 rows.
constexpr int kWgmmaStageTokens = 64;
constexpr int kWgmmaMaxHeadSize = 128;
constexpr int wgmma_consumers(int max_row_blocks) {
  return max_row_blocks <= 4 ? 3 : 2;
}
// Scratch in shared memory: the queries, which all consumers share, and P^T of each consumer. Up to
// 32 rows P^T is double-buffered. At a work tile's end the scratch has the consumers' partials of
// half a head.
constexpr int wgmma_query_bytes(int rows, int padded_head_size) {
  return rows * padded_head_size * 2;
}
constexpr int wgmma_prob_bytes(int rows) {
  return (rows <= 32 ? 2 * rows : rows) * kWgmmaStageTokens * 2;
}
constexpr int wgmma_scratch_bytes(int max_row_blocks, int rows, int padded_head_size) {
  const int consumers = wgmma_consumers(max_row_blocks);
  return std::max(wgmma_query_bytes(rows, padded_head_size) + consumers * wgmma_prob_bytes(rows),
                  consumers * rows * 64 * 4);
}
constexpr int wgmma_static_smem(int max_row_blocks) {
  return max_row_blocks <= 4 ? 2048 : 3072;
}

// prefill sm80: warps and rows of a work tile, stages, shared memory.
struct PrefillSm80Sizes {
  int row_tiles;  // of 16 rows, per warp; they share each ldmatrix of K and V
  int max_stages;
  int held_steps;  // steps of 16 dimensions with Q in registers; Q of others is in shared memory
  int tile_bytes;  // of K of 64 tokens; V has as many
  int chunks;      // 16-byte chunks of K that a lane copies; of V as many
  int raw_bytes;   // 8-bit caches: buffer of chunks before the upcast

  constexpr PrefillSm80Sizes(int head_size, bool cache_is_8_bit)
      : row_tiles(head_size <= 128 ? 2 : 1),
        max_stages(head_size <= 192 ? 3 : 2),
        held_steps(head_size == 96    ? cache_is_8_bit ? 3 : 4
                   : head_size == 128 ? 0
                   : head_size == 256 ? 7
                                      : head_size / 16),
        tile_bytes((head_size + 63) / 64 * 64 * kColumnBytes),
        chunks((head_size / (cache_is_8_bit ? 16 : 8) + 3) / 4),
        raw_bytes(cache_is_8_bit ? 2 * chunks * 32 * kMaxWarps * 16 : 0),
        shared_query_bytes(row_tiles * (head_size / 16 - held_steps) * 32 * 16) {}

  static constexpr int kMaxWarps = 8;
  static constexpr int kStaticSmem = 7168;  // at most, as ptxas reports it
  int shared_query_bytes;                   // of a warp
  constexpr int warp_rows() const { return 16 * row_tiles; }
  constexpr int shared_bytes(int warps, int stages) const {
    return stages * 2 * tile_bytes + raw_bytes + shared_query_bytes * warps;
  }
};
// An L40S or RTX 5090 has 99 KB per CTA. Heads of 96 over 8 bits fill it with 4 warps.
static_assert(PrefillSm80Sizes(96, true).shared_bytes(4, 2) + PrefillSm80Sizes::kStaticSmem <=
              99 * 1024);

}  // namespace vllm_kernels::cuda
