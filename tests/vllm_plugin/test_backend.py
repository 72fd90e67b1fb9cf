"""The attention backend on vLLM's contracts: results, and which layers it serves."""

from __future__ import annotations

import importlib
import re
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FP8_QUANT, AttentionType, Capability
from helpers import EPSILON
from torch import Tensor

from vllm_kernels import reference
from vllm_kernels.errors import Unsupported
from vllm_kernels.integrations.vllm import calls

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 32, 16, 12
BATCHES = {  # query tokens and tokens of each sequence
    "decode": [(1, 20), (1, 1), (1, 37)],
    "prefill": [(20, 20), (3, 3)],
    "mixed": [(1, 33), (7, 23), (16, 16), (1, 5)],
    "verify": [(3, 20), (3, 37)],
}
SCALES = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))


def layer(backend: ModuleType, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A layer's implementation, made as vLLM makes it: the model's dtype is the default one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        arguments = {"num_kv_heads": KV_HEADS, "kv_cache_dtype": "auto"} | settings
        return backend.Impl(HEADS, arguments.pop("head_size", SIZE), SIZE**-0.5, **arguments)
    finally:
        torch.set_default_dtype(before)


def built(backend: ModuleType, impl: Any, common: Any, device: str = "cpu") -> tuple[Any, Any]:
    """The builder of a group with this layer, and a batch's metadata."""
    config = SimpleNamespace(
        layers={"0": SimpleNamespace(impl=impl)},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
    )
    builder = backend.Builder(SimpleNamespace(), ["0"], config, torch.device(device))
    return builder, None if common is None else builder.build(0, common)


def batch(rows: list[tuple[int, int]], causal: bool | Tensor = True, padding: int = 0) -> Any:
    """vLLM's CommonAttentionMetadata of these sequences; padding: tokens of a CUDA graph."""
    queries = [query for query, _ in rows]
    starts = torch.tensor([0, *queries]).cumsum(0)
    lens = [length for _, length in rows]
    tables = torch.randperm(BLOCKS)[: 3 * len(rows)].view(-1, 3).int()
    slots = []
    for table, (query, length) in zip(tables, rows):
        positions = torch.arange(length - query, length)
        slots.append(table[positions // BLOCK] * BLOCK + positions % BLOCK)
    return SimpleNamespace(
        num_actual_tokens=sum(queries), max_query_len=max(queries), query_start_loc=starts.int(),
        seq_lens=torch.tensor(lens, dtype=torch.int32), block_table_tensor=tables,
        slot_mapping=torch.cat([*slots, torch.full((padding,), -1)]).long(), causal=causal,
    )  # fmt: skip


def make_cache(dtype: torch.dtype, heads_first: bool = True) -> Tensor:
    """[blocks, kv heads, tokens, 2 * size], as vLLM gives it in its layouts HND and NHD."""
    if heads_first:
        return torch.randn(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE).to(dtype)
    return torch.randn(BLOCKS, BLOCK, KV_HEADS, 2 * SIZE).to(dtype).transpose(1, 2)


def run(backend: ModuleType, impl: Any, cache: Tensor, common: Any, padding: int = 0) -> Any:
    """A step of the layer -> (query, key, value, output)."""
    dtype = torch.float32 if cache.dtype == torch.uint8 else cache.dtype
    tokens = common.num_actual_tokens + padding
    query = torch.randn(tokens, HEADS, SIZE, dtype=dtype)
    key, value = torch.randn(2, tokens, KV_HEADS, SIZE, dtype=dtype)
    output = torch.full_like(query, 7.0)
    _, metadata = built(backend, impl, common)
    impl.do_kv_cache_update(SCALES, key, value, cache, common.slot_mapping)
    got = impl.forward(SCALES, query, key, value, cache, metadata, output)
    assert got is output
    return query, key, value, output


def want(query: Tensor, cache: Tensor, common: Any, **options: Any) -> Tensor:
    keys, values = cache.split(SIZE, dim=-1)
    return reference.paged_attention(
        query[: common.num_actual_tokens], keys, values, common.block_table_tensor,
        common.seq_lens, query_start_loc=common.query_start_loc, layout="HND", **options,
    )[0]  # fmt: skip


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = (16 if got.dtype == torch.float32 else 4) * EPSILON[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def counted(backend, monkeypatch) -> list[dict[str, Any]]:
    """The arguments of each call of paged_attention by the backend."""
    given: list[dict[str, Any]] = []

    def call(*arguments: Any, **options: Any) -> Any:
        given.append(options)
        return backend_op(*arguments, **options)

    backend_op = backend.paged_attention
    monkeypatch.setattr(backend, "paged_attention", call)
    return given


@pytest.mark.parametrize("heads_first", [True, False], ids=["HND", "NHD"])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_one_call_for_any_batch(backend, counted, dtype, rows, heads_first):
    common, cache, impl = batch(rows), make_cache(dtype, heads_first), layer(backend, dtype)
    before = dict(calls)
    query, key, value, output = run(backend, impl, cache, common)
    assert [one["max_query_len"] for one in counted] == [common.max_query_len]
    assert {name: n - before.get(name, 0) for name, n in calls.items()} == {
        "do_kv_cache_update": 1, "forward": 1,
    } | {name: 0 for name in before if name not in ("do_kv_cache_update", "forward")}  # fmt: skip
    places = (common.slot_mapping // BLOCK, slice(None), common.slot_mapping % BLOCK)
    assert torch.equal(cache[places], torch.cat([key, value], dim=-1))
    close(output, want(query, cache, common))


@pytest.mark.parametrize(
    "settings, options",
    [
        ({"sliding_window": 8}, {"sliding_window": 8}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"alibi_slopes": [0.5, 0.25, 0.125, 2.0]}, {"alibi_slopes": (0.5, 0.25, 0.125, 2.0)}),
        ({"sinks": torch.tensor([3.0, 0.0, -1.0, 9.0]).bfloat16()}, {"sinks": (3.0, 0, -1.0, 9.0)}),
    ],
    ids=["window", "softcap", "alibi", "sinks"],
)
def test_options_of_a_layer(backend, settings, options):
    common, cache = batch(BATCHES["mixed"]), make_cache(torch.float32)
    query, *_, output = run(backend, layer(backend, **settings), cache, common)
    options = {k: torch.tensor(v) if isinstance(v, tuple) else v for k, v in options.items()}
    close(output, want(query, cache, common, **options))


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_8_bit_caches(backend, kind):
    common, cache = batch(BATCHES["mixed"]), torch.zeros_like(make_cache(torch.uint8))
    query, key, value, output = run(backend, layer(backend, kv_cache_dtype=kind), cache, common)
    typed = cache.view(torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn)
    places = (common.slot_mapping // BLOCK, slice(None), common.slot_mapping % BLOCK)
    written = torch.cat([key / 0.5, value / 2.0], dim=-1).to(typed.dtype)
    assert torch.equal(typed[places].float(), written.float())
    scales = {"k_scale": SCALES._k_scale, "v_scale": SCALES._v_scale}
    close(output, want(query, typed, common, **scales))


def test_without_metadata_the_output_is_0(backend, counted):
    output = torch.full((5, HEADS, SIZE), 7.0)
    cache = torch.tensor([])  # vLLM measures memory before there is one
    assert layer(backend).forward(SCALES, output, output, output, cache, None, output) is output
    assert not output.any() and not counted


def test_padding_of_a_graph_is_left_alone(backend):
    common, cache = batch(BATCHES["decode"], padding=2), make_cache(torch.float32)
    query, *_, output = run(backend, layer(backend), cache, common, padding=2)
    close(output[:3], want(query, cache, common))
    assert (output[3:] == 7).all()


@pytest.mark.parametrize("window", [0, 8])
def test_not_causal(backend, window):
    """A window then has two sides, as in vLLM's FlashAttention backend."""
    common, cache = batch(BATCHES["mixed"], causal=False), make_cache(torch.float32)
    query, *_, output = run(backend, layer(backend, sliding_window=window or None), cache, common)
    sides = {"sliding_window": window, "window_right": window - 1}
    close(output, want(query, cache, common, causal=False, **sides))


@pytest.mark.parametrize("window", [0, 8])
def test_causal_or_not_by_request(backend, window):
    flags = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    common, cache = batch(BATCHES["mixed"], causal=flags), make_cache(torch.float32)
    query, *_, output = run(backend, layer(backend, sliding_window=window or None), cache, common)
    sides = {"sliding_window": window, "window_right": window - 1}
    causal = want(query, cache, common, sliding_window=window)
    other = want(query, cache, common, causal=False, **sides)
    assert not torch.equal(causal[1:8], other[1:8])
    close(output, torch.cat([causal[:1], other[1:8], causal[8:24], other[24:]]))


def test_fused_output_quantization(backend):
    common, cache = batch(BATCHES["mixed"]), make_cache(torch.bfloat16)
    impl = layer(backend, torch.bfloat16)
    query, key, value, output = run(backend, impl, cache, common)
    assert impl.fused_output_quant_supported(FP8_QUANT)
    assert not impl.fused_output_quant_supported(object())
    quantized = torch.zeros(output.shape, dtype=torch.float8_e4m3fn)
    _, metadata = built(backend, impl, common)
    scale = torch.tensor(0.25)
    impl.forward(SCALES, query, key, value, cache, metadata, quantized, output_scale=scale)
    expected = (output.float() / scale).to(torch.float8_e4m3fn)
    assert torch.equal(quantized.float(), expected.float())


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_rope_and_cache_in_one(backend, kind):
    """The door of vLLM's fusion of rotary embedding and cache write."""
    common = batch(BATCHES["mixed"])
    caches = [torch.zeros_like(make_cache(torch.float32 if kind == "auto" else torch.uint8))] * 2
    caches[1] = caches[0].clone()
    impl = layer(backend, kv_cache_dtype=kind)
    assert impl.fused_rope_kvcache_supported()
    angles, positions = torch.randn(40, SIZE // 2), torch.arange(common.num_actual_tokens) % 40
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    query = torch.randn(common.num_actual_tokens, HEADS, SIZE)
    key, value = torch.randn(2, common.num_actual_tokens, KV_HEADS, SIZE)
    turned = [reference.rotary_embedding(positions, x, SIZE, table, True) for x in (query, key)]
    impl.do_kv_cache_update(SCALES, turned[1], value, caches[0], common.slot_mapping)
    impl.do_rope_and_kv_cache_update(
        SCALES, query, key, value, positions, table, True, caches[1], common.slot_mapping
    )
    close(query, turned[0].double())
    differing = (caches[0].float() - caches[1].float()).abs()
    assert differing.max() <= (1 if kind == "fp8" else 1e-6)  # codes: a rounding of the rotation


def test_batch_invariance(backend, counted, monkeypatch):
    """A sequence gets the same bits alone and in a batch."""
    monkeypatch.setattr(backend.envs, "VLLM_BATCH_INVARIANT", True)
    assert backend.Backend.supports_batch_invariance()
    common, cache = batch(BATCHES["mixed"]), make_cache(torch.bfloat16)
    impl = layer(backend, torch.bfloat16)
    query, key, value, output = run(backend, impl, cache, common)
    alone = batch([(7, 23)])
    alone.block_table_tensor = common.block_table_tensor[1:2]
    _, metadata = built(backend, impl, alone)
    out = torch.empty_like(output[1:8])
    impl.forward(SCALES, query[1:8], key, value, cache, metadata, out)
    assert torch.equal(out, output[1:8])
    given = [(one["fixed_split_size"], one["max_query_len"]) for one in counted]
    assert given == [(backend.SPLIT_SIZE, 64)] * 2


UNSERVED = {
    "encoder": (
        {"attn_type": AttentionType.ENCODER_ONLY}, torch.float32, "attention type encoder_only"
    ),
    "small heads": (
        {"head_size": 24}, torch.float32, "head size 24, not a multiple of 8 from 32 to 256"
    ),
    "odd heads": (
        {"head_size": 36}, torch.float32, "head size 36, not a multiple of 8 from 32 to 256"
    ),
    "large heads": (
        {"head_size": 512}, torch.float32, "head size 512, not a multiple of 8 from 32 to 256"
    ),
    "heads of 8 bits": (
        {"head_size": 40, "kv_cache_dtype": "fp8"}, torch.float32,
        "head size 40, not a multiple of 16 from 32 to 256",
    ),
    "dtype": ({}, torch.float64, "dtype float64"),
    "cache": (
        {"kv_cache_dtype": "bfloat16"}, torch.float32, "a KV cache of bfloat16 for float32"
    ),
    "unknown cache": (
        {"kv_cache_dtype": "nvfp4"}, torch.bfloat16, "a KV cache of nvfp4 for bfloat16"
    ),
}  # fmt: skip


@pytest.mark.parametrize("settings, dtype, reason", UNSERVED.values(), ids=UNSERVED)
def test_on_a_cpu_other_layers_are_vllms(backend, vllm, counted, settings, dtype, reason):
    impl = layer(backend, dtype, sliding_window=5, logits_soft_cap=3.0, sinks="sinks", **settings)
    attn_type = settings.get("attn_type", AttentionType.DECODER)
    assert impl.arguments == (
        HEADS, settings.get("head_size", SIZE), SIZE**-0.5, KV_HEADS, None, 5,
        settings.get("kv_cache_dtype", "auto"), 3.0, attn_type, None, "sinks",
    )  # fmt: skip
    assert impl.forward(*range(9)) == ("vLLM's forward", tuple(range(9)))
    impl.do_kv_cache_update(*range(5))
    assert impl.written == tuple(range(5))
    common = object()
    builder, metadata = built(backend, impl, common)
    assert metadata == ("vLLM's metadata", (0, common, False))
    assert not builder.supports_update_block_table
    assert not impl.fused_rope_kvcache_supported()
    assert not impl.fused_output_quant_supported(FP8_QUANT)
    assert vllm.log == [f"vllm_kernels leaves attention layers to vLLM: {reason}"]
    assert not counted


@pytest.mark.parametrize("settings, dtype, reason", UNSERVED.values(), ids=UNSERVED)
def test_on_a_gpu_vllm_is_told_why_not(vllm, monkeypatch, settings, dtype, reason):
    vllm.install(on_cpu=False)
    backend = importlib.import_module("vllm_kernels.integrations.vllm.backend")
    monkeypatch.setattr(backend._library, "cuda_loaded", True)
    message = f"vllm_kernels: attention layer: not served: {reason}"
    with pytest.raises(Unsupported, match=f"^{re.escape(message)}$"):
        layer(backend, dtype, **settings)
    if "attn_type" not in settings:
        kind = settings.get("kv_cache_dtype", "auto")
        given = (settings.get("head_size", SIZE), dtype, kind, 16, False, False, False, False, None)
        assert backend.Backend.supports_combination(*given) == reason


def test_on_a_gpu_without_our_cuda_library(vllm, monkeypatch):
    vllm.install(on_cpu=False)
    backend = importlib.import_module("vllm_kernels.integrations.vllm.backend")
    monkeypatch.setattr(backend._library, "cuda_loaded", False)
    monkeypatch.setattr(backend._library, "cuda_reason", "no such library.")
    assert backend.Backend.supports_combination(64, torch.float16, "auto") == "no such library."


def test_what_vllm_may_ask_of_the_class(backend, vllm):
    ours = backend.Backend
    assert ours.get_name() == "CUSTOM" and not ours.forward_includes_kv_cache_update
    assert ours.supports_sink() and ours.supports_sliding_window() and ours.supports_non_causal()
    assert not ours.supports_mm_prefix()
    assert ours.supports_combination(64, torch.float16, "auto") is None
    assert ours.supports_combination(64, torch.float16, None) is None
    capabilities = [Capability(7, 5), Capability(8, 0), Capability(10, 0)]
    assert [ours.supports_compute_capability(one) for one in capabilities] == [False, True, True]
    sizes = ours.get_supported_kernel_block_sizes()
    assert sizes == [256, 128, 64, 32, 16]
    assert ours.get_supported_kernel_block_sizes(SimpleNamespace(head_size=128)) == sizes
    theirs = ours.get_supported_kernel_block_sizes(SimpleNamespace(head_size=512))
    assert theirs == ["multiples of 32"]  # of vLLM's own class, which gets these layers
    assert backend.Builder._cudagraph_support.name == "UNIFORM_BATCH"
    assert not (backend.Impl.supports_dcp or backend.Impl.can_return_lse_for_decode)
    layer(backend)
    assert vllm.log == [
        f"vllm_kernels {backend.version} serves attention layers (CPU, level "
        f"{backend._C.cpu_level()})"
    ]


def test_slopes_and_sinks_move_to_the_device_once(backend):
    sinks = torch.zeros(HEADS, dtype=torch.bfloat16)
    impl = layer(backend, alibi_slopes=[1.0] * HEADS, sinks=sinks)
    built(backend, impl, None, device="meta")
    assert impl.slopes.device.type == impl.float_sinks.device.type == "meta"
    assert impl.float_sinks.dtype == impl.slopes.dtype == torch.float32


def test_new_weights_give_new_sinks(backend):
    sinks = torch.zeros(HEADS, dtype=torch.bfloat16)
    impl = layer(backend, sinks=sinks)
    built(backend, impl, None)
    sinks.fill_(3.0)
    assert torch.equal(impl.float_sinks, torch.zeros(HEADS))
    impl.process_weights_after_loading(torch.bfloat16)
    assert torch.equal(impl.float_sinks, torch.full((HEADS,), 3.0))


def test_another_groups_tables(backend):
    builder, metadata = built(backend, layer(backend), batch(BATCHES["decode"]))
    table, slots = torch.zeros(3, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    changed = builder.update_block_table(metadata, table, slots)
    assert builder.supports_update_block_table
    assert changed.block_table is table and changed.slot_mapping is slots
    assert metadata.block_table is not table and changed.seq_lens is metadata.seq_lens
