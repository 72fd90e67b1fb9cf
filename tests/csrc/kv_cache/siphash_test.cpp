// The hash against values that OpenSSL 3 gives for the reference's key 00 01 .. 0f and messages
// 00 01 02 ...: openssl mac -macopt hexkey:0001..0f -macopt size:16 -in FILE SIPHASH
#include "kv_cache/siphash.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace vllm_kernels::kv_cache {
namespace {

std::string hex(const Hash& hash) {
  std::string text;
  std::array<char, 3> digits;
  const auto* bytes = reinterpret_cast<const uint8_t*>(&hash);
  for (size_t i = 0; i < sizeof hash; ++i) {
    std::snprintf(digits.data(), digits.size(), "%02x", bytes[i]);
    text += digits.data();
  }
  return text;
}

TEST(SipHash, EqualsOpenSSL) {
  std::array<uint8_t, 16> key;
  std::vector<uint8_t> message(200);
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(i);
  for (size_t i = 0; i < message.size(); ++i) message[i] = static_cast<uint8_t>(i);
  const SipHash sip(key);
  const std::vector<std::pair<size_t, const char*>> expected = {
      {0, "a3817f04ba25a8e66df67214c7550293"},   {1, "da87c1d86b99af44347659119b22fc45"},
      {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},   {8, "3b62a9ba6258f5610f83e264f31497b4"},
      {15, "5493e99933b0a8117e08ec0f97cfc3d9"},  {16, "6ee2a4ca67b054bbfd3315bf85230577"},
      {63, "5150d1772f50834a503e069a973fbd7c"},  {64, "1eaf077dc0d4cd3f8cad4d383658a74b"},
      {80, "d2c76ae17a4370f858fba4795a0df822"},  {96, "e79731444673d4420110d764da2768ca"},
      {200, "7c5853f4ed12ff9d836a79bc4047022d"},
  };
  for (const auto& [size, digest] : expected) {
    EXPECT_EQ(hex(sip(message.data(), size)), digest) << size << " bytes";
  }
}

TEST(SipHash, DependsOnTheKey) {
  const std::vector<uint8_t> message(80, 1);
  std::array<uint8_t, 16> key{};
  const Hash before = SipHash(key)(message.data(), message.size());
  key[15] = 1;
  EXPECT_FALSE(SipHash(key)(message.data(), message.size()) == before);
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
