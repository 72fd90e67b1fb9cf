// What a call of the ledger costs in C++. bench_kv_cache.py compiles and runs it; it prints lines
// of "call<tab>median ns<tab>tenth percentile".
#include "kv_cache/ledger.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "kv_cache/kv_cache_manager.h"

namespace kv = vllm_kernels::kv_cache;

namespace {

constexpr int64_t kInstances = 8, kSequences = 64, kBlocks = 16, kBatches = 400, kCalls = 32;

// Times batches of kCalls calls. prepare() runs before each, and is not timed.
template <typename Prepare, typename Call>
void measure(const char* name, Prepare prepare, Call call) {
  std::vector<double> times;
  for (int64_t batch = 0; batch < kBatches; ++batch) {
    prepare();
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < kCalls; ++i) call(i);
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    times.push_back(time.count() / kCalls);
  }
  std::sort(times.begin(), times.end());
  std::printf("%s\t%.0f\t%.0f\n", name, times[kBatches / 2], times[kBatches / 10]);
}

}  // namespace

int main() {
  std::vector<std::unique_ptr<kv::KVCacheManager>> managers;
  std::vector<kv::KVCacheManager*> pointers;
  for (int64_t i = 0; i < kInstances; ++i) {
    managers.push_back(std::make_unique<kv::KVCacheManager>(4096, 16));
    pointers.push_back(managers.back().get());
  }
  kv::Ledger ledger(pointers);
  managers[0]->allocate(-1, 4096 * 16);  // instance 0 has no block left
  std::vector<kv::InstanceBlock> blocks(kBlocks);
  for (int64_t i = 0; i < kSequences; ++i) {
    for (kv::InstanceBlock& block : blocks) ledger.lend(-1, 0, i, std::span(&block, 1));
  }
  kv::InstanceBlock block;
  kv::BlockMove move;
  const std::span<kv::InstanceBlock> one(&block, 1);
  const auto lend = [&](int64_t i) { ledger.lend(1, 0, i, one); };
  const auto give_back = [&](int64_t i) { ledger.give_back(i, 1); };
  const auto each = [](auto call) {
    for (int64_t i = 0; i < kCalls; ++i) call(i);
  };
  each(lend);
  const auto give_all_back = [&] { each(give_back); };
  measure("lend a block of a named instance", give_all_back, lend);
  measure("lend a block of the freest of 8", give_all_back,
          [&](int64_t i) { ledger.lend(-1, 0, i, one); });
  measure("give a block back", [&] { each(lend); }, give_back);
  measure(
      "lend 16 blocks", [&] { each([&](int64_t i) { ledger.give_back(i, kBlocks); }); },
      [&](int64_t i) { ledger.lend(1, 0, i, blocks); });
  const auto lend_to_new = [&](int64_t i) { ledger.lend(1, 0, 1000 + i, one); };
  const auto free_new = [&](int64_t i) { ledger.free(1000 + i); };
  each(lend_to_new);
  measure("lend a block to a new sequence", [&] { each(free_new); }, lend_to_new);
  measure(
      "free a sequence of one block",
      [&] {
        if (!ledger.contains(1000)) each(lend_to_new);
      },
      free_new);
  measure(
      "recall a block",
      [&] {
        ledger.free(kSequences - 1);
        each([&](int64_t) { lend(kSequences - 1); });
      },
      [&](int64_t) { ledger.recall(1, std::span(&move, 1)); });
  measure("set_reserve", [] {}, [&](int64_t i) { ledger.set_reserve(i % kInstances, 1); });
  ledger.check_integrity();
}
