// Bindings of sample and top_k_top_p_mask_. ops/sampling/sample.h has the parameters.
//   sample             logits [num_rows, vocab_size] -> tokens int64 [num_samples], and optional
//                      log-probabilities of these
//   top_k_top_p_mask_  logits [num_rows, vocab_size], -inf where a token is not kept
#include "torch_ops/sampling/logits.h"

namespace vllm_kernels {
namespace {

const int32_t* read_top_k(Expect& expect, const std::optional<Tensor>& top_k, Size& samples,
                          Arguments& read) {
  if (!top_k) return nullptr;
  const Argument k = expect.tensor("top_k", *top_k).int32().shape({&samples}).contiguous();
  read.add(k);
  return k.as<const int32_t>();
}

// Uniform numbers, or seeds with offsets, of which drawing needs one.
void read_random(Expect& expect, SampleParams& params, const std::optional<Tensor>& uniforms,
                 const std::optional<Tensor>& seeds, const std::optional<Tensor>& offsets,
                 Size& samples, Arguments& read) {
  params.uniforms = read_floats(expect, "uniforms", uniforms, samples, read);
  const auto read_ints = [&](const char* name, const Tensor& tensor) {
    const Argument x = expect.tensor(name, tensor).int64().shape({&samples}).contiguous();
    read.add(x);
    return x.as<const int64_t>();
  };
  if (seeds) params.seeds = read_ints("seeds", *seeds);
  if (offsets) params.offsets = read_ints("offsets", *offsets);
  expect.that(seeds.has_value() == offsets.has_value(),
              "seeds: expected seeds and offsets together, got one of them");
  expect.that(!uniforms || !seeds, "uniforms: expected uniforms or seeds, got both");
}

// indptr int32 [num_samples + 1], tokens int32 [size], values [size]. Names are prefix + "_indptr"
// and so on.
struct ListNames {
  const char *indptr, *tokens, *values;
};
struct ListTensors {
  const std::optional<Tensor>&indptr, &tokens, &values;
};
template <typename Value>
TokenLists<Value> read_lists(Expect& expect, const ListNames& names, const ListTensors& tensors,
                             const Size& samples, const Size& vocab_size, Arguments& read) {
  const bool any = tensors.indptr || tensors.tokens || tensors.values;
  const bool all = tensors.indptr && tensors.tokens && tensors.values;
  if (any != all) {
    std::string expected = names.indptr;
    expected += ": expected ";
    expected.append(names.indptr).append(", ").append(names.tokens).append(" and ");
    expect.fail(expected.append(names.values).append(" together, got some of them"));
  }
  if (!all) return {};
  Size ends("num_samples + 1", samples + 1, samples.source), size("entries");
  const Argument indptr =
      expect.tensor(names.indptr, *tensors.indptr).int32().shape({&ends}).contiguous();
  const Argument tokens =
      expect.tensor(names.tokens, *tensors.tokens).int32().shape({&size}).contiguous();
  Argument values = expect.tensor(names.values, *tensors.values);
  if constexpr (std::is_same_v<Value, float>) {
    values.float32();
  } else {
    values.int32();
  }
  values.shape({&size}).contiguous();
  check_index(expect, indptr,
              {.noun = "a rising end of a list", .high = size + 1, .max_increase = size});
  check_index(expect, tokens, {.noun = "a token", .high = vocab_size, .skip = true});
  read.add(indptr, tokens, values);
  return {.indptr = indptr.as<const int32_t>(),
          .tokens = tokens.as<const int32_t>(),
          .values = values.as<const Value>(),
          .size = size};
}

// Draws tokens, and finds their log-probabilities if they are asked for.
void launch_sample(SampleLogprobsParams& params, bool with_logprobs, const Tensor& logits) {
  if (!with_logprobs) return launch_rows<SampleParams>(params, params.num_samples, logits);
  params.logprobs.logits = params.logits;
  params.logprobs.rows = params.rows;
  params.logprobs.tokens = params.tokens;
  launch_rows(params, params.num_samples, logits);
}

void sample(const Tensor& tokens, const Tensor& logits, const std::optional<Tensor>& temperature,
            const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
            const std::optional<Tensor>& min_p, const std::optional<Tensor>& uniforms,
            const std::optional<Tensor>& seeds, const std::optional<Tensor>& offsets,
            const std::optional<Tensor>& bitmask, const std::optional<Tensor>& bitmask_rows,
            const std::optional<Tensor>& count_indptr, const std::optional<Tensor>& count_tokens,
            const std::optional<Tensor>& counts, const std::optional<Tensor>& repetition,
            const std::optional<Tensor>& frequency, const std::optional<Tensor>& presence,
            const std::optional<Tensor>& bias_indptr, const std::optional<Tensor>& bias_tokens,
            const std::optional<Tensor>& bias_values, const std::optional<Tensor>& rows,
            const std::optional<Tensor>& logprobs, const std::optional<Tensor>& ids,
            const std::optional<Tensor>& ranks) {
  Expect expect("sample");
  Size num_rows("num_rows"), vocab_size("vocab_size"), samples("num_samples");
  const Argument x = read_logits(expect, logits, num_rows, vocab_size);
  Arguments read(x);
  SampleLogprobsParams params{};
  params.op = "sample";
  params.rows = read_rows(expect, rows, num_rows, samples, read);
  const Argument t = expect.tensor("tokens", tokens).int64().shape({&samples}).contiguous();
  params.temperature = read_floats(expect, "temperature", temperature, samples, read);
  params.top_k = read_top_k(expect, top_k, samples, read);
  params.top_p = read_floats(expect, "top_p", top_p, samples, read);
  params.min_p = read_floats(expect, "min_p", min_p, samples, read);
  read_random(expect, params, uniforms, seeds, offsets, samples, read);
  expect.that(!temperature || uniforms || seeds,
              "temperature: expected uniforms, or seeds and offsets, to draw with, got none");
  if (bitmask)
    params.bitmask = read_bitmask(expect, *bitmask, bitmask_rows, vocab_size, samples, read);
  expect.that(bitmask || !bitmask_rows, "bitmask_rows: expected a bitmask with it, got None");
  params.counts =
      read_lists<int32_t>(expect, {"count_indptr", "count_tokens", "counts"},
                          {count_indptr, count_tokens, counts}, samples, vocab_size, read);
  params.repetition = read_floats(expect, "repetition", repetition, samples, read);
  params.frequency = read_floats(expect, "frequency", frequency, samples, read);
  params.presence = read_floats(expect, "presence", presence, samples, read);
  expect.that(counts || (!repetition && !frequency && !presence),
              "token_counts: expected lists of the tokens to penalize, got None");
  params.bias =
      read_lists<float>(expect, {"bias_indptr", "bias_tokens", "bias_values"},
                        {bias_indptr, bias_tokens, bias_values}, samples, vocab_size, read);
  Arguments written(t);
  expect.that(logprobs.has_value() == ids.has_value() && ids.has_value() == ranks.has_value(),
              "logprobs: expected logprobs, ids and ranks together, got some of them");
  if (logprobs) params.logprobs = read_logprobs(expect, *logprobs, *ids, *ranks, samples, written);
  expect.apart(written, read);
  if (samples == 0) return;
  params.tokens = t.as<int64_t>();
  params.logits = pack_logits(x);
  params.num_samples = samples;
  launch_sample(params, logprobs.has_value(), logits);
}

void top_k_top_p_mask_(const Tensor& logits, const std::optional<Tensor>& top_k,
                       const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p) {
  Expect expect("top_k_top_p_mask_");
  Size num_rows("num_rows"), vocab_size("vocab_size");
  Argument x = read_logits(expect, logits, num_rows, vocab_size);
  x.written();
  Arguments read;
  SampleParams params{};
  params.op = "top_k_top_p_mask_";
  params.top_k = read_top_k(expect, top_k, num_rows, read);
  params.top_p = read_floats(expect, "top_p", top_p, num_rows, read);
  params.min_p = read_floats(expect, "min_p", min_p, num_rows, read);
  expect.apart({x}, read);
  if (num_rows == 0) return;
  params.masked = x.mutable_data();
  params.logits = pack_logits(x);
  params.num_samples = num_rows;
  launch_rows(params, num_rows, logits);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("sample", TORCH_BOX(&vllm_kernels::sample));
  library.impl("top_k_top_p_mask_", TORCH_BOX(&vllm_kernels::top_k_top_p_mask_));
}
