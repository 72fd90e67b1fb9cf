// What the bindings of the sampling ops share. Readers add what they read to `read`: outputs must
// not overlap it.
#pragma once
#include <memory>

#include "ops/sampling/sample.h"
#include "torch_ops/base/allocate.h"
#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"

namespace vllm_kernels {

// Checks logits [num_rows, vocab_size]. `vocab_size` must be at least 1 and at most kMaxVocab.
inline Argument read_logits(Expect& expect, const Tensor& logits, Size& num_rows,
                            Size& vocab_size) {
  Argument x = expect.tensor("logits", logits).floating().shape({&num_rows, &vocab_size});
  x.inner_contiguous();
  if (vocab_size < 1 || vocab_size > kMaxVocab) {
    x.fail("expected vocab_size of 1 to " + std::to_string(kMaxVocab) + ", got shape " +
           x.shape_text());
  }
  return x;
}

inline LogitRows pack_logits(const Argument& x) {
  return {.data = x.data(),
          .stride = x.stride(0),
          .num_rows = x.size(0),
          .vocab_size = int32_size(x, "vocab_size", x.size(1)),
          .dtype = x.dtype()};
}

// An optional vector with an element per sample.
inline const float* read_floats(Expect& expect, const char* name,
                                const std::optional<Tensor>& tensor, Size& samples,
                                Arguments& read) {
  if (!tensor) return nullptr;
  const Argument x = expect.tensor(name, *tensor).float32().shape({&samples}).contiguous();
  read.add(x);
  return x.as<const float>();
}

// `rows` int32 [num_samples] of logits, checked; or null, and then num_samples is num_rows.
inline const int32_t* read_rows(Expect& expect, const std::optional<Tensor>& rows,
                                const Size& num_rows, Size& samples, Arguments& read) {
  if (!rows) {
    samples = Size("num_samples", num_rows, "logits");
    return nullptr;
  }
  const Argument r = expect.tensor("rows", *rows).int32().shape({&samples}).contiguous();
  check_index(expect, r, {.noun = "a row of logits", .high = num_rows});
  read.add(r);
  return r.as<const int32_t>();
}

// Checks a bitmask int32 [mask_rows, words] and its optional `bitmask_rows`.
inline Bitmask read_bitmask(Expect& expect, const Tensor& bitmask,
                            const std::optional<Tensor>& bitmask_rows, const Size& vocab_size,
                            Size& samples, Arguments& read) {
  Size mask_rows("bitmask_rows"), words("words");
  Argument mask = expect.tensor("bitmask", bitmask);
  const char* packed_bits =
      "bitmask: expected int32 words of 32 tokens each, got one element per token: pack the bits";
  expect.that(mask.scalar_type() != aoti_torch_dtype_bool(), packed_bits);
  mask.int32().shape({&mask_rows, &words});
  expect.that(words != vocab_size || vocab_size == 1, packed_bits);
  Bitmask packed;
  if (bitmask_rows) {
    const Argument r =
        expect.tensor("bitmask_rows", *bitmask_rows).int32().shape({&samples}).contiguous();
    check_index(expect, r, {.noun = "a row of bitmask", .high = mask_rows, .skip = true});
    packed.rows = r.as<const int32_t>();
    read.add(r);
  } else {
    mask.at(0, samples);
  }
  mask.inner_contiguous();
  read.add(mask);
  packed.words = mask.as<const int32_t>();
  packed.stride = mask.stride(0);
  packed.num_rows = mask_rows;
  packed.num_words = words;
  return packed;
}

// Where log-probabilities go: logprobs float32 and ids int64 [num_samples, 1 + num_top], ranks
// int64 [num_samples]. `written` gets them.
inline TokenLogprobsParams read_logprobs(Expect& expect, const Tensor& logprobs, const Tensor& ids,
                                         const Tensor& ranks, Size& samples, Arguments& written) {
  Size columns("1 + num_top");
  const Argument l =
      expect.tensor("logprobs", logprobs).float32().shape({&samples, &columns}).contiguous();
  const Argument i = expect.tensor("ids", ids).int64().shape({&samples, &columns}).contiguous();
  const Argument r = expect.tensor("ranks", ranks).int64().shape({&samples}).contiguous();
  if (columns < 1 || columns > 1 + kMaxTopLogprobs) {
    l.fail("expected 1 to " + std::to_string(1 + kMaxTopLogprobs) + " columns, got shape " +
           l.shape_text());
  }
  written.add(l, i, r);
  TokenLogprobsParams params{};
  params.logprobs = l.as<float>();
  params.ids = i.as<int64_t>();
  params.ranks = r.as<int64_t>();
  params.num_samples = samples;
  params.num_top = int32_size(l, "num_top", columns - 1);
  return params;
}

#if defined(VLLM_KERNELS_DEVICE_CUDA)

// Launches with scratch for rows that do not fit in shared memory. The allocator reuses it in the
// order of the stream.
template <typename Params>
void launch_rows(Params params, int64_t samples, const Tensor& on) {
  const torch::stable::accelerator::DeviceGuard guard(on.device_index());
  const int64_t bytes = cuda::sampling_scratch_bytes(params.logits, samples);
  std::optional<Tensor> scratch;
  if (bytes > 0) {
    scratch = empty({&bytes, 1}, aoti_torch_dtype_uint8(), on);
    params.scratch = static_cast<uint32_t*>(scratch->data());
  }
  launch(params, on);
}

#else

// Runs the tasks, each thread's with scratch of its own.
template <typename Params>
void launch_rows(const Params& params, int64_t, const Tensor& on) {
  if (on.is_meta()) return;
  const cpu::Kernel<Params> kernel = cpu::kernel<Params>();
  const auto run = [&](int64_t begin, int64_t end) {
    const std::unique_ptr<uint32_t[]> scratch(
        new uint32_t[sampling_scratch_words(params.logits.vocab_size)]);
    Params with_scratch = params;
    with_scratch.scratch = scratch.get();
    kernel.run(with_scratch, begin, end);
  };
  torch::stable::parallel_for(0, kernel.num_tasks(params), 1, run);
}

inline void launch_rows(const SampleLogprobsParams& params, int64_t samples, const Tensor& on) {
  launch_rows<SampleParams>(params, samples, on);
  launch_rows(params.logprobs, samples, on);
}

#endif

}  // namespace vllm_kernels
