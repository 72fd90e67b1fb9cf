"""paged_attention_v1 and _v2 against a float64 reference: every axis of the contract.

Queries and keys have unit variance, so the softmax is peaked and K matters. Pools are NaN outside
the used slots, tables are permuted and hold garbage past the used part.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers import EPSILON, assert_compiles, assert_graph_replays, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

NAN = float("nan")
GARBAGE = (-1, 2**30, -(2**31), 2**31 - 1)
STORED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
PARTITION = 512
SPARSE_NAMES = ("tp_rank", "blocksparse_local_blocks", "blocksparse_vert_stride",
                "blocksparse_block_size", "blocksparse_head_sliding_step")  # fmt: skip


@dataclass
class Case:
    """The arguments of one call, in the op's own words."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    num_kv_heads: int
    scale: float
    block_tables: Tensor
    seq_lens: Tensor
    block_size: int
    max_seq_len: int
    alibi_slopes: Tensor | None = None
    kv_cache_dtype: str = "auto"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    sparse: dict[str, int] = field(default_factory=dict)

    def arguments(self) -> tuple:
        return (
            self.query, self.key_cache, self.value_cache, self.num_kv_heads, self.scale,
            self.block_tables, self.seq_lens, self.block_size, self.max_seq_len, self.alibi_slopes,
            self.kv_cache_dtype, self.k_scale, self.v_scale,
        )  # fmt: skip

    def out(self) -> Tensor:
        return torch.full(self.query.shape, NAN, dtype=self.query.dtype, device=self.query.device)

    def scratch(self, partitions: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """exp_sums, max_logits, tmp_out, poisoned."""
        partitions = partitions or max(1, -(-self.max_seq_len // PARTITION))
        shape = (*self.query.shape[:2], partitions)
        sums = torch.full(shape, NAN, device=self.query.device)
        tmp = self.query.new_full((*shape, self.query.shape[2]), NAN)
        return sums, sums.clone(), tmp

    def v1(self) -> Tensor:
        out = self.out()
        vllm_kernels.paged_attention_v1(out, *self.arguments(), **self.sparse)
        return out

    def v2(self) -> Tensor:
        out = self.out()
        vllm_kernels.paged_attention_v2(out, *self.scratch(), *self.arguments(), **self.sparse)
        return out

    def run(self, version: int) -> Tensor:
        return self.v1() if version == 1 else self.v2()

    def naive(self, partition_size: int | None = None, absolute_value: bool = False):
        value_cache = self.value_cache
        if absolute_value:  # 8-bit floats: drop the sign bit
            value_cache = value_cache & 0x7F if self.kv_cache_dtype != "auto" else value_cache.abs()
        return reference.naive_paged_attention(
            self.query, self.key_cache, value_cache, self.num_kv_heads, self.scale,
            self.block_tables, self.seq_lens, self.block_size, self.alibi_slopes, self.k_scale,
            self.v_scale, self.kv_cache_dtype, **self.sparse, partition_size=partition_size,
        )  # fmt: skip


def make_case(
    device: str,
    dtype: torch.dtype,
    lens: list[int],
    heads: int = 8,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
    spare_blocks: int = 3,
    **more: object,
) -> Case:
    """Random query and cache of unit variance; see the module's docstring for the rest."""
    stored = STORED.get(kv_cache_dtype, dtype)
    x = 16 // stored.itemsize
    pages = [-(-length // block_size) for length in lens]
    num_blocks = sum(pages) + spare_blocks
    key = torch.randn(num_blocks, kv_heads, head_size // x, block_size, x)
    value = torch.randn(num_blocks, kv_heads, head_size, block_size)
    order = torch.randperm(num_blocks)
    width = max([1, *pages]) + 2
    tables = torch.tensor(GARBAGE * width)[:width].repeat(max(1, len(lens)), 1)[: len(lens)]
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    taken = 0
    for seq, length in enumerate(lens):
        mine = order[taken : taken + pages[seq]]
        taken += pages[seq]
        tables[seq, : pages[seq]] = mine
        slots = torch.arange(pages[seq] * block_size).view(-1, block_size) < length
        used[mine] = slots
    scales = [torch.ones(1), torch.ones(())]
    if kv_cache_dtype != "auto":
        scales = [torch.tensor([0.5]), torch.tensor(1.75)]
        key, value = key / scales[0], value / scales[1]
    key[~used[:, None, None, :, None].expand_as(key)] = NAN
    value[~used[:, None, None, :].expand_as(value)] = NAN
    key, value = key.to(stored), value.to(stored)
    if kv_cache_dtype != "auto":
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    return Case(
        query=torch.randn(len(lens), heads, head_size).to(device, dtype),
        key_cache=key.to(device),
        value_cache=value.to(device),
        num_kv_heads=kv_heads,
        scale=head_size**-0.5,
        block_tables=tables.to(device, torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_size=block_size,
        max_seq_len=max([1, *lens]),
        kv_cache_dtype=kv_cache_dtype,
        k_scale=scales[0].to(device),
        v_scale=scales[1].to(device),
        **more,
    )


def assert_right(case: Case, got: Tensor, want: Tensor | None = None) -> None:
    """|got - want| within what the dtype and the length explain.

    The result is a mean of values under weights w. It is rounded once to the dtype; a 16-bit kernel
    may also round the weights, and v2 its partial results, each worth one unit of sum w |v|. In
    float32 the errors of the logits (their size times epsilon) and of the sums (growing with the
    square root of the length) remain.
    """
    want = case.naive() if want is None else want
    spread = case.naive(absolute_value=True)
    assert got.shape == want.shape
    assert not got.isnan().any(), "NaN in the result"
    longest = max([1, *case.seq_lens.tolist()])
    head_size = case.query.shape[-1]
    logit = case.scale * case.query.double().norm(dim=-1).amax().item() * math.sqrt(head_size) * 1.5
    unit32 = EPSILON[torch.float32] * (8 + 2 * logit + 0.25 * math.sqrt(longest))
    unit = EPSILON[got.dtype]
    rounded = 0.0 if got.dtype == torch.float32 else unit
    error = (got.double() - want).abs()
    allowed = 0.51 * unit * want.abs() + (unit32 + rounded) * spread + 1e-30
    if got.dtype == torch.float16:
        allowed += 2.0**-25  # denormals
    worst = (error / allowed).max().item()
    assert worst <= 1, f"off by {worst:.2f} times what is allowed, max |error| {error.max():.3e}"
    relative = ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
    most = unit32 if got.dtype == torch.float32 else 0.45 * unit
    assert relative <= most, f"relative error {relative:.2e}, allowed {most:.2e}"


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


def border_lengths(block_size: int) -> list[int]:
    b = block_size
    return [1, 2, b - 1, b, b + 1, 3 * b + 5, 511, 512, 513, 1023, 1024, 1025]


# --- right results


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_tails_and_partition_borders(device, dtype, version, kv_cache_dtype, block_size):
    case = make_case(
        device,
        dtype,
        border_lengths(block_size),
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
    )
    assert_right(case, case.run(version))


@pytest.mark.parametrize("head_size", range(32, 257, 8))
def test_head_sizes(device, version, head_size):
    """Every head size, with the other axes drawn along."""
    step = head_size // 8
    dtype = [torch.float32, torch.float16, torch.bfloat16][step % 3]
    block_size = [8, 16, 32][step // 3 % 3]
    caches = ["auto", "fp8", "fp8_e5m2"] if head_size % 16 == 0 else ["auto"]
    for kv_cache_dtype in caches:
        case = make_case(
            device,
            dtype,
            [37, 530, 1, 64],
            heads=6,
            kv_heads=2,
            head_size=head_size,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
        )
        assert_right(case, case.run(version))


@pytest.mark.parametrize("head_size", [40, 64, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (2, 1), (8, 2), (5, 1), (12, 2), (7, 1),
                                             (16, 2), (16, 1), (64, 1), (71, 1)])  # fmt: skip
def test_groups(device, version, heads, kv_heads, head_size):
    for dtype, kv_cache_dtype in (
        (torch.float32, "auto"),
        (torch.bfloat16, "auto"),
        (torch.float16, "fp8"),
    ):
        if head_size % 16 != 0:
            kv_cache_dtype = "auto"
        case = make_case(
            device,
            dtype,
            [140, 23],
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            kv_cache_dtype=kv_cache_dtype,
        )
        assert_right(case, case.run(version))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_alibi(device, dtype, version, kv_heads, kv_cache_dtype):
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(8)], device=device)
    case = make_case(
        device,
        dtype,
        [1, 17, 300, 1100],
        kv_heads=kv_heads,
        kv_cache_dtype=kv_cache_dtype,
        alibi_slopes=slopes,
    )
    assert_right(case, case.run(version))


@pytest.mark.parametrize("head_sliding_step", [0, 1, -1, 3, -2])
@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("local_blocks, vert_stride, sparse_block", [(2, 4, 64), (0, 3, 32),
                                                                     (1, 8, 16)])  # fmt: skip
def test_block_sparse(
    device, version, head_sliding_step, tp_rank, local_blocks, vert_stride, sparse_block
):
    values = (tp_rank, local_blocks, vert_stride, sparse_block, head_sliding_step)
    for dtype, block_size in ((torch.float32, 16), (torch.bfloat16, 8)):
        case = make_case(
            device,
            dtype,
            [1, 63, 64, 65, 700, 1500],
            heads=6,
            kv_heads=2,
            block_size=block_size,
            sparse=dict(zip(SPARSE_NAMES, values)),
        )
        assert_right(case, case.run(version))


def test_block_sparse_with_alibi(device, dtype, version):
    slopes = torch.linspace(0.02, 0.3, 6, device=device)
    case = make_case(
        device,
        dtype,
        [10, 333, 2000],
        heads=6,
        kv_heads=3,
        alibi_slopes=slopes,
        sparse=dict(zip(SPARSE_NAMES, (0, 1, 5, 32, 1))),
    )
    assert_right(case, case.run(version))


def test_pages_no_head_sees_are_not_read(device, version):
    case = make_case(
        device,
        torch.float32,
        [1024],
        heads=4,
        kv_heads=2,
        sparse=dict(zip(SPARSE_NAMES, (0, 1, 4, 64, 0))),
    )
    want = case.run(version)
    # With step 0 every head sees sparse blocks 3, 7, 11, 15 and the local one, the last.
    for token in range(0, 1024, 16):
        if token // 64 % 4 != 3:
            block = case.block_tables[0, token // 16].item()
            case.key_cache[block] = NAN
            case.value_cache[block] = NAN
    assert torch.equal(case.run(version), want)


def test_long_context(device, version):
    """v1 needs no scratch, whatever the length."""
    case = make_case(device, torch.float32, [60_000, 5], heads=4, kv_heads=1)
    assert_right(case, case.run(version))
    case.max_seq_len = 10**9 if version == 1 else case.max_seq_len
    assert_right(case, case.run(version))


def test_ragged_batch(device, dtype, version):
    lens = [int(x) for x in torch.randint(0, 700, (37,))]
    case = make_case(device, dtype, lens, heads=8, kv_heads=2, head_size=80)
    assert_right(case, case.run(version))


def test_very_large_query_with_fp8_cache(device, version):
    case = make_case(device, torch.bfloat16, [40, 700], kv_cache_dtype="fp8")
    case.query *= 1e5
    case.scale *= 1e-5
    assert_right(case, case.run(version))


def test_large_scores_stay_finite(device, dtype, version):
    """A softmax that is one-hot, and logits up to 1e6."""
    case = make_case(device, dtype, [33, 600])
    case.scale = 2e4
    out = case.run(version)
    assert not out.isnan().any()
    best = case.naive()
    clear = ((out.double() - best).abs().amax(-1) < 0.05).float().mean().item()
    assert clear > 0.9  # near ties may fall either way


def test_nothing_seen_gives_zero(device, dtype, version):
    """Block-sparse without local blocks: short sequences see no block at all."""
    case = make_case(device, dtype, [20, 100], sparse=dict(zip(SPARSE_NAMES, (0, 0, 8, 16, 0))))
    out = case.run(version)
    assert torch.equal(out[0], torch.zeros_like(out[0]))  # blocks 0 and 1 of stride 8, offset 1
    assert torch.equal(out[1], torch.zeros_like(out[1]))


# --- memory


def test_strided_query(device, dtype, version):
    case = make_case(device, dtype, [5, 90, 200])
    want = case.run(version)
    packed = torch.full((3, 12, 64), NAN, device=device, dtype=dtype)
    packed[:, :8] = case.query
    out = torch.empty_like(case.query)
    scratch = () if version == 1 else case.scratch()
    call = vllm_kernels.paged_attention_v1 if version == 1 else vllm_kernels.paged_attention_v2
    call(out, *scratch, *replace(case, query=packed[:, :8]).arguments())
    assert torch.equal(out, want)


def test_cache_slices_of_a_packed_tensor(device, dtype, version):
    """K and V of two layers as engines allocate them: slices with a large block stride."""
    case = make_case(device, dtype, [5, 90, 200])
    want = case.run(version)
    num_blocks, kv_heads = case.value_cache.shape[:2]
    page = case.value_cache[0, 0].numel()
    packed = torch.full((num_blocks, 3, kv_heads + 1, 2, page), NAN, device=device, dtype=dtype)
    key = packed[:, 1, :kv_heads, 0].unflatten(-1, case.key_cache.shape[2:])
    value = packed[:, 1, :kv_heads, 1].unflatten(-1, case.value_cache.shape[2:])
    key.copy_(case.key_cache)
    value.copy_(case.value_cache)
    assert torch.equal(replace(case, key_cache=key, value_cache=value).run(version), want)


def test_strides_past_int32(device, version):
    """Block strides of more than 2^31 elements: a few pages at the ends of a sparse mapping."""
    stride = 2**31 + 64
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    case = make_case(device, torch.float16, [40], heads=2, kv_heads=1, spare_blocks=0)
    want = case.run(version)
    # The CPU maps untouched pages lazily; only three pages of each cache become real.
    storage = torch.empty(2 * stride + 4096, device=device, dtype=torch.float16)
    key = storage.as_strided(case.key_cache.shape, (stride, 1024, *case.key_cache.stride()[2:]))
    value = storage[2048:].as_strided(
        case.value_cache.shape, (stride, 1024, *case.value_cache.stride()[2:])
    )
    key.copy_(case.key_cache)
    value.copy_(case.value_cache)
    far = replace(case, key_cache=key, value_cache=value)
    assert torch.equal(far.run(version), want)


def test_table_with_row_stride(device, version):
    case = make_case(device, torch.float32, [5, 90, 200])
    wide = torch.full((3, case.block_tables.shape[1] + 7), -1, dtype=torch.int32, device=device)
    wide[:, : case.block_tables.shape[1]] = case.block_tables
    strided = replace(case, block_tables=wide[:, : case.block_tables.shape[1]])
    assert torch.equal(strided.run(version), case.run(version))


# --- what must not matter


def test_unused_slots_and_ids_have_no_influence(device, dtype, version):
    case = make_case(device, dtype, [1, 15, 17, 500, 513], block_size=16)
    want = case.run(version)
    mutated = replace(case, block_tables=case.block_tables.clone())
    for poison in (float("inf"), 0.0, -float("inf")):
        key = case.key_cache.clone()
        value = case.value_cache.clone()
        key[key.isnan()] = poison
        value[value.isnan()] = poison
        for seq, length in enumerate(case.seq_lens.tolist()):
            mutated.block_tables[seq, -(-length // 16) :] = 7 if poison == 0 else -5
        got = replace(mutated, key_cache=key, value_cache=value).run(version)
        assert torch.equal(got, want)


def test_unused_fp8_slots_have_no_influence(device, version):
    case = make_case(device, torch.bfloat16, [1, 15, 17, 500, 513], kv_cache_dtype="fp8")
    want = case.run(version)
    for cache in (case.key_cache, case.value_cache):
        unused = (cache & 0x7F) == 0x7F
        assert unused.any()
        cache[unused] = 0x35
    assert torch.equal(case.run(version), want)


def test_nan_stays_in_its_row(device, dtype, version):
    case = make_case(device, dtype, [40, 130, 70], heads=8, kv_heads=2)
    want = case.run(version)
    case.query[1, 3, 7] = NAN
    got = case.run(version)
    assert got[1, 3].isnan().all()
    case.query[1, 3] = 0
    keep = torch.ones(3, 8, dtype=torch.bool, device=device)
    keep[1, 3] = False
    assert torch.equal(got[keep], want[keep])


def test_nan_in_a_used_value_shows(device, version):
    case = make_case(device, torch.float32, [40, 130], heads=4, kv_heads=2)
    block = case.block_tables[1, 2].item()
    case.value_cache[block, 1, 5, 3] = NAN
    got = case.run(version)
    assert got[1, 2:, 5].isnan().all()
    got[1, 2:, 5] = 0
    assert not got.isnan().any()


def test_two_runs_agree_bit_for_bit(device, dtype, version):
    case = make_case(device, dtype, [1000, 3, 513, 77], heads=16, kv_heads=4, head_size=128)
    assert torch.equal(case.run(version), case.run(version))


def test_context_0(device, dtype, version):
    case = make_case(device, dtype, [0, 5, 0])
    got = case.run(version)
    assert torch.equal(got[[0, 2]], torch.zeros_like(got[[0, 2]]))
    assert_right(case, got)
    empty = make_case(device, dtype, [0])
    assert torch.equal(empty.run(version), torch.zeros_like(empty.query))


def test_empty_batch(device, dtype, version):
    case = make_case(device, dtype, [])
    assert case.run(version).shape == (0, 8, 64)


# --- v2's scratch


@pytest.mark.parametrize("extra", [0, 2])
def test_scratch_contents(device, dtype, extra):
    case = make_case(device, dtype, [0, 1, 511, 512, 513, 1600])
    partitions = -(-1600 // PARTITION) + extra
    sums, maxima, tmp = case.scratch(partitions)
    out = case.out()
    vllm_kernels.paged_attention_v2(out, sums, maxima, tmp, *case.arguments())
    want_out, want_sums, want_maxima, want_tmp = case.naive(partition_size=PARTITION)
    assert_right(case, out, want_out)
    unit = max(EPSILON[dtype], 1e-5)
    for seq, length in enumerate(case.seq_lens.tolist()):
        used = -(-length // PARTITION)
        torch.testing.assert_close(
            maxima[seq, :, :used].double(), want_maxima[seq, :, :used], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            sums[seq, :, :used].double(), want_sums[seq, :, :used], rtol=max(unit, 1e-4), atol=0
        )
        error = (tmp[seq, :, :used].double() - want_tmp[seq, :, :used]).norm()
        assert error <= 0.45 * unit * want_tmp[seq, :, :used].norm() + 1e-30


def test_v1_and_v2_agree(device, dtype):
    case = make_case(device, dtype, [2000, 77], heads=8, kv_heads=2, head_size=128)
    assert_right(case, case.v2(), case.v1().double())


# --- bad input


def bad_arguments(case: Case) -> list[tuple[dict[str, object], str]]:
    """(changed arguments, the message after "<op>: ")."""
    q, key, value = case.query, case.key_cache, case.value_cache
    return [
        ({"query": q.double()}, r"query: expected float32, float16 or bfloat16, got float64"),
        ({"query": q[0]}, r"query: expected shape \[num_seqs, num_heads, head_size\], "
                          r"got shape \[8, 64\]"),
        ({"query": q.transpose(1, 2).contiguous().transpose(1, 2)},
         r"query: expected contiguous heads \(only the stride of num_seqs is free\)"),
        ({"num_kv_heads": 3}, r"num_kv_heads: expected a divisor of num_heads = 8, got 3"),
        ({"num_kv_heads": 0}, r"num_kv_heads: expected a divisor of num_heads = 8, got 0"),
        ({"num_kv_heads": 4}, r"value_cache: expected num_kv_heads = 4 \(from num_kv_heads\) at "
                              r"dimension 1, got shape \["),
        ({"block_size": 12}, r"block_size: expected 8, 16 or 32, got 12"),
        ({"block_size": 0, "key_cache": key[:, :, :, :0], "value_cache": value[..., :0]},
         r"block_size: expected 8, 16 or 32, got 0"),
        ({"num_kv_heads": 0, "key_cache": key[:, :0], "value_cache": value[:, :0]},
         r"num_kv_heads: expected a divisor of num_heads = 8, got 0"),
        ({"query": q[..., :0].contiguous(), "key_cache": key[:, :, :0],
          "value_cache": value[:, :, :0]}, r"query: expected a head_size of 32 to 256 .*got 0"),
        ({"block_size": 32}, r"value_cache: expected block_size = 32 \(from block_size\) at "
                             r"dimension 3, got shape"),
        ({"kv_cache_dtype": "fp8"}, r'value_cache: expected uint8 or float8_e4m3fn \(from '
                                    r'kv_cache_dtype = "fp8"\), got float32'),
        ({"kv_cache_dtype": "fp4"}, r'kv_cache_dtype: expected "auto", "fp8", "fp8_e4m3" or '
                                    r'"fp8_e5m2", got "fp4"'),
        ({"key_cache": key.half()}, r'key_cache: expected float32 \(from kv_cache_dtype = "auto"\)'
                                    r", got float16"),
        ({"key_cache": key[:, :, :4]}, r"key_cache: expected head_size / x = 16 \(from "
                                       r"value_cache\) at dimension 2"),
        ({"key_cache": key.flatten(3)}, r"key_cache: expected shape \[num_blocks, num_kv_heads, "
                                        r"head_size / x, block_size, x = 16 bytes / "),
        ({"key_cache": key[:-1]}, r"key_cache: expected num_blocks = \d+ \(from value_cache\)"),
        ({"value_cache": value.transpose(2, 3).contiguous().transpose(2, 3)},
         r"value_cache: expected the page of a head to be contiguous"),
        ({"block_tables": case.block_tables.long()},
         r"block_tables: expected int32, got int64; cast it with .int\(\)"),
        ({"block_tables": case.block_tables[:2]},
         r"block_tables: expected num_seqs = 3 \(from query\) at dimension 0, got shape \[2, "),
        ({"seq_lens": case.seq_lens.long()}, r"seq_lens: expected int32, got int64; cast it"),
        ({"seq_lens": case.seq_lens[:1]}, r"seq_lens: expected num_seqs = 3 \(from query\)"),
        ({"alibi_slopes": torch.ones(7, device=q.device)},
         r"alibi_slopes: expected num_heads = 8 \(from query\) at dimension 0, got shape \[7\]"),
        ({"alibi_slopes": torch.ones(8, device=q.device).half()},
         r"alibi_slopes: expected float32, got float16"),
        ({"k_scale": torch.ones(2, device=q.device)}, r"k_scale: expected one element, got shape"),
        ({"v_scale": torch.ones(1, device=q.device).half()}, r"v_scale: expected float32, got"),
        ({"max_seq_len": -1}, r"max_seq_len: expected a length >= 0, got -1"),
        ({"sparse": {"blocksparse_vert_stride": 2, "blocksparse_block_size": 24}},
         r"blocksparse_block_size: expected a multiple of block_size = 16, got 24"),
        *(({"sparse": {"blocksparse_vert_stride": 2, name: value}},
           rf"{name}: expected {low} to 2147483647, got {value}")
          for name, value, low in [("tp_rank", 2**32, 0), ("tp_rank", -1, 0),
                                   ("blocksparse_local_blocks", 2**32 + 1, 0),
                                   ("blocksparse_vert_stride", 2**32 + 2, -2**31),
                                   ("blocksparse_block_size", 2**32 + 64, -2**31),
                                   ("blocksparse_head_sliding_step", -2**31, 1 - 2**31)]),
        ({"sparse": {"tp_rank": 2**20, "blocksparse_vert_stride": 2,
                     "blocksparse_head_sliding_step": -200}},
         r"blocksparse_head_sliding_step: expected \(tp_rank \+ 1\) \* num_heads \* \|step\| <= "
         r"2\^30, got tp_rank = 1048576, num_heads = 8, step = -200"),
        ({"sparse": {"tp_rank": 2**31 - 1, "blocksparse_vert_stride": 2,
                     "blocksparse_head_sliding_step": 2**31 - 1}},
         r"blocksparse_head_sliding_step: expected"),
    ]  # fmt: skip


def test_bad_input(device, version):
    case = make_case(device, torch.float32, [5, 40, 600])
    for change, message in bad_arguments(case):
        with raises(rf"^paged_attention_v{version}: {message}"):
            bad = replace(case, **change)
            out = torch.empty_like(case.query)
            call = (
                vllm_kernels.paged_attention_v1 if version == 1 else vllm_kernels.paged_attention_v2
            )
            scratch = () if version == 1 else case.scratch()
            call(out, *scratch, *bad.arguments(), **bad.sparse)


def test_bad_out(device):
    case = make_case(device, torch.float32, [5, 40, 600])
    out = case.out()
    for bad, message in [
        (out[:2], r"out: expected shape \[3, 8, 64\] \(from query\), got shape \[2, 8, 64\]"),
        (out.half(), r"out: expected float32 \(from query\), got float16"),
        (out[:1].expand(3, 8, 64), r"out: expected a contiguous tensor, got strides \[0, 64, 1\]"),
        (case.query, r"out and query overlap in memory"),
    ]:
        with raises(rf"^paged_attention_v1: {message}"):
            vllm_kernels.paged_attention_v1(bad, *case.arguments())


def inside(other: Tensor, like: Tensor) -> Tensor:
    """A tensor of like's shape and dtype that starts in the memory of `other`."""
    whole = torch.zeros(other.numel() * other.itemsize + like.numel() * like.itemsize,
                        dtype=torch.uint8, device=other.device)  # fmt: skip
    memory = whole[: other.numel() * other.itemsize].view(other.dtype).view(other.shape)
    memory.copy_(other)
    other.set_(memory)
    return whole.view(like.dtype)[: like.numel()].view(like.shape)


def test_written_tensors_overlap_nothing(device, version):
    read = ("query", "key_cache", "value_cache", "block_tables", "seq_lens", "alibi_slopes",
            "k_scale", "v_scale")  # fmt: skip
    written = ("out",) if version == 1 else ("out", "exp_sums", "max_logits", "tmp_out")
    op = vllm_kernels.paged_attention_v1 if version == 1 else vllm_kernels.paged_attention_v2
    for bad in written:
        for name in (*read, *written[: written.index(bad)]):
            case = make_case(device, torch.float32, [5, 40, 600])
            case.alibi_slopes = torch.ones(8, device=device)
            case.k_scale, case.v_scale = torch.ones(2, 1, device=device).unbind()
            outputs = dict(zip(written, (case.out(), *case.scratch())))
            other = outputs[name] if name in outputs else getattr(case, name)
            outputs[bad] = inside(other, outputs[bad])
            with raises(rf"^paged_attention_v{version}: {bad} and {name} overlap in memory$"):
                op(*outputs.values(), *case.arguments())


def test_any_max_seq_len(device):
    case = make_case(device, torch.float32, [5, 40, 600])
    want = case.v1()
    for bound in (2**31 - 1, 2**31, 2**40, sys.maxsize):
        assert torch.equal(replace(case, max_seq_len=bound).v1(), want)
        with raises(rf"^paged_attention_v2: exp_sums: expected room for {-(-bound // 512)} "
                    rf"partitions of 512 tokens \(max_seq_len = {bound}\), got shape"):  # fmt: skip
            vllm_kernels.paged_attention_v2(
                case.out(), *case.scratch(), *replace(case, max_seq_len=bound).arguments()
            )
    roomy = replace(case, max_seq_len=4096)
    assert_right(case, roomy.v2())


def test_bad_head_size(device, version):
    for head_size, cache in ((24, "auto"), (264, "auto"), (60, "auto"), (72, "fp8")):
        stored = STORED.get(cache, torch.float32)
        x = 16 // stored.itemsize
        case = make_case(device, torch.float32, [5])
        case.query = torch.zeros(1, 8, head_size, device=device)
        case.kv_cache_dtype = cache
        case.key_cache = torch.zeros(4, 2, head_size // x, 16, x, device=device).to(stored)
        case.value_cache = torch.zeros(4, 2, head_size, 16, device=device).to(stored)
        step = 16 if cache == "fp8" else 8
        with raises(
            rf"^paged_attention_v{version}: query: expected a head_size of 32 to 256 in "
            rf"steps of {step} .*got {head_size}$"
        ):
            case.run(version)


def test_bad_scratch(device):
    case = make_case(device, torch.float32, [5, 40, 600])
    sums, maxima, tmp = case.scratch()
    for scratch, message in [
        (
            (
                sums[:, :, :1].contiguous(),
                maxima[:, :, :1].contiguous(),
                tmp[:, :, :1].contiguous(),
            ),
            r"exp_sums: expected room for 2 partitions of 512 tokens \(max_seq_len = 600\), got",
        ),
        (
            (sums, maxima[:, :, :1].contiguous(), tmp),
            r"max_logits: expected max_num_partitions = 2 \(from exp_sums\) at dimension 2",
        ),
        ((sums, maxima, tmp.half()), r"tmp_out: expected float32 \(from out\), got float16"),
        ((sums.double(), maxima, tmp), r"exp_sums: expected float32, got float64"),
        (
            (sums, maxima, tmp[..., :32].contiguous()),
            r"tmp_out: expected head_size = 64 \(from query\) at dimension 3",
        ),
        ((sums, maxima[:2], tmp), r"max_logits: expected num_seqs = 3 \(from query\)"),
        ((sums, sums, tmp), r"max_logits and exp_sums overlap in memory"),
    ]:
        with raises(rf"^paged_attention_v2: {message}"):
            vllm_kernels.paged_attention_v2(case.out(), *scratch, *case.arguments())


def test_bad_rows_on_the_cpu(version):
    """Lengths and ids are looked at before anything is computed; out stays as it was."""

    def broken(row: int, length: int | None = None, column: int = 0, block: int | None = None):
        case = make_case("cpu", torch.float32, [5, 40, 600])
        if length is not None:
            case.seq_lens[row] = length
        if block is not None:
            case.block_tables[row, column] = block
        return case

    fits = r"expected a length that fits block_tables in \[0, 641\)$"
    block = r"expected a block in \[0, 45\)$"
    cases = [
        (broken(1, length=-3), rf"seq_lens\[1\] = -3: {fits}"),
        (broken(2, length=641), rf"seq_lens\[2\] = 641: {fits}"),
        (
            broken(0, length=601),
            r"seq_lens\[0\] = 601: expected a length up to max_seq_len in \[0, 601\)$",
        ),
        (broken(2, column=37, block=-1), rf"block_tables\[2, 37\] = -1: {block}"),
        (broken(1, column=2, block=45), rf"block_tables\[1, 2\] = 45: {block}"),
    ]
    for case, message in cases:
        out = torch.zeros_like(case.query)
        with raises(rf"^paged_attention_v{version}: {message}"):
            scratch = () if version == 1 else case.scratch()
            op = (
                vllm_kernels.paged_attention_v1 if version == 1 else vllm_kernels.paged_attention_v2
            )
            op(out, *scratch, *case.arguments())
        assert not out.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bad_rows_are_contained_on_cuda(version):
    case = make_case("cuda", torch.bfloat16, [70, 5, 40, 600, 30])
    want = case.run(version)
    case.seq_lens[1] = -3  # as 0
    case.block_tables[2, 1] = -1  # skipped: as if the row did not have that page
    case.seq_lens[4] = 2**31 - 1  # clamped to max_seq_len; ids past the used part are garbage
    got = case.run(version)
    torch.cuda.synchronize()
    assert torch.equal(got[[0, 3]], want[[0, 3]])
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert not got[2].isnan().any()


def test_required_tensor_is_none(device):
    case = make_case(device, torch.float32, [5])
    with pytest.raises((RuntimeError, TypeError), match="key_cache"):
        torch.ops.vllm_kernels.paged_attention_v1(
            case.out(), *replace(case, key_cache=None).arguments()
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_mixed_devices():
    case = make_case("cuda", torch.float32, [5])
    case.seq_lens = case.seq_lens.cpu()
    with raises(
        r"^paged_attention_v1: seq_lens: expected a tensor on cuda:0 \(from query\), got cpu"
    ):
        case.v1()


def test_inference_only(device, version):
    case = make_case(device, torch.float32, [5])
    case.query.requires_grad_()
    with raises(rf"^paged_attention_v{version}: inference only: use torch.no_grad\(\)$"):
        case.run(version)
    with torch.no_grad():
        case.run(version)
    names = ("query", "key_cache", "value_cache", "alibi_slopes", "k_scale", "v_scale")
    written = 1 if version == 1 else 4
    op = vllm_kernels.paged_attention_v1 if version == 1 else vllm_kernels.paged_attention_v2
    for index in range(written + len(names)):
        case = make_case(device, torch.float32, [5])
        case.alibi_slopes = torch.ones(8, device=device)
        case.k_scale, case.v_scale = torch.ones(1, device=device), torch.ones(1, device=device)
        outputs = (case.out(), *case.scratch())[:written]
        tensors = (*outputs, *(getattr(case, name) for name in names))
        tensors[index].requires_grad_()
        with raises(rf"^paged_attention_v{version}: inference only: use torch.no_grad\(\)$"):
            op(*outputs, *case.arguments())


# --- torch


def test_opcheck_and_compile(device, dtype):
    case = make_case(device, dtype, [5, 40])
    opcheck("paged_attention_v1", case.out(), *case.arguments())
    opcheck("paged_attention_v2", case.out(), *case.scratch(), *case.arguments())
    assert_compiles(vllm_kernels.paged_attention_v1, case.out(), *case.arguments())
    assert_compiles(vllm_kernels.paged_attention_v2, case.out(), *case.scratch(), *case.arguments())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_calls_of_many_python_threads():
    """Each asks for another amount of shared memory; no launch may see another thread's amount."""
    cases = [make_case("cuda", torch.bfloat16, [length], heads=heads, head_size=size)
             for length in (40, 3000, 9000) for heads in (2, 32) for size in (64, 128)]  # fmt: skip
    want = [(case.v1(), case.v2()) for case in cases]
    torch.cuda.synchronize()

    def work(index: int) -> bool:
        case = cases[index]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            rounds = [(case.v1(), case.v2()) for _ in range(200)]
            stream.synchronize()
        return all(torch.equal(a, b) for got in rounds for a, b in zip(got, want[index]))

    with ThreadPoolExecutor(len(cases)) as pool:
        assert all(pool.map(work, range(len(cases))))


def test_threads_give_right_results(version):
    """Work is cut by the number of threads; every cut must be right."""
    before = torch.get_num_threads()
    case = make_case("cpu", torch.float32, [3000, 0, 129, 1, 700], heads=4, kv_heads=2)
    want = case.naive()
    try:
        for threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(threads)
            assert_right(case, case.run(version), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_graph_replay(dtype, version, kv_cache_dtype):
    """Captured at one set of lengths, replayed at others, with padded rows (length 0)."""
    case = make_case("cuda", dtype, [700, 40, 1200, 8], kv_cache_dtype=kv_cache_dtype)
    out = torch.empty_like(case.query)
    scratch = case.scratch()

    def call() -> None:
        if version == 1:
            vllm_kernels.paged_attention_v1(out, *case.arguments())
        else:
            vllm_kernels.paged_attention_v2(out, *scratch, *case.arguments())

    def refill() -> None:
        case.seq_lens.copy_(torch.tensor([13, 0, 1024, 0], device="cuda"))
        case.query.normal_()

    assert_graph_replays(call, refill, out, lambda: case.run(version))
