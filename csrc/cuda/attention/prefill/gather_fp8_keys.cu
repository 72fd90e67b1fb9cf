// Transposes V of an e4m3 cache for the 8-bit wgmma of prefill sm90 (sm90/fp8.cuh), and may copy K
// (AttentionChoice::copies_fp8_keys).
//
// Scratch: K [num_kv_heads, rows, head_size padded to 32] if it is copied, V^T [num_kv_heads,
// head_size, rows], then the first row of each sequence [num_seqs + 1], the lengths [num_seqs],
// k_scale times that of the queries and v_scale [2, num_kv_heads]. A sequence has a multiple of 128
// rows. Rows without a visible token are 0. 128 rows before the window are not written, because
// nobody reads them. Behind the sequences are 128 rows of zeros, for those that do not fit.
//
// V^T has the tokens of each 16 in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15. So a lane's
// accumulators of Q K^T are, once packed, its operands of P V. (PTX ISA, wgmma: fragments of D and
// of an 8-bit A.)
//
// A CTA per 128 rows and KV head, or per several such blocks of a long batch. Each adds up the
// sequences' lengths itself. Reads and writes each byte of V: 34 MB each way for 4 sequences of 8k
// tokens and 8 heads of 128. Early reads: none.
#include "cuda/attention/prefill/gather_fp8_keys.h"

#include <algorithm>

#include "cuda/base/device.h"
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/reduce.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256, kCtasPerSm = 6;
constexpr int kGroups = kFp8Rows / 16;

struct Fp8Rows {
  E4M3Query query;
  int32_t* starts;  // [num_seqs + 1]
  int32_t* lens;    // [num_seqs]
  float* scales;
  char* key;  // null: is not copied
  char* value;
  int32_t rows;      // of a head
  int32_t max_rows;  // of the sequences together
  int32_t min_query_len;
  int32_t key_bytes;  // of a row of K
  int32_t chunks;     // of 16 bytes in head_size
  FastDivisor by_chunk;
};

// Of the CTA's rows.
struct Fp8Shared {
  int64_t warp_sums[kThreads / 32];
  int32_t seq;                // -1: no sequence's rows
  int32_t start;              // of the sequence
  int32_t end;                // of the sequences that fit
  int64_t key[kFp8Rows];      // where K of the row's token begins, or -1
  int64_t value[kFp8Rows];    // of V
  int64_t group[kGroups];     // of V of a group's first token, whether it is visible or not
  uint32_t visible[kGroups];  // bits of a group's visible tokens
};

// Bytes that are 0xff where the low four bits of `bits` are set.
__device__ __forceinline__ uint32_t byte_mask(uint32_t bits) {
  return ((bits & 15) * 0x00204081 & 0x01010101) * 0xff;
}

// Rows of a sequence: a multiple of kFp8Rows, and if it is empty kFp8Rows, which its work tile
// reads.
__device__ __forceinline__ int64_t rows_of(const PagedAttentionParams& p, const Fp8Rows& to,
                                           int seq) {
  if (query_range(p, seq).count < to.min_query_len) return 0;
  return (int64_t{max(key_range(p, seq).count, 1)} + kFp8Rows - 1) & -kFp8Rows;
}

// Finds the sequence that has `first_row`, and the end of all. The first CTA stores their starts
// and lengths. One that does not fit in max_rows has none, and length 0, nor have those after it. A
// thread has the sequences of an equal part of the batch.
__device__ __forceinline__ void find_sequence(const PagedAttentionParams& p, const Fp8Rows& to,
                                              Fp8Shared& shared, int first_row) {
  if (threadIdx.x == 0) shared.seq = -1, shared.end = 0;
  const int share = (p.num_seqs + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * share, p.num_seqs);
  const int last = min(first + share, p.num_seqs);
  int64_t mine = 0, total;
#pragma unroll 1
  for (int seq = first; seq < last; ++seq) mine += rows_of(p, to, seq);
  const int64_t before = inclusive_block_sum(mine, shared.warp_sums, total) - mine;
  int64_t start = before;
#pragma unroll 1
  for (int seq = first; seq < last; ++seq) {
    const int64_t end = start + rows_of(p, to, seq);
    if (end > to.max_rows) break;
    atomicMax(&shared.end, static_cast<int32_t>(end));
    if (first_row >= start && first_row < end) {
      shared.seq = seq;
      shared.start = static_cast<int32_t>(start);
    }
    start = end;
  }
  __syncthreads();
  if (first_row > 0 || blockIdx.y > 0) return;
  start = before;
#pragma unroll 1
  for (int seq = first; seq < last; ++seq) {
    const int64_t end = start + rows_of(p, to, seq);
    to.starts[seq] = static_cast<int32_t>(min(start, int64_t{shared.end}));
    to.lens[seq] = end <= to.max_rows ? key_range(p, seq).count : 0;
    start = end;
  }
  if (threadIdx.x == 0) to.starts[p.num_seqs] = shared.end;
}

// Finds the tokens of the rows from first_row on. Returns false if nobody reads them.
__device__ __forceinline__ bool locate(const PagedAttentionParams& p, const Fp8Rows& to,
                                       Fp8Shared& shared, int first_row) {
  find_sequence(p, to, shared, first_row);
  const int kv_head = blockIdx.y, seq = shared.seq;
  const bool is_behind = seq < 0;  // no sequence's
  if (first_row > shared.end) return false;
  const RowRange keys = is_behind ? RowRange{} : key_range(p, seq);
  int first_token = 0, visible_from = 0;
  if (!is_behind) {
    first_token = first_row - shared.start;
    const int first_query = keys.count - query_range(p, seq).count;
    if (p.sliding_window > 0) visible_from = first_query - p.sliding_window + 1;
  }
  if (first_token + kFp8Rows <= visible_from) return false;
  const int i = threadIdx.x;
  if (i < kFp8Rows) {
    const int token = first_token + i;
    int block = -1, row = 0;
    if (token >= visible_from && token < keys.count) {
      block = 0;
      row = keys.first + token;
      if (p.key_start_loc == nullptr) {
        block = p.block_tables[seq * p.block_table_stride + token / p.kv.block_size];
        row = token % p.kv.block_size;
      }
    }
    const bool visible = block >= 0 && block < p.kv.num_blocks;
    const int64_t value = p.kv.value_offset(block, kv_head, row, 0);
    shared.key[i] = visible ? p.kv.key_offset(block, kv_head, row, 0) : -1;
    shared.value[i] = visible ? value : -1;
    const uint32_t group = __ballot_sync(0xffffffffu, visible) >> i / 16 % 2 * 16 & 0xffff;
    if (i % 16 == 0) shared.visible[i / 16] = group;
    if (group >> i % 16 == 1) shared.group[i / 16] = value - i % 16;  // the last visible one
  }
  __syncthreads();
  return true;
}

// Calls body(row, chunk) for each 16 bytes of the CTA's rows. Neighbouring threads have
// neighbouring chunks. In layout vllm eight of them have neighbouring rows of a chunk: loads have
// 128 bytes in a row, and stores fill sectors.
template <typename Body>
__device__ __forceinline__ void for_each_chunk(const PagedAttentionParams& p, const Fp8Rows& to,
                                               const Body& body) {
  const int shift = p.kv.layout == KvLayout::kVllm ? 3 : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < kFp8Rows * to.chunks; i += kThreads) {
    const int group = i >> shift, quotient = static_cast<int>(to.by_chunk.divide(group));
    body((quotient << shift) + i - (group << shift), group - quotient * to.chunks);
  }
}

__device__ __forceinline__ uint4 load_or_zero(const void* from, int64_t offset, int64_t behind) {
  if (offset < 0) return {};
  return *reinterpret_cast<const uint4*>(static_cast<const char*>(from) + offset + behind);
}

// Four words of 16 tokens in the order of V^T.
__device__ __forceinline__ uint4 in_order(const uint4& tokens) {
  return {__byte_perm(tokens.x, tokens.z, 0x5410), __byte_perm(tokens.x, tokens.z, 0x7632),
          __byte_perm(tokens.y, tokens.w, 0x5410), __byte_perm(tokens.y, tokens.w, 0x7632)};
}

// Layout vllm: a page has V^T already.
__device__ __forceinline__ void copy_packed_values(const PagedAttentionParams& p,
                                                   const Fp8Shared& shared, char* to, int rows) {
#pragma unroll 4
  for (int i = threadIdx.x; i < kGroups * p.kv.head_size; i += kThreads) {
    const int group = i % kGroups, dim = i / kGroups;
    const uint32_t visible = shared.visible[group];
    uint4 tokens = load_or_zero(p.kv.value, visible != 0 ? shared.group[group] : -1,
                                dim * p.kv.value_dim_stride);
    tokens = {tokens.x & byte_mask(visible), tokens.y & byte_mask(visible >> 4),
              tokens.z & byte_mask(visible >> 8), tokens.w & byte_mask(visible >> 12)};
    *reinterpret_cast<uint4*>(to + int64_t{dim} * rows + group * 16) = in_order(tokens);
  }
}

// Layouts NHD and HND: transposes in shared memory, a thread 16 tokens of 4 dimensions. Chunk c of
// row r is at c ^ (r / 16), so that the groups of a warp are in different banks.
__device__ __forceinline__ void transpose_values(const PagedAttentionParams& p, const Fp8Rows& from,
                                                 const Fp8Shared& shared, uint4* tile, char* to) {
  const int pitch = (from.chunks + 7) / 8 * 8;
  for_each_chunk(p, from, [&](int row, int chunk) {
    tile[row * pitch + (chunk ^ row / 16)] =
        load_or_zero(p.kv.value, shared.value[row], int64_t{chunk} * 16);
  });
  __syncthreads();
  const auto* words = reinterpret_cast<const uint32_t*>(tile);
#pragma unroll 1
  for (int i = threadIdx.x; i < kGroups * 4 * from.chunks; i += kThreads) {
    const int group = i % kGroups, quad = i / kGroups;
    const int column = (quad / 4 ^ group) * 4 + quad % 4;
    const auto token = [&](int t) { return words[(group * 16 + t) * pitch * 4 + column]; };
    uint32_t dims[4][4];  // [dimension][word of V^T]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t a = token(2 * j), b = token(2 * j + 1), c = token(2 * j + 8),
                     d = token(2 * j + 9);
      const uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
      const uint32_t ab2 = __byte_perm(a, b, 0x7362), cd2 = __byte_perm(c, d, 0x7362);
      dims[0][j] = __byte_perm(ab, cd, 0x5410);
      dims[1][j] = __byte_perm(ab, cd, 0x7632);
      dims[2][j] = __byte_perm(ab2, cd2, 0x5410);
      dims[3][j] = __byte_perm(ab2, cd2, 0x7632);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<uint4*>(to + (int64_t{quad} * 4 + j) * from.rows + group * 16) =
          uint4{dims[j][0], dims[j][1], dims[j][2], dims[j][3]};
    }
  }
}

__device__ __forceinline__ float scale_of(const float* scales, int at) {
  return scales == nullptr ? 1.0f : scales[at];
}

__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    gather_fp8_kernel(const __grid_constant__ PagedAttentionParams p,
                      const __grid_constant__ Fp8Rows to) {
  extern __shared__ uint4 tile[];  // rows of V
  __shared__ Fp8Shared shared;
  launch_dependents();
  wait_for_primary_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const int head = blockIdx.y, stride = p.kv.scale_stride;
    to.scales[head] = to.query.of(head) * scale_of(p.kv.k_scale, head * stride);
    to.scales[p.kv.num_kv_heads + head] = scale_of(p.kv.v_scale, head * stride);
  }
  const int64_t kv_head = blockIdx.y;
#pragma unroll 1
  for (int first_row = blockIdx.x * kFp8Rows; first_row < to.rows;
       first_row += gridDim.x * kFp8Rows) {
    if (first_row > static_cast<int>(blockIdx.x) * kFp8Rows) __syncthreads();  // reads shared
    const bool is_read = locate(p, to, shared, first_row);
    if (first_row > shared.end) return;
    if (!is_read) continue;
    if (to.key != nullptr) {
      char* key = to.key + (kv_head * to.rows + first_row) * to.key_bytes;
      const int64_t chunk_stride = p.kv.layout == KvLayout::kVllm ? p.kv.key_chunk_stride : 16;
      for_each_chunk(p, to, [&](int row, int chunk) {
        *reinterpret_cast<uint4*>(key + int64_t{row} * to.key_bytes + chunk * 16) =
            load_or_zero(p.kv.key, shared.key[row], chunk * chunk_stride);
      });
    }
    char* value = to.value + kv_head * p.kv.head_size * to.rows + first_row;
    if (p.kv.layout == KvLayout::kVllm) {
      copy_packed_values(p, shared, value, to.rows);
    } else {
      transpose_values(p, to, shared, tile, value);
    }
  }
}

}  // namespace

Fp8Keys gather_fp8_keys(const PagedAttentionParams& p, const E4M3Query& query,
                        const AttentionChoice& choice, void* scratch, void* stream) {
  const PagedKv& kv = p.kv;
  const auto rows = static_cast<int32_t>(choice.fp8_rows);
  const Fp8Scratch at(p, rows, choice.copies_fp8_keys);
  char* base = static_cast<char*>(scratch);
  char* key = choice.copies_fp8_keys ? base : nullptr;
  char* value = base + at.value;
  auto* starts = reinterpret_cast<int32_t*>(base + at.starts);
  auto* lens = reinterpret_cast<int32_t*>(base + at.lens);
  auto* scales = reinterpret_cast<float*>(base + at.scales);

  const int chunks = kv.head_size / 16;
  const Fp8Rows to = {.query = query,
                      .starts = starts,
                      .lens = lens,
                      .scales = scales,
                      .key = key,
                      .value = value,
                      .rows = rows,
                      .max_rows = rows - kFp8Rows,
                      .min_query_len = choice.min_query_len,
                      .key_bytes = static_cast<int32_t>(at.key_bytes),
                      .chunks = chunks,
                      .by_chunk = FastDivisor(chunks)};
  // The host has a bound on the rows. Few CTAs find out that none is left for them.
  const int most = 4 * kCtasPerSm * current_device_model().num_sms / kv.num_kv_heads + 1;
  const auto blocks = static_cast<unsigned>(std::min(rows / kFp8Rows, most));
  const int shared_bytes = kFp8Rows * ((chunks + 7) / 8 * 8) * 16;
  launch_kernel("paged_attention", gather_fp8_kernel,
                dim3(blocks, static_cast<unsigned>(kv.num_kv_heads)), dim3(kThreads), shared_bytes,
                stream, p, to);

  PagedAttentionParams gathered = p;
  gathered.seq_lens = lens;
  gathered.has_cumulative_lens = false;
  PagedKv& made = gathered.kv;
  if (key != nullptr) {
    gathered.key_start_loc = starts;
    made.key = key;
    made.num_blocks = 1;
    made.block_size = rows;
    made.layout = KvLayout::kNHD;
    made.key_head_stride = rows * at.key_bytes;
    made.key_token_stride = at.key_bytes;
  }
  if (gathered.key_start_loc != nullptr) gathered.max_blocks_per_seq = 1;  // all rows are a block
  made.value = value;
  made.value_head_stride = int64_t{kv.head_size} * rows;
  made.value_token_stride = 1;
  made.value_dim_stride = rows;
  made.k_scale = scales;
  made.v_scale = scales + kv.num_kv_heads;
  made.scale_stride = 1;
  return {gathered, starts};
}

}  // namespace vllm_kernels::cuda
