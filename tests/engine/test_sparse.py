"""Engines whose decoding sequences attend to selected pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

import torch
from engines import SMALL, greedy, prompts, replayed
from tiny_models import tiny_model
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.model_runner import ModelRunner
from vllm_kernels.engine.request import SamplingParams
from vllm_kernels.hf.attention_interface import AttentionOptions
from vllm_kernels.integrations.transformers import PageSelection, PromptLookup, SparQ
from vllm_kernels.kv_cache.tensors import KVCache, KVShape
from vllm_kernels.reference.cache import token_rows

FEW = PageSelection(budget=24, sink_pages=1, recent_pages=1, dense_layers=1)
ALL = PageSelection(budget=1024, dense_layers=0)
EACH_HEAD = replace(FEW, per_kv_head=True)
LONG = (60, 9, 90, 33, 140, 3)
ATTEND = KVCache.attend


def served(model, texts: list[list[int]], max_tokens: int = 24, **options) -> list[list[int]]:
    with Engine(model, **(SMALL | options)) as engine:
        tokens = greedy(engine, texts, max_tokens=max_tokens)
        engine.manager.check_integrity()
    return tokens


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each layer selected pages. Every time the bounds hold for all visible keys, and the
    pages are the reference's."""
    counts: Counter[int] = Counter()
    select = KVCache.select_pages

    def checked(
        cache: KVCache, layer: int, query: Tensor, tables: Tensor, lens: Tensor, *args, **options
    ) -> tuple[Tensor, Tensor]:
        counts[layer] += 1
        got = select(cache, layer, query, tables, lens, *args, **options)
        bounds, size = cache.page_bounds[layer].cpu(), cache.shape.block_size
        want = reference.select_pages(
            query.cpu(), bounds, tables.cpu(), lens.cpu(), *args, block_size=size, **options
        )
        for ours, exact in zip(got, want, strict=True):
            assert torch.equal(ours.cpu(), exact)
        keys = visible_keys(cache, layer)
        for table, length in zip(tables.tolist(), lens.tolist()):
            for page in range(-(-length // size)):
                visible = keys[table[page]][: length - page * size].float()
                least, most = bounds[table[page]].float().unbind(1)
                assert (visible.amin(0) >= least).all() and (visible.amax(0) <= most).all()
        return got

    monkeypatch.setattr(KVCache, "select_pages", checked)
    return counts


def visible_keys(cache: KVCache, layer: int) -> Tensor:
    """[num_blocks, block_size, num_kv_heads, head_size], dequantized."""
    keys = token_rows(cache.key_caches[layer].cpu(), cache.shape.layout)
    if cache.shape.cache_dtype == "auto":
        return keys
    return keys.float() * cache._k_scales[layer].cpu()[:, None]


@pytest.mark.parametrize("per_kv_head", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", ["vllm", "NHD", "HND"])
def test_a_budget_for_all_is_dense(
    layout: str, fused: bool, per_kv_head: bool, device: str, selections
) -> None:
    """Bit for bit: log-probabilities are equal. On CUDA a table for each KV head may split
    sequences in other places."""
    model, texts = tiny_model("llama", device), prompts(LONG)
    options = SMALL | {"layout": layout, "fused": fused, "cuda_graphs": False}
    results = []
    for sparse in (None, replace(ALL, per_kv_head=per_kv_head)):
        with Engine(model, sparse=sparse, **options) as engine:
            outputs = engine.generate(texts, SamplingParams(max_tokens=20, logprobs=2))
        is_exact = device == "cpu" or not per_kv_head
        logprobs = [o.completions[0].logprobs for o in outputs] if is_exact else []
        results.append(([o.completions[0].tokens for o in outputs], logprobs))
    assert results[0] == results[1]
    assert selections[0] == selections[1] > 19


@pytest.mark.parametrize("sparse", [FEW, EACH_HEAD], ids=["one", "each_head"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_few_pages(
    cache_dtype: str, fused: bool, sparse: PageSelection, device: str, selections
) -> None:
    """Other tokens than of dense attention; the same ones whatever the batch and the path."""
    model, texts = tiny_model("llama", device), prompts(LONG)
    options = {"cache_dtype": cache_dtype, "cuda_graphs": False, "check": False}
    tokens = served(model, texts, sparse=sparse, fused=fused, **options)
    assert tokens != served(model, texts, fused=fused, **options)
    assert selections[0] == 0 < selections[1]
    # Prompts are dense, so the first token is that of dense attention.
    for one, text in zip(tokens, texts):
        assert served(model, [text], sparse=sparse, **options) == [one]


def test_each_kv_head_has_its_own_pages() -> None:
    model, texts = tiny_model("llama"), prompts(LONG)
    one, each = (served(model, texts, sparse=x, check=False) for x in (FEW, EACH_HEAD))
    assert one != each


def test_a_prompt_is_dense_to_its_last_token(selections) -> None:
    """Also where one token of it is left: after a prefix that is cached, or in a chunk."""
    model, (text,) = tiny_model("llama"), prompts((97,))
    params = SamplingParams(max_tokens=1, logprobs=2)
    results = []
    for options in ({}, {"max_batch_tokens": 96}):
        options = {"max_batch_tokens": 200, "check": False} | options
        with Engine(model, sparse=FEW, **(SMALL | options)) as engine:
            for _ in range(2):  # 96 tokens are cached
                (output,) = engine.generate([text], params)
                results.append(output.completions[0].logprobs[0].keys())
    assert results == results[:1] * 4
    assert not selections


def test_only_the_selected_pages_are_attended_to(monkeypatch, selections) -> None:
    model, lengths = tiny_model("llama"), []

    def noted(cache: KVCache, layer: int, query: Tensor, tables: Tensor, lens: Tensor, **options):
        if layer == 1 and options.get("query_start_loc") is None:
            lengths.extend(lens.tolist())
        return ATTEND(cache, layer, query, tables, lens, **options)

    monkeypatch.setattr(KVCache, "attend", noted)
    served(model, prompts((140,)), sparse=FEW, check=False)
    assert len(lengths) == 23 and max(lengths) <= 24 and min(lengths) > 16


@pytest.mark.parametrize(("name", "layers"), [("mistral-window", []), ("gemma2", [1])])
def test_layers_that_need_positions_are_dense(name: str, layers: list[int], selections) -> None:
    model, sparse = tiny_model(name), PageSelection(24, recent_pages=1, dense_layers=0)
    served(model, prompts((140, 60)), sparse=sparse)
    assert sorted(selections) == layers


def test_layers_with_sinks_have_no_pages_of_each_kv_head() -> None:
    options = AttentionOptions(1.0, sinks=torch.zeros(4))
    assert FEW.serves(1, options) and not EACH_HEAD.serves(1, options)


def test_forks_and_swaps_keep_the_bounds(device: str, selections) -> None:
    """Parallel samples copy a page on write; a small cache swaps sequences out and in."""
    model, texts = tiny_model("llama", device), prompts((50, 30, 60, 41))
    options = {"sparse": FEW, "cuda_graphs": False}
    expected = served(model, texts, 40, **options)
    small = {"num_blocks": 26, "host_bytes": 1 << 22}
    with Engine(model, **(SMALL | options | small)) as engine:
        assert greedy(engine, texts, max_tokens=40) == expected
        assert engine.statistics().scheduler.num_swapped > 0
        params = SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=5)
        completions = engine.generate(texts[:2], params)[0].completions
    assert len({tuple(completion.tokens) for completion in completions}) > 1
    assert selections[1] > 60


@pytest.mark.parametrize("sparse", [FEW, EACH_HEAD], ids=["one", "each_head"])
def test_padded_passes(sparse: PageSelection, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA graphs need, without a GPU."""
    model, texts = tiny_model("llama"), prompts(LONG)
    expected = served(model, texts, sparse=sparse)
    monkeypatch.setattr(ModelRunner, "_capture", replayed)
    assert served(model, texts, sparse=sparse, cuda_graphs=True) == expected


@pytest.mark.parametrize("sparse", [FEW, EACH_HEAD], ids=["one", "each_head"])
def test_cuda_graphs(sparse: PageSelection) -> None:
    if not (torch.cuda.is_available() and vllm_kernels.cuda_loaded):
        pytest.skip("needs a GPU and the CUDA library")
    model, texts = tiny_model("llama", "cuda"), prompts(LONG)
    expected = served(model, texts, sparse=sparse, cuda_graphs=False)
    assert served(model, texts, sparse=sparse) == expected


@pytest.mark.parametrize("per_kv_head", [False, True])
def test_torch_compile(per_kv_head: bool, device: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, texts = tiny_model("llama", device, num_hidden_layers=1), prompts((60,))
    options = {"sparse": replace(FEW, dense_layers=0, per_kv_head=per_kv_head), "check": False}
    expected = served(model, texts, 4, **options)
    assert served(model, texts, 4, compile="aot_eager", **options) == expected
    assert not torch._dynamo.utils.counters["graph_break"]


# --- SparQ


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("layout", "select", "cache_dtype"),
    [
        ("vllm", "pages", "auto"),
        ("NHD", "tokens", "auto"),
        ("HND", "pages", "auto"),
        ("vllm", "pages", "fp8"),
    ],
)
def test_sparq(layout: str, select: str, cache_dtype: str, fused: bool, device: str) -> None:
    """Equal tokens in a batch, alone and on both paths; a k for all tokens is dense."""
    model, texts = tiny_model("llama", device), prompts(LONG)
    options = {"layout": layout, "cache_dtype": cache_dtype, "cuda_graphs": False, "check": False}
    dense = served(model, texts, fused=fused, **options)
    everything = SparQ(r=16, k=1024, select=select, dense_layers=0)
    assert served(model, texts, sparse=everything, fused=fused, **options) == dense
    few = SparQ(r=16, k=24, window=8, select=select, dense_layers=1)
    tokens = served(model, texts, sparse=few, fused=fused, **options)
    assert tokens != dense
    for one, text in zip(tokens, texts):
        assert served(model, [text], sparse=few, **options) == [one]


def test_sparq_is_what_the_op_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()
    attend = KVCache.attend_sparq

    def checked(cache: KVCache, layer: int, query: Tensor, tables: Tensor, lens: Tensor, **options):
        calls[layer] += 1
        got = attend(cache, layer, query, tables, lens, **options)
        options.pop("out")
        want = reference.sparq_attention(
            query, cache.key_caches[layer], cache.value_caches[layer], tables, lens,
            layout=cache.shape.layout, **options,
        )  # fmt: skip
        torch.testing.assert_close(got, want[0].float(), rtol=1e-4, atol=1e-4)
        return got

    monkeypatch.setattr(KVCache, "attend_sparq", checked)
    sparse = SparQ(r=16, k=24, window=8, dense_layers=0)
    served(tiny_model("gemma2"), prompts((60, 90)), sparse=sparse, check=False)
    assert not calls  # softcap and windows
    served(tiny_model("llama"), prompts((60, 90)), sparse=sparse, check=False)
    assert calls[0] == calls[1] > 20


def test_sparq_in_padded_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = tiny_model("llama"), prompts(LONG)
    sparse = SparQ(r=16, k=24, window=8, dense_layers=1)
    expected = served(model, texts, sparse=sparse)
    monkeypatch.setattr(ModelRunner, "_capture", replayed)
    assert served(model, texts, sparse=sparse, cuda_graphs=True) == expected


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"sparse": "quest"},
            TypeError,
            "Engine: sparse: expected PageSelection, SparQ or None",
        ),
        (
            {"sparse": PageSelection(39)},
            ValueError,
            "Engine: sparse: budget: expected at least 40 tokens, for sink_pages and recent_pages "
            "of 8, got 39",
        ),
        ({"sparse": SparQ(r=10)}, ValueError, "Engine: sparse: r: expected a multiple of 4"),
        ({"sparse": SparQ(k=8)}, ValueError, "Engine: sparse: k: expected at least "),
        (
            {"sparse": SparQ(r=16), "cache_dtype": "fp8", "k_scale": torch.ones(2, 2)},
            ValueError,
            r"Engine: sparse: expected one k_scale a layer, got one a head, with SparQ\(r=16",
        ),
        (
            {
                "sparse": replace(ALL, per_kv_head=True),
                "cache_dtype": "fp8",
                "v_scale": torch.ones(2, 2),
            },
            ValueError,
            "Engine: sparse: expected one v_scale a layer, got one a head, with PageSelection",
        ),
        (
            {"sparse": ALL, "speculative": PromptLookup()},
            ValueError,
            "Engine: sparse: expected None with speculative, whose passes are dense, got Page",
        ),
    ],
)
def test_refused(options: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        Engine(tiny_model(), **(SMALL | options))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"budget": 2.0}, TypeError, "budget: expected an integer, got 2.0"),
        ({"budget": 0}, ValueError, "budget: expected at least 1, got 0"),
        ({"recent_pages": 0}, ValueError, "recent_pages: expected at least 1, got 0"),
        ({"dense_layers": True}, TypeError, "dense_layers: expected an integer, got True"),
        ({"per_kv_head": 1}, TypeError, "per_kv_head: expected a bool, got 1"),
    ],
)
def test_options(arguments: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^PageSelection: {message}$"):
        PageSelection(**arguments)


def test_a_cache_without_bounds(device: str) -> None:
    cache = KVCache(KVShape(1, 1, 32, torch.float32), 4)
    ints = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"^KVCache: select_pages: there are no bounds: give KV"):
        cache.select_pages(0, torch.zeros(1, 1, 32), ints, ints[0], 80)


def test_a_table_for_each_kv_head_of_a_cache_with_scales(device: str) -> None:
    """One scale a layer is served, one a head is refused."""
    shape = KVShape(1, 2, 32, torch.float32, cache_dtype="fp8")
    query, key = (torch.randn(3, heads, 32, device=device) for heads in (4, 2))
    slots = torch.arange(3, device=device)
    table, length = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [3]))
    each = table[:, None].expand(1, 2, 1)
    for scale in (torch.tensor([0.5]), torch.tensor([[0.5, 0.25]])):
        cache = KVCache(shape, 2, device=device, k_scale=scale, v_scale=0.5)
        cache.write(0, key, key, slots)
        want = cache.attend(0, query[:1], table, length)
        if scale.ndim == 1:
            torch.testing.assert_close(cache.attend(0, query[:1], each, length), want)
        else:
            with pytest.raises(NotImplementedError, match="k_scale: expected one element with a b"):
                cache.attend(0, query[:1], each, length)
