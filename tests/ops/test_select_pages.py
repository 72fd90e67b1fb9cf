"""select_pages: against its definition in float64, exact where numbers are small integers."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, needs_gpu, opcheck, raises, to_layout
from pages_cases import lengths_and_tables

import vllm_kernels
from vllm_kernels import reference

LENS = [700, 0, 1, 16, 17, 333, 80]
BLOCK = 16


class Case:
    """Sequences, their query and bounds: small integers, whose scores are exact and often equal."""

    def __init__(
        self, device: str, dtype: torch.dtype, lens: list[int] | None = None, *,
        heads: tuple[int, int] = (8, 2), size: int = 64, exact: bool = True,
    ) -> None:  # fmt: skip
        lens = LENS if lens is None else lens
        self.tables, self.lens, blocks = lengths_and_tables(lens, BLOCK, device)
        shape = (blocks, heads[1], 2, size)
        numbers = torch.randint(-3, 4, shape) if exact else torch.randn(shape)
        self.bounds = numbers.sort(2).values.to(device, dtype)
        shape = (len(lens), heads[0], size)
        numbers = torch.randint(-2, 3, shape) if exact else torch.randn(shape)
        self.query = numbers.to(device, dtype)

    def select(self, budget: int, select=vllm_kernels.select_pages, **options):
        options = {"block_size": BLOCK, **options}
        return select(self.query, self.bounds, self.tables, self.lens, budget, **options)

    def check(self, budget: int, **options) -> None:
        got = self.select(budget, **options)
        want = self.select(budget, reference.select_pages, **options)
        for name, one, other in zip(("tables", "lens"), got, want):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("per_kv_head", [False, True])
@pytest.mark.parametrize("budget", [80, 96, 300, 700, 5000])
@pytest.mark.parametrize(("sinks", "recent"), [(1, 4), (0, 1), (2, 2)])
def test_matches_reference(device, dtype, per_kv_head, budget, sinks, recent):
    options = {"sink_pages": sinks, "recent_pages": recent, "per_kv_head": per_kv_head}
    Case(device, dtype).check(budget, **options)


@pytest.mark.parametrize("per_kv_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "size"),
    [((1, 1), 8), ((4, 4), 80), ((32, 8), 128), ((12, 3), 7), ((4, 4), 2048)],
    ids=str,
)
def test_heads_and_sizes(device, dtype, per_kv_head, heads, size):
    Case(device, dtype, heads=heads, size=size).check(128, per_kv_head=per_kv_head)


def test_long_sequences(device):
    """Many CTAs of a row, many pages of equal score."""
    case = Case(device, torch.bfloat16, [40_000, 9000], heads=(4, 2), size=32)
    for per_kv_head in (False, True):
        for budget in (80, 2048, 32_000):
            case.check(budget, per_kv_head=per_kv_head)


@pytest.mark.parametrize("equal", [400, 700, 1500])
def test_many_equal_scores(device, equal):
    """More pages of nearly equal score than a CTA ranks, with or without some far from them."""
    case = Case(device, torch.float32, [1600 * BLOCK, 2048 * BLOCK, 2049 * BLOCK], size=32)
    case.bounds[torch.randperm(len(case.bounds))[: len(case.bounds) * equal // 1600]] = 1.0
    near = case.bounds.clone()
    for far in (1.0, 1e6, 1e-6):
        case.bounds[::97] = near[::97] * far
        for budget in (96, 20_000):
            case.check(budget, per_kv_head=True)


def test_scores_of_any_numbers(device, dtype):
    """No page that is left out scores above one that is kept, but for rounding in float32."""
    case = Case(device, dtype, [5000, 333], heads=(8, 2), size=128, exact=False)
    for per_kv_head in (False, True):
        tables, _ = case.select(512, per_kv_head=per_kv_head)
        for seq, length in enumerate(case.lens.tolist()):
            ids = case.tables[seq, : -(-length // BLOCK)].long()
            scores = reference.page_scores(case.query[seq], case.bounds[ids])
            scores = scores if per_kv_head else scores.sum(0, keepdim=True)
            for row, of_row in enumerate(scores):
                table = tables[seq, row] if per_kv_head else tables[seq]
                kept = torch.isin(ids, table[: min(len(ids), 32)].long())
                assert kept[0] and kept[-4:].all() and kept.sum() == min(len(ids), 32)
                free = torch.ones_like(kept)
                free[0], free[-4:] = False, False
                if (free & ~kept).any():
                    gap = of_row[free & ~kept].max() - of_row[free & kept].min()
                    assert gap <= 1e-5 * of_row.abs().max()


def test_scores_bound_every_product(device):
    """The reason of it all: score(page) >= q . k, for bounds of page_bounds_update."""
    keys = torch.randn(9, BLOCK, 2, 64, device=device)
    bounds = torch.zeros(9, 2, 2, 64, device=device)
    slots = torch.arange(BLOCK - 1, 9 * BLOCK, BLOCK, device=device)
    vllm_kernels.page_bounds_update(bounds, keys, slots, layout="NHD")
    query = torch.randn(8, 64, device=device)
    products = torch.einsum("hgd,pthd->hgpt", query.double().view(2, 4, 64), keys.double())
    assert (products.amax(3).sum(1) <= reference.page_scores(query, bounds) + 1e-9).all()


def test_a_budget_for_all_pages_gives_dense_attention_bit_for_bit(device, dtype, layout):
    case = Case(device, dtype, exact=False)
    shape = (len(case.bounds), BLOCK, 2, 64)
    keys, values = (
        to_layout(torch.randn(shape, device=device).to(dtype), layout, is_key)
        for is_key in (True, False)
    )
    attend = vllm_kernels.paged_attention
    for budget in (700 + BLOCK, 10**9):
        tables, lens = case.select(budget)
        assert torch.equal(lens, case.lens)
        dense = attend(case.query, keys, values, case.tables, case.lens, layout=layout)
        sparse = attend(case.query, keys, values, tables, lens, layout=layout)
        if tables.shape != case.tables.shape and dtype == torch.float32 and device == "cuda":
            # There the width of the tables bounds the splits of a sequence.
            torch.testing.assert_close(dense, sparse)
        else:
            assert torch.equal(dense, sparse)


def test_attention_over_the_kept_pages(device):
    """The unmodified kernel on the new tables is attention over the tokens of the kept pages."""
    case = Case(device, torch.float32, exact=False)
    keys, values = (torch.randn(len(case.bounds), BLOCK, 2, 64, device=device) for _ in range(2))
    tables, lens = case.select(160)
    got = vllm_kernels.paged_attention(case.query, keys, values, tables, lens, layout="NHD")
    for seq, length in enumerate(lens.tolist()):
        pages = tables[seq, : -(-length // BLOCK)].long()
        k, v = (x[pages].flatten(0, 1)[:length].double().repeat_interleave(4, 1)
                for x in (keys, values))  # fmt: skip
        weights = torch.einsum("hd,thd->ht", case.query[seq].double(), k).div(8).softmax(-1)
        want = torch.einsum("ht,thd->hd", weights, v) if length else torch.zeros(8, 64)
        torch.testing.assert_close(got[seq].double().cpu(), want.double().cpu(), rtol=0, atol=2e-5)


def test_nan_stays_in_its_row(device):
    case = Case(device, torch.float32, [700, 700], exact=True)
    want = case.select(160)[0][1].clone()
    case.query[0] = float("nan")  # counts as 0: all scores are equal, the first pages are kept
    tables, _ = case.select(160)
    assert torch.equal(tables[1], want)
    assert torch.equal(tables[0], torch.cat([case.tables[0, :6], case.tables[0, 40:44]]))
    page = case.tables[1, 30]
    case.bounds[page, 1, 0, 3] = float("nan")
    case.bounds[case.tables[1, 20], 0, 1, 3] = float("inf")
    case.query[1] = case.query[1].abs() + 1
    tables, _ = case.select(160)
    assert page in tables[1] and case.tables[1, 20] in tables[1]
    assert torch.equal(tables[0], torch.cat([case.tables[0, :6], case.tables[0, 40:44]]))


def test_nan_pages_do_not_displace_pages_that_are_always_kept(device):
    case = Case(device, torch.float32, [700])
    case.bounds[:] = float("nan")
    tables, _ = case.select(96)
    assert torch.equal(tables[0], case.tables[0, [0, 1, 40, 41, 42, 43]])


def test_strided_tensors(device, dtype):
    case = Case(device, dtype)
    want = case.select(160)
    packed = torch.randn(len(LENS), 12, 65, device=device).to(dtype)
    packed[:, 2:10, 1:] = case.query
    case.query = packed[:, 2:10, 1:]
    wide = torch.zeros(len(case.bounds), 3, *case.bounds.shape[1:], dtype=dtype, device=device)
    wide[:, 1] = case.bounds
    case.bounds = wide[:, 1]
    case.tables = torch.cat([case.tables, case.tables], 1)[:, : case.tables.shape[1]]
    got = case.select(160)
    assert all(torch.equal(x, y) for x, y in zip(got, want))
    odd = torch.zeros(len(wide) * 257 + 1, dtype=dtype, device=device)[1:].view(-1, 257)[:, :256]
    odd.copy_(case.bounds.flatten(1))
    case.bounds = odd.view(-1, 2, 2, 64)
    got = case.select(160)
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_given_outputs(device):
    case = Case(device, torch.float32)
    for heads in ((), (2,)):
        memory = torch.full((len(LENS), *heads, 20), -7, dtype=torch.int32, device=device)
        tables, lens = memory[..., :10], torch.zeros_like(case.lens)
        got = case.select(1, out=(tables, lens))
        want = case.select(160, reference.select_pages, per_kv_head=bool(heads))
        assert got[0] is tables and got[1] is lens
        assert torch.equal(tables, want[0]) and torch.equal(lens, want[1])
        assert (memory[..., 10:] == -7).all()


def test_nothing_to_do(device):
    empty = Case(device, torch.float32, [])
    tables, lens = empty.select(160)
    assert tables.shape == (0, 2) and lens.shape == (0,)
    Case(device, torch.float32, [0, 0]).check(160)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_give_equal_tables(threads):
    case = Case("cpu", torch.float32, [5000, 333], exact=False)
    want, before = case.select(160), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = case.select(160)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_bad_indices(device):
    case = Case(device, torch.float32)
    good = case.select(160)
    case.tables[0, 9] = -3
    case.lens[6] = 10**6
    if device == "cpu":
        with raises(r"^select_pages: seq_lens\[6\] = 1000000: expected a length that fits block_t"):
            case.select(160)
        case.lens[6] = 80
        with raises(r"^select_pages: block_tables\[0, 9\] = -3: expected a block in \[0, \d+\)$"):
            case.select(160)
    else:  # contained: the other rows are right
        tables, lens = case.select(160)
        torch.cuda.synchronize()
        assert torch.equal(tables[1:6], good[0][1:6]) and torch.equal(lens[1:6], good[1][1:6])
        assert -3 not in tables[0]


def test_bad_input(device):
    case = Case(device, torch.float32)
    query, bounds, given, lengths = case.query, case.bounds, case.tables, case.lens
    tables = torch.zeros(len(LENS), 10, dtype=torch.int32, device=device)
    lens = torch.zeros_like(lengths)
    good = (tables, lens, query, bounds, given, lengths, BLOCK, 1, 4)
    cases = [
        ({0: tables[:, :4]},
         r"budget: expected at least sink_pages \+ recent_pages = 5 pages, got 4$"),
        ({0: tables[:3]}, r"tables: expected num_seqs = 7 \(from query\) at dimension 0, got"),
        ({0: tables[:, None].expand(7, 3, 10)},
         r"tables: expected num_kv_heads = 2 \(from bounds\) at dimension 1, got"),
        ({0: tables[:1].expand(7, 10)}, r"tables: is written, so its elements must not share mem"),
        ({1: lens[:3]}, r"lens: expected num_seqs = 7 \(from query\) at dimension 0, got"),
        ({1: lengths}, r"(lens and seq_lens|seq_lens and lens) overlap in memory$"),
        ({2: query[:, :7]}, r"query: expected num_heads to be a multiple of num_kv_heads = 2 \(f"),
        ({3: bounds.half()}, r"bounds: expected float32 \(from query\), got float16$"),
        ({3: bounds[..., :32]}, r"bounds: expected head_size = 64 \(from query\) at dimension 3"),
        ({4: given.long()}, r"block_tables: expected int32, got int64; cast it with .int\(\)$"),
        ({5: lengths.long()}, r"seq_lens: expected int32, got int64; cast it with .int\(\)$"),
        ({6: 0}, r"block_size: expected one in \[1, 2\^31\), got 0$"),
        ({7: -1}, r"sink_pages: expected a number >= 0, got -1$"),
        ({8: 0}, r"recent_pages: expected a number >= 1, got 0$"),
    ]  # fmt: skip
    for changed, message in cases:
        with raises(rf"^select_pages: {message}"):
            torch.ops.vllm_kernels.select_pages(*(changed.get(i, x) for i, x in enumerate(good)))
    wide = (query.new_zeros(7, 2, 4097), bounds.new_zeros(2, 2, 2, 4097))
    with raises(
        r"^select_pages: bounds: expected head_size of 1 to 4096, got shape \[2, 2, 2, 4097"
    ):
        torch.ops.vllm_kernels.select_pages(tables, lens, *wide, *good[4:])
    for budget in (0, 1.5, "x"):
        with raises(rf"^select_pages: budget: expected a number of tokens, got {budget}$"):
            case.select(budget)
    with raises(r"^select_pages: out: expected \(tables, lens\), got Tensor$"):
        case.select(160, out=tables)
    with raises(r"^select_pages: per_kv_head: expected a bool, got int$"):
        case.select(160, per_kv_head=2)
    with raises(r"^select_pages: block_tables: expected shape \[num_seqs, max_pages\], got shape"):
        vllm_kernels.select_pages(query, bounds, lengths, lengths, 160, block_size=BLOCK)
    with raises(r"^select_pages: query: requires grad, .*no_grad\(\)$"):
        vllm_kernels.select_pages(
            query.clone().requires_grad_(), bounds, given, lengths, 160, block_size=BLOCK
        )


def test_opcheck_and_compile(device):
    case = Case(device, torch.float32)
    tables = torch.zeros(len(LENS), 10, dtype=torch.int32, device=device)
    args = (case.query, case.bounds, case.tables, case.lens)
    opcheck("select_pages", tables, torch.zeros_like(case.lens), *args, BLOCK)
    for per_kv_head in (False, True):
        assert_compiles(
            lambda *tensors, each=per_kv_head: vllm_kernels.select_pages(
                *tensors, 160, block_size=BLOCK, per_kv_head=each
            ),
            *args,
        )


@needs_gpu
@pytest.mark.parametrize("per_kv_head", [False, True])
def test_graph_replay_with_grown_lengths(per_kv_head):
    case = Case("cuda", torch.bfloat16, [5000, 900, 333], heads=(8, 2))
    full = case.lens.clone()
    case.lens.copy_(torch.tensor([4000, 100, 0]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.select(160, per_kv_head=per_kv_head)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tables, lens = case.select(160, per_kv_head=per_kv_head)
    for lengths in (full, full // 2, full):
        case.lens.copy_(lengths)
        want = case.select(160, reference.select_pages, per_kv_head=per_kv_head)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(tables, want[0]) and torch.equal(lens, want[1])
