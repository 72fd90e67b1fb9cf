// Neighbouring elements of two vectors, parted and joined. Anonymous namespace: see cpu/base/vec.h.
#pragma once
#include "cpu/base/vec.h"

namespace vllm_kernels::cpu {
namespace {

// Two vectors as the even and the odd elements of the 2 * kLanes that follow each other, and back.
inline void split_pairs(Vec low, Vec high, Vec& even, Vec& odd) {
#if defined(__AVX512F__)
  even =
      __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  odd =
      __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
  even = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14);
  odd = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  even = __builtin_shufflevector(low, high, 0, 2, 4, 6);
  odd = __builtin_shufflevector(low, high, 1, 3, 5, 7);
#endif
}
inline void join_pairs(Vec even, Vec odd, Vec& low, Vec& high) {
#if defined(__AVX512F__)
  low = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30,
                                 15, 31);
#elif defined(__AVX2__)
  low = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
  high = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  low = __builtin_shufflevector(even, odd, 0, 4, 1, 5);
  high = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
#endif
}

}  // namespace
}  // namespace vllm_kernels::cpu
