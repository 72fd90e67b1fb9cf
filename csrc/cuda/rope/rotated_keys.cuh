// The source of keys that rope_and_cache gives to the cache writers' bodies. GivenKeys of
// cuda/cache/kv_writer.cuh is the one without rotation.
#pragma once
#include <cstdint>

#include "cuda/base/prefetch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/cache/kv_writer.cuh"
#include "cuda/rope/rope_queries.cuh"

namespace vllm_kernels::cuda {

// Rotates keys by the positions of their tokens. In Neox style another thread has the other side of
// a pair. This thread loads it as well, from the same cache line.
template <typename T, int kVectors, typename A = void>
class RotatedKeys {
 public:
  static constexpr bool kByHead = true;

  RotatedKeys() = default;
  __device__ __forceinline__ RotatedKeys(const Angles& angles, const CacheWrite& write)
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
  __device__ __forceinline__ void rotate(int d, Vector<T> (&k)[kVectors]) const {
    if (!valid()) return;
    const int half = angles_->half;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = d + i * kWidth;
      if (at >= 2 * half) continue;
      if (angles_->is_neox) {
        const bool second = at >= half;
        float own[kWidth], other[kWidth], cosines[kWidth], sines[kWidth];
        angles_->template load<A>(position_, second ? at - half : at, cosines, sines);
        upcast(as_vec(k[i]), own);
        upcast(as_vec(other_[i]), other);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          own[j] = rotate_one(own[j], other[j], cosines[j], second ? sines[j] : -sines[j]);
        }
        k[i] = bits_as<Vector<T>>(downcast<T>(own));
      } else {
        constexpr int kPairs = kWidth / 2;
        float all[kWidth], values[2][kPairs], cosines[kPairs], sines[kPairs];
        angles_->template load<A>(position_, at / 2, cosines, sines);
        upcast(as_vec(k[i]), all);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[j / kPairs][j % kPairs] = all[j];
        rotate_pairs<false>(values, cosines, sines);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) all[j] = values[j / kPairs][j % kPairs];
        k[i] = bits_as<Vector<T>>(downcast<T>(all));
      }
    }
  }
  // Whether the position is valid.
  __device__ __forceinline__ bool valid() const { return angles_->known(position_); }

 private:
  static constexpr int kWidth = kVecWidth<T>;
  __device__ __forceinline__ static Vec16<T> as_vec(const Vector<T>& x) {
    return bits_as<Vec16<T>>(x);
  }

  const Angles* angles_;
  GivenKeys<T, kVectors> given_;
  Vector<T> other_[kVectors];
  int64_t position_;
};

}  // namespace vllm_kernels::cuda
