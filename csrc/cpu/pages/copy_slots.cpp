// copy_slots (ops/pages/copy_slots.h). A task is a few accesses of one cache, for all pairs: it
// reads them into a buffer, then writes them. So no task reads what another one writes.
#include "ops/pages/copy_slots.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int64_t kBufferBytes = 4 * int64_t{kMaxCopiedSlots};

// How the bytes of a token are cut: `chunks` of `bytes` a run, the last of them shorter, and so
// many of these for a task.
struct Cut {
  int64_t bytes, chunks, per_task, tasks;

  Cut(const CopySlotsParams& p, const TokenGeometry& token) {
    const int64_t room = kBufferBytes / p.num_slots / token.element_bytes * token.element_bytes;
    bytes = token.run_bytes < room ? token.run_bytes : room;
    chunks = ceil_div(token.run_bytes, bytes);
    const int64_t fit = kTaskBytes / (p.num_slots * bytes);
    per_task = fit > 1 ? fit : 1;
    tasks = ceil_div(token.runs * chunks, per_task);
  }
};

int64_t tasks_of_a_cache(const CopySlotsParams& p) {
  int64_t most = 0;
  for (int64_t i = 0; i < p.num_caches; ++i) {
    const int64_t tasks = Cut(p, p.caches[i].token).tasks;
    most = tasks > most ? tasks : most;
  }
  return most;
}

Loop loop_of(const CopySlotsParams& p) {
  return {.count = p.num_caches * tasks_of_a_cache(p)};
}

// Visits the pairs that are not skipped: body(bytes of the token at src, at dst).
template <typename Body>
void for_each_pair(const CopySlotsParams& p, const SlotCache& cache, const Body& body) {
  for (int32_t i = 0; i < p.num_slots; ++i) {
    if (p.src[i] < 0 || p.dst[i] < 0) continue;
    const auto at = [&](int64_t slot) {
      return cache.start + slot / p.block_size * cache.token.block_stride +
             slot % p.block_size * cache.token.token_stride;
    };
    body(at(p.src[i]), at(p.dst[i]));
  }
}

// Copies [first, last) of a token's chunks. `Bytes` is their number of bytes, maybe a constant.
template <typename Bytes>
void copy_chunks(const CopySlotsParams& p, const SlotCache& cache, const Cut& cut, Bytes bytes,
                 int64_t first, int64_t last) {
  alignas(64) char buffer[kBufferBytes];
  const TokenGeometry& token = cache.token;
  const auto move_all = [&](bool load) {
    char* at = buffer;
    for_each_pair(p, cache, [&](const char* from, char* to) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t run = i / cut.chunks, begin = (i - run * cut.chunks) * cut.bytes;
        const int64_t offset = run * token.run_stride + begin;
        const int64_t left = token.run_bytes - begin;
        const int64_t size = left < bytes ? left : static_cast<int64_t>(bytes);
        if constexpr (std::is_same_v<Bytes, int64_t>) {
          load ? std::memcpy(at, from + offset, size) : std::memcpy(to + offset, at, size);
        } else {
          load ? std::memcpy(at, from + offset, bytes) : std::memcpy(to + offset, at, bytes);
        }
        at += bytes;
      }
    });
  };
  move_all(true);
  move_all(false);
}

void run(const CopySlotsParams& p, int64_t begin, int64_t end) {
  const int64_t per_cache = tasks_of_a_cache(p);
  for (int64_t task = begin; task < end; ++task) {
    const SlotCache& cache = p.caches[task / per_cache];
    const Cut cut(p, cache.token);
    const int64_t first = task % per_cache * cut.per_task, all = cache.token.runs * cut.chunks;
    const int64_t last = first + cut.per_task < all ? first + cut.per_task : all;
    const auto copy = [&](auto bytes) { copy_chunks(p, cache, cut, bytes, first, last); };
    if (first >= last) continue;
    if (cut.bytes == 2) {  // V of layout vllm
      copy(std::integral_constant<int64_t, 2>());
    } else if (cut.bytes == 1) {
      copy(std::integral_constant<int64_t, 1>());
    } else {
      copy(cut.bytes);
    }
  }
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(CopySlotsParams, loop_of, run)

}  // namespace vllm_kernels::cpu
