"""The ops as typed Python calls.

Names and argument order are those of vLLM's ``_custom_ops``, so a call site moves over by changing
the import. Every op runs on CPU and CUDA tensors, writes into tensors the caller owns, and is for
inference only: under grad mode a tensor that requires grad is refused.

``torch.ops.vllm_kernels.<op>`` are the same ops without the grad check.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from vllm_kernels import _C, _library

_ops = torch.ops.vllm_kernels


def _inference_only(op: str, *tensors: Tensor | None) -> None:
    """The stable C ABI cannot ask requires_grad, so the rule is kept here."""
    if is_grad_enabled():
        for tensor in tensors:
            # What is not a tensor is refused by the op's schema, with its name.
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise RuntimeError(f"{op}: inference only: use torch.no_grad()")


# --- norms


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Root-mean-square norm: ``out = round(x / sqrt(mean(x²) + epsilon)) * weight``, row by row.

    The mean is taken in float32; the normalised value is rounded to the dtype before the product,
    as in vLLM's op of the same name and in Llama (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        out: [..., hidden_size], written; may be ``input`` itself. Rows may be strided.
        input: [..., hidden_size], float32, float16 or bfloat16. Rows may be strided.
        weight: [hidden_size], dtype of ``input``.
        epsilon: >= 0.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    _inference_only("rms_norm", out, input, weight)
    _ops.rms_norm.default(out, input, weight, epsilon)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """Adds to the residual stream and norms it: both arguments are replaced.

    ``residual = round(residual + input)``, then ``input = rms_norm(residual)`` with the rounding
    of ``rms_norm``.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16, written. Rows may be strided.
        residual: shape and dtype of ``input``, written, apart from it. Rows may be strided.
        weight: [hidden_size], dtype of ``input``.
        epsilon: >= 0.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    _inference_only("fused_add_rms_norm", input, residual, weight)
    _ops.fused_add_rms_norm.default(input, residual, weight, epsilon)


# --- rotary and activations


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Rotary position embedding of query and key, in place.

    The first ``rotary_size`` elements of each head are turned in pairs by the angle of the token's
    position: ``(x, y) -> (x cos - y sin, y cos + x sin)``, in float32 and rounded once (Su et al.
    2021, arXiv:2104.09864). The rest of the head stays as it is.

    Args:
        positions: [tokens] or [batch, seq], int64; sequences may be strided (or one, expanded).
        query: [positions' dimensions, heads * head_size] or [..., heads, head_size], written;
            float32, float16 or bfloat16. Tokens and heads may be strided.
        key: like ``query`` with its own number of heads, or None.
        head_size: elements a head.
        cos_sin_cache: [max_position, rotary_size], any floating dtype: the cosines of the angles,
            then their sines. ``rotary_size`` is even and at most ``head_size``.
        is_neox: pairs ``(i, i + rotary_size / 2)``; otherwise ``(2 i, 2 i + 1)`` as in GPT-J.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given. A position outside
            of ``cos_sin_cache`` is an error on a CPU; on a GPU its token is left unchanged.
    """
    _inference_only("rotary_embedding", query, key, cos_sin_cache)
    _ops.rotary_embedding.default(positions, query, key, head_size, cos_sin_cache, is_neox)


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """SwiGLU's product: ``out = round(silu(gate)) * up`` (Shazeer 2020, arXiv:2002.05202).

    ``silu(x) = x / (1 + exp(-x))``, in float32 and rounded to the dtype before the product.

    Args:
        out: [..., d], written, apart from ``input``. Rows may be strided.
        input: [..., 2 * d], gate then up; float32, float16 or bfloat16. Rows may be strided.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    _inference_only("silu_and_mul", out, input)
    _ops.silu_and_mul.default(out, input)


def mul_and_silu(out: Tensor, input: Tensor) -> None:
    """``out = up * round(silu(gate))``: up is the first half of ``input``, gate the second.

    Shapes and errors as ``silu_and_mul``.
    """
    _inference_only("mul_and_silu", out, input)
    _ops.mul_and_silu.default(out, input)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    """GeGLU's product: ``out = round(gelu(gate)) * up``, gelu(x) = x (1 + erf(x / sqrt 2)) / 2.

    Shapes and errors as ``silu_and_mul``.
    """
    _inference_only("gelu_and_mul", out, input)
    _ops.gelu_and_mul.default(out, input)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """``out = round(gelu(gate)) * up`` with the tanh form of gelu, as ``gelu_new``.

    Shapes and errors as ``silu_and_mul``.
    """
    _inference_only("gelu_tanh_and_mul", out, input)
    _ops.gelu_tanh_and_mul.default(out, input)


def gelu_new(out: Tensor, input: Tensor) -> None:
    """gelu by tanh: ``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`` (arXiv:1606.08415).

    Computed in float32 and rounded once.

    Args:
        out: [..., d], written; may be ``input`` itself. Rows may be strided.
        input: [..., d], float32, float16 or bfloat16. Rows may be strided.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    _inference_only("gelu_new", out, input)
    _ops.gelu_new.default(out, input)


def gelu_fast(out: Tensor, input: Tensor) -> None:
    """The function of ``gelu_new``, under the other name that Hugging Face models give it."""
    _inference_only("gelu_fast", out, input)
    _ops.gelu_fast.default(out, input)


def gelu_quick(out: Tensor, input: Tensor) -> None:
    """gelu by sigmoid: ``x / (1 + exp(-1.702 x))`` (arXiv:1606.08415). Shapes as ``gelu_new``."""
    _inference_only("gelu_quick", out, input)
    _ops.gelu_quick.default(out, input)


# --- cache


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Writes new keys and values into a paged cache of layout "vllm".

    Token t goes to slot ``slot_mapping[t] = block * block_size + position in the block``. Slot -1
    leaves the token out. Where a slot comes up more than once, exactly the last token of the call
    is written, with whole rows, on CPU and CUDA alike.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size], float32, float16 or bfloat16; the strides
            of tokens and heads are free.
        key_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x], written; x = 16
            bytes of elements; the strides of blocks and heads are free.
        value_cache: [num_blocks, num_kv_heads, head_size, block_size], written; likewise.
        slot_mapping: [n] int64, n <= num_tokens; tokens past n are ignored (CUDA-graph padding).
        kv_cache_dtype: "auto" (dtype of key), "fp8" or "fp8_e4m3", "fp8_e5m2" (uint8 or float8
            tensors): x / scale to nearest even, saturating.
        k_scale, v_scale: one float32 on the same device; for 8-bit caches.

    Single tokens cost a 32-byte sector a value here, because a token's values lie block_size apart.
    On CUDA the tokens of a call are taken in groups of 16; a group whose slots are 16 neighbours
    from a multiple of 16 on is transposed and costs what it weighs. (Where block_size is a
    multiple of 8 only: 8 in place of 16.) For decoding large batches
    :func:`reshape_and_cache_flash` is cheaper by nature.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given. On the CPU also for
            a slot below -1 or past the cache, before anything is written; on CUDA such a token is
            left out, and reported with VLLM_KERNELS_CHECK=1, as are repeated slots.
    """
    _inference_only("reshape_and_cache", key, value, key_cache, value_cache, k_scale, v_scale)
    _ops.reshape_and_cache.default(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """:func:`reshape_and_cache` for the layout of flash attention.

    Args (where they differ):
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], written; the
            strides of blocks, tokens and heads are free, so a permuted HND cache works as well.
    """
    _inference_only("reshape_and_cache_flash", key, value, key_cache, value_cache, k_scale, v_scale)
    _ops.reshape_and_cache_flash.default(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


def copy_blocks(
    key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor
) -> None:
    """Copies blocks within every cache: what copy-on-write asks for after a fork.

    Args:
        key_caches, value_caches: one tensor a layer, [num_blocks, ...], of any layout and dtype,
            written. All blocks have one size in bytes, without gaps; the stride of blocks is free.
        block_mapping: [n, 2] int64, pairs (source, destination), on the caches' device or the CPU.
            No block may be a destination twice, or both a source and a destination: the order of
            the copies is not defined on CUDA (on the CPU it is that of the list).

    Needs no sync and no upload; safe in CUDA graphs (a mapping on the CPU is then baked in).

    Raises:
        RuntimeError: also for a block out of range where the mapping is on the CPU, before anything
            is copied; on CUDA such a pair is skipped.
    """
    _inference_only("copy_blocks", *key_caches, *value_caches)
    _ops.copy_blocks.default(key_caches, value_caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks between two caches, each on the CPU or on one GPU.

    Args:
        src: [num_src_blocks, ...], any dtype.
        dst: [num_dst_blocks, ...], dtype of src, blocks of the same shape and strides, written.
        block_mapping: [n, 2] int64 on the CPU, pairs (block of src, block of dst).

    Neighbouring pairs travel as one copy, on the current stream of the GPU. A copy from or to
    pageable memory may wait for its turn; pinned memory does not, and must then stay untouched
    until the stream gets there.

    Raises:
        RuntimeError: also for a block out of range, before anything is copied.
    """
    _inference_only("swap_blocks", src, dst)
    _ops.swap_blocks.default(src, dst, block_mapping)


def convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Converts a cache to or from 8 bits, element by element in memory; the shapes may differ.

    Args:
        output: contiguous, as many elements as input, written.
        input: contiguous. One of the two is float32, float16 or bfloat16, the other 8-bit (uint8,
            or the float8 dtype that kv_dtype names), which gives the direction:
            8-bit = x / scale, to nearest even, saturating; or x = 8-bit * scale.
        scale: of the 8-bit side.
        kv_dtype: "fp8" or "fp8_e4m3", "fp8_e5m2".

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    _inference_only("convert_fp8", output, input)
    _ops.convert_fp8.default(output, input, scale, kv_dtype)


# --- attention

# The op's __call__ only calls its `_op`, and costs 0.3 us: called directly, once a layer and token.
# torch.compile knows the op, not its `_op`.
_traced_v1 = _ops.paged_attention_v1.default
_traced_v2 = _ops.paged_attention_v2.default
_traced = _ops.paged_attention.default
_direct_v1 = getattr(_traced_v1, "_op", _traced_v1)
_direct_v2 = getattr(_traced_v2, "_op", _traced_v2)
_direct = getattr(_traced, "_op", _traced)


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Decode attention over a paged KV cache, one pass over each sequence.

    ``out[s, h] = softmax(scale * q[s, h] . K) V`` over the ``seq_lens[s]`` tokens that
    ``block_tables[s]`` names (Kwon et al. 2023, arXiv:2309.06180; vLLM's op of the same name).
    A sequence of length 0 gives 0. Every page is read once per KV head, not once per query head.

    Args:
        out: [num_seqs, num_heads, head_size], contiguous, written.
        query: [num_seqs, num_heads, head_size], float32, float16 or bfloat16; the stride between
            sequences is free.
        key_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x], x = 16 bytes' worth.
        value_cache: [num_blocks, num_kv_heads, head_size, block_size].
        num_kv_heads: a divisor of num_heads.
        scale: of the product, usually head_size ** -0.5.
        block_tables: [num_seqs, max_blocks_per_seq] int32; ids past a sequence's end are ignored.
        seq_lens: [num_seqs] int32, in tokens.
        block_size: 8, 16 or 32 tokens.
        max_seq_len: a bound on seq_lens; needs no memory, so it may be any length.
        alibi_slopes: [num_heads] float32; adds slope * (t - seq_len + 1) to the logit of token t.
        kv_cache_dtype: "auto" (query's dtype), "fp8" or "fp8_e4m3", "fp8_e5m2" (uint8 tensors).
        k_scale, v_scale: one float32 on the same device; 8-bit elements stand for element * scale.
        tp_rank ... blocksparse_head_sliding_step: vLLM's block-sparse pattern, on when
            blocksparse_vert_stride > 1 (csrc/ops/paged_attention.h).

    Head sizes: multiples of 8 from 32 to 256 (of 16 for 8-bit caches).

    Raises:
        RuntimeError: naming the argument, what was expected and what was given. On the CPU also for
            a length or block id out of range; on CUDA such a row is contained (clamped, skipped).
    """
    if is_grad_enabled():
        try:  # asked here first: a call of _inference_only() costs 0.5 us
            asks_for_grad = (
                out.requires_grad
                or query.requires_grad
                or key_cache.requires_grad
                or value_cache.requires_grad
                or k_scale.requires_grad
                or v_scale.requires_grad
                or (alibi_slopes is not None and alibi_slopes.requires_grad)
            )
        except AttributeError:  # no tensor: the op's schema refuses it by name
            asks_for_grad = False
        if asks_for_grad:
            _inference_only(
                "paged_attention_v1",
                out, query, key_cache, value_cache, k_scale, v_scale, alibi_slopes,
            )  # fmt: skip
    op = _traced_v1 if is_dynamo_compiling() else _direct_v1
    if blocksparse_vert_stride <= 1:  # the pattern is off; every argument costs 0.1 us
        op(
            out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
            block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale,
        )  # fmt: skip
        return
    op(
        out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
        block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank,
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
        blocksparse_head_sliding_step,
    )  # fmt: skip


def paged_attention_v2(
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """:func:`paged_attention_v1` with the sequence cut in partitions of 512 tokens, merged after.

    Better than v1 for few long sequences. The scratch holds what vLLM's holds afterwards.

    Args (beside those of v1):
        exp_sum: [num_seqs, num_heads, partitions] float32, written: sum of exp(logit - max_logits).
        max_logits: [num_seqs, num_heads, partitions] float32, written: largest logit.
        tmp_out: [num_seqs, num_heads, partitions, head_size] in out's dtype, written: normalised
            output of each partition. partitions >= ceil(max_seq_len / 512).
    """
    if is_grad_enabled():
        _inference_only(
            "paged_attention_v2", out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache,
            alibi_slopes, k_scale, v_scale,
        )  # fmt: skip
    op = _traced_v2 if is_dynamo_compiling() else _direct_v2
    if blocksparse_vert_stride <= 1:  # the pattern is off; every argument costs 0.1 us
        op(
            out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale,
            block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype,
            k_scale, v_scale,
        )  # fmt: skip
        return
    op(
        out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale,
        block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale,
        v_scale, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
        blocksparse_block_size, blocksparse_head_sliding_step,
    )  # fmt: skip


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int | None = None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "vllm",
    out: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
    split_tokens: int = 0,
    early_pages: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of any query tokens to the pages of their sequences.

    A sequence's query tokens are its last ones: of ``n`` query tokens, token i has the position
    ``p = seq_len - n + i`` and sees the tokens t with ``p - sliding_window < t <= p``. That serves
    decoding (n = 1), speculative verification, chunked prefill and prefill. With

        s(t) = cap(scale * q . k[t]) + slope * (t - p),   cap(x) = softcap * tanh(x / softcap)

    the result is ``out = sum exp(s(t)) v[t] / (sum exp(s(t)) + exp(sink))`` and
    ``lse = log(sum exp(s(t)) + exp(sink))``, the sink only where there is one. A query token that
    sees nothing (a negative position too) gives 0 and -inf (its sink). (Pages: Kwon et al. 2023,
    arXiv:2309.06180; ALiBi: Press et al. 2022, arXiv:2108.12409; softcap: Gemma 2,
    arXiv:2408.00118; sinks: Xiao et al. 2024, arXiv:2309.17453, as logits of gpt-oss.)

    Slots that no query token of the sequence sees may hold anything. Those of V that one of them
    sees should be finite: in 16 bits on CUDA a tile of query tokens is multiplied with V at once,
    with weight 0 for what a token does not see, and 0 * NaN is NaN. So NaN or infinity in V of a
    later query token may reach earlier ones of the same sequence and KV head, and nothing else.

    Args:
        query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; the stride between
            tokens is free. head_size: a multiple of 8 (of 16 for an 8-bit cache) from 32 to 256.
        key_cache, value_cache: dtype of query, float8_e4m3fn, float8_e5m2 or int8. By layout:
            "vllm"  K [num_blocks, num_kv_heads, head_size / x, block_size, x], x = 16 bytes' worth,
                    V [num_blocks, num_kv_heads, head_size, block_size]; a head's page contiguous
            "NHD"   [num_blocks, block_size, num_kv_heads, head_size]; last dimension contiguous
            "HND"   [num_blocks, num_kv_heads, block_size, head_size]; last dimension contiguous
            All other strides are free: slices of a packed tensor need no copy. block_size is a
            power of two from 1 to 256; num_heads is a multiple of num_kv_heads.
        block_tables: [num_seqs, max_blocks_per_seq] int32; ids that no query token sees (past the
            sequence's end, before its window) are ignored.
        seq_lens: [num_seqs] int32, in tokens, the query tokens included.
        scale: of the product; head_size ** -0.5 by default.
        query_start_loc: [num_seqs + 1] int32, where each sequence's query tokens start in query;
            None: one a sequence. Tokens that no sequence owns are left as they are. Padded rows of
            0 tokens and 0 query tokens, as BatchBuffers has them, are fine.
        max_query_len: a bound on a sequence's query tokens, num_tokens by default. CUDA chooses the
            kernel by it, so give it wherever a batch has several tokens.
        alibi_slopes: [num_heads] float32.
        sliding_window: tokens a query token sees, itself included; 0: all.
        softcap: bound on the scaled product; 0: none.
        sinks: [num_heads] float32.
        k_scale, v_scale: for an 8-bit cache, whose elements stand for element * scale: float32, one
            element or [num_kv_heads]; None stands for 1.
        layout: "vllm", "NHD" or "HND".
        out: like query, written; the stride between tokens is free. None: a new tensor.
        return_lse: whether to return the log-sum-exp as well.
        workspace: scratch for CUDA from :func:`paged_attention_workspace`; not used on a CPU. None:
            one that belongs to the current stream. Calls that run at the same time need one each,
            as the default gives them, but for graphs captured on one stream and replayed on two.
        split_tokens: 0 cuts sequences into pieces as suits the batch. Else a piece has at most
            about this many tokens (2048, say) whatever else is in the batch: a sequence's result is
            then the same bit for bit in every batch called with the same max_query_len
            (batch-invariant mode). On CUDA the workspace bounds the pieces: slice block_tables to
            the longest sequence. A CPU then leaves sequences uncut.
        early_pages: lets CUDA read tables, lengths, starts and pages before the kernels before it
            have ended. Only for callers who know that nothing that may still be running writes any
            of them: not behind the cache writer of the same layer. (This library's kernels let
            their successor start early, so several in a row may be running; a copy or one of
            torch's own kernels ends such a row.) By default results depend on nothing that is read
            before all of them have ended: indices of up to 32 sequences are looked at early, to
            guess which pages will be asked for, and read again after; a wrong guess costs time.

    Returns:
        out, or (out, lse) with lse [num_tokens, num_heads] float32, natural logarithm.
        (:func:`merge_attn_states` takes its transpose, contiguous.)

    Raises:
        RuntimeError: naming the argument, what was expected and what was given. On the CPU also for
            a length, block id or query_start_loc out of range, before anything is written; on CUDA
            such a row is contained (clamped, skipped).
    """
    if is_grad_enabled():
        _inference_only(
            "paged_attention",
            out, query, key_cache, value_cache, alibi_slopes, sinks, k_scale, v_scale,
        )  # fmt: skip
    if not isinstance(query, Tensor):
        raise RuntimeError(f"paged_attention: query: expected a tensor, got {query!r:.40}")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if max_query_len is None:
        max_query_len = 1 if query_start_loc is None else query.shape[0]
    if out is None:
        out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
    op = _traced if is_dynamo_compiling() else _direct
    op(
        out, lse, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale,
        alibi_slopes, sliding_window, softcap, sinks, k_scale, v_scale, layout, max_query_len,
        workspace, split_tokens, early_pages,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def paged_attention_workspace(device: torch.device | str | int) -> Tensor:
    """Scratch for one :func:`paged_attention` at a time on a CUDA device: uint8, 32 MiB, zeros.

    Every call leaves it zero where that matters, so it is made once.
    """
    return torch.zeros(_C.paged_attention_workspace_bytes, dtype=torch.uint8, device=device)


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Merges attention over two disjoint sets of keys by their log-sum-exp.

    The registered op has output_lse second; this order is that of vLLM's wrapper. (Merging partial
    softmax results: Milakov and Gimelshein 2018, arXiv:1805.02867.)

    Args:
        output: [num_tokens, num_heads, head_size], written; may be prefix_output or suffix_output.
        prefix_output, suffix_output: the same shape and dtype; the strides of tokens and heads are
            free in all three.
        prefix_lse, suffix_lse: [num_heads, num_tokens] float32, contiguous, natural logarithm. -inf
            (and +inf) marks a part without keys, whose output is not looked at.
        output_lse: [num_heads, num_tokens] float32, written; may be prefix_lse or suffix_lse.

    Where both parts are empty the output is 0 and its lse -inf.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    _inference_only(
        "merge_attn_states", output, prefix_output, prefix_lse, suffix_output, suffix_lse,
        output_lse,
    )  # fmt: skip
    _ops.merge_attn_states.default(
        output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse
    )


OPS = [
    # norms
    "rms_norm",
    "fused_add_rms_norm",
    # rotary and activations
    "rotary_embedding",
    "silu_and_mul",
    "mul_and_silu",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gelu_new",
    "gelu_fast",
    "gelu_quick",
    # cache
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "copy_blocks",
    "swap_blocks",
    "convert_fp8",
    # attention
    "merge_attn_states",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
]
"""Every op of the library."""


__all__ = ["check", "paged_attention_workspace", *OPS]


def check() -> None:
    """Waits for the GPUs that have checks under way and raises what check mode has found there.

    With ``VLLM_KERNELS_CHECK=1`` in the environment every CUDA op also scans its index tensors
    (slots, positions, lengths, block tables). The first bad value, which the kernels skip, is
    raised by a later op, or at once by this call; under CUDA-graph replay too. On the CPU every
    call checks its index tensors anyway, and this function does nothing.

    Raises:
        RuntimeError: naming op, argument, index and value.
    """
    if _library.cuda_loaded and torch.cuda.is_initialized():
        for device in _ops.scanned_devices.default():
            torch.cuda.synchronize(device)
        _ops.raise_bad_index.default()


def _fake(op: str) -> Callable[..., None]:
    """What runs for fake and meta tensors. torch calls it for a call with any meta tensor, too."""
    names = [argument.name for argument in getattr(_ops, op).default._schema.arguments]

    def fake(*args: object, **kwargs: object) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = [
            (name, tensor)
            for name, value in given.items()
            if not (op == "copy_blocks" and name == "block_mapping")  # may be on the CPU
            for tensor in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(tensor, Tensor)
        ]
        meta = next((name for name, tensor in tensors if tensor.is_meta), None)
        real = next(((name, tensor) for name, tensor in tensors if not tensor.is_meta), None)
        if meta is not None and real is not None:
            raise RuntimeError(
                f"{op}: {meta}: expected a tensor on {real[1].device} (from {real[0]}), got meta"
            )

    return fake


def _register_fakes() -> None:
    """All ops write into their arguments and return nothing."""
    for name in OPS:
        if name == "swap_blocks":  # its mapping is on the CPU, wherever the caches are
            torch.library.register_fake("vllm_kernels::swap_blocks")(lambda *args, **kwargs: None)
        else:
            torch.library.register_fake(f"vllm_kernels::{name}")(_fake(name))


_register_fakes()
_library.explain_missing_cuda(OPS)
