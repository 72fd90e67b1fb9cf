"""The rivals of bench_layer.py: vLLM's and FlashInfer's ops for the same layer.

vLLM's ops and FlashAttention 3 come from the kit ../shared/peers (its env.sh unpacks them to $PK);
FlashInfer from there or from where it is installed. Each library's planning and metadata are made
here, outside of the timing, and each gets contiguous queries, keys and values at no cost.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

from benchmarks.layer import EPSILON, Candidate, Layer, Missing

PARTITION = 512  # tokens, of vLLM's paged_attention_v2
WORKSPACE_BYTES = 256 << 20


@functools.cache
def _load(library: str) -> None:
    path = Path(os.environ.get("PK", "/tmp/pk")) / library
    if not path.exists():
        raise Missing(f"{path} is not there (the kit's env.sh unpacks it)")
    torch.ops.load_library(str(path))


def _vllm_small_ops(layer: Layer, write, attend) -> Candidate:
    """vLLM's norm, rotary and activation around one of its cache writers and attentions."""
    _load("vllm_cs.so")
    _load("vllm_pa.so")
    ops = torch.ops._C

    def norm(x, residual, weight):
        ops.fused_add_rms_norm(x, residual, weight, EPSILON)

    def turn_write_attend(i):
        ops.rotary_embedding(
            layer.positions, layer.query[i].flatten(1), layer.key[i].flatten(1),
            layer.shape.head_size, layer.cos_sin, True,
        )  # fmt: skip
        write(i)
        attend(i)

    return Candidate(norm, turn_write_attend, ops.silu_and_mul)


def _vllm_cache_writer(layer: Layer, layout: str):
    _load("vllm_pa.so")
    ops = torch.ops.peer_vllm
    op = ops.reshape_and_cache if layout == "vllm" else ops.reshape_and_cache_flash
    caches = layer.caches[layout]
    return lambda i: op(
        layer.key[i], layer.value[i], *caches[i], layer.slots, "auto", layer.one, layer.one
    )


def vllm_fa3(layer: Layer) -> Candidate:
    """What vLLM runs on an H200: its small ops and FlashAttention 3, layout NHD."""
    _load("fa3.so")
    ops, s = torch.ops._vllm_fa3_C, layer.shape
    caches = layer.caches["NHD"]
    starts = torch.arange(layer.batch + 1, dtype=torch.int32, device=layer.device)
    plan = ops.get_scheduler_metadata(
        layer.batch, 1, layer.context, s.heads, s.kv_heads, s.head_size, s.head_size,
        torch.bfloat16, layer.seq_lens, starts, None, None, None, None, s.page, 0, True, -1, -1,
        False, 0, None, 0,
    )  # fmt: skip

    def attend(i):
        ops.fwd(
            layer.query[i], *caches[i], None, None, None, layer.attended[i], starts, None, None,
            None, layer.seq_lens, 1, layer.context, layer.block_tables, None, None, None, None,
            None, None, None, None, layer.scale, True, -1, -1, 0.0, True, plan, 0, None, 0, None,
            1, 0, None,
        )  # fmt: skip

    return _vllm_small_ops(layer, _vllm_cache_writer(layer, "NHD"), attend)


def _vllm_paged_attention(version: int, layer: Layer) -> Candidate:
    """vLLM's own attention, on its own layout."""
    _load("vllm_pa.so")
    caches, s = layer.caches["vllm"], layer.shape
    scratch = []
    if version == 2:
        partial = (layer.batch, s.heads, -(-layer.context // PARTITION))
        sums = torch.empty(partial, device=layer.device)
        scratch = [sums, torch.empty_like(sums), layer.query[0].new_empty(*partial, s.head_size)]
    op = getattr(torch.ops.peer_vllm, f"paged_attention_v{version}")

    def attend(i):
        op(
            layer.attended[i], *scratch, layer.query[i], *caches[i], s.kv_heads, layer.scale,
            layer.block_tables, layer.seq_lens, s.page, layer.context, None, "auto", layer.one,
            layer.one, 0, 0, 0, 64, 0,
        )  # fmt: skip

    return _vllm_small_ops(layer, _vllm_cache_writer(layer, "vllm"), attend)


def _flashinfer(layer: Layer, make_attend) -> Candidate:
    """FlashInfer's small ops around one of its decode kernels, layout NHD."""
    from benchmarks import rivals

    fi = rivals.flashinfer
    if fi is None:
        raise Missing(rivals.MISSING["flashinfer"])
    caches, s = layer.caches["NHD"], layer.shape
    int32 = {"dtype": torch.int32, "device": layer.device}
    pages = layer.block_tables.flatten()
    page_starts = torch.arange(layer.batch + 1, **int32) * layer.pages
    last_page = torch.full((layer.batch,), layer.in_block + 1, **int32)
    sequences = torch.arange(layer.batch, **int32)  # of each new token
    positions = layer.positions.int()
    cos_sin = layer.cos_sin.float()  # it asks for float32
    attend = make_attend(layer, fi, page_starts, pages, last_page)

    def norm(x, residual, weight):
        fi.fused_add_rmsnorm(x, residual, weight, EPSILON)

    def turn_write_attend(i):
        fi.apply_rope_with_cos_sin_cache_inplace(
            layer.positions, layer.query[i].flatten(1), layer.key[i].flatten(1), s.head_size,
            cos_sin, True,
        )  # fmt: skip
        fi.append_paged_kv_cache(
            layer.key[i], layer.value[i], sequences, positions, caches[i], pages, page_starts,
            last_page, "NHD",
        )  # fmt: skip
        attend(i)

    return Candidate(norm, turn_write_attend, lambda out, x: fi.silu_and_mul(x, out))


def _flashinfer_decode(tensor_cores: bool, layer, fi, page_starts, pages, last_page):
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=layer.device)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=tensor_cores, backend="fa2" if tensor_cores else "auto"
    )
    s = layer.shape
    wrapper.plan(
        page_starts, pages, last_page, s.heads, s.kv_heads, s.head_size, s.page,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=layer.scale,
    )  # fmt: skip
    caches = layer.caches["NHD"]
    return lambda i: wrapper.run(layer.query[i], caches[i], out=layer.attended[i])


def _flashinfer_xqa(layer, fi, page_starts, pages, last_page):
    from flashinfer.xqa import xqa

    s, batch = layer.shape, layer.batch
    pairs = batch * s.kv_heads
    semaphores = torch.zeros(2 * pairs + 8, dtype=torch.uint32, device=layer.device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=layer.device)
    lengths = layer.seq_lens.view(torch.uint32).view(batch, 1)
    caches = layer.caches["NHD"]

    def attend(i):
        xqa(
            layer.query[i].unsqueeze(1), *caches[i], layer.block_tables, lengths,
            layer.attended[i].unsqueeze(1), workspace, semaphores, s.kv_heads, s.page,
            q_scale=1.0, kv_scale=1.0, kv_layout="NHD",
        )  # fmt: skip

    return attend


PEERS = {
    "vllm_fa3": vllm_fa3,
    "vllm_v1": functools.partial(_vllm_paged_attention, 1),
    "vllm_v2": functools.partial(_vllm_paged_attention, 2),
    "flashinfer_tc": lambda layer: _flashinfer(layer, functools.partial(_flashinfer_decode, True)),
    "flashinfer_cc": lambda layer: _flashinfer(layer, functools.partial(_flashinfer_decode, False)),
    "flashinfer_xqa": lambda layer: _flashinfer(layer, _flashinfer_xqa),
}
"""Candidate -> prepare(layer); on a GPU only."""
