// VLLM_KERNELS_CHECK=1: scans an index argument [rows, columns] (int32 or int64) for values that
// are out of bounds or repeated. One CTA of 512 threads walks the elements in order. It stops at
// the first 512 that contain a bad one and reports the smallest bad index to the host. Nothing is
// read before the PDL wait. The bounds are in ops/index_check.h; the host side of the report is
// take_bad_index() below.
#include "cuda/base/index_check.h"

#include <atomic>
#include <mutex>

#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 512;

// One per device, in pinned host memory that is mapped into the device. The report is unread while
// reported != taken.
struct Report {
  BadIndex bad;
  unsigned taken;              // written by the host: number of reports that it has read
  volatile unsigned reported;  // written by the device after `bad`: number of reports
};

// Number of reports that this device has begun. While a report is unread it is ahead of
// Report::taken, and later bad indices are dropped: the first one counts.
__device__ unsigned begun;

__device__ int64_t value_at(const IndexCheckParams& p, int64_t i) {
  const int64_t at = (i / p.columns) * p.row_stride + i % p.columns;
  return p.is_int64 ? static_cast<const int64_t*>(p.values)[at]
                    : static_cast<const int32_t*>(p.values)[at];
}

__device__ bool in_use(const IndexCheckParams& p, int64_t i) {
  const ColumnRange used = p.used_columns(i / p.columns);
  return i % p.columns >= used.begin && i % p.columns < used.end;
}

__device__ IndexBounds bounds_at(const IndexCheckParams& p, int64_t i) {
  return p.bounds_of(i / p.columns, value_at(p, i), i > 0 ? value_at(p, i - 1) : 0);
}

__device__ bool out_of_bounds(const IndexBounds& bounds, int64_t value) {
  if (bounds.skip && value == -1) return false;
  return value < bounds.low || value >= bounds.high;
}

// Whether an element before `i` has this value, for value >= 0. `i` is
// blockDim.x * n + threadIdx.x. All threads of the CTA must call it together.
__device__ bool comes_before(const IndexCheckParams& p, int64_t i, int64_t value) {
  __shared__ int64_t tile[kThreads];
  bool found = false;
  for (int64_t first = 0; first <= i - threadIdx.x; first += kThreads) {
    const int64_t mine = first + threadIdx.x;
    __syncthreads();  // all threads have read the previous tile
    tile[threadIdx.x] = mine < p.rows * p.columns ? value_at(p, mine) : -1;
    __syncthreads();
    const int count = static_cast<int>(min(i - first, int64_t{kThreads}));
    for (int j = 0; j < count; ++j) found |= tile[j] == value;
  }
  return found && value >= 0;
}

// A single CTA, so that one reduction finds the smallest bad index.
__global__ void __launch_bounds__(kThreads) index_check_kernel(IndexCheckParams p, Report* report) {
  launch_dependents();
  wait_for_primary_kernel();
  __shared__ unsigned long long first_bad;
  if (threadIdx.x == 0) first_bad = ~0ull;
  __syncthreads();
  for (int64_t first = 0; first < p.rows * p.columns; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const bool inside = i < p.rows * p.columns && in_use(p, i);
    const int64_t value = inside ? value_at(p, i) : -1;
    const bool repeated = p.bounds.unique && comes_before(p, i, value);
    const bool bad = inside && (repeated || out_of_bounds(bounds_at(p, i), value));
    if (bad) atomicMin(&first_bad, static_cast<unsigned long long>(i));
    if (__syncthreads_or(bad)) break;
  }
  if (threadIdx.x != 0 || first_bad == ~0ull) return;
  const unsigned taken = *const_cast<volatile unsigned*>(&report->taken);
  if (atomicCAS(&begun, taken, taken + 1) != taken) return;
  const int64_t i = static_cast<int64_t>(first_bad);
  const int64_t value = value_at(p, i);
  // Field by field: nvcc 13.0 makes one copy of the parameters of an initializer list here.
  BadIndex& bad = report->bad;
  bad.op = p.op;
  bad.argument = p.argument;
  bad.one_dimensional = p.one_dimensional;
  bad.row = i / p.columns;
  bad.column = i % p.columns + p.first_column;
  bad.value = value;
  const IndexBounds bounds = bounds_at(p, i);
  bad.bounds = bounds;
  bad.repeated = !out_of_bounds(bounds, value);
  __threadfence_system();
  report->reported = taken + 1;
}

std::mutex reports_mutex;
Report* reports[kMaxDevices] =
    {};  // by device; never freed, because a CUDA graph may still write to it

Report* report_of_current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(reports_mutex);
  Report*& report = reports[device % kMaxDevices];
  if (report == nullptr) {
    // The first call may come during a stream capture, which forbids allocation in the default
    // mode.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "VLLM_KERNELS_CHECK");
    void* memory = nullptr;
    const cudaError_t error = cudaHostAlloc(&memory, sizeof(Report), cudaHostAllocMapped);
    check(cudaThreadExchangeStreamCaptureMode(&mode), "VLLM_KERNELS_CHECK");
    check(error, "VLLM_KERNELS_CHECK: pinned memory");
    report = new (memory) Report{};
  }
  return report;
}

}  // namespace

void scan_indices(const IndexCheckParams& p, void* stream) {
  if (p.rows * p.columns == 0) return;
  Report* report = report_of_current_device();
  void* mapped = nullptr;
  check(cudaHostGetDevicePointer(&mapped, report, 0), "VLLM_KERNELS_CHECK");
  launch_kernel(p.op, index_check_kernel, dim3(1), dim3(kThreads), 0, stream, p,
                static_cast<Report*>(mapped));
}

std::vector<int64_t> scanned_devices() {
  const std::lock_guard<std::mutex> lock(reports_mutex);
  std::vector<int64_t> devices;
  for (int64_t device = 0; device < kMaxDevices; ++device) {
    if (reports[device] != nullptr) devices.push_back(device);
  }
  return devices;
}

std::optional<BadIndex> take_bad_index() {
  const std::lock_guard<std::mutex> lock(reports_mutex);
  for (Report* report : reports) {
    if (report == nullptr || report->reported == report->taken) continue;
    std::atomic_thread_fence(std::memory_order_acquire);
    const BadIndex bad = report->bad;
    report->taken = report->reported;
    return bad;
  }
  return std::nullopt;
}

}  // namespace vllm_kernels::cuda
