"""paged_attention with tables in CSR form: the bits of the same call with block tables."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, needs_cuda_library, opcheck, raises
from paged_attention_cases import Case, make_case
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

BF16 = torch.bfloat16
GARBAGE = [-1, 2**30, -(2**31)]


def page_list(case: Case, first: int = 0) -> dict[str, Tensor]:
    """The pages of the case's tables, behind `first` ids that no sequence has."""
    block_size, device = case.block_size, case.query.device
    lens = case.seq_lens.tolist()
    counts = [-(-length // block_size) for length in lens]
    ids = [row[:count] for row, count in zip(case.block_tables.cpu(), counts)]
    garbage = torch.tensor(GARBAGE, dtype=torch.int32)
    last = [length - max(0, count - 1) * block_size for length, count in zip(lens, counts)]
    return {
        "kv_indptr": first + torch.tensor([0, *counts], device=device).cumsum(0).int(),
        "kv_indices": torch.cat([garbage[:first], *ids, garbage]).to(device),
        "last_page_len": torch.tensor(last, dtype=torch.int32, device=device),
    }


def attend(case: Case, pages: dict[str, Tensor], **options: object) -> Tensor:
    caches = case.query, case.key_cache, case.value_cache
    given = {**case.options, **options, "max_query_len": case.max_query_len}
    return vllm_kernels.paged_attention(*caches, **pages, **given)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("queries", [None, [1, 5, 1, 3, 1]], ids=["decode", "mixed"])
def test_same_bits_as_block_tables(device, dtype, layout, block_size, queries):
    lens = [300, block_size, 1, 2 * block_size + 1, 40]
    if queries is not None:
        lens[2], lens[1] = 0, block_size + 5
    shapes = {"block_size": block_size, "layout": layout, "head_size": 128}
    case = make_case(device, dtype, lens, queries and [1, 5, 0, 3, 2], **shapes)
    want, want_lse = case.run_with_lse()
    width = case.block_tables.shape[1]  # the SIMT kernel splits by the host's bound
    for first in (0, 3):
        pages = page_list(case, first)
        out, lse = attend(case, pages, return_lse=True, max_pages=width)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
    if dtype != torch.float32:
        assert torch.equal(attend(case, pages), want)


@pytest.mark.parametrize("options", [{"sliding_window": 50}, {"fixed_split_size": 64},
                                     {"softcap": 20.0}, {"causal": False}])  # fmt: skip
def test_options(device, layout, options):
    case = make_case(device, BF16, [700, 33, 1, 0], layout=layout, stored=torch.int8, **options)
    assert torch.equal(attend(case, page_list(case)), case.run())


def test_prompts(device, layout):
    """Of a length that prefill kernels serve."""
    case = make_case(device, BF16, [530, 300], [500, 300], head_size=128, layout=layout)
    assert torch.equal(attend(case, page_list(case)), case.run())


@needs_cuda_library
def test_kv_ready_in_a_graph(layout):
    """A promise about the caller's tensors. The tables are made in the same graph, just before."""
    case = make_case("cuda", BF16, [300, 17, 1000, 5], head_size=128, layout=layout)
    pages, want = page_list(case), case.run()
    others = page_list(case, 3) | {"last_page_len": torch.ones_like(pages["last_page_len"])}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(case, others, kv_ready=True)
        out = attend(case, pages, kv_ready=True)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


def test_many_sequences(device):
    """More than a warp has lanes, and lists of one page."""
    case = make_case(device, BF16, [i % 16 for i in range(100)], head_size=128)
    assert torch.equal(attend(case, page_list(case)), case.run())


def test_reference():
    case = make_case("cpu", torch.float32, [37, 0, 5])
    pages = page_list(case, 2)
    tables, lens = reference.table_of_page_list(**pages, block_size=16)
    assert torch.equal(lens, case.seq_lens)
    assert torch.equal(tables[0], case.block_tables[0, :3])


def test_bad_pages_on_the_cpu():
    case = make_case("cpu", torch.float32, [37, 20], spare_blocks=0)
    good = page_list(case)
    change = lambda name, *values: {name: torch.tensor(values, dtype=torch.int32)}  # noqa: E731
    cases = [
        (change("kv_indptr", 0, 3, 2), r"kv_indptr\[2\] = 2: expected a rising end of a list, .*"),
        (change("kv_indptr", 0, 3, 9), r"kv_indptr\[2\] = 9: expected a rising end of a list, .*"),
        (
            change("last_page_len", 5, 17),
            r"last_page_len\[1\] = 17: expected a number of tokens .*",
        ),
        (
            change("kv_indices", 1, 2, 0, 3, 5),
            r"kv_indices\[4\] = 5: expected a block in \[0, 5\)$",
        ),
        (change("kv_indptr", 0, 3), r"kv_indptr: expected num_seqs \+ 1 = 3 .*"),
        (change("last_page_len", 5), r"last_page_len: expected num_seqs = num_tokens = 2 .*"),
        ({"kv_indices": None}, r"kv_indices: expected a tensor, got None$"),
        ({"kv_indices": good["kv_indices"].long()}, r"kv_indices: expected int32, got int64; .*"),
        ({"max_pages": 2}, r"kv_indptr\[1\] = 3: expected a rising end of a list, at most max_.*"),
        ({"max_pages": -2}, r"max_pages: expected a number of pages >= 0 \(-1: any\), got -2$"),
        (
            {"seq_lens": case.seq_lens},
            r"kv_indptr: expected no block_tables and seq_lens, got some$",
        ),
    ]
    for changed, message in cases:
        with raises("^paged_attention: " + message):
            attend(case, {**good, **changed})


def test_too_few_tokens_on_the_cpu():
    case = make_case("cpu", torch.float32, [37, 20], [3, 20])
    pages = page_list(case)
    pages["last_page_len"][1] -= 1
    with raises(r"^paged_attention: length\[1\] = 19: expected at least its 20 query tokens$"):
        attend(case, pages)


@needs_cuda_library
def test_bad_pages_are_contained():
    """Sequences that are right give what they give, whatever the others have."""
    case = make_case("cuda", BF16, [300, 70, 5], head_size=128)
    want = case.run()
    good = page_list(case)
    for name, row, value in [
        ("kv_indptr", 2, -7), ("kv_indptr", 2, 2**31 - 1), ("last_page_len", 1, 2**31 - 1),
        ("last_page_len", 1, -5), ("kv_indices", 20, 2**30), ("kv_indices", 20, -3),
    ]:  # fmt: skip
        pages = {key: x.clone() for key, x in good.items()}
        pages[name][row] = value
        out = attend(case, pages)
        others = [0] if name == "kv_indptr" else [0, 2]  # two sequences share an end
        assert torch.equal(out[others], want[others])
        # A length that is too large reads all of the last page, which is NaN behind the tokens.
        assert out[1].isfinite().all() or name == "kv_indptr" or value == 2**31 - 1


@needs_cuda_library
def test_graph_replays_with_other_lists():
    long = make_case("cuda", BF16, [900, 33, 5, 400], head_size=128)
    pages = page_list(long)
    short = {key: x.clone() for key, x in pages.items()}
    short["kv_indptr"][1:] -= 10
    short["kv_indices"] = torch.cat([pages["kv_indices"][10:], pages["kv_indices"][:10]])
    given = {key: x.clone() for key, x in short.items()}
    want = attend(long, pages)
    out = torch.empty_like(want)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        attend(long, given, out=out)
    for key, x in given.items():
        x.copy_(pages[key])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_opcheck_and_compile(device):
    case = make_case(device, BF16, [37, 5])
    pages = page_list(case)
    out, ids, last = torch.empty_like(case.query), pages["kv_indices"], pages["last_page_len"]
    opcheck(
        "paged_attention", out, None, case.query, case.key_cache, case.value_cache, ids, last, None,
        0.1, None, 0, 0.0, None, None, None, "vllm", 1, None, 0, False, 0, pages["kv_indptr"],
    )  # fmt: skip
    assert_compiles(lambda: attend(case, pages))
