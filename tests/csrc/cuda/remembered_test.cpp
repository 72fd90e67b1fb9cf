// Remembered, as tensor_maps.cu uses it: the keys are numbers of a tensor map, the values count the
// calls that made them.
#include "cuda/base/remembered.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

namespace vllm_kernels::cuda {
namespace {

struct Key {
  const void* base;
  uint64_t sizes[2];
  uint32_t box;
  uint32_t dtype;
};

constexpr size_t kSets = 8, kWays = 4;
using Values = Remembered<Key, int, kSets, kWays>;

struct Counter {
  int made = 0;
  int operator()(const Key&) { return ++made; }
};

Key key_at(uintptr_t address) {
  return {.base = reinterpret_cast<void*>(address), .sizes = {64, 16}, .box = 32, .dtype = 1};
}

TEST(Remembered, MakesAValueOnce) {
  Values values;
  Counter make;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(values.of(key_at(256), std::ref(make)), 1);
  EXPECT_EQ(make.made, 1);
}

TEST(Remembered, EveryFieldCounts) {
  Values values;
  Counter make;
  const Key first = key_at(256);
  EXPECT_EQ(values.of(first, std::ref(make)), 1);
  std::vector<Key> others(5, first);
  others[0].base = reinterpret_cast<void*>(512);
  others[1].sizes[0] = 128;
  others[2].sizes[1] = 17;
  others[3].box = 64;
  others[4].dtype = 2;
  int expected = 1;
  for (const Key& other : others) EXPECT_EQ(values.of(other, std::ref(make)), ++expected);
  EXPECT_EQ(make.made, 6);
}

// One bit anywhere, and whichever set it lands in: a value is only given to its own key.
TEST(Remembered, EveryBitCounts) {
  Values values;
  const auto sum = [](const Key& key) {
    unsigned char bytes[sizeof(Key)];
    std::memcpy(bytes, &key, sizeof(Key));
    unsigned sum = 0;
    for (const unsigned char byte : bytes) sum = sum * 31 + byte;
    return static_cast<int>(sum);
  };
  for (int round = 0; round < 2; ++round) {
    for (size_t bit = 0; bit < sizeof(Key) * 8; ++bit) {
      Key key = key_at(256);
      unsigned char bytes[sizeof(Key)];
      std::memcpy(bytes, &key, sizeof(Key));
      bytes[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
      std::memcpy(&key, bytes, sizeof(Key));
      EXPECT_EQ(values.of(key, sum), sum(key));
    }
  }
}

// A null base is a key like any other, also before anything is remembered.
TEST(Remembered, NullIsAKey) {
  Values values;
  Counter make;
  EXPECT_EQ(values.of(Key{}, std::ref(make)), 1);
  EXPECT_EQ(values.of(Key{}, std::ref(make)), 1);
}

TEST(Remembered, KeepsTheLatestAndNoMore) {
  Values values;
  Counter make;
  constexpr int kMany = 100 * kSets * kWays;
  for (int i = 0; i < kMany; ++i) values.of(key_at(4096 * i), std::ref(make));
  EXPECT_EQ(make.made, kMany);
  values.of(key_at(4096 * (kMany - 1)), std::ref(make));
  EXPECT_EQ(make.made, kMany) << "the latest is remembered";
  int found = 0;
  for (int i = 0; i < kMany; ++i) {
    const int before = make.made;
    Values copy = values;
    copy.of(key_at(4096 * i), std::ref(make));
    found += make.made == before;
  }
  EXPECT_LE(found, static_cast<int>(kSets * kWays));
  EXPECT_GE(found, static_cast<int>(kSets * kWays) / 2);
}

// As many keys as ways have room, whichever set they are in.
TEST(Remembered, AFewKeysStay) {
  Values values;
  Counter make;
  for (int round = 0; round < 10; ++round) {
    for (size_t i = 0; i < kWays; ++i) values.of(key_at(64 * i), std::ref(make));
  }
  EXPECT_EQ(make.made, static_cast<int>(kWays));
}

TEST(Remembered, AFailureChangesNothing) {
  Values values;
  Counter make;
  const auto fail = [](const Key&) -> int { throw std::runtime_error("no"); };
  EXPECT_THROW(values.of(key_at(256), fail), std::runtime_error);
  EXPECT_EQ(values.of(key_at(256), std::ref(make)), 1);
  EXPECT_EQ(values.of(key_at(256), fail), 1);
}

// As tensor_map() has it. ThreadSanitizer runs this, too.
TEST(Remembered, EachThreadHasItsOwn) {
  const auto count = [] {
    static thread_local Values values;
    Counter make;
    for (int i = 0; i < 1000; ++i) values.of(key_at(64 * (i % 4)), std::ref(make));
    return make.made;
  };
  std::vector<int> made(8);
  std::vector<std::thread> threads;
  for (int& one : made) threads.emplace_back([&] { one = count(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, std::vector<int>(8, 4));
}

}  // namespace
}  // namespace vllm_kernels::cuda
