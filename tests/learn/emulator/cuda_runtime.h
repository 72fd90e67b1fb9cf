// Runs CUDA kernels of examples/learn on a CPU. Each CUDA thread is a fiber. Blocks run one after
// the other. The next fiber is drawn at random, so a missing barrier shows as a wrong result.
//
// - Shared memory is filled with NaN before each block.
// - Shuffles, __syncwarp() and the tensor-core functions of ptx.cuh wait for all 32 lanes. A lane
//   that has ended, or is at another of them, is an error.
// - Bulk copies land at a random later time, in a random order.
// - A deadlock is an error.
//
// Not seen: a missing __syncwarp() beside a function that waits for the warp anyway.
//
// tests/learn/emulate.py rewrites kernel<<<...>>>(...) to emulator::launch() and compiles the file.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_bf16.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static __attribute__((section("emulated_shared")))

struct uint2 {
  alignas(8) uint32_t x;
  uint32_t y;
};
struct uint4 {
  alignas(16) uint32_t x;
  uint32_t y, z, w;
};
struct float4 {
  alignas(16) float x;
  float y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaErrorInvalidValue = 1, cudaFuncAttributeMaxDynamicSharedMemorySize = 8;

// All shared variables of the file.
extern "C" char __start_emulated_shared[] __attribute__((weak));
extern "C" char __stop_emulated_shared[] __attribute__((weak));

namespace emulator {

constexpr size_t kStack = 64 << 10, kMaxShared = 227 << 10, kStaticShared = 48 << 10;

struct Warp {
  uint64_t argument[2][32];  // of two successive exchanges
  const char* name[32];      // what each lane waits for
  int arrived = 0, generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 thread;
  Warp* warp;
  int lane;
  bool ended = false;
  std::function<bool()> ready;  // what it waits for
};

struct Barrier {
  int arrivals, pending;
  int64_t bytes = 0;
  int parity = 0;
  void check() {
    if (pending != 0 || bytes != 0) return;
    pending = arrivals;
    parity ^= 1;
  }
};

struct Copy {
  void* to;
  const void* from;
  uint32_t bytes;
  uint64_t* barrier;
};

struct Config {
  dim3 grid, block;
  size_t shared = 0;
  void* stream = nullptr;
};

inline uint32_t random_state = 1;
inline std::string error;
inline Fiber* current = nullptr;
inline dim3 block_index;
inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline int block_arrived, block_generation;
inline std::map<uint64_t*, Barrier> barriers;
inline std::vector<Copy> copies;
inline size_t allowed_shared = kStaticShared;
alignas(1024) inline char dynamic_shared[kMaxShared];

inline uint32_t random_number() {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  return random_state ^= random_state << 5;
}
inline void yield() {
  swapcontext(&current->context, &scheduler);
}
[[noreturn]] inline void fail(const std::string& message) {
  if (error.empty()) error = message;
  for (;;) yield();  // never continued
}
inline void wait_until(std::function<bool()> ready) {
  current->ready = std::move(ready);
  yield();
}

// Waits for all lanes of the warp, and returns what each of them gave.
inline const uint64_t* exchange(const char* name, uint64_t argument) {
  Fiber& self = *current;
  Warp& warp = *self.warp;
  const int generation = warp.generation;
  uint64_t* slots = warp.argument[generation & 1];
  slots[self.lane] = argument;
  warp.name[self.lane] = name;
  if (++warp.arrived == 32) {
    for (const char* other : warp.name) {
      if (std::strcmp(other, name)) fail(std::string("lanes meet in ") + name + " and " + other);
    }
    warp.arrived = 0;
    ++warp.generation;
  }
  wait_until([&warp, generation] { return warp.generation != generation; });
  return slots;
}

inline void land(size_t index) {
  const Copy copy = copies[index];
  copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(index));
  std::memcpy(copy.to, copy.from, copy.bytes);
  Barrier& barrier = barriers.at(copy.barrier);
  barrier.bytes -= copy.bytes;
  barrier.check();
}

inline void run_block(const std::function<void()>& kernel, dim3 block, size_t shared) {
  std::memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
  std::memset(dynamic_shared, 0xff, shared);
  barriers.clear();
  block_arrived = block_generation = 0;
  std::vector<Warp> warps(block.x / 32);
  fibers = std::vector<Fiber>(block.x);
  static const std::function<void()>* running;
  running = &kernel;
  for (unsigned i = 0; i < block.x; ++i) {
    Fiber& fiber = fibers[i];
    fiber.stack.reset(new char[kStack]);
    fiber.thread = dim3(i, 0, 0);
    fiber.warp = &warps[i / 32];
    fiber.lane = static_cast<int>(i % 32);
    fiber.ready = [] { return true; };
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler;
    makecontext(
        &fiber.context,
        +[] {
          (*running)();
          current->ended = true;
        },
        0);
  }
  std::vector<Fiber*> waiting;
  for (Fiber& fiber : fibers) waiting.push_back(&fiber);
  size_t favourite = 0;
  while (!waiting.empty() && error.empty()) {
    if (!copies.empty() && random_number() % 8 == 0) land(random_number() % copies.size());
    // The first that is ready, from a random place on; mostly in one warp, which so runs ahead.
    if (random_number() % 256 == 0) favourite = random_number() % warps.size();
    size_t first = random_number() % waiting.size();
    if (random_number() % 16 != 0) {
      first = 0;
      while (first < waiting.size() - 1 && waiting[first]->warp < &warps[favourite]) ++first;
      first = (first + random_number() % 32) % waiting.size();
    }
    size_t index = 0;
    bool found = false;
    for (size_t i = 0; i < waiting.size() && !found; ++i) {
      index = (first + i) % waiting.size();
      found = waiting[index]->ready();
    }
    if (!found) {
      if (copies.empty()) {
        error = "deadlock";
        break;
      }
      land(random_number() % copies.size());
      continue;
    }
    current = waiting[index];
    swapcontext(&scheduler, &current->context);
    if (current->ended) waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(index));
  }
  if (error.empty() && !copies.empty()) error = "a bulk copy that nobody waited for";
  copies.clear();
}

inline void launch(const Config& config, const std::function<void()>& kernel) {
  if (!error.empty()) return;
  const size_t shared = __stop_emulated_shared - __start_emulated_shared;
  if (config.block.x > 1024 || config.block.x % 32 || config.block.y * config.block.z != 1) {
    error = "block size";
  } else if (config.grid.y > 65535 || config.grid.z > 65535) {
    error = "grid size";
  } else if (config.shared > allowed_shared || config.shared + shared > kMaxShared ||
             shared > kStaticShared) {
    error = "shared memory";
  }
  for (unsigned z = 0; z < config.grid.z; ++z) {
    for (unsigned y = 0; y < config.grid.y; ++y) {
      for (unsigned x = 0; x < config.grid.x && error.empty(); ++x) {
        block_index = dim3(x, y, z);
        run_block(kernel, config.block, config.shared);
      }
    }
  }
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx emulator::block_index

inline void __syncthreads() {
  const int generation = emulator::block_generation;
  size_t live = 0;
  for (const auto& fiber : emulator::fibers) live += !fiber.ended;
  if (live != emulator::fibers.size()) emulator::fail("__syncthreads() after a thread has ended");
  if (++emulator::block_arrived == static_cast<int>(live)) {
    emulator::block_arrived = 0;
    ++emulator::block_generation;
  }
  emulator::wait_until([generation] { return emulator::block_generation != generation; });
}
inline void __syncwarp() {
  emulator::exchange("__syncwarp", 0);
}
inline float __shfl_xor_sync(unsigned mask, float x, int distance) {
  if (mask != 0xffffffffu) emulator::fail("a shuffle of some lanes");
  const int lane = emulator::current->lane;
  const uint64_t* all = emulator::exchange("__shfl_xor_sync", __float_as_uint(x));
  return __uint_as_float(static_cast<uint32_t>(all[lane ^ distance]));
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
using std::max;
using std::min;

template <typename Kernel>
int cudaFuncSetAttribute(Kernel, int, int bytes) {
  if (bytes + (__stop_emulated_shared - __start_emulated_shared) >
      static_cast<std::ptrdiff_t>(emulator::kMaxShared)) {
    return cudaErrorInvalidValue;
  }
  emulator::allowed_shared = std::max(emulator::kStaticShared, static_cast<size_t>(bytes));
  return 0;
}
inline int cudaGetLastError() {
  return emulator::error.empty() ? 0 : 719;
}

extern "C" inline __attribute__((used)) void emulator_seed(unsigned seed) {
  emulator::random_state = seed * 2654435761u + 1;
  emulator::error.clear();
}
extern "C" inline __attribute__((used)) const char* emulator_error() {
  return emulator::error.c_str();
}
