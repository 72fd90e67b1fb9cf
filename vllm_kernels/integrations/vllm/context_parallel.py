"""vLLM's decode context parallelism: the cache of a sequence is dealt over the ranks of a group.

A rank attends, with the query heads of all ranks, to the part of the context that it holds. The
whole context is older than the new tokens. So it needs positions for windows and ALiBi alone.
vLLM's collective merges the parts by their log-sum-exp, and gives each rank its own heads. Every
rank has the keys of the new tokens, which are merged last. vLLM's FlashAttention backend has the
same order of steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import merge_attn_states, paged_attention, varlen_attention


class Shards:
    """What a builder has for it: this rank's lengths, at the same place for each batch."""

    def __init__(self, vllm_config: Any, impls: list[Any], device: torch.device) -> None:
        from vllm.distributed.parallel_state import get_dcp_group
        from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

        parallel = vllm_config.parallel_config
        self.world_size, self.rank = impls[0].dcp_world_size, impls[0].dcp_rank
        self.interleave = parallel.cp_kv_cache_interleave_size
        all_to_all = parallel.dcp_comm_backend == "a2a"
        self.combine = dcp_a2a_lse_reduce if all_to_all else cp_lse_ag_out_rs
        sequences = vllm_config.scheduler_config.max_num_seqs
        self.lens = torch.zeros(sequences, dtype=torch.int32, device=device)
        for impl in impls:
            impl.shard = {}
            if impl.slopes is None and not impl.window:
                continue
            impl.shard = {
                "shards": self.world_size, "shard": self.rank, "interleave": self.interleave,
                "sliding_window": impl.window, "causal": True,
            }  # fmt: skip
            if impl.slopes is not None:
                impl.shard["alibi_slopes"] = get_dcp_group().all_gather(impl.slopes, dim=0)

    def context_lens(self, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        """[num_seqs]: the tokens before the new ones that this rank holds."""
        from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

        local = get_dcp_local_seq_lens(
            seq_lens - query_start_loc.diff(), self.world_size, self.rank, self.interleave
        )
        lens = self.lens[: len(seq_lens)]
        lens.copy_(local)
        return lens


def attend_to_shards(
    impl: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Any, ...],
    metadata: Any,
    out: Tensor,
) -> None:
    """query, out: [num_tokens, num_heads, head_size]; key, value: the new tokens'."""
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    key_cache, value_cache, k_scale, v_scale = cache
    common = {
        "scale": impl.scale, "softcap": impl.softcap, "max_query_len": metadata.max_query_len,
        "return_lse": True, "workspace": metadata.workspace,
    }  # fmt: skip
    starts = metadata.query_start_loc
    positions: dict[str, Any] = {"causal": False}
    if impl.shard:
        positions = impl.shard | {"total_seq_lens": metadata.seq_lens}
    context, lse = paged_attention(
        group.all_gather(query.contiguous(), dim=1), key_cache, value_cache, metadata.block_table,
        metadata.shard_lens, query_start_loc=starts, k_scale=k_scale, v_scale=v_scale,
        layout="HND", fixed_split_size=impl.split_size, **positions, **common,
    )  # fmt: skip
    context, lse = metadata.combine(context, lse, group, return_lse=True)
    # Sinks count once: with the new tokens, whose heads no other rank has.
    _, new_lse = varlen_attention(
        query, key, value, starts, starts, causal=metadata.causal, sinks=impl.float_sinks, out=out,
        alibi_slopes=impl.slopes, window=(impl.window - 1, impl.window - 1),
        max_key_len=metadata.max_query_len, fixed_split_size=impl.split_size, **common,
    )  # fmt: skip
    merge_attn_states(out, context, lse.t().contiguous(), out, new_lse.t().contiguous())
