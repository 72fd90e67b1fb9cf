"""attention_with_kvcache: a reference in float64, padded rows, aliases, torch's checks, errors."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, ints, opcheck, raises, to_layout
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference
from vllm_kernels.ops import _common

BOUND = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SIZE, KV_HEADS, HEADS = 64, 2, 6
LENS = [5, 0, 31, 16, -1, 40]
ROOM = 64  # tokens of a sequence


def make_case(
    device: str,
    dtype: torch.dtype,
    page: int = 16,
    layout: str = "NHD",
    queries: int = 1,
    new: int = 1,
    lens: list[int] | None = None,
) -> dict[str, object]:
    """The op's arguments; page 0: rows. What no sequence may read is NaN."""
    lens = LENS if lens is None else lens

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    count = ROOM // page if page else 1
    order = torch.randperm(len(lens) * count + 3)
    table = order[: len(lens) * count].view(len(lens), count).to(device, torch.int32)
    if not page:
        table = torch.arange(len(lens), dtype=torch.int32, device=device)[:, None]
    shape = (len(order) if page else len(lens), page or ROOM, KV_HEADS, SIZE)
    caches = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"]
    for seq, length in enumerate(lens):
        for position in range(max(0, length)):
            column, token = divmod(position, page or ROOM)
            for cache in caches:
                cache[int(table[seq, column]), token] = random(KV_HEADS, SIZE)
    case: dict[str, object] = {
        "query": random(len(lens), queries, HEADS, SIZE),
        "key_cache": to_layout(caches[0], layout, True),
        "value_cache": to_layout(caches[1], layout, False),
        "seq_lens": ints(lens, device),
    }
    if page:
        case.update(block_tables=table, layout=layout)
    if new:
        case.update(key=random(len(lens), new, KV_HEADS, SIZE))
        case.update(value=random(len(lens), new, KV_HEADS, SIZE))
    return case


def check(case: dict[str, object], **options: object) -> Tensor:
    """Runs a copy of the case beside the reference; the caches must be equal bit by bit."""
    case = {**case, **options}
    bounds = {name: case.pop(name) for name in ("max_query_len",) if name in case}
    want, *caches = reference.attention_with_kvcache(**on_cpu(case))
    out = vllm_kernels.attention_with_kvcache(**case, **bounds)
    query = case["query"]
    bound = BOUND[query.dtype]
    assert out.dtype == query.dtype and out.device == query.device and out.is_contiguous()
    torch.testing.assert_close(out.double().cpu(), want, rtol=bound, atol=bound)
    for name, cache in zip(("key_cache", "value_cache"), caches, strict=True):
        torch.testing.assert_close(case[name].cpu(), cache, rtol=0, atol=0, equal_nan=True)
    return out


def on_cpu(case: dict[str, object]) -> dict[str, object]:
    return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in case.items()}


@pytest.mark.parametrize("queries, new", [(1, 1), (1, 0), (3, 3), (3, 0), (2, 5)])
def test_pages(device, dtype, layout, queries, new):
    lens = LENS if new else [9, 16, 31, 3, -1, 40]
    case = make_case(device, dtype, 16, layout, queries, new, lens)
    out = check(case)
    assert not out[4].any(), "a padded row"


@pytest.mark.parametrize("page", [1, 8, 32])
def test_page_sizes(device, page):
    check(make_case(device, torch.bfloat16, page, new=2))


@pytest.mark.parametrize("queries, new", [(1, 1), (1, 0), (2, 3)])
def test_rows(device, dtype, queries, new):
    lens = LENS if new else [9, 16, 31, 3, -1, 40]
    check(make_case(device, dtype, 0, queries=queries, new=new, lens=lens))
    heads_first = make_case(device, dtype, 0, queries=queries, new=new, lens=lens)
    for name in ("key_cache", "value_cache"):
        rows = heads_first[name]
        heads_first[name] = rows.transpose(1, 2).contiguous().transpose(1, 2)
    check(heads_first)


@pytest.mark.parametrize("length", [50, 63])
def test_rows_of_any_length(device, length):
    """Slices of longer rows: pages of 1 and 2 tokens."""
    case = make_case(device, torch.bfloat16, 0, lens=[5, 0, 31])
    for name in ("key_cache", "value_cache"):
        case[name] = case[name][:, :length]
    check(case)


def test_options(device, dtype):
    case = make_case(device, dtype, queries=3, new=3)
    sinks = torch.linspace(-1, 2, HEADS, device=device)
    for options in (
        {"scale": 0.3}, {"sliding_window": 7}, {"softcap": 3.0}, {"sinks": sinks},
        {"causal": False}, {"causal": False, "window_right": 1},
    ):  # fmt: skip
        check({**case}, **options)


def test_ragged_queries_and_cumulative_lengths(device, dtype):
    lens, counts = [5, 31, 40], [2, 1, 4]
    case = make_case(device, dtype, lens=lens, new=0)
    starts = ints([0, *counts], device).cumsum(0).int()
    case["query"] = torch.randn(7, HEADS, SIZE).to(device, dtype)
    by_lens = check(case, query_start_loc=starts, max_query_len=4)
    ends = ints([0, *lens], device).cumsum(0).int()
    options = {"cumulative": True, "max_query_len": 4}
    by_ends = check(case, query_start_loc=starts, seq_lens=ends, **options)
    assert torch.equal(by_lens, by_ends)


def test_tokens_that_no_sequence_owns(device, dtype):
    case = make_case(device, dtype, lens=[5, 31], new=0)
    query = torch.randn(9, HEADS, SIZE).to(device, dtype)
    starts = ints([1, 3, 4], device)
    torch.empty(8 * query.numel(), device=device).fill_(torch.nan)  # the allocator reuses it
    call = {**case, "query": query, "query_start_loc": starts, "max_query_len": 2}
    out = vllm_kernels.attention_with_kvcache(**call)
    assert not out[:1].any() and not out[4:].any()
    call |= {"query": query[1:4].contiguous(), "query_start_loc": starts - 1}
    assert torch.equal(vllm_kernels.attention_with_kvcache(**call), out[1:4])


def test_cumulative_lengths_of_long_and_short_queries(device, layout):
    """On CUDA the kernels take the differences: prefill, decode beside it, and decode alone."""
    counts = [30] * 60 + [1] * 40 + [0, 3]
    lens = [count + (7 * seq) % 30 for seq, count in enumerate(counts)]
    case = make_case(device, torch.bfloat16, layout=layout, lens=lens, new=0)
    starts, ends = (ints([0, *numbers], device).cumsum(0).int() for numbers in (counts, lens))
    case["query"] = torch.randn(sum(counts), HEADS, SIZE).to(device, torch.bfloat16)
    case.update(query_start_loc=starts, max_query_len=30)
    for options in ({}, {"causal": False}, {"sliding_window": 9}, {"softcap": 3.0}):
        by_ends = check(case, seq_lens=ends, cumulative=True, **options)
        assert torch.equal(by_ends, check(case, **options))
    short = {"query": case["query"][-43:], "query_start_loc": starts[60:] - starts[60]}
    short |= {"block_tables": case["block_tables"][60:], "max_query_len": 3}
    by_ends = check(case, **short, seq_lens=ends[60:] + 5, cumulative=True)
    assert torch.equal(by_ends, check(case, **short, seq_lens=case["seq_lens"][60:]))


def test_cumulative_lengths_of_another_number_are_refused(device):
    case = make_case(device, torch.float32, lens=[5, 31], new=0)
    case.update(query=case["query"][:, 0], seq_lens=ints([0, 5, 36], device), cumulative=True)
    message = r"seq_lens: expected num_seqs \+ 1 = 4 \(from query_start_loc\) at dimension 0, got"
    with raises(rf"^attention_with_kvcache: {message} shape \[3\]$"):
        vllm_kernels.attention_with_kvcache(**case, query_start_loc=ints([0, 1, 1, 2], device))


def test_padded_rows_store_nothing(device):
    """A length below 0, a table without a page for the first new token, a full table (CUDA)."""
    lens = [-1, 20, 20, -5] if device == "cpu" else [-1, 20, 64, -5]
    case = make_case(device, torch.float32, lens=[0, 20, 20, 0])
    case["seq_lens"] = ints(lens, device)
    case["block_tables"][1, 1] = -1
    if device == "cpu":
        case["block_tables"][2] = -1
    before = case["key_cache"].clone()
    out = vllm_kernels.attention_with_kvcache(**case)
    assert not out.any()
    torch.testing.assert_close(case["key_cache"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("length, block", [(9, 10**6), (10**6, 0), (2**31 - 1, 0), (9, -7)])
def test_bad_indices_are_contained(device, length, block):
    """On CUDA: the row is cut or left out, its neighbours are right, and no other slot changes."""
    if device == "cpu":
        pytest.skip("a CPU refuses them")
    case = make_case(device, torch.bfloat16, lens=[5, 9, 31])
    changed = {name: x.clone() if isinstance(x, Tensor) else x for name, x in case.items()}
    changed["seq_lens"][1] = length
    changed["block_tables"][1] = block if block else changed["block_tables"][1]
    want = vllm_kernels.attention_with_kvcache(**case)
    out = vllm_kernels.attention_with_kvcache(**changed)
    torch.testing.assert_close(out[::2], want[::2], rtol=1.6e-2, atol=1.6e-2)
    row = case["block_tables"][1, 0]
    case["key_cache"][row, 9] = torch.nan  # the token that only the good call stores
    torch.testing.assert_close(
        changed["key_cache"], case["key_cache"], rtol=0, atol=0, equal_nan=True
    )


def test_eight_bit_cache(device):
    case = make_case(device, torch.bfloat16, lens=[5, 0, 31])
    for name in ("key_cache", "value_cache"):
        case[name] = case[name].nan_to_num(0.0).to(torch.float8_e4m3fn)
    want, *caches = reference.attention_with_kvcache(**on_cpu(case))
    out = vllm_kernels.attention_with_kvcache(**case)
    torch.testing.assert_close(out.double().cpu(), want, rtol=3e-2, atol=3e-2)
    assert torch.equal(case["key_cache"].cpu().float(), caches[0].float())


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_those_of_the_writer(device, dtype, layout, stored):
    """Bit by bit what reshape_and_cache stores, with any number of heads and head sizes."""
    case = make_case(device, dtype, layout=layout, lens=[5, 0, 31], new=2)
    for name in ("key_cache", "value_cache"):
        rows = case[name].transpose(1, 2) if layout == "HND" else case[name]
        if layout == "vllm" and name == "key_cache":  # 16 bytes are more elements
            rows = rows.permute(0, 3, 1, 2, 4).flatten(-2)
        elif layout == "vllm":
            rows = rows.permute(0, 3, 1, 2)
        eight = rows.nan_to_num(0.0).float().to(stored)
        case[name] = to_layout(eight, layout, name == "key_cache")
    caches = reference.attention_with_kvcache(**on_cpu(case))[1:]
    vllm_kernels.attention_with_kvcache(**case)
    for name, want in zip(("key_cache", "value_cache"), caches, strict=True):
        assert torch.equal(case[name].cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("seqs, new", [(1024, 1), (1025, 1), (3, 20), (40, 30)])
def test_few_and_many_new_tokens(device, seqs, new):
    """On CUDA one launch writes up to 1024 tokens and computes the indices."""
    lens = [(7 * seq) % 17 for seq in range(seqs)]
    case = make_case(device, torch.bfloat16, new=new, lens=lens)
    check(case)
    assert case["key_cache"].isnan().any()


def test_tokens_that_are_not_aligned(device):
    """Slices that begin at no multiple of 16 bytes: of tokens, and of caches."""
    case = make_case(device, torch.bfloat16, lens=[5, 0, 31])
    for name in ("key", "value"):
        wide = torch.zeros(3, 1, KV_HEADS, SIZE + 1, dtype=torch.bfloat16, device=device)
        wide[..., 1:] = case[name]
        check({**case, name: wide[..., 1:]})
    for name in ("key_cache", "value_cache"):
        cache = case[name]
        memory = torch.zeros(cache.numel() + 1, dtype=cache.dtype, device=device)
        memory[1:] = cache.flatten()
        check({**case, name: memory[1:].view(cache.shape)})


@pytest.mark.parametrize("new", [1, 3])
def test_of_two_tokens_with_one_slot_the_last_is_stored(device, layout, new):
    case = make_case(device, torch.bfloat16, layout=layout, lens=[5, 9, 5, 2], new=new)
    case["block_tables"][2] = case["block_tables"][0]
    check(case)
    row = case["block_tables"][2, 0]
    if layout == "NHD":
        assert torch.equal(case["key_cache"][row, 5], case["key"][2, 0])


def test_strided_tokens_and_interleaved_caches(device):
    """Slices of one QKV product; K and V as halves of one buffer."""
    case = make_case(device, torch.bfloat16, lens=[5, 0, 31])
    qkv = torch.randn(3, 1, HEADS + 2 * KV_HEADS, SIZE).to(device, torch.bfloat16)
    query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    both = torch.stack([case["key_cache"], case["value_cache"]], dim=2)
    check({**case, "query": query, "key": key, "value": value, "key_cache": both[:, :, 0],
           "value_cache": both[:, :, 1]})  # fmt: skip


def test_nothing_to_do(device):
    case = make_case(device, torch.bfloat16, lens=[5, 0])
    no_queries = {**case, "query": case["query"][:, :0]}
    out = vllm_kernels.attention_with_kvcache(**no_queries)
    assert out.shape == (2, 0, HEADS, SIZE)
    row = case["block_tables"][0, 0]
    assert torch.equal(case["key_cache"][row, 5], case["key"][0, 0]), "the token is stored"


def test_a_changed_tensor_is_checked_again(device):
    """The op checks every call: tensors that were right may be changed in place."""
    case = make_case(device, torch.bfloat16)
    changes = {
        "block_tables": (lambda x: x.resize_(3, 4), r"num_seqs = 6"),
        "seq_lens": (lambda x: x.unsqueeze_(0), r"expected 1 dimensions"),
        "key": (lambda x: x.squeeze_(1), r"expected shape \[batch, new_tokens, num_kv_heads"),
        "query": (lambda x: x.t_() if x.dim() == 2 else x.transpose_(2, 3), r""),
        "value_cache": (lambda x: x.untyped_storage().resize_(0), r"expected memory for all"),
    }
    for name, (change, message) in changes.items():
        mine = {key: x.clone() if isinstance(x, Tensor) else x for key, x in case.items()}
        vllm_kernels.attention_with_kvcache(**mine)
        change(mine[name])
        with raises(rf"^attention_with_kvcache: \w+: .*{message}"):
            vllm_kernels.attention_with_kvcache(**mine)


def test_bad_input(device):
    case = make_case(device, torch.bfloat16, queries=2, new=2)
    rows = make_case(device, torch.bfloat16, 0)
    for given, message in (
        ({"value": None}, r"expected key and value together, got one$"),
        ({"seq_lens": case["seq_lens"].long()}, r"seq_lens: expected int32, got int64"),
        ({"query": case["query"].transpose(1, 2)}, r"query: expected one stride between all"),
        ({"query": case["query"][0, 0]}, r"query: expected 3 to 4 dimensions, got shape"),
        ({"query_start_loc": case["seq_lens"]}, r"query_start_loc: expected None for query of 4"),
        ({"block_tables": case["block_tables"][:2]}, r"block_tables: expected num_seqs = 6"),
        ({"block_tables": case["block_tables"][:, :0]}, r"block_tables: expected pages, got sh"),
        ({"query": case["query"][:5]}, r"query: expected batch 6 of seq_lens, got shape \[5, 2, "),
        ({"key": case["key"][:2]}, r"key: expected batch = 6 \(from seq_lens\) at dimension 0"),
        ({"key": case["key"].float()}, r"key: expected bfloat16 \(from query\), got float32"),
        ({"value_cache": case["key_cache"]}, r"value_cache and key_cache overlap|key_cache and "),
        ({"softcap": -1.0}, r"softcap: expected a finite number >= 0"),
        ({"window_right": -2, "causal": False}, r"window_right: expected a number of tokens"),
        ({"scale": float("nan")}, r"scale: expected a number that is finite"),
        ({**rows, "layout": "HND"}, r"layout: expected \"NHD\", which caches of rows have"),
        ({**rows, "key_cache": rows["key_cache"][:2]}, r"value_cache: expected batch_cache = 2"),
    ):  # fmt: skip
        arguments = {**case, **given}
        if "layout" in given:
            arguments.pop("block_tables")
        elif "block_tables" not in given and len(given) > 3:
            arguments.pop("block_tables"), arguments.pop("layout")
        with raises(rf"^attention_with_kvcache: {message}"):
            vllm_kernels.attention_with_kvcache(**arguments)
    with raises(r"^attention_with_kvcache: key: requires grad"):
        key = case["key"].clone().requires_grad_()
        vllm_kernels.attention_with_kvcache(**{**case, "key": key})


def test_bad_values_on_the_cpu():
    """Before anything is written."""
    case = make_case("cpu", torch.bfloat16, lens=[5, 9])
    before = case["key_cache"].clone()
    bad_page = case["block_tables"].clone()
    bad_page[1, 0] = 99
    for given, message in (
        ({"seq_lens": ints([5, 64], "cpu")}, r"seq_lens\[1\] = 64: expected a length that leaves"),
        ({"block_tables": bad_page}, r"block_tables\[1, 0\] = 99: expected a block in \[0, 11\)"),
    ):
        with raises(rf"^attention_with_kvcache: {message}"):
            vllm_kernels.attention_with_kvcache(**{**case, **given})
    torch.testing.assert_close(case["key_cache"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page", [0, 16])
def test_opcheck_and_compile(device, page):
    case = make_case(device, torch.float32, page, lens=[5, 0])
    for name in ("key_cache", "value_cache"):
        case[name] = case[name].nan_to_num(0.0)
    options = {name: x for name, x in case.items() if name not in ("key", "value")}
    opcheck("attention_with_kvcache", **case)
    opcheck("attention_with_kvcache", **options)

    def call() -> Tensor:
        return vllm_kernels.attention_with_kvcache(**case)

    assert_compiles(call)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(), call())


def test_replayed_graph(device):
    """Indices are computed anew in every replay; other lengths, and rows of nobody."""
    if device != "cuda":
        pytest.skip("CUDA graphs")
    for page in (0, 16):
        case = make_case(device, torch.bfloat16, page, queries=2, new=2, lens=[5, 0, 31])
        before = [case[name].clone() for name in ("key_cache", "value_cache")]
        vllm_kernels.attention_with_kvcache(**case)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = vllm_kernels.attention_with_kvcache(**case)
        for lens in ([5, 0, 31], [3, -1, 30], [-1, 0, 17]):
            case["seq_lens"].copy_(ints(lens, device))
            for name, cache in zip(("key_cache", "value_cache"), before, strict=True):
                case[name].copy_(cache)
            want, key, _ = reference.attention_with_kvcache(**on_cpu(case))
            graph.replay()
            torch.testing.assert_close(out.double().cpu(), want, rtol=1.6e-2, atol=1.6e-2)
            torch.testing.assert_close(case["key_cache"].cpu(), key, equal_nan=True)


def test_modes_are_skipped_for_default_devices_alone(device):
    """No torch function of a call passes through a default device; other modes see them all."""
    case = make_case(device, torch.bfloat16, new=0)
    seen = []

    class Counter(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    def call() -> Tensor:
        query = case["query"][:, 0]
        return vllm_kernels.paged_attention(
            query, case["key_cache"], case["value_cache"], case["block_tables"],
            case["seq_lens"].clamp_min(0), layout="NHD",
        )  # fmt: skip

    want = call()
    assert not _common.may_skip_modes()
    torch.set_default_device("meta")
    try:
        assert _common.may_skip_modes()
        assert torch.equal(call(), want)
        with Counter():
            assert not _common.may_skip_modes()
            assert torch.equal(call(), want)
    finally:
        torch.set_default_device(None)
    assert len(seen) > 1
