// Bindings of the smaller ops on logits. ops/sampling/sample.h has the parameters.
//   token_logprobs               logits [num_rows, vocab_size], tokens [num_samples] -> log_softmax
//                                at the token and at the highest logits
//   softmax                      logits -> float32 probabilities
//   apply_token_bitmask_         -inf where a bit is 0
//   apply_repetition_penalties   vLLM's op: tokens of two masks, penalized once
//   append_token_counts          a new token of each row -> the row's list of tokens and counts
//   spec_verify                  drafted tokens [num_seqs, num_draft] -> tokens to keep
#include <algorithm>

#include "torch_ops/sampling/logits.h"

namespace vllm_kernels {
namespace {

void token_logprobs(const Tensor& logprobs, const Tensor& ids, const Tensor& ranks,
                    const Tensor& logits, const Tensor& tokens, const std::optional<Tensor>& rows) {
  Expect expect("token_logprobs");
  Size num_rows("num_rows"), vocab_size("vocab_size"), samples("num_samples");
  const Argument x = read_logits(expect, logits, num_rows, vocab_size);
  Arguments read(x);
  const int32_t* row_ids = read_rows(expect, rows, num_rows, samples, read);
  const Argument t = expect.tensor("tokens", tokens).int64().shape({&samples}).contiguous();
  read.add(t);
  Arguments written;
  TokenLogprobsParams params = read_logprobs(expect, logprobs, ids, ranks, samples, written);
  expect.apart(written, read);
  check_index(expect, t, {.noun = "a token", .high = vocab_size});
  if (samples == 0) return;
  params.logits = pack_logits(x);
  params.rows = row_ids;
  params.tokens = t.as<const int64_t>();
  launch_rows(params, samples, logits);
}

void softmax(const Tensor& out, const Tensor& logits, const std::optional<Tensor>& temperature) {
  Expect expect("softmax");
  Size num_rows("num_rows"), vocab_size("vocab_size");
  const Argument x = read_logits(expect, logits, num_rows, vocab_size);
  Argument o = expect.tensor("out", out).float32().shape({&num_rows, &vocab_size});
  o.inner_contiguous().written();
  Arguments read;
  const float* divisors = read_floats(expect, "temperature", temperature, num_rows, read);
  expect.same_or_apart(o, x);
  expect.apart({o}, read);
  if (num_rows == 0) return;
  launch_rows(SoftmaxParams{.out = o.as<float>(),
                            .out_stride = o.stride(0),
                            .logits = pack_logits(x),
                            .temperature = divisors,
                            .scratch = nullptr},
              num_rows, logits);
}

void apply_token_bitmask_(const Tensor& logits, const Tensor& bitmask,
                          const std::optional<Tensor>& bitmask_rows) {
  Expect expect("apply_token_bitmask_");
  Size num_rows("num_rows"), vocab_size("vocab_size");
  Argument x = read_logits(expect, logits, num_rows, vocab_size);
  x.written();
  Arguments read;
  const Bitmask mask = read_bitmask(expect, bitmask, bitmask_rows, vocab_size, num_rows, read);
  expect.apart({x}, read);
  if (num_rows == 0) return;
  launch(TokenBitmaskParams{.out = x.mutable_data(), .logits = pack_logits(x), .bitmask = mask},
         logits);
}

void apply_repetition_penalties(const Tensor& logits, const Tensor& prompt_mask,
                                const Tensor& output_mask, const Tensor& repetition_penalties) {
  Expect expect("apply_repetition_penalties");
  Size num_rows("num_rows"), vocab_size("vocab_size");
  Argument x = read_logits(expect, logits, num_rows, vocab_size);
  x.written();
  const auto read_mask = [&](const char* name, const Tensor& mask) {
    return expect.tensor(name, mask).boolean().shape({&num_rows, &vocab_size}).inner_contiguous();
  };
  const Argument prompt = read_mask("prompt_mask", prompt_mask);
  const Argument output = read_mask("output_mask", output_mask);
  const Argument penalties = expect.tensor("repetition_penalties", repetition_penalties)
                                 .float32()
                                 .shape({&num_rows})
                                 .contiguous();
  expect.apart({x}, {prompt, output, penalties});
  if (num_rows == 0) return;
  launch(RepetitionPenaltiesParams{.out = x.mutable_data(),
                                   .logits = pack_logits(x),
                                   .prompt_mask = prompt.as<const uint8_t>(),
                                   .output_mask = output.as<const uint8_t>(),
                                   .prompt_stride = prompt.stride(0),
                                   .output_stride = output.stride(0),
                                   .penalties = penalties.as<const float>()},
         logits);
}

// Fails, on a CPU, for a row whose list has no room for its token.
void check_room(const Argument& lengths, const AppendTokenCountsParams& p) {
  for (int64_t row = 0; row < p.num_rows; ++row) {
    const AppendTokenCountsParams::Row list = p.of(row);
    if (list.token < 0 || list.length < list.room) continue;
    const int32_t* tokens = p.tokens + list.begin;
    if (std::find(tokens, tokens + list.length, list.token) != tokens + list.length) continue;
    lengths.fail("expected a free entry in the list of row " + std::to_string(row) + ", got " +
                 std::to_string(list.length) + " entries in use");
  }
}

void append_token_counts(const Tensor& tokens, const Tensor& counts, const Tensor& lengths,
                         const Tensor& indptr, const Tensor& new_tokens,
                         const std::optional<Tensor>& positions,
                         const std::optional<Tensor>& next_positions) {
  Expect expect("append_token_counts");
  Size num_rows("num_rows"), size("entries");
  const Argument n =
      expect.tensor("new_tokens", new_tokens).int64().shape({&num_rows}).contiguous();
  Size ends("num_rows + 1", num_rows + 1, "new_tokens");
  const Argument i = expect.tensor("indptr", indptr).int32().shape({&ends}).contiguous();
  const Argument t = expect.tensor("tokens", tokens).int32().shape({&size}).contiguous();
  const Argument c = expect.tensor("counts", counts).int32().shape({&size}).contiguous();
  const Argument l = expect.tensor("lengths", lengths).int32().shape({&num_rows}).contiguous();
  AppendTokenCountsParams params{.indptr = i.as<const int32_t>(),
                                 .tokens = t.as<int32_t>(),
                                 .counts = c.as<int32_t>(),
                                 .lengths = l.as<int32_t>(),
                                 .new_tokens = n.as<const int64_t>(),
                                 .num_rows = num_rows,
                                 .size = size};
  Arguments read(n), written(t);
  read.add(i);
  written.add(c, l);
  expect.that(positions.has_value() == next_positions.has_value(),
              "positions: expected positions and next_positions together, got one of them");
  if (positions) {
    const Argument p =
        expect.tensor("positions", *positions).int64().shape({&num_rows}).contiguous();
    const Argument k =
        expect.tensor("next_positions", *next_positions).int64().shape({&num_rows}).contiguous();
    params.positions = p.as<const int64_t>();
    params.next_positions = k.as<int64_t>();
    read.add(p);
    written.add(k);
  }
  check_index(expect, i,
              {.noun = "a rising end of a list", .high = size + 1, .max_increase = size});
  check_index(expect, l, {.noun = "a number of entries", .high = size + 1});
  check_index(expect, n, {.noun = "a token", .high = int64_t{1} << 31, .skip = true});
  expect.apart(written, read);
  if (num_rows == 0) return;
  if (kOnCpu && !new_tokens.is_meta()) check_room(l, params);
  launch(params, new_tokens);
}

void spec_verify(const Tensor& tokens, const Tensor& accepted, const Tensor& draft_tokens,
                 const std::optional<Tensor>& target_tokens,
                 const std::optional<Tensor>& target_probs,
                 const std::optional<Tensor>& draft_probs, const std::optional<Tensor>& uniforms) {
  Expect expect("spec_verify");
  Size num_seqs("num_seqs"), num_draft("num_draft"), vocab_size("vocab_size"), two("2", 2, nullptr);
  const Argument drafts =
      expect.tensor("draft_tokens", draft_tokens).int64().shape({&num_seqs, &num_draft});
  Argument(drafts).contiguous();
  Size length("num_draft + 1", num_draft + 1, "draft_tokens");
  const Argument out =
      expect.tensor("tokens", tokens).int64().shape({&num_seqs, &length}).contiguous();
  const Argument count =
      expect.tensor("accepted", accepted).int32().shape({&num_seqs}).contiguous();
  Arguments read(drafts);
  expect.that(target_tokens.has_value() != target_probs.has_value(),
              "target_tokens: expected target_tokens or target_probs, got both or none");
  expect.that(target_probs || !uniforms, "uniforms: expected target_probs with them, got None");
  expect.that(
      !target_probs || uniforms,
      "uniforms: expected float32 [num_seqs, num_draft + 1, 2] with target_probs, got None");
  expect.that(target_probs || !draft_probs, "draft_probs: expected target_probs with it, got None");
  SpecVerifyParams params{};
  if (target_tokens) {
    const Argument t = expect.tensor("target_tokens", *target_tokens)
                           .int64()
                           .shape({&num_seqs, &length})
                           .contiguous();
    params.target_tokens = t.as<const int64_t>();
    read.add(t);
  } else {
    const Argument p = expect.tensor("target_probs", *target_probs)
                           .float32()
                           .shape({&num_seqs, &length, &vocab_size})
                           .contiguous();
    if (vocab_size < 1) p.fail("expected vocab_size >= 1, got shape " + p.shape_text());
    const Argument u = expect.tensor("uniforms", *uniforms)
                           .float32()
                           .shape({&num_seqs, &length, &two})
                           .contiguous();
    params.target_probs = p.as<const float>();
    params.uniforms = u.as<const float>();
    params.vocab_size = int32_size(p, "vocab_size", vocab_size);
    read.add(p, u);
    check_index(expect, drafts, {.noun = "a token", .high = vocab_size, .skip = true});
  }
  if (draft_probs) {
    const Argument q = expect.tensor("draft_probs", *draft_probs)
                           .float32()
                           .shape({&num_seqs, &num_draft, &vocab_size})
                           .contiguous();
    params.draft_probs = q.as<const float>();
    read.add(q);
  }
  expect.apart({out, count}, read);
  if (num_seqs == 0) return;
  params.tokens = out.as<int64_t>();
  params.accepted = count.as<int32_t>();
  params.num_seqs = num_seqs;
  params.num_draft = int32_size(drafts, "num_draft", num_draft);
  params.draft_tokens = drafts.as<const int64_t>();
  launch(params, draft_tokens);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("token_logprobs", TORCH_BOX(&vllm_kernels::token_logprobs));
  library.impl("softmax", TORCH_BOX(&vllm_kernels::softmax));
  library.impl("apply_token_bitmask_", TORCH_BOX(&vllm_kernels::apply_token_bitmask_));
  library.impl("apply_repetition_penalties", TORCH_BOX(&vllm_kernels::apply_repetition_penalties));
  library.impl("append_token_counts", TORCH_BOX(&vllm_kernels::append_token_counts));
  library.impl("spec_verify", TORCH_BOX(&vllm_kernels::spec_verify));
}
