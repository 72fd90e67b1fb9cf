// Why decode attention in bfloat16 stays below a read on a Zen 3 core: time of one tile (8 pages of
// 4 KiB of K, then of V) read, multiplied, and both.
//
//   g++ -O2 -std=c++20 -march=x86-64-v3 -pthread overlap.cpp -o overlap && ./overlap [threads]
//
// The arithmetic is that of csrc/cpu/attention/page_dot.h with 4 heads: a vector of K or V is
// upcast to two, and each is multiplied for 4 heads, 16384 multiply-adds a tile. While the pages of
// one side are multiplied, those of the other are prefetched, one line of each page at a time.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

constexpr long kPages = 65536, kTile = 8, kPageBytes = 4096, kLines = 64;
using Page = const char*;

alignas(32) float weights[8 * kTile * 8];  // [page][part][head][lane]

inline void accumulate(__m256& sum, __m256 a, __m256 b) {  // in the order of the source
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}

// 64 bytes of a page for 4 heads.
inline void multiply(Page line, const float* weight, __m256 (&sums)[4][2]) {
  const __m256i odd = _mm256_set1_epi32(0xffff0000);
  __m256 parts[2][2];
  for (int i = 0; i < 2; ++i) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line) + i);
    parts[i][0] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    parts[i][1] = _mm256_castsi256_ps(_mm256_and_si256(words, odd));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m256 w = _mm256_load_ps(weight + i * 8);
    accumulate(sums[i & 3][0], parts[0][i >> 2], w);
    accumulate(sums[i & 3][1], parts[1][i >> 2], w);
  }
}

inline float fold(const __m256 (&sums)[4][2]) {
  __m256 all = _mm256_setzero_ps();
#pragma GCC unroll 4
  for (int head = 0; head < 4; ++head) all += sums[head][0] + sums[head][1];
  return all[0];
}

enum Mode { kRead, kMultiplyCached, kMultiplyCachedAndPrefetch, kMultiply };

// 8 pages from `data`, a line of each page in turn; `next`: the pages to prefetch.
template <Mode mode>
float side(const Page* data, const Page* next) {
  float result = 0;
  for (long line = 0; line < kLines; ++line) {
    __m256 sums[4][2] = {};
    for (long page = 0; page < kTile; ++page) {
      if (mode != kMultiplyCached) _mm_prefetch(next[page] + line * 64, _MM_HINT_T1);
      if (mode == kRead) {
        asm volatile("vmovdqa %0, %%ymm0" : : "m"(data[page][line * 64]) : "xmm0");
      } else {
        multiply(data[page] + line * 64, weights + page * 64, sums);
      }
    }
    if (mode != kRead) result += fold(sums);
  }
  return result;
}

template <Mode mode>
void run(const Page* pages, long tiles) {
  alignas(4096) char cached[2 * kPageBytes] = {};  // the 8 pages' stand-in in the first-level cache
  Page near[kTile];
  for (long i = 0; i < kTile; ++i) near[i] = cached + i % 2 * kPageBytes;
  float result = 0;
  for (long i = 0; i < 2 * tiles - 1; ++i) {
    const bool own = mode == kRead || mode == kMultiply;
    result += side<mode>(own ? pages + i * kTile : near, pages + (i + 1) * kTile);
  }
  asm volatile("" : : "x"(result));
}

int main(int count, char** arguments) {
  const long threads = count > 1 ? atol(arguments[1]) : 1;
  auto* memory = static_cast<char*>(mmap(nullptr, kPages * kPageBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::vector<Page> pages;
  for (long i = 0; i < kPages; ++i) {
    for (long at = 0; at < kPageBytes; ++at) memory[i * kPageBytes + at] = 0x3f;
    pages.push_back(memory + i * kPageBytes);
  }
  std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
  std::fill(std::begin(weights), std::end(weights), 1e-3f);
  const struct {
    const char* name;
    void (*run)(const Page*, long);
  } modes[] = {{"read", run<kRead>},
               {"multiply what the first-level cache has", run<kMultiplyCached>},
               {"the same, and prefetch", run<kMultiplyCachedAndPrefetch>},
               {"multiply what was prefetched", run<kMultiply>}};
  double best[4] = {1e9, 1e9, 1e9, 1e9};
  const long tiles = kPages / threads / (2 * kTile);
  for (int round = 0; round < 9; ++round) {
    for (int mode = 0; mode < 4; ++mode) {
      const auto begin = std::chrono::steady_clock::now();
      std::vector<std::thread> workers;
      for (long i = 0; i < threads; ++i) {
        workers.emplace_back(modes[mode].run, pages.data() + kPages / threads * i, tiles);
      }
      for (auto& worker : workers) worker.join();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      best[mode] = std::min(best[mode], taken.count());
    }
  }
  for (int mode = 0; mode < 4; ++mode) {
    printf("%-40s %5.2f us a tile, %5.1f GB/s\n", modes[mode].name, best[mode] / tiles * 1e6,
           kPages * kPageBytes / best[mode] / 1e9);
  }
}
