// One head in the registers of neighbouring lanes, between the QKV GEMM and attention: bias, RMS
// norm, rotation. A lane holds kVecPairs pairs of Vecs (HeadVecPairs, HeadVecs). Within the rotated
// elements a pair holds the Vecs that are rotated together. Past them it holds two consecutive
// Vecs.
#pragma once
#include <cstdint>

#include "cuda/base/prefetch.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/base/types.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/norm/rms_norm_rows.cuh"

namespace vllm_kernels::cuda {

// Loads kWidth cosines from element `cosine` on, and kWidth sines from element `sine` on. `base` is
// an array of any floating dtype.
template <int kWidth>
__device__ __forceinline__ void load_angles(const void* base, DType dtype, int64_t cosine,
                                            int64_t sine, float (&cosines)[kWidth],
                                            float (&sines)[kWidth]) {
  const auto load = [&](auto tag) {
    using C = decltype(tag);
    // Both loads are issued before the first is used.
    const auto* elements = static_cast<const C*>(base);
    const auto first = *reinterpret_cast<const Vec<C, kWidth>*>(elements + cosine);
    const auto second = *reinterpret_cast<const Vec<C, kWidth>*>(elements + sine);
    upcast(first, cosines);
    upcast(second, sines);
  };
  if (dtype == DType::kFloat32) {
    load(float{});
  } else if (dtype == DType::kBFloat16) {
    load(BFloat16{});
  } else {
    load(Half{});
  }
}

// Rotates one element of a pair; `sine` is negative for the first element. All kernels call it, so
// all round alike.
__device__ __forceinline__ float rotate_one(float own, float other, float cosine, float sine) {
  return fmaf(own, cosine, other * sine);
}

// Rotates the kWidth pairs of two Vecs. Neox: pair j is element j of both Vecs. GPT-J: it is
// elements 2j and 2j + 1 of the two Vecs in sequence.
template <bool kNeox, int kWidth>
__device__ __forceinline__ void rotate_pairs(float (&values)[2][kWidth],
                                             const float (&cosines)[kWidth],
                                             const float (&sines)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    constexpr int kNext = kNeox ? kWidth : 1;  // from a pair's first element to its second
    const int i = kNeox ? j : 2 * j;
    float& x = values[i / kWidth][i % kWidth];
    float& y = values[(i + kNext) / kWidth][(i + kNext) % kWidth];
    const float rotated = rotate_one(x, y, cosines[j], -sines[j]);
    y = rotate_one(y, x, cosines[j], sines[j]);
    x = rotated;
  }
}

// The same, for Vecs. The caller branches on is_neox first. Values converted before that branch
// would hold registers across it.
template <bool kNeox, typename T, typename A, int kWidth>
__device__ __forceinline__ void rotate_vecs(Vec<T, kWidth> (&vecs)[2],
                                            const Vec<A, kWidth>& cosines,
                                            const Vec<A, kWidth>& sines) {
  float values[2][kWidth], float_cosines[kWidth], float_sines[kWidth];
  upcast(cosines, float_cosines);
  upcast(sines, float_sines);
  upcast(vecs[0], values[0]);
  upcast(vecs[1], values[1]);
  rotate_pairs<kNeox>(values, float_cosines, float_sines);
  vecs[0] = downcast<T>(values[0]);
  vecs[1] = downcast<T>(values[1]);
}

// The positions of a lane's Vec pairs in the head. Pair i is the head's Vec pair lane + i * lanes.
template <int kWidth, int kVecPairs>
struct HeadVecPairs {
  int offset[kVecPairs][2];  // elements from the head's start; -1: none
  int pair[kVecPairs];       // index of its first cosine; -1: not rotated

  __device__ __forceinline__ HeadVecPairs(int head_size, int rotary_size, bool is_neox, int lane,
                                          int lanes, bool inside) {
    const int half = rotary_size / 2;
#pragma unroll
    for (int i = 0; i < kVecPairs; ++i) {
      const int first = (lane + i * lanes) * kWidth;  // index of the first pair
      const bool rotated = first < half;
      pair[i] = rotated && inside ? first : -1;
      offset[i][0] = rotated && is_neox ? first : 2 * first;
      offset[i][1] = rotated && is_neox ? half + first : 2 * first + kWidth;
#pragma unroll
      for (int& d : offset[i]) {
        if (!inside || d >= head_size) d = -1;
      }
    }
  }
};

// The cosines and sines of a lane's pairs, as they are stored: type A. For kWidth == 1 the stored
// type is known at run time only, and they are float.
template <typename A, int kWidth, int kVecPairs>
struct HeadAngles {
  Vec<A, kWidth> cosines[kVecPairs];
  Vec<A, kWidth> sines[kVecPairs];

  // `row` is the index of the position's first cosine; its sines start `half` later.
  __device__ __forceinline__ void load(const HeadVecPairs<kWidth, kVecPairs>& vec_pairs,
                                       const void* cos_sin, DType dtype, int64_t row, int half) {
#pragma unroll
    for (int i = 0; i < kVecPairs; ++i) {
      if (vec_pairs.pair[i] < 0) continue;
      const int64_t first = row + vec_pairs.pair[i];
      if constexpr (kWidth == 1) {
        float cosine[1], sine[1];
        load_angles(cos_sin, dtype, first, first + half, cosine, sine);
        cosines[i] = downcast<float>(cosine);
        sines[i] = downcast<float>(sine);
      } else {
        const A* start = static_cast<const A*>(cos_sin) + first;
        cosines[i] = *reinterpret_cast<const Vec<A, kWidth>*>(start);
        sines[i] = *reinterpret_cast<const Vec<A, kWidth>*>(start + half);
      }
    }
  }
};

template <typename T, int kWidth, int kVecPairs>
struct HeadVecs {
  using VecPairs = HeadVecPairs<kWidth, kVecPairs>;
  Vec<T, kWidth> vecs[kVecPairs][2];  // zero where the head has no Vec

  // Calls body(vec, element of the head) for every Vec of the head.
  template <typename Body>
  __device__ __forceinline__ void each(const VecPairs& vec_pairs, Body&& body) {
#pragma unroll
    for (int i = 0; i < kVecPairs; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (vec_pairs.offset[i][half] >= 0) body(vecs[i][half], vec_pairs.offset[i][half]);
      }
    }
  }

  __device__ __forceinline__ void prefetch(const VecPairs& vec_pairs, const T* row) {
#pragma unroll
    for (int i = 0; i < kVecPairs; ++i) {
#pragma unroll
      for (int d : vec_pairs.offset[i]) {
        if (d >= 0) prefetch_l2(row + d);
      }
    }
  }
  __device__ __forceinline__ void load(const VecPairs& vec_pairs, const T* row) {
#pragma unroll
    for (int i = 0; i < kVecPairs; ++i) vecs[i][0] = vecs[i][1] = {};
    each(vec_pairs, [&](Vec<T, kWidth>& vec, int d) { vec = at(row, d); });
  }
  __device__ __forceinline__ void store(const VecPairs& vec_pairs, T* row) {
    each(vec_pairs, [&](const Vec<T, kWidth>& vec, int d) {
      *reinterpret_cast<Vec<T, kWidth>*>(row + d) = vec;
    });
  }
  __device__ __forceinline__ void add(const VecPairs& vec_pairs, const T* bias) {
    each(vec_pairs, [&](Vec<T, kWidth>& vec, int d) { vec = vec + at(bias, d); });
  }

  // 1 / sqrt(mean square + epsilon) of the head that `lanes` neighbouring lanes hold. All lanes of
  // the warp call it.
  __device__ __forceinline__ float inverse_root(int head_size, int lanes, float epsilon) const {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecPairs; ++i) {
      square += sum_of_squares(vecs[i][0]) + sum_of_squares(vecs[i][1]);
    }
    return cuda::inverse_root(lanes_sum(square, lanes), __frcp_rn(head_size), epsilon);
  }
  __device__ __forceinline__ void norm(const VecPairs& vec_pairs, const T* weight, float inverse) {
    each(vec_pairs, [&](Vec<T, kWidth>& vec, int d) { vec = normed(vec, inverse, at(weight, d)); });
  }

  template <typename A>
  __device__ __forceinline__ void rotate(const VecPairs& vec_pairs,
                                         const HeadAngles<A, kWidth, kVecPairs>& angles,
                                         bool is_neox) {
#pragma unroll
    for (int i = 0; i < kVecPairs; ++i) {
      if (vec_pairs.pair[i] < 0) continue;
      float values[2][kWidth], cosines[kWidth], sines[kWidth];
      upcast(vecs[i][0], values[0]);
      upcast(vecs[i][1], values[1]);
      upcast(angles.cosines[i], cosines);
      upcast(angles.sines[i], sines);
      if (is_neox) {
        rotate_pairs<true>(values, cosines, sines);
      } else {
        rotate_pairs<false>(values, cosines, sines);
      }
      vecs[i][0] = downcast<T>(values[0]);
      vecs[i][1] = downcast<T>(values[1]);
    }
  }

 private:
  __device__ __forceinline__ static Vec<T, kWidth> at(const T* row, int d) {
    return *reinterpret_cast<const Vec<T, kWidth>*>(row + d);
  }
};

}  // namespace vllm_kernels::cuda
