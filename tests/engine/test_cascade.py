"""Engines whose sequences attend to common blocks together give what each gets alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

import torch
from engines import SMALL, by_transformers, greedy, prompts, replayed
from test_engine import COMPILED
from tiny_models import tiny_model

from vllm_kernels.engine import layer_groups
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.model_runner import ModelRunner
from vllm_kernels.engine.request import SamplingParams
from vllm_kernels.kv_cache import KVCacheManager
from vllm_kernels.kv_cache.tensors import KVCache
from vllm_kernels.ops import cascade

ATTEND_CASCADE = KVCache.attend_cascade
ROOMY = SMALL | {"max_batch_size": 6, "max_batch_tokens": 200}


@pytest.fixture(autouse=True)
def cascades(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[int, int]]]:
    """Lets every cascade pay. Called: (sequences, common blocks) of the calls of attention since
    the last time."""
    calls: list[tuple[int, int]] = []
    attend = KVCache.attend_cascade

    def counted(self, layer, query, tables, lens, plan, **options):
        if not (query.is_cuda and torch.cuda.is_current_stream_capturing()):
            tokens = int(plan.seq_lens[: plan.num_splits].sum())
            calls.append((int((lens > 0).sum()), tokens // self.shape.block_size))
        return attend(self, layer, query, tables, lens, plan, **options)

    monkeypatch.setattr(KVCache, "attend_cascade", counted)
    monkeypatch.setattr(cascade, "MIN_SAVED_BYTES", {"cpu": 1, "cuda": 1})

    def take() -> list[tuple[int, int]]:
        taken, calls[:] = list(calls), []
        return taken

    return take


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, cascades) -> list[tuple[int, int]]:
    """(common blocks, columns of the tables) of each plan. Attention is left as it is, for
    torch.compile."""
    made: list[tuple[int, int]] = []

    def plan(tables, lens, num_common, **sizes):
        made.append((int(num_common), tables.shape[1]))
        return cascade.cascade_plan(tables, lens, num_common, **sizes)

    monkeypatch.setattr(KVCache, "attend_cascade", ATTEND_CASCADE)
    monkeypatch.setattr(layer_groups, "cascade_plan", plan)
    return made


def shared(common: int, own: tuple[int, ...]) -> list[list[int]]:
    """Prompts that begin with the same tokens."""
    (beginning,) = prompts((common,))
    return [beginning + end for end in prompts(own)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "gemma2"])
def test_a_shared_prompt(name: str, overlap: bool, device: str, cascades) -> None:
    model = tiny_model(name, device)
    texts = shared(40, (1, 5, 9, 12, 3))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=overlap, cuda_graphs=False, **ROOMY) as engine:
        greedy(engine, texts[:1], max_tokens=1)  # its prompt is cached then
        assert not cascades()  # one sequence shares with nobody
        assert greedy(engine, texts) == expected
        # gemma2: a full and a sliding layer, the others: two full layers
        layers = 1 if name == "gemma2" else 2
        assert cascades() == [(5, 5)] * (19 * layers)
        engine.manager.check_integrity()
    with Engine(model, overlap=overlap, cuda_graphs=False, cascade=False, **ROOMY) as engine:
        greedy(engine, texts[:1], max_tokens=1)
        assert greedy(engine, texts) == expected
        assert not cascades()


@pytest.mark.parametrize(
    "name, min_saved", [("mistral-window", 1), ("bloom", 1), ("gpt_oss", 1), ("llama", 10**9)]
)
def test_where_no_layer_can_cascade(name: str, min_saved: int, monkeypatch, cascades) -> None:
    """Windows, ALiBi and sinks attend alone, as do engines too small for it to pay: nobody asks the
    manager, and no plan is made."""
    monkeypatch.setattr(cascade, "MIN_SAVED_BYTES", {"cpu": min_saved})
    monkeypatch.setattr(KVCacheManager, "num_common_prefix_blocks", None)
    monkeypatch.setattr(layer_groups, "cascade_plan", None)
    model = tiny_model(name)
    texts = shared(40, (1, 5, 9))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, **ROOMY) as engine:
        greedy(engine, texts[:1], max_tokens=1)
        assert greedy(engine, texts) == expected
    assert not cascades()


def test_tables_are_as_wide_as_the_longest_sequence(plans: list[tuple[int, int]]) -> None:
    """In blocks of 8, to a power of two; not as max_length, which would have 128."""
    model = tiny_model()
    texts = shared(40, (1, 5, 9))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, **ROOMY) as engine:
        greedy(engine, texts[:1], max_tokens=1)
        assert greedy(engine, texts) == expected
    assert plans == [(5, 8)] * 15 + [(5, 16)] * 4


@pytest.mark.parametrize("layout", ["vllm", "NHD", "HND"])
def test_layouts_and_splits(layout: str, device: str, monkeypatch, cascades) -> None:
    monkeypatch.setattr(cascade, "_num_splits", lambda *_: 3)
    monkeypatch.setattr(cascade, "MIN_SPLIT_TOKENS", 16)
    model = tiny_model("llama", device)
    texts = shared(40, (1, 5, 9))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, layout=layout, **ROOMY) as engine:
        greedy(engine, texts[:1], max_tokens=1)
        assert greedy(engine, texts) == expected
    assert cascades()


def test_parallel_samples(overlap: bool, cascades) -> None:
    """n of one prompt: the same tokens as without a cascade, by their seeds."""
    model = tiny_model()
    (text,) = prompts((44,))
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=4)
    outputs = []
    for used in (True, False):
        with Engine(model, overlap=overlap, cascade=used, **ROOMY) as engine:
            (output,) = engine.generate([text], params)
            outputs.append([one.tokens for one in output.completions])
        calls = cascades()
        assert bool(calls) is used
        assert set(calls) <= {(4, 5)}  # 5 full blocks of 8; the sixth is copied by each
    assert outputs[0] == outputs[1]


def test_requests_that_come_and_go(overlap: bool, device: str, cascades) -> None:
    """Passes with chunks of prompts beside; sequences that share less, or nothing."""
    model = tiny_model("llama", device)
    texts = [*shared(40, (1, 5, 9)), *prompts((30,)), *shared(24, (7, 2))]
    texts[4] = texts[0][:24] + texts[4][24:]
    lengths = (25, 8, 30, 6, 12, 9)
    expected = [by_transformers(model, text, n) for text, n in zip(texts, lengths)]
    small = ROOMY | {"max_batch_tokens": 16}
    with Engine(model, overlap=overlap, **small) as engine:
        greedy(engine, texts[:1], max_tokens=1)
        got: dict[int, list[int]] = {}
        waiting = list(zip(texts, lengths))
        while waiting or engine.has_unfinished:
            if waiting and sum(map(len, got.values())) >= 6 * len(got):
                text, length = waiting.pop(0)
                got[engine.add_request(text, SamplingParams(max_tokens=length))] = []
            for output in engine.step():
                got[output.request_id].append(output.token)
        engine.manager.check_integrity()
    assert list(got.values()) == expected
    if device == "cpu":
        assert {(2, 5), (3, 5)} <= set(cascades())


def test_padded_passes(overlap: bool, monkeypatch, cascades) -> None:
    """As CUDA graphs have them: a graph for any number of common blocks."""
    monkeypatch.setattr(ModelRunner, "_capture", replayed)
    model = tiny_model()
    asked = {common: shared(common, (1, 5, 9)) for common in (40, 16)}
    expected = {key: [by_transformers(model, x) for x in texts] for key, texts in asked.items()}
    with Engine(model, cuda_graphs=True, overlap=overlap, **ROOMY) as engine:
        for common, texts in asked.items():
            greedy(engine, texts[:1], max_tokens=1)
            cascades()
            assert greedy(engine, texts) == expected[common]
            assert (3, common // 8) in cascades()
        assert {cascade for size, cascade, _ in engine._packed._graphs if size == 4} == {True}
        engine.reset()
        engine.warm_up()
        graphs = {key[:2] for key in engine._packed._graphs}
        assert graphs == {(1, False), *((size, yes) for size in (2, 4, 6) for yes in (False, True))}
        assert greedy(engine, texts) == expected[common]


def test_a_cascade_that_cannot_be_captured(monkeypatch, cascades) -> None:
    """The engine goes on with the graphs of plain passes."""

    def capture(self, step):
        if step.num_common_blocks is not None:
            raise RuntimeError("no room")
        return replayed(self, step)

    monkeypatch.setattr(ModelRunner, "_capture", capture)
    model = tiny_model()
    texts = shared(40, (1, 5, 9))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, cuda_graphs=True, **ROOMY) as engine:
        greedy(engine, texts[:1], max_tokens=1)
        with pytest.warns(UserWarning, match="no more cascades: no room"):
            assert greedy(engine, texts) == expected
        assert (4, False, False) in engine._packed._graphs and not cascades()
        monkeypatch.setattr(KVCacheManager, "num_common_prefix_blocks", None)  # nobody counts them
        assert greedy(engine, texts) == expected


def test_in_cuda_graphs() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for name in ("llama", "gemma2"):
        model = tiny_model(name, "cuda")
        asked = [shared(common, (1, 5, 9)) for common in (40, 16)]
        expected = [[by_transformers(model, x) for x in texts] for texts in asked]
        with Engine(model, **ROOMY) as engine:
            for texts, tokens in zip(asked, expected):
                greedy(engine, texts[:1], max_tokens=1)
                assert greedy(engine, texts) == tokens
            assert (4, True, False) in engine._packed._graphs
            assert (4, False, False) not in engine._packed._graphs


@pytest.mark.parametrize("name", sorted(COMPILED.keys() - {"bloom"}))
def test_under_torch_compile(name: str, plans: list[tuple[int, int]]) -> None:
    """Passes with a cascade and without one are traced, neither with a break."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(name.split(",")[0], num_hidden_layers=1)
    texts = shared(40, (1, 5, 9))
    expected = [by_transformers(model, text, 6) for text in texts]
    options = ROOMY | {"fused": COMPILED[name], "compile": "aot_eager", "check": False}
    with Engine(model, **options) as engine:
        assert greedy(engine, texts[:1], max_tokens=2) == [expected[0][:2]]
        assert not plans
        assert greedy(engine, texts, max_tokens=6) == expected
        assert plans == [(5, 8)] * 5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    assert not torch._dynamo.utils.counters["graph_break"]
