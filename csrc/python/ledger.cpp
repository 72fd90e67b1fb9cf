// The ledger in Python. vllm_kernels/distributed/ledger.py documents the methods and wraps them.
// Calls are short, so they keep the GIL. Results are allocated before the ledger changes.
#include "kv_cache/ledger.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "python/kv_cache.h"

namespace py = pybind11;

namespace vllm_kernels::kv_cache {
namespace {

// Rows [n, fields] of T, which is a struct of Field values.
template <typename T, typename Field>
class Rows {
 public:
  Rows(const char* call, int64_t size, int64_t min, int64_t max)
      : array_({py::ssize_t{checked(call, "num_blocks", size, min, max)},
                py::ssize_t{sizeof(T) / sizeof(Field)}}) {}

  std::span<T> values() {
    return {reinterpret_cast<T*>(array_.mutable_data()), static_cast<size_t>(array_.shape(0))};
  }
  py::array array() && { return std::move(array_); }

 private:
  py::array_t<Field> array_;
};
using BlockRows = Rows<InstanceBlock, int32_t>;
using MoveRows = Rows<BlockMove, int64_t>;

std::unique_ptr<Ledger> make_ledger(const py::tuple& managers) {
  std::vector<KVCacheManager*> pointers;
  for (const py::handle manager : managers) pointers.push_back(manager.cast<KVCacheManager*>());
  return std::make_unique<Ledger>(std::move(pointers));
}

py::array lend(Ledger& self, std::optional<int64_t> lender, int64_t borrower, int64_t sequence_id,
               int64_t num_blocks) {
  BlockRows rows("lend", num_blocks, 1, kMaxBlocks);
  self.lend(lender.value_or(Ledger::kAnyInstance), borrower, sequence_id, rows.values());
  return std::move(rows).array();
}

py::array recall(Ledger& self, int64_t lender, int64_t num_blocks) {
  self.recall(lender, {});  // refuses a bad lender
  MoveRows rows("recall", num_blocks, 0, self.counts(lender).lent);
  self.recall(lender, rows.values());
  return std::move(rows).array();
}

py::array blocks(const Ledger& self, int64_t sequence_id) {
  const std::vector<InstanceBlock> list = self.blocks(sequence_id);
  BlockRows rows("blocks", static_cast<int64_t>(list.size()), 0, kMaxTokens);
  std::copy(list.begin(), list.end(), rows.values().begin());
  return std::move(rows).array();
}

py::list instance_lost(Ledger& self, int64_t instance) {
  py::list ids;
  self.instance_lost(instance, [&](std::span<const int64_t> lost) {
    for (const int64_t id : lost) ids.append(id);
  });
  return ids;
}

py::tuple counts(const Ledger& self, int64_t instance) {
  const InstanceCounts counts = self.counts(instance);
  return py::make_tuple(counts.total, counts.lent, counts.used, counts.free, counts.borrowed,
                        counts.reserve, counts.lost);
}

}  // namespace
}  // namespace vllm_kernels::kv_cache

void bind_ledger(py::module_& module) {
  namespace kv = vllm_kernels::kv_cache;
  using kv::Ledger;
  py::class_<Ledger>(module, "Ledger")
      .def(py::init(&kv::make_ledger), py::arg("managers"), py::keep_alive<1, 2>())
      .def("__reduce__",
           [](const Ledger&) -> py::object {
             throw py::type_error(
                 "Ledger cannot be pickled or copied: its loans belong to its managers");
           })
      .def("set_reserve", &Ledger::set_reserve, py::arg("instance"), py::arg("num_blocks"))
      .def("lend", &kv::lend, py::arg("lender"), py::arg("borrower"), py::arg("sequence_id"),
           py::arg("num_blocks"))
      .def("give_back", &Ledger::give_back, py::arg("sequence_id"), py::arg("num_blocks"))
      .def("free", &Ledger::free, py::arg("sequence_id"))
      .def("recall", &kv::recall, py::arg("lender"), py::arg("num_blocks"))
      .def("instance_lost", &kv::instance_lost, py::arg("instance"))
      .def("instance_back", &Ledger::instance_back, py::arg("instance"))
      .def("__contains__", &Ledger::contains, py::arg("sequence_id"))
      .def("blocks", &kv::blocks, py::arg("sequence_id"))
      .def("owed", &Ledger::owed, py::arg("borrower"), py::arg("lender"))
      .def("counts", &kv::counts, py::arg("instance"))
      .def("check_integrity", &Ledger::check_integrity);
}
