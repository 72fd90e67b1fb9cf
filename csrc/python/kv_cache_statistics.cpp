// The manager's Statistics in Python: its counts with their meanings, and a repr. Part of
// bind_kv_cache().
#include <string>

#include "kv_cache/errors.h"
#include "kv_cache/statistics.h"
#include "python/kv_cache.h"

namespace py = pybind11;
using vllm_kernels::kv_cache::concat;
using vllm_kernels::kv_cache::Statistics;

namespace {

struct Count {
  const char* name;
  int64_t Statistics::* value;
  const char* meaning;
};

constexpr Count kCounts[] = {
    {"total_blocks", &Statistics::total_blocks,
     "used_blocks + held_blocks + cached_blocks + free_blocks: all blocks but the null block."},
    {"used_blocks", &Statistics::used_blocks, "Blocks that sequences hold."},
    {"held_blocks", &Statistics::held_blocks,
     "Blocks that a Ledger has: lent to other instances, or for sequences that borrow."},
    {"cached_blocks", &Statistics::cached_blocks,
     "Blocks that no sequence holds, with tokens that a new one may find."},
    {"free_blocks", &Statistics::free_blocks, "Blocks that no sequence holds, empty."},
    {"shared_blocks", &Statistics::shared_blocks, "Used blocks that two or more sequences hold."},
    {"peak_used_blocks", &Statistics::peak_used_blocks, "The most used at any time."},
    {"num_sequences", &Statistics::num_sequences, "Sequences."},
    {"num_swapped_sequences", &Statistics::num_swapped_sequences, "Sequences in host blocks."},
    {"total_host_blocks", &Statistics::total_host_blocks, "Host blocks."},
    {"used_host_blocks", &Statistics::used_host_blocks, "Host blocks that sequences hold."},
    {"num_tokens", &Statistics::num_tokens,
     "Tokens of all sequences that are not swapped; a shared one counts once a sequence. With "
     "shards: of this rank."},
    {"table_entries", &Statistics::table_entries,
     "Blocks of these sequences, shared ones once each: what would be used unshared."},
    {"waste_slots", &Statistics::waste_slots,
     "Slots of used blocks that hold no token of any sequence."},
    {"num_copies", &Statistics::num_copies,
     "Copy-on-write pairs returned since construction or reset()."},
    {"num_evictions", &Statistics::num_evictions,
     "Cached blocks given out anew since construction or reset()."},
    {"queried_tokens", &Statistics::queried_tokens,
     "Tokens that allocate() looked up since construction or reset()."},
    {"hit_tokens", &Statistics::hit_tokens, "Looked-up tokens that were cached."},
};

double hit_rate(const Statistics& self) {
  return self.queried_tokens == 0 ? 0.0
                                  : static_cast<double>(self.hit_tokens) / self.queried_tokens;
}

std::string repr(const Statistics& self) {
  std::string text = "Statistics(";
  for (const Count& count : kCounts) text += concat(count.name, "=", self.*count.value, ", ");
  return concat(text, "hit_rate=", hit_rate(self), ")");
}

}  // namespace

void bind_kv_cache_statistics(py::module_& module) {
  py::class_<Statistics> statistics(module, "Statistics", "A snapshot of the cache in numbers.");
  for (const Count& count : kCounts) {
    statistics.def_readonly(count.name, count.value, count.meaning);
  }
  statistics
      .def_property_readonly("hit_rate", &hit_rate,
                             "hit_tokens / queried_tokens, 0 where there were none.")
      .def("__repr__", &repr);
}
