"""paged_attention of prompts and chunks of them, where a GPU has a kernel for many query rows.

That one takes more than 64 query rows a KV head of 16 bits, in pages of 16 tokens (of more in NHD
and HND), where tiles of 128 rows keep half of the device busy: the cases are about as small as that
allows. The CPU, which has no such kernel, runs them with fewer tokens and heads.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_paged_attention_general import LAYOUTS, NAN, Case, check, make_case, per_head

import vllm_kernels

BF16, F16 = torch.bfloat16, torch.float16


def make(device: str, dtype: torch.dtype, lens: list[int], queries: list[int], **options) -> Case:
    """make_case() of 24 KV heads, so that 3 tiles of 128 rows are enough; or less on the CPU."""
    if device == "cpu":
        lens, queries = ([n // 8 for n in numbers] for numbers in (lens, queries))
        options |= {"heads": options.get("heads", 24) // options.get("kv_heads", 24), "kv_heads": 1}
    return make_case(device, dtype, lens, queries, **{"heads": 24, "kv_heads": 24, **options})


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cuda(device: str) -> str:
    if device != "cuda":
        pytest.skip("of CUDA kernels only")
    return device


@pytest.mark.parametrize("head_size", [64, 96, 128, 192, 256])
def test_prompts(device, layout, head_size):
    """No prefix and some, one tile of rows and several, ends inside of pages and of tiles."""
    if device == "cpu" and head_size != 128:
        pytest.skip("the CPU's kernel is the one that other tests have")
    dtype = F16 if head_size in (96, 256) else BF16
    check(make(device, dtype, [300, 130], [300, 77], head_size=head_size, layout=layout))


@pytest.mark.parametrize("heads, kv_heads", [(24, 8), (20, 4), (16, 2), (71, 1)])
def test_groups(cuda, heads, kv_heads):
    """Tiles that begin inside of a query token's heads, and tiles that do not."""
    shapes = {"heads": heads, "kv_heads": kv_heads, "head_size": 64}
    tokens = 128 * 70 // heads + 5
    check(make(cuda, BF16, [tokens + 100], [tokens], layout="vllm", **shapes))


@pytest.mark.parametrize("names", [["alibi_slopes"], ["sliding_window"], ["softcap"], ["sinks"],
                                   ["alibi_slopes", "sliding_window", "softcap", "sinks"]],
                         ids=lambda names: "+".join(names))  # fmt: skip
def test_options(cuda, layout, names):
    options = {
        "alibi_slopes": per_head(24, 0.01, 0.4),
        "sliding_window": 50,
        "softcap": 2.0,
        "sinks": per_head(24, -3.0, 4.0),
    }
    chosen = {name: options[name] for name in names}
    check(make(cuda, BF16, [200, 301], [90, 301], layout=layout, **chosen))


@pytest.mark.parametrize("window", [1, 16, 127, 128, 300])
def test_windows(cuda, window):
    check(make(cuda, F16, [500, 131], [290, 131], layout="vllm", sliding_window=window))


def test_mixed_batch(device, layout):
    """Decodes, verifications and chunks in one call: two launches, side by side."""
    lens = [400, 1, 33, 0, 900, 300, 17, 65, 64, 500]
    queries = [1, 1, 2, 0, 1, 290, 17, 65, 33, 4]
    case = make(device, BF16, lens, queries, heads=32, kv_heads=8, head_size=128, layout=layout)
    check(case)
    assert torch.equal(case.run(), case.run())


def test_many_sequences(device):
    """More than a warp's lanes; short ones and such that are longer than their context."""
    queries = [(i * 37) % 90 for i in range(40)]
    lens = [max(0, q - 3 + (i * 91) % 150) for i, q in enumerate(queries)]
    check(make(device, BF16, lens, queries, layout="NHD"))


def test_longer_pages_of_rows(cuda):
    for block_size, order in ((32, "HND"), (256, "NHD"), (32, "vllm"), (8, "vllm")):
        check(make(cuda, BF16, [300, 130], [300, 77], block_size=block_size, layout=order))


def test_a_sequences_result_does_not_depend_on_the_batch(cuda, layout):
    lens, queries = [300, 700, 129], [290, 300, 129]
    case = make(cuda, BF16, lens, queries, layout=layout)
    whole = case.run()
    first = 0
    for seq, count in enumerate(queries):
        if count >= 290:
            alone = replace(
                case.with_options(
                    query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=cuda)
                ),
                query=case.query[first : first + count],
                block_tables=case.block_tables[seq : seq + 1],
                seq_lens=case.seq_lens[seq : seq + 1],
            )
            assert torch.equal(alone.run(), whole[first : first + count])
        first += count


def test_pages_that_no_row_sees_are_not_read(cuda, layout):
    """Behind the context, and before every window of a tile of rows."""
    case = make(cuda, BF16, [600], [290], layout=layout, sliding_window=40)
    want = case.run()
    gone = case.block_tables[0, : (600 - 290 - 40) // 16].long()
    case.key_cache[gone] = NAN
    case.value_cache[gone] = NAN
    case.block_tables[0, : (600 - 290 - 40) // 16] = -1
    assert torch.equal(case.run(), want)


def test_later_tokens_have_no_influence_on_earlier_tiles(cuda, layout):
    """A token that is NaN spoils the rows that see it and those of their tile, not those before."""
    case = make(cuda, BF16, [290], [290], layout=layout)
    want = case.run()
    page = case.block_tables[0, 200 // 16].long()
    case.value_cache[page] = NAN
    assert torch.equal(case.run()[:128], want[:128])


def test_bad_pages_are_contained(cuda, layout):
    """Tokens of a page that there is not are skipped, the other sequences are right."""
    case = make(cuda, BF16, [300, 310], [300, 290], layout=layout)
    want = case.run()
    case.block_tables[0, 2] = 2**30
    got = case.run()
    assert torch.equal(got[300:], want[300:]) and torch.equal(got[:32], want[:32])
    assert not got.isnan().any() and not torch.equal(got[48:], want[48:])


def test_replayed_graph(cuda):
    """Other lengths than those of the capture; a batch that is padded with tokens of nobody."""
    case = make(cuda, BF16, [300, 20, 500], [290, 1, 200], heads=32, kv_heads=8, layout="vllm")
    case.run()
    graph = torch.cuda.CUDAGraph()
    out = torch.full_like(case.query, NAN)
    with torch.cuda.graph(graph):
        vllm_kernels.paged_attention(
            *case.tensors(), **case.options, max_query_len=case.max_query_len, out=out
        )
    for lens, starts in (([300, 20, 500], [0, 290, 291, 491]), ([200, 9, 131], [0, 70, 79, 210])):
        case.seq_lens.copy_(torch.tensor(lens))
        case.options["query_start_loc"].copy_(torch.tensor(starts))
        out.fill_(NAN)
        graph.replay()
        want = case.naive()[0][: starts[-1]]
        error = ((out[: starts[-1]].double() - want).norm() / want.norm()).item()
        assert error < 3e-3
