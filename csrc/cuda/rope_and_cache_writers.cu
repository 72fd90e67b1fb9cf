#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/rope_rows.cuh"
#include "cuda/write_pages.cuh"
#include "cuda/write_rows.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kRun = 16;  // tokens of a block that stores

// Where angles lie.
struct Angles {
  const int64_t* positions;  // [num_tokens]
  const void* cos_sin_cache;
  uint32_t stride;        // from position to position, bytes
  uint32_t max_position;  // below 2^31
  int32_t half;           // pairs
  DType dtype;
  bool is_neox;

  __device__ __forceinline__ bool known(int64_t position) const {
    return static_cast<uint64_t>(position) < max_position;
  }
  template <int kWidth>
  __device__ __forceinline__ void load(int64_t position, int pair, float (&cosines)[kWidth],
                                       float (&sines)[kWidth]) const {
    const auto* row =
        stepped(static_cast<const char*>(cos_sin_cache), static_cast<uint32_t>(position), stride);
    load_angles(row, dtype, pair, pair + half, cosines, sines);
  }
};

// Keys turned by their tokens' positions on the way. In Neox style the other half of a pair is
// another thread's: loaded here as well, from the same line.
template <typename T, int kVectors>
class TurnedKeys {
 public:
  static constexpr int kLater = 8;
  static constexpr bool kByHead = true;

  TurnedKeys() = default;
  __device__ __forceinline__ TurnedKeys(const Angles& angles, const CacheWrite& write)
      : angles_(&angles), given_(write) {}

  __device__ __forceinline__ void prefetch(int token, int head, int d) const {
    given_.prefetch(token, head, d);
    prefetch_l2(angles_->positions + token);
  }
  __device__ __forceinline__ void load(int token, int head, int d, Vector<T> (&k)[kVectors]) {
    position_ = angles_->positions[token];
    given_.load(token, head, d, k);
    if (!angles_->is_neox) return;
    const int half = angles_->half;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = d + i * kWidth;
      other_[i] = *given_.at(token, head, at < half ? at + half : at < 2 * half ? at - half : at);
    }
  }
  __device__ __forceinline__ void turn(int d, Vector<T> (&k)[kVectors]) const {
    if (!known()) return;
    const int half = angles_->half;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = d + i * kWidth;
      if (at >= 2 * half) continue;
      if (angles_->is_neox) {
        const bool second = at >= half;
        float own[kWidth], other[kWidth], cosines[kWidth], sines[kWidth];
        angles_->load(position_, second ? at - half : at, cosines, sines);
        widen(as_pack(k[i]), own);
        widen(as_pack(other_[i]), other);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          own[j] = turn_one(own[j], other[j], cosines[j], second ? sines[j] : -sines[j]);
        }
        k[i] = bits_as<Vector<T>>(narrow<T>(own));
      } else {
        constexpr int kPairs = kWidth / 2;
        float all[kWidth], values[2][kPairs], cosines[kPairs], sines[kPairs];
        angles_->load(position_, at / 2, cosines, sines);
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
  __device__ __forceinline__ bool known() const { return angles_->known(position_); }

 private:
  static constexpr int kWidth = kVectorWidth<T>;
  __device__ __forceinline__ static Pack16<T> as_pack(const Vector<T>& x) {
    return bits_as<Pack16<T>>(x);
  }

  const Angles* angles_;
  GivenKeys<T, kVectors> given_;
  Vector<T> other_[kVectors];
  int64_t position_;
};

// Of a grid's rows every period-th block stores, until there are `storing`; the others turn queries
// in place, `rows` heads each.
struct Queries {
  Angles angles;
  void* data;
  uint32_t token_stride, head_stride;  // bytes
  int32_t num_tokens;
  int32_t heads;  // of a token
  FastDivisor by_heads;
  int32_t rows;
  int32_t lanes;  // of a head: 16 bytes of either side of its pairs each
  FastDivisor by_lanes;
  int32_t storing;
  int32_t period;
  FastDivisor by_period;

  // This block's number among those that store, or -1.
  __device__ __forceinline__ int group() const {
    const int nth = by_period.divide(blockIdx.x);
    return nth < storing && static_cast<int>(blockIdx.x) == nth * period ? nth : -1;
  }
  // Its number among the others of its row.
  __device__ __forceinline__ int other() const {
    return blockIdx.x - min(static_cast<int>(by_period.divide(blockIdx.x)) + 1, storing);
  }
};

template <typename T>
__device__ __forceinline__ void turn_query(const Queries& q) {
  constexpr int kWidth = kVectorWidth<T>;
  const int thread = threadIdx.x;
  const int block = q.other() + (gridDim.x - q.storing) * (blockIdx.y + gridDim.y * blockIdx.z);
  const int within = q.by_lanes.divide(thread);
  const int row = block * q.rows + within;
  if (within >= q.rows || row >= q.num_tokens * q.heads) return;
  const Angles& angles = q.angles;
  const int token = q.by_heads.divide(row), head = row - token * q.heads;
  const int pair = (thread - within * q.lanes) * kWidth;
  T* start = stepped(stepped(static_cast<T*>(q.data), token, q.token_stride), head, q.head_stride) +
             (angles.is_neox ? pair : 2 * pair);
  auto* first = reinterpret_cast<Pack16<T>*>(start);
  auto* second = reinterpret_cast<Pack16<T>*>(start + (angles.is_neox ? angles.half : kWidth));
  if (q.num_tokens <= 1024) {  // few: under way before the wait
    prefetch_l2(angles.positions + token);
    prefetch_l2(first);
    prefetch_l2(second);
  }
  wait_for_predecessor();
  const int64_t position = angles.positions[token];
  const Pack16<T> packs[2] = {*first, *second};
  if (!angles.known(position)) return;  // the token stays as it is
  float cosines[kWidth], sines[kWidth], values[2][kWidth];
  angles.load(position, pair, cosines, sines);
  widen(packs[0], values[0]);
  widen(packs[1], values[1]);
  angles.is_neox ? turn_pairs<true>(values, cosines, sines)
                 : turn_pairs<false>(values, cosines, sines);
  *first = narrow<T>(values[0]);
  *second = narrow<T>(values[1]);
}

template <typename T, typename C, int kLanes, bool kMany>
__global__ void __launch_bounds__(kRun* kLanes,
                                  std::min(kResident<T, C, kMany>, kIs8Bit<C> ? 2 : 4) * 16 /
                                      kLanes)
    rope_and_pages_kernel(Queries queries, PagesWrite write) {
  launch_dependents();
  const int group = queries.group();
  if (group < 0) return turn_query<T>(queries);
  const TurnedKeys<T, kVectorWidth<C> / kVectorWidth<T>> keys(queries.angles, write);
  write_pages<T, C, kRun, kLanes, kMany>(write, keys, group);
}

template <typename T, typename C, int kThreads, int kOwn>
__global__ void __launch_bounds__(kThreads, (kIs8Bit<C> ? 512
                                             : kOwn > 1 ? 1024
                                                        : 1280) /
                                                kThreads)
    rope_and_rows_kernel(Queries queries, RowsWrite write) {
  launch_dependents();
  const int group = queries.group();
  if (group < 0) return turn_query<T>(queries);
  const TurnedKeys<T, kVectorWidth<C> / kVectorWidth<T>> keys(queries.angles, write);
  write_rows<T, C, kThreads, 1, kOwn>(write, keys, group);
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
    Queries queries{.angles = {.positions = p.positions,
                               .cos_sin_cache = p.cos_sin_cache,
                               .stride = bytes(p.cos_sin_stride, p.cos_sin_dtype),
                               .max_position = static_cast<uint32_t>(p.max_position),
                               .half = p.rotary_size / 2,
                               .dtype = p.cos_sin_dtype,
                               .is_neox = p.is_neox},
                    .data = p.query.data,
                    .token_stride = bytes(p.query.token_stride, p.dtype),
                    .head_stride = bytes(p.query.head_stride, p.dtype),
                    .num_tokens = static_cast<int32_t>(p.num_tokens),
                    .heads = p.query.count,
                    .by_heads = FastDivisor(p.query.count),
                    .rows = threads / lanes,
                    .lanes = lanes,
                    .by_lanes = FastDivisor(lanes),
                    .storing = static_cast<int32_t>(grid.x),
                    .period = 1};
    grid.x += static_cast<unsigned>(
        ceil_div(ceil_div(p.num_tokens * p.query.count, queries.rows), int64_t{grid.y} * grid.z));
    // Many tokens: in between, so that one kind's instructions meet the other's transfers.
    if (p.num_tokens > 1024) queries.period = static_cast<int32_t>(grid.x) / queries.storing;
    queries.by_period = FastDivisor(queries.period);
    launch_kernel(p.op, kernel, grid, dim3(threads), 0, stream, queries, plan);
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
            kRun * pages.lanes, pages.grid, pages.write);
      } else {
        const RowsShape rows(write, 0);
        run(rows.threads == 64    ? rope_and_rows_kernel<T, C, 64, 32>
            : rows.threads == 128 ? rope_and_rows_kernel<T, C, 128, 1>
                                  : rope_and_rows_kernel<T, C, 256, 1>,
            rows.threads, rows.grid, rows.write);
      }
    });
  });
}

}  // namespace vllm_kernels::cuda
