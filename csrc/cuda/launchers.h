// The table of contents of csrc/cuda: one launcher per params struct.
// A launcher enqueues on `stream` of the current device and does not wait. It throws
// std::runtime_error if the launch fails.
#pragma once
#include "ops/activation.h"
#include "ops/activation_gated.h"
#include "ops/attention_with_kvcache.h"
#include "ops/convert_fp8.h"
#include "ops/copy_blocks.h"
#include "ops/fused_decode_attention.h"
#include "ops/gather_cache.h"
#include "ops/merge_attn_states.h"
#include "ops/mla_cache.h"
#include "ops/paged_attention.h"
#include "ops/pages/copy_slots.h"
#include "ops/pages/page_bounds_update.h"
#include "ops/pages/page_list.h"
#include "ops/pages/select_pages.h"
#include "ops/pages/sparq_attention.h"
#include "ops/pages/value_mean_update.h"
#include "ops/reshape_and_cache.h"
#include "ops/reshape_and_cache_per_token_quant.h"
#include "ops/rms_norm.h"
#include "ops/rms_norm_quant.h"
#include "ops/rope_and_cache.h"
#include "ops/rotary_embedding.h"
#include "ops/sampling/sample.h"
#include "ops/scaled_quant.h"
#include "ops/upcast_query.h"

namespace vllm_kernels::cuda {

using Stream = void*;  // cudaStream_t, without CUDA's headers

// --- norms
void launch(const RmsNormParams& params, Stream stream);
void launch(const RmsNormGainParams& params, Stream stream);
void launch(const RmsNormQuantParams& params, Stream stream);

// --- rotary and activations
void launch(const RotaryParams& params, Stream stream);
void launch(const RopeAndCacheParams& params, Stream stream);
void launch(const ActivationParams& params, Stream stream);
void launch(const GatedParams& params, Stream stream);
void launch(const GatedQuantParams& params, Stream stream);
void launch(const ScaledQuantParams& params, Stream stream);

// --- cache
void launch(const ReshapeAndCacheParams& params, Stream stream);
void launch(const ReshapeAndCachePerTokenQuantParams& params, Stream stream);
void launch(const GatherCacheParams& params, Stream stream);
void launch(const ConcatAndCacheMlaParams& params, Stream stream);
void launch(const UpconvertMlaParams& params, Stream stream);
void launch(const ConcatMlaQParams& params, Stream stream);
void launch(const CopyBlocksParams& params, Stream stream);
void launch(const SwapBlocksParams& params, Stream stream);
void launch(const SwapBlocksBatchParams& params, Stream stream);
void launch(const ConvertFp8Params& params, Stream stream);

// --- pages
void launch(const PageBoundsUpdateParams& params, Stream stream);
void launch(const SelectPagesParams& params, Stream stream);
void launch(const CopySlotsParams& params, Stream stream);
void launch(const SparqParams& params, Stream stream);  // without its attention
void launch(const ValueMeanUpdateParams& params, Stream stream);

// --- attention
// paged_attention, v1, v2, varlen_attention, attention_with_kvcache, sparq_attention. `workspace`
// has kPagedAttentionWorkspaceBytes that no concurrent launch uses; null selects the stream's own
// workspace. `scratch` has attention_scratch_bytes(), for this launch alone.
int64_t attention_scratch_bytes(const PagedAttentionParams& params, const E4M3Query& query);
void launch_paged_attention(const PagedAttentionParams& params, const E4M3Query& query,
                            void* workspace, void* scratch, Stream stream);
void launch(const FusedDecodeAttentionParams& params, void* workspace, Stream stream);
void launch(const KvcacheIndicesParams& params, Stream stream);
// Only where may_append(). Otherwise: the indices, then the writer of reshape_and_cache.
void launch(const KvcacheAppendParams& params, Stream stream);
bool may_append(const ReshapeAndCacheParams& write);
void launch(const PageListParams& params, Stream stream);
void launch(const MergeAttnStatesParams& params, Stream stream);
void launch(const CombineAttnPartialsParams& params, Stream stream);

// --- sampling
// Bytes of `scratch` that the next four launchers need for so many samples; often none.
int64_t sampling_scratch_bytes(const LogitRows& logits, int64_t samples);
void launch(const SampleParams& params, Stream stream);
void launch(const SampleLogprobsParams& params, Stream stream);
void launch(const TokenLogprobsParams& params, Stream stream);
void launch(const SoftmaxParams& params, Stream stream);
void launch(const TokenBitmaskParams& params, Stream stream);
void launch(const RepetitionPenaltiesParams& params, Stream stream);
void launch(const AppendTokenCountsParams& params, Stream stream);
void launch(const SpecVerifyParams& params, Stream stream);

}  // namespace vllm_kernels::cuda
