#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/rope_rows.cuh"
#include "cuda/write_pages.cuh"
#include "cuda/write_rows.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kRun = 16;  // tokens of a block that stores

// Keys turned by their tokens' positions on the way. In Neox style the other half of a pair is
// another thread's: loaded here as well, from the same line.
template <typename T, int kVectors>
class TurnedKeys {
 public:
  static constexpr int kLater = 8;
  static constexpr bool kByHead = true;

  TurnedKeys() = default;
  __device__ __forceinline__ TurnedKeys(const RopeAndCacheParams& p,
                                        const ReshapeAndCacheParams& write,
                                        const WriterStrides& strides)
      : p_(&p), given_(write, strides) {}

  __device__ __forceinline__ void prefetch(int token, int head, int d) const {
    given_.prefetch(token, head, d);
    prefetch_l2(p_->positions + token);
  }
  __device__ __forceinline__ void load(int token, int head, int d, Vector<T> (&k)[kVectors]) {
    position_ = p_->positions[token];
    given_.load(token, head, d, k);
    if (!p_->is_neox) return;
    const int half = p_->rotary_size / 2;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = d + i * kWidth;
      other_[i] = *given_.at(token, head, at < half ? at + half : at < 2 * half ? at - half : at);
    }
  }
  __device__ __forceinline__ void turn(int d, Vector<T> (&k)[kVectors]) const {
    if (!known()) return;
    const int half = p_->rotary_size / 2;
    const int64_t row = position_ * p_->cos_sin_stride;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = d + i * kWidth;
      if (at >= 2 * half) continue;
      if (p_->is_neox) {
        const bool second = at >= half;
        const int64_t cosine = row + (second ? at - half : at);
        float values[2][kWidth], cosines[kWidth], sines[kWidth];
        load_angles(p_->cos_sin_cache, p_->cos_sin_dtype, cosine, cosine + half, cosines, sines);
        widen(as_pack(second ? other_[i] : k[i]), values[0]);
        widen(as_pack(second ? k[i] : other_[i]), values[1]);
        turn_pairs<true>(values, cosines, sines);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[0][j] = second ? values[1][j] : values[0][j];
        k[i] = bits_as<Vector<T>>(narrow<T>(values[0]));
      } else {
        constexpr int kPairs = kWidth / 2;
        const int64_t cosine = row + at / 2;
        float all[kWidth], values[2][kPairs], cosines[kPairs], sines[kPairs];
        load_angles(p_->cos_sin_cache, p_->cos_sin_dtype, cosine, cosine + half, cosines, sines);
        widen(as_pack(k[i]), all);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[j / kPairs][j % kPairs] = all[j];
        turn_pairs<false>(values, cosines, sines);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) all[j] = values[j / kPairs][j % kPairs];
        k[i] = bits_as<Vector<T>>(narrow<T>(all));
      }
    }
  }
  // Whether the position is one.
  __device__ __forceinline__ bool known() const {
    return position_ >= 0 && position_ < p_->max_position;
  }

 private:
  static constexpr int kWidth = kVectorWidth<T>;
  __device__ __forceinline__ static Pack16<T> as_pack(const Vector<T>& x) {
    return bits_as<Pack16<T>>(x);
  }

  const RopeAndCacheParams* p_;
  GivenKeys<T, kVectors> given_;
  Vector<T> other_[kVectors];
  int64_t position_;
};

// Of a grid's rows every period-th block stores, until there are `storing`; the others turn queries
// in place, `rows` heads each.
struct QueryBlocks {
  int storing;
  int period;
  FastDivisor by_period;
  int rows;
  FastDivisor lanes;  // of a head: 16 bytes of either side of its pairs each
  FastDivisor heads;
  uint32_t token_stride, head_stride;  // of queries, bytes
  uint32_t angle_stride;               // from position to position, bytes

  // This block's number among those that store, or -1.
  __device__ __forceinline__ int group() const {
    const int nth = by_period.divide(blockIdx.x);
    return nth < storing && static_cast<int>(blockIdx.x) == nth * period ? nth : -1;
  }
  // Its number among the others of its row.
  __device__ __forceinline__ int query() const {
    return blockIdx.x - min(static_cast<int>(by_period.divide(blockIdx.x)) + 1, storing);
  }
};

template <typename T>
__device__ __forceinline__ void turn_query(const RopeAndCacheParams& p, const QueryBlocks& blocks,
                                           int num_lanes) {
  constexpr int kWidth = kVectorWidth<T>;
  const int thread = threadIdx.x;
  const int block = blocks.query() +
                    (gridDim.x - blocks.storing) * (blockIdx.y + gridDim.y * blockIdx.z);
  const int within = blocks.lanes.divide(thread);
  const int row = block * blocks.rows + within;
  if (within >= blocks.rows || row >= static_cast<int>(p.num_tokens) * p.query.count) return;
  const int token = blocks.heads.divide(row), head = row - token * p.query.count;
  const int half = p.rotary_size / 2, pair = (thread - within * num_lanes) * kWidth;
  T* start = stepped(stepped(static_cast<T*>(p.query.data), token, blocks.token_stride), head,
                     blocks.head_stride) +
             (p.is_neox ? pair : 2 * pair);
  auto* first = reinterpret_cast<Pack16<T>*>(start);
  auto* second = reinterpret_cast<Pack16<T>*>(start + (p.is_neox ? half : kWidth));
  if (p.num_tokens <= 1024) {  // few: under way before the wait
    prefetch_l2(p.positions + token);
    prefetch_l2(first);
    prefetch_l2(second);
  }
  wait_for_predecessor();
  const int64_t position = p.positions[token];
  const Pack16<T> packs[2] = {*first, *second};
  if (position < 0 || position >= p.max_position) return;  // the token stays as it is
  const auto* angles = stepped(static_cast<const char*>(p.cos_sin_cache),
                               static_cast<uint32_t>(position), blocks.angle_stride);
  float cosines[kWidth], sines[kWidth], values[2][kWidth];
  load_angles(angles, p.cos_sin_dtype, pair, pair + half, cosines, sines);
  widen(packs[0], values[0]);
  widen(packs[1], values[1]);
  p.is_neox ? turn_pairs<true>(values, cosines, sines) : turn_pairs<false>(values, cosines, sines);
  *first = narrow<T>(values[0]);
  *second = narrow<T>(values[1]);
}

template <typename T, typename C, int kLanes, bool kMany>
__global__ void __launch_bounds__(kRun* kLanes,
                                  std::min(kResident<T, C, kMany>, kIs8Bit<C> ? 2 : 3) * 16 /
                                      kLanes)
    rope_and_pages_kernel(RopeAndCacheParams p, ReshapeAndCacheParams write, QueryBlocks blocks,
                          int num_lanes, PagesPlan plan) {
  launch_dependents();
  const int group = blocks.group();
  if (group < 0) {
    turn_query<T>(p, blocks, num_lanes);
    return;
  }
  const TurnedKeys<T, kVectorWidth<C> / kVectorWidth<T>> keys(p, write, plan.strides);
  write_pages<T, C, kRun, kLanes, kMany>(write, plan, keys, group);
}

template <typename T, typename C, int kThreads, int kOwn>
__global__ void __launch_bounds__(kThreads, (kIs8Bit<C> ? 512 : kOwn > 4 ? 768 : 1024) / kThreads)
    rope_and_rows_kernel(RopeAndCacheParams p, ReshapeAndCacheParams write, QueryBlocks blocks,
                         int num_lanes, RowsPlan plan) {
  launch_dependents();
  const int group = blocks.group();
  if (group < 0) {
    turn_query<T>(p, blocks, num_lanes);
    return;
  }
  const TurnedKeys<T, kVectorWidth<C> / kVectorWidth<T>> keys(p, write, plan.strides);
  write_rows<T, C, kThreads, 1, kOwn>(write, plan, keys, group);
}

}  // namespace

bool fits_writers(const RopeAndCacheParams& p) {
  const bool plain = p.query.bias == nullptr && p.key.bias == nullptr && p.value.bias == nullptr &&
                     p.query.weight == nullptr && p.key.weight == nullptr;
  const auto small = [](int64_t stride) { return stride < (1ll << 32) / 4; };
  if (!plain || !packs_fit(p) || !small(p.query.token_stride) || !small(p.query.head_stride) ||
      !small(p.cos_sin_stride) || p.max_position > INT32_MAX) {
    return false;
  }
  const ReshapeAndCacheParams write = as_write(p);
  if (p.kv.layout == KvLayout::kVllm) return p.kv.block_size % kRun == 0 && pages_aligned(write);
  return p.kv.layout == KvLayout::kNHD && rows_aligned(write);
}

void launch_writers(const RopeAndCacheParams& p, Stream stream) {
  const ReshapeAndCacheParams write = as_write(p);
  const auto bytes = [](int64_t stride, DType dtype) {
    return static_cast<uint32_t>(stride * size_of(dtype));
  };
  // `threads`, `grid`: the writer's.
  const auto run = [&](auto kernel, int threads, dim3 grid, const auto& plan) {
    const int lanes = p.rotary_size / 2 * size_of(p.dtype) / 16;
    QueryBlocks blocks{.storing = static_cast<int>(grid.x),
                       .period = 1,
                       .rows = threads / lanes,
                       .lanes = FastDivisor(lanes),
                       .heads = FastDivisor(p.query.count),
                       .token_stride = bytes(p.query.token_stride, p.dtype),
                       .head_stride = bytes(p.query.head_stride, p.dtype),
                       .angle_stride = bytes(p.cos_sin_stride, p.cos_sin_dtype)};
    grid.x += static_cast<unsigned>(
        ceil_div(ceil_div(p.num_tokens * p.query.count, blocks.rows), int64_t{grid.y} * grid.z));
    // Many tokens: in between, so that one kind's instructions meet the other's transfers.
    if (p.num_tokens > 1024) blocks.period = static_cast<int>(grid.x) / blocks.storing;
    blocks.by_period = FastDivisor(blocks.period);
    launch_kernel(p.op, kernel, grid, dim3(threads), 0, stream, p, write, blocks, lanes, plan);
  };
  const PagesShape pages(write, kRun);
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      if (p.kv.layout == KvLayout::kVllm) {
        run(pages.lanes == kFewChunks ? rope_and_pages_kernel<T, C, kFewChunks, false>
            : pages.lanes == 8        ? rope_and_pages_kernel<T, C, 8, true>
                                      : rope_and_pages_kernel<T, C, 16, true>,
            kRun * pages.lanes, pages.grid, pages.plan);
      } else {
        const RowsShape rows(write, 1);
        const int side_by_side = rows.plan.rows;
        run(rows.threads == 64     ? rope_and_rows_kernel<T, C, 64, 32>
            : rows.threads == 128 ? rope_and_rows_kernel<T, C, 128, 1>
            : side_by_side > 4    ? rope_and_rows_kernel<T, C, 256, 32>
            : side_by_side > 1    ? rope_and_rows_kernel<T, C, 256, 4>
                                  : rope_and_rows_kernel<T, C, 256, 1>,
            rows.threads, rows.grid, rows.plan);
      }
    });
  });
}

}  // namespace vllm_kernels::cuda
