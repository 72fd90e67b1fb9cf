"""paged_attention with a tree of new tokens, against the float64 reference."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, needs_cuda_library, raises
from paged_attention_cases import Case, assert_right, check, make_case, per_head, with_token_scales
from torch import Tensor

import vllm_kernels

BF16 = torch.bfloat16


def random_trees(counts: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """A tree for each sequence, or several: every token has an earlier parent, or none."""
    words = []
    for count in counts:
        seen: list[int] = []
        for token in range(count):
            parent = int(torch.randint(-1, token, ())) if token else -1
            seen.append(1 << token | (seen[parent] if parent >= 0 else 0))
        words += seen
    return signed(words, dtype)


def chains(counts: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return signed([(2 << token) - 1 for count in counts for token in range(count)], dtype)


def signed(words: list[int], dtype: torch.dtype) -> Tensor:
    size = 8 * dtype.itemsize
    return torch.tensor([word - (word >> (size - 1) << size) for word in words], dtype=dtype)


def tree_case(device: str, dtype: torch.dtype, lens: list[int], counts: list[int], **options):
    words = options.pop("words", torch.int64)
    case = make_case(device, dtype, lens, counts, **options)
    mask = random_trees(counts, words).to(device)
    return case.with_options(tree_mask=mask)


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_layouts(device, dtype, layout, block_size):
    lens, counts = [300, 17, 0, 64, 5], [6, 17, 0, 1, 5]
    check(tree_case(device, dtype, lens, counts, block_size=block_size, layout=layout))


@pytest.mark.parametrize("words", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 15, 31, 32, 33, 63, 64])
def test_numbers_of_tokens(device, layout, words, count):
    if count > 8 * words.itemsize:
        pytest.skip("more tokens than bits")
    for lens in ([count, count + 1], [count + 70, 2 * count + 200]):
        check(tree_case(device, BF16, lens, [count, count], layout=layout, words=words))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (20, 2), (16, 1)], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_heads(device, layout, heads, head_size):
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_size": head_size, "layout": layout}
    check(tree_case(device, BF16, [700, 133], [8, 11], **sizes))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_8_bit_caches(device, layout, stored):
    case = tree_case(device, BF16, [500, 90], [9, 30], stored=stored, layout=layout)
    check(case)
    if stored == torch.int8:
        check(with_token_scales(case))


@pytest.mark.parametrize(
    "options",
    [{"softcap": 20.0}, {"alibi_slopes": per_head(8, 0.01, 0.4)}, {"sinks": per_head(8, -1, 1)}],
    ids=lambda options: "+".join(options),
)  # fmt: skip
def test_options(device, layout, options):
    case = tree_case(device, BF16, [1000, 80], [12, 30], layout=layout, **options)
    check(case)
    assert_right(case, case.with_options(fixed_split_size=256).run())


def test_many_sequences_and_splits(device, layout):
    counts = [1 + i % 9 for i in range(40)]
    lens = [count + 37 * i % 500 for i, count in enumerate(counts)]
    check(tree_case(device, BF16, lens, counts, layout=layout))
    check(tree_case(device, BF16, [20_000, 3], [10, 3], layout=layout))


@pytest.mark.parametrize("counts", [[1, 1], [5, 2], [30, 9], [64, 40]], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_a_chain_is_causal_attention(device, dtype, layout, counts, heads):
    """Bit for bit where the same kernel runs."""
    sizes = {"heads": heads[0], "kv_heads": heads[1], "layout": layout}
    case = make_case(device, dtype, [300, 64], counts, **sizes)
    chain = case.with_options(tree_mask=chains(counts).to(device))
    check(chain)
    rows = case.max_query_len * heads[0] // heads[1]
    if device == "cpu" or rows <= 64:
        assert torch.equal(chain.run(), case.run())


def test_own_bits_and_later_tokens_do_not_matter(device):
    case = tree_case(device, BF16, [40, 90], [5, 8])
    mask = case.options["tree_mask"]
    index = torch.cat([torch.arange(5), torch.arange(8)]).to(device)
    without = mask & ~(1 << index)
    later = mask | (-1 << (index + 1))
    for other in (without, later, mask.int(), mask.int().view(torch.uint32)):
        assert torch.equal(case.with_options(tree_mask=other).run(), case.run())


def test_an_accepted_path_is_plain_decoding(device, dtype, layout):
    """Tokens 0, 2 and 5 of a tree, packed by copy_slots, give what their chain gives."""
    case = make_case(device, dtype, [50], [6], layout=layout)
    mask = torch.tensor([1, 3, 5, 13, 21, 37], device=device)  # 5 after 2 after 0
    tree = case.with_options(tree_mask=mask).run()
    path, first = [0, 2, 5], 44
    table = case.block_tables[0].cpu()

    def slots(tokens: list[int]) -> Tensor:
        at = torch.tensor(tokens) + first
        return (table[at // 16].long() * 16 + at % 16).to(device)

    caches = [case.key_cache, case.value_cache]
    vllm_kernels.copy_slots(caches, slots(path), slots([0, 1, 2]), layout=layout)
    chain = Case(
        case.query[path], case.key_cache, case.value_cache, case.block_tables,
        case.seq_lens - 3, 16, {**case.options}, 3,
    )  # fmt: skip
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    chain = chain.with_options(query_start_loc=starts)
    bound = {torch.float32: 1e-6, torch.float16: 2e-3, BF16: 2e-2}[dtype]
    torch.testing.assert_close(tree[path].float(), chain.run().float(), rtol=bound, atol=bound)


def test_page_lists(device):
    case = tree_case(device, BF16, [40, 90], [5, 8])
    used = [-(-length // 16) for length in (40, 90)]
    ids = torch.cat([case.block_tables[i, :n] for i, n in enumerate(used)])
    ends = torch.tensor([0, used[0], sum(used)], dtype=torch.int32, device=device)
    last = torch.tensor([8, 10], dtype=torch.int32, device=device)
    pages = {"kv_indptr": ends, "kv_indices": ids, "last_page_len": last, "max_pages": 6}
    got = vllm_kernels.paged_attention(
        *case.tensors()[:3], **pages, **case.options, max_query_len=8
    )
    torch.testing.assert_close(got, case.run(), rtol=1e-2, atol=1e-2)


def test_explain(device):
    case = tree_case(device, BF16, [400, 300], [60, 64], heads=32, kv_heads=8, head_size=128)
    text = vllm_kernels.explain(
        vllm_kernels.paged_attention, *case.tensors(), **case.options, max_query_len=64
    )
    assert device == "cpu" or "prefill kernels have no tree mask" in text


def test_bad_input(device):
    case = tree_case(device, BF16, [40, 90], [5, 8])
    mask = case.options["tree_mask"]
    for options, message in (
        ({"tree_mask": mask[:5]}, "tree_mask: expected num_tokens = 13 (from query)"),
        ({"tree_mask": mask.short()}, "tree_mask: expected int32, got int16"),
        ({"causal": False}, "tree_mask: expected causal=True and sliding_window=0"),
        ({"sliding_window": 9}, "tree_mask: expected causal=True and sliding_window=0"),
    ):
        with raises(re.escape(message)):
            case.with_options(**options).run()
    with raises("tree_mask: expected max_query_len <= 32 for int32, got 33"):
        vllm_kernels.paged_attention(
            *case.tensors(), **{**case.options, "tree_mask": mask.int()}, max_query_len=33
        )


def test_opcheck_and_compile(device):
    case = tree_case(device, BF16, [40, 90], [5, 8])

    def call(query: Tensor, mask: Tensor) -> Tensor:
        options = {**case.options, "tree_mask": mask}
        return vllm_kernels.paged_attention(query, *case.tensors()[1:], **options, max_query_len=8)

    assert_compiles(call, case.query, case.options["tree_mask"])


@needs_cuda_library
def test_cuda_graph():
    case = tree_case("cuda", BF16, [400, 90], [5, 8])
    mask, other = case.options["tree_mask"].clone(), random_trees([5, 8]).cuda()
    out = torch.empty_like(case.query)
    call = case.with_options(tree_mask=mask, out=out)

    def run() -> None:
        vllm_kernels.paged_attention(*call.tensors(), **call.options, max_query_len=8)

    assert_graph_replays(
        run, lambda: mask.copy_(other), out, case.with_options(tree_mask=other).run
    )
