"""Attention to sequences whose keys and values are dealt over ranks (context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._types import Layout
from ..errors import InvalidArgument, InvalidIndex, InvalidType
from ..ops import combine_attn_partials, paged_attention, varlen_attention
from ..ops._common import refuse_8_bit_query

__all__ = ["ContextParallel"]

Exchange = Literal["all_to_all", "gather"]
# torch 2.13 has renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_sum_and_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_LINE = 16  # bytes that a row of the exchange is padded to, so that its parts stay aligned


class _Parts(NamedTuple):
    """Results over disjoint sets of keys."""

    out: Tensor  # [parts, num_tokens, num_heads, head_size]; all strides but the last are free
    lse: Tensor  # [parts, num_tokens, num_heads] float32


class ContextParallel:
    """Attention to sequences whose keys and values are dealt over the ranks of a group.

    Token i of a sequence lives on rank ``i // interleave % N``, as in vLLM's decode context
    parallelism (``cp_kv_cache_interleave_size``). A rank stores its tokens of a sequence one after
    the other, in blocks of its own. ``interleave = block_size`` deals whole blocks.

    The ranks divide the query heads and have the same KV heads. :meth:`attend` gathers the query
    heads, attends to the rank's own tokens with the log-sum-exp, and exchanges the partial results
    by heads. (Log-sum-exp: Dao et al. 2022, arXiv:2205.14135; DistAttention: Lin et al. 2024,
    arXiv:2401.02669; exchange by heads: Bhatia et al. 2025, arXiv:2507.07120.)

    Nothing synchronises with the host, and every tensor of a call is made by torch's allocator. So
    a CUDA graph may capture a call, if it may capture the group's collectives.

    Args:
        group: A process group of torch.distributed, one device per rank. None with ``shards``.
        interleave: Number of consecutive tokens on a rank, at least 1.
        shards: Number of ranks that run in this process, without a group. Arguments that differ
            between ranks then have a leading dimension [shards], and query has all heads.

    Raises:
        ValueError: An argument is out of range, or not one of ``group`` and ``shards`` is given.

    Example:
        >>> from vllm_kernels.distributed import ContextParallel
        >>> parallel = ContextParallel(shards=2, interleave=16)
        >>> parallel.local_lens(torch.tensor([40])).tolist()  # 16 and 8 tokens on rank 0
        [[24], [16]]
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        interleave: int = 1,
        shards: int | None = None,
    ) -> None:
        if (group is None) == (shards is None):
            raise InvalidArgument(
                "ContextParallel: group: expected one of group and shards, got "
                + ("both" if shards else "none; dist.group.WORLD is None before init_process_group")
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise InvalidArgument(
                f"ContextParallel: group: expected a ProcessGroup, got {group!r:.40}; for shards "
                "in one process give shards=N"
            )
        for name, number in (("interleave", interleave), ("shards", shards)):
            if number is not None and number < 1:
                raise InvalidArgument(f"ContextParallel: {name}: expected at least 1, got {number}")
        self.group = group
        self.interleave = interleave
        if group is None:
            assert shards is not None
            self.size, self._ranks = shards, list(range(shards))
        else:
            self.size, self._ranks = group.size(), [group.rank()]

    def local_lens(self, seq_lens: Tensor) -> Tensor:
        """Counts the tokens of each sequence that live on this rank.

        Args:
            seq_lens: [num_seqs], in tokens of all ranks.

        Returns:
            int32 [num_seqs] on the device of seq_lens; [shards, num_seqs] without a group.

        Raises:
            TypeError: seq_lens has no integers.
        """
        if seq_lens.is_floating_point():
            raise InvalidType(
                f"ContextParallel.local_lens: seq_lens: expected integers, got {seq_lens.dtype}"
            )
        lens = seq_lens.to(torch.int32)
        k, period = self.interleave, self.size * self.interleave
        full, rest = lens // period * k, lens % period
        counts = [full + (rest - rank * k).clamp(0, k) for rank in self._ranks]
        return counts[0] if self.group is not None else torch.stack(counts)

    def slots(
        self,
        positions: Tensor,
        block_tables: Tensor,
        *,
        block_size: int,
        query_start_loc: Tensor | None = None,
    ) -> Tensor:
        """Finds where this rank stores new tokens.

        Args:
            positions: [num_tokens], position of each token in its sequence.
            block_tables: [num_seqs, blocks] int32, this rank's blocks; [shards, num_seqs, blocks]
                without a group.
            block_size: Number of tokens per block.
            query_start_loc: [num_seqs + 1] int32, where each sequence's tokens start. None: one
                token per sequence.

        Returns:
            int64 [num_tokens] for :func:`vllm_kernels.reshape_and_cache`, -1 where another rank
            has the token, or no sequence; [shards, num_tokens] without a group. A token of a
            negative position is padding, too.

        Raises:
            IndexError: A table has no block for a token of this rank. On CUDA its slot is -1.

        Example:
            >>> from vllm_kernels.distributed import ContextParallel
            >>> parallel, tables = ContextParallel(shards=2), torch.tensor([[[5]], [[7]]])
            >>> starts = torch.tensor([0, 4], dtype=torch.int32)  # positions 0 to 3 of a sequence
            >>> parallel.slots(torch.arange(4), tables, block_size=16, query_start_loc=starts)
            tensor([[ 80,  -1,  81,  -1],
                    [ -1, 112,  -1, 113]])
        """
        k = self.interleave
        is_token = positions >= 0
        positions = positions.long().clamp_min(0)
        tokens = torch.arange(len(positions), device=positions.device)
        rows = tokens
        if query_start_loc is not None:
            rows = torch.searchsorted(query_start_loc[1:], tokens, right=True)
            is_token = is_token & (rows < len(query_start_loc) - 1)
            rows = rows.clamp_max(len(query_start_loc) - 2)
        owners = positions // k % self.size
        local = positions // (k * self.size) * k + positions % k
        found = []
        for rank, tables in zip(self._ranks, self._of_each_rank(block_tables)):
            column = local // block_size
            is_inside = column < tables.shape[1]
            is_mine = is_token & (owners == rank)
            if positions.device.type == "cpu" and bool((is_mine & ~is_inside).any()):
                raise InvalidIndex(
                    "ContextParallel.slots: block_tables: expected a block for local token "
                    f"{int(local[is_mine].max())} of rank {rank}, got {tables.shape[1]} blocks of "
                    f"{block_size}"
                )
            block = tables[rows, torch.where(is_inside & is_mine, column, 0)].long()
            slot = block * block_size + local % block_size
            found.append(torch.where(is_inside & is_mine, slot, -1))
        return found[0] if self.group is not None else torch.stack(found)

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor | Sequence[Tensor],
        value_cache: Tensor | Sequence[Tensor],
        block_tables: Tensor,
        local_lens: Tensor,
        *,
        seq_lens: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        max_query_len: int | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sliding_window: int = 0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        layout: Layout = "vllm",
        exchange: Exchange = "all_to_all",
    ) -> Tensor:
        """Attention of new tokens to all tokens of their sequences, on all ranks.

        Without ``key`` each sequence has one query token, its last one, and the cache has it: a
        decode step. With ``key`` and ``value`` the query tokens attend to the cache, which has the
        tokens before them, and causally to each other: a chunk of a prompt, or drafted tokens. They
        may be stored before or after the call. All ranks need all new keys and values.

        With ``seq_lens`` the attention op knows the position of every stored token. So windows and
        ALiBi work, and several query tokens per sequence need no ``key`` once they are stored.

        Args:
            query: [num_tokens, num_heads, head_size], this rank's heads, float32,
                float16 or bfloat16. Rank r has the heads
                ``r * num_heads ..`` of the group. All heads without a group.
            key_cache, value_cache: This rank's cache. [shards, ...] or a list without a group.
            block_tables: [num_seqs, blocks] int32, this rank's blocks; [shards, num_seqs, blocks]
                without a group.
            local_lens: :meth:`local_lens` of the sequences. With ``key``, of the tokens before the
                new ones.
            seq_lens: [num_seqs] int32, in tokens of all ranks, with the new ones. ``interleave`` is
                then a power of two.
            key, value: [num_tokens, num_kv_heads, head_size], the new tokens.
            query_start_loc: [num_seqs + 1] int32. None: one token per sequence.
            max_query_len: A bound on a sequence's query tokens, num_tokens by default.
            sinks: [num_heads] float32, of query's heads.
            alibi_slopes: [num_heads] float32, of query's heads; with ``seq_lens``.
            sliding_window: With ``seq_lens``.
            exchange: "all_to_all" sends every rank the partial results of its heads, and combines
                them in one op. "gather" exchanges the log-sum-exp, and sums the weighted results
                by a reduce-scatter in the dtype of query: less traffic, a rounding more per rank.
            The others: as for :func:`vllm_kernels.paged_attention`.

        Returns:
            [num_tokens, num_heads, head_size], the result of query's heads.

        Raises:
            RuntimeError: As :func:`vllm_kernels.paged_attention`, and if only one of key and value
                is given, or several tokens per sequence, ALiBi or a window without what they need.
                A rank that ended raises the error of torch.distributed.

        Example:
            >>> from vllm_kernels.distributed import ContextParallel
            >>> parallel = ContextParallel(shards=2)
            >>> query, caches = torch.randn(1, 4, 64), torch.randn(2, 2, 4, 16, 2, 64)
            >>> tables = torch.tensor([[[3, 1]], [[0, 2]]], dtype=torch.int32)
            >>> lens = parallel.local_lens(torch.tensor([50]))
            >>> out = parallel.attend(query, *caches, tables, lens, layout="NHD")
            >>> out.shape
            torch.Size([1, 4, 64])
        """
        if exchange not in ("all_to_all", "gather"):
            raise InvalidArgument(
                f"ContextParallel.attend: exchange: expected all_to_all or gather, got {exchange!r}"
            )
        refuse_8_bit_query("ContextParallel.attend", "query", query)
        if seq_lens is None:
            _refuse_positions(alibi_slopes, sliding_window)
        _refuse_other_keys(query, key, value, query_start_loc, seq_lens)
        if not len(query):
            return torch.empty_like(query)
        if max_query_len is None:
            max_query_len = 1 if query_start_loc is None else len(query)
        shared: dict[str, Any] = {"scale": scale, "softcap": softcap, "return_lse": True}
        shared["max_query_len"] = max_query_len
        options = shared | {"k_scale": k_scale, "v_scale": v_scale, "layout": layout}
        options["query_start_loc"] = query_start_loc
        # One token per sequence sees all of the cache, causal or not.
        options["causal"] = query_start_loc is None or seq_lens is not None
        if seq_lens is not None:
            options |= {"total_seq_lens": seq_lens, "shards": self.size}
            options |= {"interleave": self.interleave, "sliding_window": sliding_window}
            options["alibi_slopes"] = self._of_all_heads(alibi_slopes)
        caches = zip(
            *map(self._of_each_rank, (key_cache, value_cache, block_tables, local_lens)),
        )
        num_own = (key is not None) + (sinks is not None)
        if self.group is None:
            parts, lses = _new_parts(query, self.size + num_own), []
            for rank, cache in enumerate(caches):
                if seq_lens is not None:
                    options["shard"] = rank
                lses.append(paged_attention(query, *cache, out=parts.out[rank], **options)[1])
            torch.stack(lses, out=parts.lse[: self.size])
        else:
            if seq_lens is not None:
                options["shard"] = self._ranks[0]
            part, lse = paged_attention(self._gather_heads(query), *next(caches), **options)
            swap = self._all_to_all if exchange == "all_to_all" else self._reduce_scatter
            parts = swap(query, part, lse, num_own)
        if key is not None and value is not None:
            if query_start_loc is None:
                query_start_loc = torch.arange(len(query) + 1, device=query.device).int()
            at = len(parts.out) - num_own
            key, value = (self._heads_of_query(tensor, query) for tensor in (key, value))
            _, parts.lse[at] = varlen_attention(
                query, key, value, query_start_loc, query_start_loc, out=parts.out[at],
                alibi_slopes=alibi_slopes, window=(sliding_window - 1, -1),
                max_key_len=max_query_len, **shared,
            )  # fmt: skip
        if sinks is not None:  # a key with this logit and a value of 0
            parts.out[-1], parts.lse[-1] = 0, sinks
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        combine_attn_partials(out, parts.out, parts.lse.contiguous())
        return out

    # Inner workings. N ranks, T tokens, H heads of this rank, D elements of a head.

    def _of_each_rank(self, tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns one tensor for each rank of this process."""
        if self.group is not None:
            assert isinstance(tensors, Tensor)
            return [tensors]
        if len(tensors) != self.size:
            raise InvalidArgument(
                f"ContextParallel: expected tensors of {self.size} shards, got {len(tensors)}"
            )
        return list(tensors)

    def _gather_heads(self, query: Tensor) -> Tensor:
        """Returns [T, N * H, D], the heads of all ranks."""
        return self._gather(query).transpose(0, 1).flatten(1, 2)

    def _of_all_heads(self, of_heads: Tensor | None) -> Tensor | None:
        """Returns [N * H], what the heads of all ranks have."""
        if of_heads is None or self.group is None:
            return of_heads
        return self._gather(of_heads).flatten()

    def _gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, [N, ...]."""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        _all_gather(gathered.flatten(0, 1), tensor.contiguous(), group=self.group)
        return gathered

    def _heads_of_query(self, keys: Tensor, query: Tensor) -> Tensor:
        """Returns the KV heads of this rank's query heads."""
        if self.group is None:
            return keys
        heads = query.shape[1]
        per_key = self.size * heads // keys.shape[1]
        first = self._ranks[0] * heads
        if heads % per_key == 0 or per_key % heads == 0:
            return keys[:, first // per_key : -(-(first + heads) // per_key)]
        return keys[:, torch.arange(first, first + heads, device=keys.device) // per_key]

    def _all_to_all(self, query: Tensor, out: Tensor, lse: Tensor, num_own: int) -> _Parts:
        """Exchanges out [T, N * H, D] and lse [T, N * H] by heads, in one message per rank.

        Returns:
            The parts of all ranks, and room for ``num_own`` more.
        """
        sent = _packed_parts(query, self.size)
        sent.parts.out.copy_(_by_rank(out, self.size))
        sent.parts.lse.copy_(_by_rank(lse, self.size))
        received = _packed_parts(query, self.size + num_own)
        dist.all_to_all_single(received.rows[: self.size], sent.rows, group=self.group)
        return received.parts

    def _reduce_scatter(self, query: Tensor, out: Tensor, lse: Tensor, num_own: int) -> _Parts:
        """Exchanges lse [T, N * H], and sums the weighted out [T, N * H, D] by heads.

        Returns:
            One part, and room for ``num_own`` more.
        """
        total = self._gather(lse).logsumexp(0)
        weight = torch.where(lse == -torch.inf, 0.0, (lse - total).exp())
        weighted = (out.float() * weight[..., None]).to(out.dtype)
        parts = _new_parts(query, 1 + num_own)
        weighted = _by_rank(weighted, self.size).flatten(0, 1)
        _sum_and_scatter(parts.out[0], weighted, group=self.group)
        parts.lse[0] = _by_rank(total, self.size)[self._ranks[0]]
        return parts


class _PackedParts(NamedTuple):
    """Parts in rows of bytes, which an all-to-all exchanges."""

    rows: Tensor  # uint8 [parts, bytes]: out, then lse, then padding
    parts: _Parts  # views of the rows


def _packed_parts(query: Tensor, number: int) -> _PackedParts:
    out_bytes, lse_bytes = query.numel() * query.itemsize, query[..., 0].numel() * 4
    row = -(-(out_bytes + lse_bytes) // _LINE) * _LINE
    rows = query.new_empty(number, row, dtype=torch.uint8)
    out = rows[:, :out_bytes].view(query.dtype).unflatten(1, query.shape)
    lse = rows[:, out_bytes : out_bytes + lse_bytes].view(torch.float32)
    return _PackedParts(rows, _Parts(out, lse.unflatten(1, query.shape[:2])))


def _new_parts(query: Tensor, number: int) -> _Parts:
    lse = query.new_empty(number, *query.shape[:2], dtype=torch.float32)
    return _Parts(query.new_empty(number, *query.shape), lse)


def _by_rank(heads: Tensor, size: int) -> Tensor:
    """[T, N * H, ...] -> [N, T, H, ...]."""
    return heads.unflatten(1, (size, -1)).transpose(0, 1)


def _refuse_positions(alibi_slopes: Tensor | None, sliding_window: int) -> None:
    """Raises for options that need positions in the whole sequence."""
    for name, is_given in (("alibi_slopes", alibi_slopes is not None),
                           ("sliding_window", sliding_window != 0)):  # fmt: skip
        if is_given:
            raise InvalidArgument(
                f"ContextParallel.attend: seq_lens: expected lengths of all ranks' tokens with "
                f"{name}, got none"
            )


def _refuse_other_keys(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    query_start_loc: Tensor | None,
    seq_lens: Tensor | None,
) -> None:
    """Raises unless several query tokens per sequence have keys and values, or positions."""
    if (key is None) != (value is None):
        raise InvalidArgument(
            "ContextParallel.attend: key: expected key and value, got one of them"
        )
    if key is None and query_start_loc is not None and seq_lens is None:
        raise InvalidArgument(
            "ContextParallel.attend: key: expected the new tokens' keys and values, or seq_lens, "
            "with query_start_loc, got none"
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor is not None and tensor.dtype != query.dtype:
            raise InvalidArgument(
                f"ContextParallel.attend: {name}: expected {query.dtype} (from query), got "
                f"{tensor.dtype}"
            )
