"""cascade_attention: equal to paged_attention where tables begin with the same blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import LAYOUTS, assert_compiles, assert_graph_replays, raises
from paged_attention_cases import EIGHT_BITS, NAN, Case, assert_right, make_case, per_head

import vllm_kernels
import vllm_kernels.ops.cascade as cascade_module
from vllm_kernels.kv_cache import KVCacheManager


def shared_case(device: str, dtype: torch.dtype, common: int, own: list[int], **options) -> Case:
    """Sequences with common * 16 tokens in the blocks of the first one, and then their own."""
    case = make_case(device, dtype, [common * 16 + n for n in own], **options)
    case.block_tables[:, :common] = case.block_tables[0, :common]
    return case


def cascade(case: Case, common: int, **more: object):
    options = {**case.options, "max_query_len": case.max_query_len, **more}
    return vllm_kernels.cascade_attention(*case.tensors(), common, **options)


@pytest.mark.parametrize("queries", [None, [1, 5, 2, 17]], ids=["decode", "several"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_paged_attention(device, dtype, layout, queries):
    own = [1, 9, 40, 33]  # tokens behind the common ones, those of the query among them
    for options in ({}, {"softcap": 2.0}, {"sinks": per_head(8, -3.0, 6.0)}):
        case = shared_case(device, dtype, 5, own, queries=queries, layout=layout, **options)
        for common in (0, 1, 5):
            assert_right(case, cascade(case, common, return_lse=True))


def test_tokens_that_no_sequence_owns(device):
    case = shared_case(device, torch.float32, 3, [9, 5], queries=[2, 3])
    want, lse = cascade(case, 3, return_lse=True)
    wider = replace(case, query=torch.cat([case.query, case.query[:4]]))
    out, wide_lse = cascade(wider, 3, return_lse=True)
    torch.testing.assert_close(out[:5], want)
    torch.testing.assert_close(wide_lse[:5], lse)
    assert not out[5:].any() and (wide_lse[5:] == -torch.inf).all()


@pytest.mark.parametrize("num_splits", [1, 2, 3, 5])
def test_splits_of_the_common_blocks(device, dtype, num_splits, monkeypatch):
    """As a GPU has them for few rows: equal ones, a shorter last one, empty ones."""
    monkeypatch.setattr(cascade_module, "_num_splits", lambda *_: num_splits)
    monkeypatch.setattr(cascade_module, "MIN_SPLIT_TOKENS", 16)
    monkeypatch.setattr(cascade_module, "ONE_MIXED_BATCH", ("cuda", "cpu"))
    for common, queries in ((4, [3, 1]), (7, None)):
        case = shared_case(device, dtype, common, [9, 1], queries=queries)
        assert_right(case, cascade(case, common, return_lse=True))


@pytest.mark.parametrize("queries", [None, [1, 5, 2]], ids=["decode", "several"])
def test_a_plan_for_any_number_of_common_blocks(device, queries, monkeypatch):
    """As a CUDA graph has it: the number is read on the device, and the plan serves every layer."""
    monkeypatch.setattr(cascade_module, "_num_splits", lambda *_: 3)
    monkeypatch.setattr(cascade_module, "MIN_SPLIT_TOKENS", 32)
    case = shared_case(device, torch.float32, 7, [9, 5, 40], queries=queries)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    for common in (0, 1, 4, 7):
        count.fill_(common)
        plan = vllm_kernels.cascade_plan(
            case.block_tables, case.seq_lens, count, block_size=16, num_heads=8, num_kv_heads=2,
            query_start_loc=case.options.get("query_start_loc"), num_tokens=len(case.query),
        )  # fmt: skip
        assert plan.num_splits == 3 and len(plan.block_tables) == 3 + 3
        for _ in range(2):
            assert_right(case, cascade(case, plan, return_lse=True))


def test_padded_rows(device):
    """Those of a CUDA graph, of no tokens: the others' results are as without them."""
    case = shared_case(device, torch.float32, 4, [9, 5, 40])
    case.seq_lens[2] = 0
    case.block_tables[2] = -1
    want = vllm_kernels.paged_attention(*case.tensors(), **case.options)
    got = cascade(case, 4)
    torch.testing.assert_close(got[:2], want[:2])


def test_when_it_pays():
    saved = cascade_module.MIN_SAVED_BYTES["cpu"] // 512
    cpu = torch.device("cpu")
    assert vllm_kernels.cascade_pays(3, saved // 2 + 1, 512, cpu)
    assert not vllm_kernels.cascade_pays(3, saved // 2 - 1, 512, cpu)
    assert not vllm_kernels.cascade_pays(1, 1 << 30, 512, cpu)
    assert not vllm_kernels.cascade_pays(64, 0, 512, cpu)


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=lambda x: str(x).split(".")[-1])
def test_eight_bits(device, stored):
    case = shared_case(device, torch.bfloat16, 4, [3, 30], stored=stored, scales_per_head=True)
    got = cascade(case, 4)
    want, _ = case.naive()
    assert ((got.double() - want).norm() / want.norm()).item() < 2.0**-8


def test_nothing_of_its_own(device):
    """The first query token may be the last common token."""
    case = shared_case(device, torch.float32, 3, [0, 7])
    assert_right(case, cascade(case, 3, return_lse=True))


def test_strided_out_and_empty_batch(device):
    case = shared_case(device, torch.float32, 3, [5, 7])
    wide = torch.full((2, 20, 64), 7.0, device=device)
    got = cascade(case, 3, out=wide[:, 4:12])
    assert torch.equal(got, cascade(case, 3)) and (wide[:, :4] == 7).all()
    none = replace(
        case, query=case.query[:0], block_tables=case.block_tables[:0], seq_lens=case.seq_lens[:0]
    )
    assert cascade(none, 3).shape == (0, 8, 64)
    starts = torch.zeros(3, dtype=torch.int32, device=device)
    assert cascade(replace(case, query=case.query[:0]), 3, query_start_loc=starts).shape[0] == 0


def test_common_blocks_by_the_manager(device):
    """Sequences that were forked from a prompt, as the manager's tables have them."""
    manager = KVCacheManager(32, 16)
    manager.allocate(0, 70)
    for sequence, count in ((1, 3), (2, 30)):
        manager.fork(0, sequence)
        manager.append(sequence, count)
    common = manager.num_common_prefix_blocks([0, 1, 2])
    assert common == 4
    rows = [torch.from_numpy(manager.block_table(sequence).copy()) for sequence in range(3)]
    tables = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    cache = torch.randn(2, 32, 16, 2, 64, device=device)
    lens = torch.tensor([70, 73, 100], dtype=torch.int32, device=device)
    query = torch.randn(3, 8, 64, device=device)
    case = Case(query, *cache, tables.int().to(device), lens, 16, {"layout": "NHD"}, None)
    assert_right(case, cascade(case, common, return_lse=True))


def test_bad_count(device):
    case = shared_case(device, torch.float32, 3, [5, 7])
    for count in (-1, case.block_tables.shape[1] + 1):
        with raises(rf"^cascade_attention: num_common_blocks: expected 0 to \d+ .* got {count}$"):
            cascade(case, count)


def test_plan_of_another_batch(device):
    case = shared_case(device, torch.float32, 3, [5, 7, 9])
    plan = vllm_kernels.cascade_plan(
        case.block_tables[:2], case.seq_lens[:2], 3, block_size=16, num_heads=8, num_kv_heads=2
    )
    with pytest.raises(RuntimeError, match=r"plan: expected one of 3 sequences .*, got one of 2"):
        cascade(case, plan)


def test_compiles(device):
    case = shared_case(device, torch.float32, 3, [5, 7])
    assert_compiles(lambda: cascade(case, 3))


def test_replayed_graph(device):
    if device != "cuda":
        pytest.skip("CUDA graphs")
    case = shared_case(device, torch.bfloat16, 4, [60, 9, 30])
    out = torch.full_like(case.query, NAN)

    def refill() -> None:
        case.seq_lens.copy_(torch.tensor([66, 70, 94]))

    assert_graph_replays(
        lambda: cascade(case, 4, out=out), refill, out,
        lambda: cascade(case, 4, out=torch.empty_like(out)),
    )  # fmt: skip
