#include "kv_cache/sequence_index.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <unordered_map>

namespace vllm_kernels::kv_cache {
namespace {

TEST(SequenceIndex, AnyInt64IsAKey) {
  SequenceIndex index;
  EXPECT_EQ(index.find(0), SequenceIndex::kAbsent);
  index.erase(0);
  const int64_t keys[] = {0, -1, 1, std::numeric_limits<int64_t>::min(),
                          std::numeric_limits<int64_t>::max()};
  index.reserve(std::size(keys));
  int32_t position = 0;
  for (const int64_t key : keys) index.insert(key, position++);
  position = 0;
  for (const int64_t key : keys) EXPECT_EQ(index.find(key), position++);
  index.clear();
  EXPECT_EQ(index.size(), 0u);
  for (const int64_t key : keys) EXPECT_EQ(index.find(key), SequenceIndex::kAbsent);
}

// Keys from a small range, so that runs of collisions form, close and wrap around the end.
TEST(SequenceIndex, BehavesLikeAMap) {
  std::mt19937_64 random(1);
  for (const int64_t step : {int64_t{1}, int64_t{16}, int64_t{1} << 40}) {
    SequenceIndex index;
    std::unordered_map<int64_t, int32_t> model;
    for (int i = 0; i < 20000; ++i) {
      const int64_t key = static_cast<int64_t>(random() % 64) * step;
      if (random() % 2) {
        index.reserve(1);
        index.insert(key, i);
        model[key] = i;
      } else {
        index.erase(key);
        model.erase(key);
      }
      ASSERT_EQ(index.size(), model.size());
      if (i % 16 == 0) {
        for (int64_t k = 0; k < 64; ++k) {
          const auto found = model.find(k * step);
          ASSERT_EQ(index.find(k * step),
                    found == model.end() ? SequenceIndex::kAbsent : found->second);
        }
      }
    }
  }
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
