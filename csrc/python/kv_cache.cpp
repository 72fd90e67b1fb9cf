// The KV-cache manager in Python. Each binding converts its arguments with the GIL, and releases
// the GIL for the call itself. vllm_kernels/kv_cache documents the methods and wraps them.
#include "python/kv_cache.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "python/kv_cache_arguments.h"
#include "python/released_gil.h"

namespace py = pybind11;

namespace vllm_kernels::kv_cache {
namespace {

using ReleaseGil = py::call_guard<ReleasedGil>;

// --- results and calls ---

// Room for `size` copy-on-write pairs, allocated before the manager changes. keep() cuts it to the
// actual number without allocating, so that no error can lose a pair.
class CopyPairs {
 public:
  explicit CopyPairs(size_t size) : array_({static_cast<py::ssize_t>(size), py::ssize_t{2}}) {
    static_assert(sizeof(BlockCopy) == 2 * sizeof(int64_t));
    room_ = {reinterpret_cast<BlockCopy*>(array_.mutable_data()), size};
  }

  std::span<BlockCopy> room() const { return room_; }

  // The array has no other owner yet, so its first dimension can be shortened in place.
  py::array keep(int64_t size) && {
    py::detail::array_proxy(array_.ptr())->dimensions[0] = static_cast<py::ssize_t>(size);
    return std::move(array_);
  }

 private:
  Int64Array array_;
  std::span<BlockCopy> room_;
};

// Runs `call(room)` without the GIL. The call writes pairs to the room and returns their number.
template <typename Call>
py::array collect_copies(size_t size, Call call) {
  CopyPairs pairs(size);
  int64_t count = 0;
  {
    const ReleasedGil released;
    count = call(pairs.room());
  }
  return std::move(pairs).keep(count);
}

py::array slots_of(const KVCacheManager& manager, int64_t id, int64_t start,
                   std::optional<int64_t> num_tokens, int64_t group) {
  const int64_t tokens = manager.num_tokens(id);
  const auto check = [&](bool fits, int64_t count) {
    if (fits) return;
    throw InvalidArgument(concat("slot_mapping: start, num_tokens: expected a range within ",
                                 tokens, " tokens, got ", count, " from ", start));
  };
  // Checked before memory is allocated. The manager checks again: the sequence may have changed.
  check(start >= 0 && start <= tokens, num_tokens.value_or(0));
  const int64_t count = num_tokens.value_or(tokens - start);
  check(count >= 0 && count <= tokens - start, count);
  Int64Array slots(count);
  manager.slot_mapping(id, start, {slots.mutable_data(), static_cast<size_t>(count)}, group);
  return slots;
}

py::array table_of(const KVCacheManager& manager, int64_t id, int64_t group) {
  const std::vector<int32_t> table = manager.block_table(id, group);
  return py::array_t<int32_t>(static_cast<py::ssize_t>(table.size()), table.data());
}

py::bytes bytes_of(const Hash& hash) {
  return py::bytes(reinterpret_cast<const char*>(&hash), sizeof hash);
}

// Tuples of (kind, fields...). The Python side turns them into named tuples.
py::list events_of(const KVCacheManager& manager) {
  const Events taken = manager.peek_events();
  const int32_t* tokens = taken.tokens.data();
  py::list events;
  for (const Event& event : taken.events) {
    const auto kind = static_cast<int32_t>(event.kind);
    if (event.kind == Event::Kind::kCleared) {
      events.append(py::make_tuple(kind));
    } else if (event.kind == Event::Kind::kRemoved) {
      events.append(py::make_tuple(kind, event.group, event.block, bytes_of(event.hash)));
    } else {
      const std::vector<int32_t> of_block(tokens, tokens + manager.block_tokens());
      tokens += manager.block_tokens();
      events.append(py::make_tuple(kind, event.group, event.block, bytes_of(event.hash),
                                   bytes_of(event.parent), of_block));
    }
  }
  return events;
}

int64_t allocate(KVCacheManager& self, py::handle sequence_id, py::handle tokens,
                 std::optional<int64_t> num_new, py::handle salt, py::handle adapter,
                 py::handle cache_dtype, const py::sequence& multimodal) {
  const int64_t id = id_of(sequence_id, "allocate: sequence_id");
  const PrefixKeys keys = prefix_keys(salt, adapter, cache_dtype, multimodal);
  if (is_integer(tokens)) {
    if (num_new) {
      throw InvalidArgument("allocate: num_new: expected None with a number of tokens");
    }
    self.allocate(id, integer_of(tokens, "allocate: tokens"), keys);
    return 0;
  }
  const TokensInput input(tokens, "allocate: tokens");
  const ReleasedGil released;
  return self.allocate(id, input.values(), num_new.value_or(kMaxTokens), keys);
}

bool can_allocate(const KVCacheManager& self, py::handle tokens, py::handle salt,
                  py::handle adapter, py::handle cache_dtype, const py::sequence& multimodal) {
  const PrefixKeys keys = prefix_keys(salt, adapter, cache_dtype, multimodal);
  if (is_integer(tokens)) {
    return self.can_allocate(integer_of(tokens, "can_allocate: tokens"));
  }
  const TokensInput input(tokens, "can_allocate: tokens");
  const ReleasedGil released;
  return self.can_allocate(input.values(), keys);
}

int64_t match(const KVCacheManager& self, py::handle tokens, py::handle salt, py::handle adapter,
              py::handle cache_dtype, const py::sequence& multimodal) {
  const TokensInput input(tokens, "match: tokens");
  const PrefixKeys keys = prefix_keys(salt, adapter, cache_dtype, multimodal);
  const ReleasedGil released;
  return self.match(input.values(), keys);
}

std::unique_ptr<KVCacheManager> make_manager(
    int64_t num_blocks, int64_t block_size, int64_t shards, int64_t shard, int64_t interleave,
    int64_t num_host_blocks, int64_t watermark_blocks, const std::vector<int64_t>& windows,
    bool prefix_caching, bool null_block, bool events, int64_t max_references,
    const std::optional<std::string>& hash_key, int hash_bits) {
  Options options{.num_blocks = num_blocks,
                  .block_size = block_size,
                  .shards = shards,
                  .shard = shard,
                  .interleave = interleave,
                  .max_references = max_references,
                  .num_host_blocks = num_host_blocks,
                  .watermark_blocks = watermark_blocks,
                  .windows = windows,
                  .null_block = null_block,
                  .prefix_caching = prefix_caching,
                  .events = events,
                  .hash_bits = hash_bits};
  if (hash_key) {
    if (hash_key->size() != 16) {
      throw InvalidArgument(
          concat("KVCacheManager: hash_key: expected 16 bytes, got ", hash_key->size()));
    }
    std::copy(hash_key->begin(), hash_key->end(), options.hash_key.emplace().begin());
  }
  return std::make_unique<KVCacheManager>(options);
}

// --- classes ---

void bind_buffers(py::module_& module) {
  py::class_<OwnedBuffers>(module, "BatchBuffers")
      .def(py::init<py::handle, py::handle, py::handle, py::handle, py::handle>(),
           py::arg("block_tables"), py::arg("seq_lens"), py::arg("query_start_loc"),
           py::arg("slot_mapping"), py::arg("positions") = py::none())
      .def_property_readonly("changed_rows", &OwnedBuffers::changed_rows)
      .def("invalidate", [](OwnedBuffers& self) { self.view.invalidate(); });
}

using Class = py::class_<KVCacheManager>;

void bind_one_sequence(Class& manager) {
  manager
      .def("match", &match, py::arg("tokens"), py::arg("salt") = py::none(),
           py::arg("adapter") = py::none(), py::arg("cache_dtype") = py::none(),
           py::arg("multimodal") = py::tuple())
      .def("can_allocate", &can_allocate, py::arg("tokens"), py::arg("salt") = py::none(),
           py::arg("adapter") = py::none(), py::arg("cache_dtype") = py::none(),
           py::arg("multimodal") = py::tuple())
      .def("allocate", &allocate, py::arg("sequence_id"), py::arg("tokens"),
           py::arg("num_new") = py::none(), py::arg("salt") = py::none(),
           py::arg("adapter") = py::none(), py::arg("cache_dtype") = py::none(),
           py::arg("multimodal") = py::tuple())
      .def(
          "append",
          [](KVCacheManager& self, int64_t id, int64_t num_tokens, py::handle tokens,
             int64_t lookahead) {
            const AppendInput input(tokens, "append: tokens", lookahead);
            return collect_copies(self.num_groups(), [&](std::span<BlockCopy> room) {
              return self.append(std::span(&id, 1), std::span(&num_tokens, 1), room,
                                 input.options());
            });
          },
          py::arg("sequence_id"), py::arg("num_tokens") = 1, py::arg("tokens") = py::none(),
          py::arg("lookahead") = 0)
      .def(
          "fork",
          [](KVCacheManager& self, py::handle parent_id, py::handle child_id) {
            self.fork(id_of(parent_id, "fork: parent_id"), id_of(child_id, "fork: child_id"));
          },
          py::arg("parent_id"), py::arg("child_id"))
      .def(
          "free",
          [](KVCacheManager& self, int64_t id, std::optional<int64_t> num_computed) {
            self.free(id, num_computed.value_or(kMaxTokens));
          },
          py::arg("sequence_id"), py::arg("num_computed") = py::none())
      .def(
          "truncate",
          [](KVCacheManager& self, int64_t id, int64_t num_tokens,
             std::optional<int64_t> num_computed) {
            self.truncate(id, num_tokens, num_computed.value_or(kMaxTokens));
          },
          py::arg("sequence_id"), py::arg("num_tokens"), py::arg("num_computed") = py::none())
      .def("__contains__", &KVCacheManager::contains, py::arg("sequence_id"))
      .def("num_tokens", &KVCacheManager::num_tokens, py::arg("sequence_id"))
      .def("num_local_tokens", &KVCacheManager::num_local_tokens, py::arg("sequence_id"))
      .def("num_known_tokens", &KVCacheManager::num_known_tokens, py::arg("sequence_id"))
      .def("is_swapped", &KVCacheManager::is_swapped, py::arg("sequence_id"))
      .def("block_table", &table_of, py::arg("sequence_id"), py::arg("group") = 0)
      .def("slot_mapping", &slots_of, py::arg("sequence_id"), py::arg("start") = 0,
           py::arg("num_tokens") = py::none(), py::arg("group") = 0)
      .def("sequence_ids", &KVCacheManager::sequence_ids);
}

void bind_batches(Class& manager) {
  manager
      .def(
          "allocate_batch",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_tokens) {
            const Int64Input ids(sequence_ids, "allocate: sequence_ids");
            const Int64Counts counts(num_tokens, "allocate: num_tokens", ids.values().size());
            const ReleasedGil released;
            self.allocate(ids.values(), counts.values());
          },
          py::arg("sequence_ids"), py::arg("num_tokens"))
      .def(
          "free_batch",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_computed) {
            const Int64Input ids(sequence_ids, "free: sequence_ids");
            const auto computed =
                optional_counts(num_computed, "free: num_computed", ids.values().size());
            const ReleasedGil released;
            self.free(ids.values(), values_of(computed));
          },
          py::arg("sequence_ids"), py::arg("num_computed") = py::none())
      .def(
          "truncate_batch",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_tokens,
             py::handle num_computed) {
            const Int64Input ids(sequence_ids, "truncate: sequence_ids");
            const Int64Counts counts(num_tokens, "truncate: num_tokens", ids.values().size());
            const auto computed =
                optional_counts(num_computed, "truncate: num_computed", ids.values().size());
            const ReleasedGil released;
            self.truncate(ids.values(), counts.values(), values_of(computed));
          },
          py::arg("sequence_ids"), py::arg("num_tokens"), py::arg("num_computed") = py::none())
      .def(
          "reorder",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle parent_ids) {
            const Int64Input ids(sequence_ids, "reorder: sequence_ids");
            const Int64Input parents(parent_ids, "reorder: parent_ids");
            const ReleasedGil released;
            self.reorder(ids.values(), parents.values());
          },
          py::arg("sequence_ids"), py::arg("parent_ids"));
}

void bind_steps(Class& manager) {
  manager
      .def(
          "append_batch",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_tokens,
             py::handle tokens, int64_t lookahead) {
            const Int64Input ids(sequence_ids, "append: sequence_ids");
            const Int64Counts counts(num_tokens, "append: num_tokens", ids.values().size());
            const AppendInput input(tokens, "append: tokens", lookahead);
            const size_t room = ids.values().size() * self.num_groups();
            return collect_copies(room, [&](std::span<BlockCopy> copies) {
              return self.append(ids.values(), counts.values(), copies, input.options());
            });
          },
          py::arg("sequence_ids"), py::arg("num_tokens") = 1, py::arg("tokens") = py::none(),
          py::arg("lookahead") = 0)
      .def(
          "record_tokens",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_tokens,
             py::handle tokens) {
            const Int64Input ids(sequence_ids, "record_tokens: sequence_ids");
            const Int64Counts counts(num_tokens, "record_tokens: num_tokens", ids.values().size());
            const TokensInput input(tokens, "record_tokens: tokens");
            const ReleasedGil released;
            self.record_tokens(ids.values(), counts.values(), input.values());
          },
          py::arg("sequence_ids"), py::arg("num_tokens"), py::arg("tokens"))
      .def(
          "build",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_query_tokens,
             const Buffers& buffers) {
            const Int64Input ids(sequence_ids, "build: sequence_ids");
            const Int64Counts counts(num_query_tokens, "build: num_query_tokens",
                                     ids.values().size());
            const std::vector<BatchBuffers*> groups = views(buffers);
            const ReleasedGil released;
            return self.build(ids.values(), counts.values(), groups);
          },
          py::arg("sequence_ids"), py::arg("num_query_tokens"), py::arg("buffers"))
      .def(
          "step",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_tokens,
             const Buffers& buffers, py::handle tokens, int64_t lookahead) {
            const Int64Input ids(sequence_ids, "step: sequence_ids");
            const Int64Counts counts(num_tokens, "step: num_tokens", ids.values().size());
            const AppendInput input(tokens, "step: tokens", lookahead);
            const std::vector<BatchBuffers*> groups = views(buffers);
            const size_t room = ids.values().size() * self.num_groups();
            return collect_copies(room, [&](std::span<BlockCopy> copies) {
              return self.step(ids.values(), counts.values(), groups, copies, input.options());
            });
          },
          py::arg("sequence_ids"), py::arg("num_tokens"), py::arg("buffers"),
          py::arg("tokens") = py::none(), py::arg("lookahead") = 0);
}

using CanSwap = bool (KVCacheManager::*)(std::span<const int64_t>);
using Swap = int64_t (KVCacheManager::*)(std::span<const int64_t>, std::span<BlockCopy>);

void bind_can_swap(Class& manager, const std::string& name, CanSwap can_swap) {
  manager.def(
      name.c_str(),
      [can_swap, argument = name + ": sequence_ids"](KVCacheManager& self, py::handle object) {
        const Int64Input ids(object, argument.c_str());
        const ReleasedGil released;
        return (self.*can_swap)(ids.values());
      },
      py::arg("sequence_ids"));
}

void bind_swap(Class& manager, const std::string& name, Swap swap) {
  manager.def(
      name.c_str(),
      [swap, argument = name + ": sequence_ids"](KVCacheManager& self, py::handle object) {
        const Int64Input ids(object, argument.c_str());
        int64_t room = 0;
        try {
          room = self.num_table_entries(ids.values());
        } catch (const UnknownSequence&) {
          (self.*swap)(ids.values(), {});  // throws the same in its own name
          throw;
        }
        return collect_copies(
            room, [&](std::span<BlockCopy> copies) { return (self.*swap)(ids.values(), copies); });
      },
      py::arg("sequence_ids"));
}

void bind_manager(py::module_& module) {
  Class manager(module, "KVCacheManager");
  manager
      .def(py::init(&make_manager), py::arg("num_blocks"), py::arg("block_size"), py::kw_only(),
           py::arg("shards") = 1, py::arg("shard") = 0, py::arg("interleave") = 1,
           py::arg("num_host_blocks") = 0, py::arg("watermark_blocks") = 0,
           py::arg("windows") = std::vector<int64_t>{kFullAttention},
           py::arg("prefix_caching") = true, py::arg("null_block") = false,
           py::arg("events") = false, py::arg("max_references") = kMaxReferences,
           py::arg("hash_key") = py::none(), py::arg("hash_bits") = 128)
      .def("__reduce__",
           [](const KVCacheManager&) -> py::object {
             throw py::type_error(
                 "KVCacheManager cannot be pickled or copied: its blocks belong to one cache");
           })
      .def_property_readonly("has_null_block", &KVCacheManager::has_null_block)
      .def_property_readonly("num_free_blocks", &KVCacheManager::num_free_blocks)
      .def_property_readonly("num_free_host_blocks", &KVCacheManager::num_free_host_blocks)
      .def_property_readonly("num_sequences", &KVCacheManager::num_sequences);
  bind_one_sequence(manager);
  bind_batches(manager);
  bind_steps(manager);
  bind_can_swap(manager, "can_swap_out", &KVCacheManager::can_swap_out);
  bind_can_swap(manager, "can_swap_in", &KVCacheManager::can_swap_in);
  bind_swap(manager, "swap_out", &KVCacheManager::swap_out);
  bind_swap(manager, "swap_in", &KVCacheManager::swap_in);
  manager
      .def(
          "num_common_prefix_blocks",
          [](const KVCacheManager& self, py::handle sequence_ids, int64_t group) {
            const Int64Input ids(sequence_ids, "num_common_prefix_blocks: sequence_ids");
            return self.num_common_prefix_blocks(ids.values(), group);
          },
          py::arg("sequence_ids"), py::arg("group") = 0)
      .def(
          "evict_blocks",
          [](KVCacheManager& self, py::handle blocks) {
            const Int64Input input(blocks, "evict_blocks: blocks");
            self.evict_blocks(input.values());
          },
          py::arg("blocks"))
      .def("reset_prefix_cache", &KVCacheManager::reset_prefix_cache, ReleaseGil())
      .def("peek_events", &events_of)
      .def("drop_events", &KVCacheManager::drop_events, py::arg("count"))
      .def("reset", &KVCacheManager::reset, ReleaseGil())
      .def("statistics", &KVCacheManager::statistics, ReleaseGil())
      .def("check_integrity", &KVCacheManager::check_integrity, ReleaseGil());
}

}  // namespace
}  // namespace vllm_kernels::kv_cache

void bind_kv_cache(py::module_& module) {
  bind_kv_cache_exceptions(module);
  bind_kv_cache_statistics(module);
  vllm_kernels::kv_cache::bind_buffers(module);
  vllm_kernels::kv_cache::bind_manager(module);
}
