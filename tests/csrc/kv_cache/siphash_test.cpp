// The hash against values that OpenSSL 3 gives for the reference's key 00 01 .. 0f and messages
// 00 01 02 ...: openssl mac -macopt hexkey:0001..0f -macopt size:16 -macopt c-rounds:1 -macopt
// d-rounds:3 -in FILE SIPHASH
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
      {0, "e77ebcb22788a5befd62db6add303001"},   {1, "fc6f370460d3eda85e0573cc2b2ff063"},
      {7, "1084b923f2aae0c3a62f2ec80848ab77"},   {8, "aa12fee1d5e3dab4724f16ab35f9c799"},
      {15, "c17e5505b2bd526c2921cdec1e7e0109"},  {16, "d0a8d95715518eebb513b0f83d9e1793"},
      {63, "4c5800e34efe426f079f6b0aa75260ad"},  {64, "1253def24b4aa5364ec8a759ba6a66c2"},
      {80, "c84c3733beccc694066a271a4c4a73f0"},  {96, "b427cf98051bafe1efcd679ca30e0267"},
      {200, "59301d38dad5fb4a7d555582d6b70ee6"},
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
