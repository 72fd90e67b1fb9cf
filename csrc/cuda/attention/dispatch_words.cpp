// A kernel choice in words, for reports (ops/report.h).
#include "cuda/attention/dispatch.h"

namespace vllm_kernels::cuda {
namespace {

struct Words {
  uint32_t bit;
  const char* text;
};
constexpr Words kObstacleWords[] = {
    {kFloat32, "tensor cores need a float16 or bfloat16 query"},
    {kBlockSparse, "only the SIMT kernel has block-sparse patterns"},
    {kSharedMemoryTooSmall, "shared memory is too small"},
    {kSmallPages,
     "tensor cores need pages of 8 tokens (8-bit layout vllm: 16), or of 1 with up to 16 rows"},
    {kEmptyCache, "the cache has no blocks"},
    {kUnalignedCache, "K or V: base or strides are no multiples of 16 bytes"},
    {kUnalignedQuery, "query: base or token stride is unaligned (16 bytes are always right)"},
    {kUnalignedOut, "out: base or token stride is unaligned (16 bytes are always right)"},
    {kNotCausal, "decode kernels are causal"},
    {kContiguousKeys, "decode kernels read K and V in pages"},
    {kScaleNotPositive, "prefill kernels need scale > 0"},
    {kTreeMask, "prefill kernels have no tree mask"},
    {kStripe, "prefill kernels take whole sequences, no shards"},
    {kFewRows, "too few query rows for the prefill kernels"},
    {kNoWgmma, "wgmma kernels need an H100 or H200 and code for 9.0a"},
    {kPageSize, "prefill sm90 needs pages of 16 tokens or more"},
    {kCacheType, "prefill kernels need a cache of the query's dtype, or of 8 bits"},
    {kSoftcapOrAlibiOn8Bit, "prefill sm90 has no softcap or ALiBi on 8-bit caches"},
    {kHeadSizeOn8Bit, "prefill sm90 has 8-bit caches up to heads of 192"},
    {kLongSequences, "prefill sm80 has sequences up to 2^30 tokens"},
    {kFixedSplit, "fixed_split_size: the kernel may not depend on the batch"},
    {kWgmmaHeadSize, "decode_wgmma has heads up to 128"},
    {kWgmmaInt4, "decode_wgmma has no int4"},
    {kFusedCache, "one launch has float16, bfloat16 and e4m3 caches of layout vllm"},
    {kFusedPageSize, "one launch has pages up to 16 tokens"},
    {kFusedHeadSize, "one launch has heads up to 128"},
    {kFusedGroup, "one launch has up to 8 query heads per KV head"},
    {kTokenScales,
     "prefill sm80 has no scale a token, nor prefill sm90 for int4, or for layout vllm with heads "
     "above 128"},
    {kUnalignedProjection,
     "one launch reads qkv, weights, cos_sin_cache and the cache in vectors of 16 bytes"},
};

const char* name_of(const KernelChoice& choice) {
  switch (choice.kernel) {
    case AttentionKernel::kDecode:
      if (choice.halves_stages) return "decode (two warps a stage)";
      return choice.multi_warp ? "decode (several warps a pipeline)" : "decode";
    case AttentionKernel::kDecodeWgmma:
      return "decode_wgmma";
    case AttentionKernel::kPrefillSm90:
      return "prefill sm90";
    case AttentionKernel::kPrefillSm80:
      return "prefill sm80";
    default:
      return "simt";
  }
}

const char* name_of(KvForm form) {
  switch (form) {
    case KvForm::kPackedPages:
      return "packed pages";
    case KvForm::kPackedBoxes:
      return "packed boxes";
    case KvForm::kPlainRows:
      return "plain rows";
    case KvForm::kLines:
      return "lines of several KV heads";
    default:
      return "swizzled rows";
  }
}

}  // namespace

std::string because(uint32_t obstacles) {
  std::string text;
  for (const Words& words : kObstacleWords) {
    if ((obstacles & words.bit) == 0) continue;
    text += (text.empty() ? "; because: " : "; ") + std::string(words.text);
  }
  return text;
}

std::string describe(const KernelChoice& choice) {
  std::string text = name_of(choice);
  if (choice.kernel != AttentionKernel::kSimt) {
    text += ", head size " + std::to_string(choice.padded_head_size) + ", " + name_of(choice.form);
  }
  text += ", grid " + std::to_string(choice.grid.x);
  if (choice.kernel == AttentionKernel::kSimt) {
    text += "x" + std::to_string(choice.grid.y) + "x" + std::to_string(choice.grid.z);
  }
  if (choice.warps > 0) {
    text += ", " + std::to_string(choice.warps) + " warps, ";
    if (choice.stages > 0) text += std::to_string(choice.stages) + " stages, ";
    text += std::to_string(choice.shared_bytes) + " bytes of shared memory";
  }
  return text + because(choice.obstacles);
}

std::string describe(const AttentionChoice& choice) {
  std::string text = describe(choice.main);
  if (choice.may_split)
    text += "\nCTAs may share the keys of a work tile; a second launch adds them up";
  if (choice.gathered_rows > 0) {
    text += "\nafter K and V of up to " + std::to_string(choice.gathered_rows) +
            " tokens are gathered to contiguous keys of 16 bits";
    if (choice.gathers_some) text += "; the same kernel without that for other sequences";
  }
  if (choice.fp8_rows > 0) {
    text += "\nmultiplied in 8 bits, after V of up to " + std::to_string(choice.fp8_rows) +
            " tokens is transposed" + (choice.copies_fp8_keys ? " and K is copied" : "");
  } else if (choice.upcasts_query) {
    text += "\nafter the queries are converted to 16 bits";
  }
  if (choice.has_concurrent_decode) {
    text += "\nconcurrently, for sequences of fewer than " + std::to_string(choice.min_query_len) +
            " query tokens: " + describe(choice.concurrent_decode);
  }
  return text;
}

}  // namespace vllm_kernels::cuda
