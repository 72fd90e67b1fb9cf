"""sparq_attention: against its definition in float64, and against dense attention where all is
kept."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    assert_close,
    assert_compiles,
    needs_gpu,
    opcheck,
    opcheck_float8,
    raises,
    to_layout,
)
from pages_cases import EIGHT_BITS, lengths_and_tables

import vllm_kernels
from vllm_kernels import reference
from vllm_kernels.reference.cache import token_rows

LENS = [700, 0, 1, 16, 17, 333, 80]
FLOOR = {torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


class Case:
    """Sequences whose tokens the query tells apart: each KV head has a direction of its own, along
    which the keys of all pages differ."""

    def __init__(
        self, device: str, dtype: torch.dtype, layout: str, lens: list[int] | None = None, *,
        heads: tuple[int, int] = (8, 2), size: int = 64, block: int = 16,
        stored: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.dtype, self.block = layout, dtype, block
        lens = LENS if lens is None else lens
        self.tables, self.lens, blocks = lengths_and_tables(lens, block, device)
        shape = (blocks, block, heads[1], size)
        keys, values = torch.randn(2, *shape)
        stored = stored or dtype
        factor = 20 if stored == torch.int8 else 1
        self.keys, self.values = (
            to_layout((factor * x).to(stored).to(device), layout, is_key)
            for x, is_key in ((keys, True), (values, False))
        )
        common = torch.randn(len(lens), heads[1], 1, size)
        common *= torch.rand(size) ** 3  # few components matter
        apart = torch.randn(len(lens), heads[1], heads[0] // heads[1], size)
        self.query = (3 * common + 0.3 * apart).flatten(1, 2).to(device, dtype)
        self.scales = {} if stored == dtype else {
            name: torch.tensor([value / factor], device=device)
            for name, value in (("k_scale", 0.8), ("v_scale", 1.3))
        }  # fmt: skip

    def call(self, function=vllm_kernels.sparq_attention, **options):
        options = {"layout": self.layout, **self.scales, **options}
        tensors = (self.query, self.keys, self.values, self.tables, self.lens)
        return function(*tensors, **options)

    def mean(self):
        sizes = (len(self.lens), -1, self.query.shape[-1])
        kv_heads = token_rows(self.keys, self.layout).shape[2]
        return torch.randn(sizes[0], kv_heads, sizes[2]).to(self.query)

    def check(self, **options) -> None:
        out, lse = self.call(return_lse=True, **options)
        want, want_lse = self.call(reference.sparq_attention, **options)
        assert_close(out, want, 2, FLOOR[self.dtype])
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("select", ["pages", "tokens"])
@pytest.mark.parametrize(
    "options",
    [
        {"r": 32, "k": 96}, {"r": 16, "k": 160, "window": 33, "sink_tokens": 5},
        {"r": 64, "k": 128, "window": 0}, {"r": 32, "k": 5000},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("has_mean", [False, True])
def test_matches_reference(device, dtype, layout, select, options, has_mean):
    if layout == "vllm" and select == "tokens":
        pytest.skip("refused: test_bad_input")
    case = Case(device, dtype, layout)
    case.check(select=select, mean_value=case.mean() if has_mean else None, **options)


@pytest.mark.parametrize(
    ("heads", "size", "block", "r"),
    [
        ((1, 1), 32, 8, 16), ((4, 4), 80, 32, 16), ((32, 8), 128, 16, 32), ((12, 3), 96, 1, 32),
        ((6, 2), 72, 4, 24), ((16, 1), 256, 256, 64), ((5, 1), 40, 64, 8),
    ],
    ids=str,
)  # fmt: skip
def test_heads_sizes_and_pages(device, dtype, layout, heads, size, block, r):
    case = Case(device, dtype, layout, [900, 70], heads=heads, size=size, block=block)
    case.check(r=r, k=3 * block if block > 16 else 96, window=block)
    case.check(r=r, k=2 * block if block > 16 else 80, window=1, mean_value=case.mean())


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("has_mean", [False, True])
def test_8_bit_caches(device, layout, name, has_mean):
    case = Case(device, torch.bfloat16, layout, stored=EIGHT_BITS[name])
    case.check(r=32, k=96, mean_value=case.mean() if has_mean else None)


def test_long_sequences(device, layout):
    """Many CTAs and tasks of a row."""
    case = Case(device, torch.bfloat16, layout, [40_000, 9000], heads=(8, 2), size=64)
    case.check(r=16, k=2048)
    if layout != "vllm":
        case.check(r=16, k=2048, select="tokens", mean_value=case.mean())


@pytest.mark.parametrize("select", ["pages", "tokens"])
def test_all_components_and_all_tokens_are_dense_attention(device, dtype, layout, select):
    if layout == "vllm" and select == "tokens":
        pytest.skip("refused: test_bad_input")
    case = Case(device, dtype, layout)
    want, lse = case.call(reference.paged_attention, scale=64**-0.5)
    for k in (720, 10**6):
        got, got_lse = case.call(r=64, k=k, select=select, return_lse=True, mean_value=case.mean())
        assert_close(got, want, 2, FLOOR[dtype])
        torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=2e-5)


def test_the_kept_tokens_are_the_best_ones(device):
    """With all components the scores are exact: the kept tokens have the highest sums of the
    group. One-hot values show which they are."""
    length, k = 256, 96
    case = Case(device, torch.float32, "HND", [length], heads=(4, 1), size=256)
    rows = torch.eye(length, device=device)[:, None]  # of the sequence's tokens
    pages = case.tables[0, : length // 16].long()
    case.values[pages] = rows.view(-1, 16, 1, length).transpose(1, 2)
    out = case.call(r=256, k=k, window=8, sink_tokens=3, select="tokens")
    kept = (out[0] > 0).all(0)
    keys = case.keys[pages].transpose(1, 2).flatten(0, 1)[:, 0]
    sums = (case.query[0] @ keys.T).sum(0)
    sums[:3] = sums[-8:] = torch.inf
    assert kept.sum() == k
    assert torch.equal(kept.nonzero()[:, 0], sums.topk(k).indices.sort().values)


def test_scale_and_its_sign(device):
    case = Case(device, torch.float32, "NHD")
    case.check(k=96, scale=0.03)
    case.check(k=96, scale=-0.2)


def test_strided_caches(device, dtype, layout):
    """Slices of a packed cache: blocks and heads are further apart."""
    case = Case(device, dtype, layout)
    want = case.call(k=96)
    for name in ("keys", "values"):
        cache = getattr(case, name)
        packed = cache.new_zeros(len(cache), 3, *cache.shape[1:])
        packed[:, 1] = cache
        setattr(case, name, packed[:, 1])
    assert torch.equal(case.call(k=96), want)
    for name in ("keys", "values"):  # elements, not 16 bytes
        cache = getattr(case, name)
        odd = cache.new_zeros(cache.numel() + 1)[1:].view(cache.shape)
        setattr(case, name, odd.copy_(cache))
    assert_close(case.call(k=96), want.double(), 2, FLOOR[dtype])


def test_nan_stays_in_its_sequence(device, layout):
    case = Case(device, torch.float32, layout, [700, 700])
    mean = case.mean()
    want = case.call(k=96, mean_value=mean)[1].clone()
    case.query[0] = float("nan")
    got = case.call(k=96, mean_value=mean)
    assert got[0].isnan().all() and torch.equal(got[1], want)
    case.query[0] = 1.0
    case.keys[case.tables[0, 20]] = float("nan")  # the lowest score: not kept
    got = case.call(k=96)
    assert got.isfinite().all()


def test_unused_slots_have_no_influence(device, layout):
    case = Case(device, torch.float32, layout, [690, 33])
    want = case.call(k=96)
    for cache, is_key in ((case.keys, True), (case.values, False)):
        rows = token_rows(cache, layout).clone()
        for seq, length in enumerate(case.lens.tolist()):
            rows[case.tables[seq, length // 16], length % 16 :] = float("nan")
        cache.copy_(to_layout(rows, layout, is_key))
    assert torch.equal(case.call(k=96), want)


def test_given_outputs_and_workspace(device):
    case = Case(device, torch.float16, "vllm")
    out = torch.full_like(case.query, 7)
    workspace = vllm_kernels.paged_attention_workspace(device)
    got = case.call(k=96, out=out, workspace=workspace)
    assert got is out and torch.equal(got, case.call(k=96))


def test_a_mean_of_another_dtype_is_converted(device):
    case = Case(device, torch.float16, "vllm")
    mean = case.mean()
    assert torch.equal(case.call(k=96, mean_value=mean), case.call(k=96, mean_value=mean.float()))


def test_nothing_to_do(device, layout):
    assert Case(device, torch.float32, layout, []).call().shape == (0, 8, 64)
    case = Case(device, torch.float32, layout, [0, 0])
    assert (case.call(k=96, mean_value=case.mean()) == 0).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(threads, layout):
    case = Case("cpu", torch.float32, layout, [5000, 333])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case.check(k=512, mean_value=case.mean())
    finally:
        torch.set_num_threads(before)


def test_explain(device):
    text = Case(device, torch.float32, "NHD").call(
        lambda *tensors, **options: vllm_kernels.explain(
            vllm_kernels.sparq_attention, *tensors, **options
        )
    )
    first, second = text.splitlines()
    assert first.startswith("sparq_attention: a choice of pages for each KV head")
    assert second.startswith("paged_attention: ")


def test_bad_indices(device):
    case = Case(device, torch.float32, "NHD")
    good = case.call(k=96)
    case.tables[0, 9] = -3
    case.lens[6] = 10**6
    if device == "cpu":
        with raises(r"^sparq_attention: seq_lens\[6\] = 1000000: expected a length that fits bl"):
            case.call(k=96)
        case.lens[6] = 80
        with raises(
            r"^sparq_attention: block_tables\[0, 9\] = -3: expected a block in \[0, \d+\)$"
        ):
            case.call(k=96)
    else:  # contained: the other rows are right
        got = case.call(k=96)
        torch.cuda.synchronize()
        assert torch.equal(got[1:6], good[1:6])


def test_bad_input(device):
    case = Case(device, torch.float32, "vllm")
    packed = torch.zeros(7, 12, 64, device=device)
    apart = case.values.new_zeros(len(case.values), 3, 2, 64, 16)[:, 1]
    ones = torch.ones(2, device=device)
    cases = [
        ({"r": 30}, r"r: expected a multiple of 4, the components of a chunk, up to head_size = "),
        ({"r": 68}, r"r: expected a multiple of 4, .* up to head_size = 64, got 68$"),
        ({"r": 0}, r"r: expected a multiple of 4, .* got 0$"),
        ({"k": 0}, r"k: expected a number of tokens >= 1, got 0$"),
        ({"k": 40, "window": 33},
         r"k: expected at least 48 tokens, which hold sink_tokens and window in whole pages, "),
        ({"window": -1}, r"window: expected a number of tokens >= 0, got -1$"),
        ({"sink_tokens": -1}, r"sink_tokens: expected a number of tokens >= 0, got -1$"),
        ({"select": "tokens"}, r"select: expected \"pages\" for layout \"vllm\", which inter"),
        ({"select": "rows"}, r"select: expected \"pages\" or \"tokens\", got \"rows\"$"),
        ({"components": "single"},
         r"components: expected \"chunks\", got \"single\", which is in reference.sparq_attention"),
        ({"components": 3}, r"components: expected \"chunks\", got 3$"),
        ({"layout": "NHD"}, r"key_cache: expected shape \[num_blocks, block_size, num_kv_heads, h"),
        ({"mean_value": torch.zeros(7, 1, 64, device=device)},
         r"mean_value: expected num_kv_heads = 2 \(from \w+\) at dimension 1, got shape"),
        ({"mean_value": torch.zeros(3, 2, 64, device=device)}, r"mean_value: expected num_seqs ="),
        ({"scale": float("nan")}, r"scale: expected a number that is finite in float32, got nan$"),
        ({"out": packed[:, :8]}, r"out: expected .*contiguous"),
        ({"k_scale": ones}, r"k_scale: expected None: only 8-bit caches have scales, this one is"),
    ]  # fmt: skip
    for changed, message in cases:
        with raises(rf"^sparq_attention: {message}"):
            case.call(**{"k": 96, **changed})
    case.query, kept = packed[:, 2:10], case.query
    with raises(r"^sparq_attention: query: expected .*contiguous"):
        case.call(k=96)
    case.query, case.values, values = kept, apart, case.values
    with raises(
        r"^sparq_attention: value_cache: expected blocks, KV heads and tokens as far apart"
    ):
        case.call(k=96)
    case.values = values
    with raises(r"^sparq_attention: out and query overlap|^sparq_attention: query and out overlap"):
        case.call(k=96, out=case.query)
    with raises(r"^sparq_attention: query: requires grad, .*no_grad\(\)$"):
        case.query = case.query.clone().requires_grad_()
        case.call(k=96)
    quantized = Case(device, torch.float32, "NHD", stored=torch.int8)
    with raises(r"^sparq_attention: k_scale and v_scale: expected one element, got one for each"):
        quantized.call(k=96, k_scale=ones, v_scale=ones)


def test_opcheck_and_compile(device, layout):
    case = Case(device, torch.float32, layout)
    tensors = (case.query, case.keys, case.values, case.tables, case.lens)
    for mean in (None, case.mean()):
        options = (0.1, 16, 96, 8, 0, "pages", mean, None, None, layout)
        opcheck("sparq_attention", torch.zeros_like(case.query), None, *tensors, *options)
    lse = torch.zeros(len(LENS), 8, device=device)
    opcheck("sparq_attention", torch.zeros_like(case.query), lse, *tensors, *options)
    assert_compiles(
        lambda *tensors: vllm_kernels.sparq_attention(
            *tensors, k=96, layout=layout, return_lse=True, mean_value=mean
        ),
        *tensors,
    )
    case = Case(device, torch.float32, layout, stored=torch.float8_e4m3fn)
    tensors = (case.query, case.keys, case.values, case.tables, case.lens)
    options = (0.1, 32, 96, 8, 0, "pages", None, *case.scales.values(), layout)
    opcheck_float8("sparq_attention", torch.zeros_like(case.query), None, *tensors, *options)


@needs_gpu
@pytest.mark.parametrize("has_mean", [False, True])
def test_graph_replay_with_grown_lengths(layout, has_mean):
    case = Case("cuda", torch.bfloat16, layout, [5000, 900, 333])
    options = {"k": 256, "mean_value": case.mean() if has_mean else None}
    full = case.lens.clone()
    case.lens.copy_(torch.tensor([4000, 100, 0]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.call(**options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.call(**options)
    for lengths in (full, full // 2, full):
        case.lens.copy_(lengths)
        want, _ = case.call(reference.sparq_attention, **options)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, want, 2, FLOOR[torch.bfloat16])
