"""cp_gather_cache, gather_and_maybe_dequant_cache and gather_paged_kv against their references."""

from __future__ import annotations

import pytest
import torch
from helpers import LAYOUTS, assert_compiles, bits, opcheck, raises, to_layout
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Any bits for what is only moved; finite numbers, of the scale of 1, for what is converted."""
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 127, shape, device=device).to(dtype)


class Batch:
    """Sequences of pages in random order, garbage behind them in the block table."""

    def __init__(self, device: str, lengths: list[int], starts: list[int] | None = None,
                 block: int = 16, spare_rows: int = 3) -> None:  # fmt: skip
        ends = [(start + n) for start, n in zip(starts or [0] * len(lengths), lengths)]
        pages = [-(-end // block) for end in ends]
        self.num_blocks = sum(pages) + 2
        ids = torch.randperm(self.num_blocks)
        self.table = torch.full((len(lengths) + 1, max(pages, default=0) + 2), 2**30)
        used = 0
        for seq, count in enumerate(pages):
            self.table[seq, :count] = ids[used : used + count]
            used += count
        self.table = self.table.int().to(device)
        lens = torch.tensor(lengths, dtype=torch.int64)
        self.cu = torch.cat([torch.zeros(1), lens.cumsum(0)]).int().to(device)
        self.starts = None if starts is None else torch.tensor(starts).int().to(device)
        self.rows = sum(lengths) + spare_rows
        self.token_to_seq = torch.arange(len(lengths)).repeat_interleave(lens).int().to(device)
        self.tokens = sum(lengths)
        self.batch = len(lengths)


BATCHES = {
    "one": ([37], None),
    "ragged": ([5, 0, 16, 33, 0, 0, 1, 100], None),
    "starts": ([5, 0, 16, 33, 0, 20], [3, 7, 16, 17, 0, 31]),
    "many": ([3] * 100 + [0] * 40 + [7], None),
    "none": ([0, 0], None),
}


@pytest.fixture(params=BATCHES)
def batch_name(request: pytest.FixtureRequest) -> str:
    return request.param


def check_cp(batch: Batch, src: Tensor, dst: Tensor) -> None:
    args = (src, dst, batch.table, batch.cu, batch.batch, batch.starts)
    want, before = reference.cp_gather_cache(*args), dst.clone()
    for gather in (vllm_kernels.cp_gather_cache, vllm_kernels.gather_cache):
        dst.copy_(before)
        gather(*args)
        assert torch.equal(bits(dst), bits(want))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("entry", [(576,), (656,), (2, 64), (7,), (1,)])
def test_cp_gather_cache(device, batch_name, stored, entry):
    batch = Batch(device, *BATCHES[batch_name])
    src = noise((batch.num_blocks, 16, *entry), stored, device)
    check_cp(batch, src, noise((batch.rows, *entry), stored, device))


@pytest.mark.parametrize("block", [1, 5, 64])
def test_cp_gather_cache_of_any_block_size(device, block):
    batch = Batch(device, [5, 0, 16, 33], [2, 0, 70, 5], block)
    check_cp(batch, noise((batch.num_blocks, block, 64), torch.half, device),
             noise((batch.rows, 64), torch.half, device))  # fmt: skip


def test_cp_gather_cache_of_strided_tensors(device):
    batch = Batch(device, *BATCHES["starts"])
    packed = noise((batch.num_blocks, 3, 16, 80), torch.half, device)
    wide = noise((batch.rows, 2, 72), torch.half, device)
    before = wide.clone()
    check_cp(batch, packed[:, 1, :, :64], wide[:, 1, :64])
    wide[:, 1, :64] = before[:, 1, :64]
    assert torch.equal(wide, before)
    unaligned = noise((batch.num_blocks * 16 * 65 + 1,), torch.half, device)[1:]
    check_cp(batch, unaligned.view(-1, 16, 65)[..., :64], wide[:, 0, 1:65])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("entry", [(576,), (2, 64), (7,)])
def test_gather_and_maybe_dequant_cache(device, dtype, batch_name, kv_cache_dtype, entry):
    batch = Batch(device, *BATCHES[batch_name])
    stored = {**EIGHT_BITS, "fp8_e4m3": torch.float8_e4m3fn, "auto": dtype}[kv_cache_dtype]
    src = noise((batch.num_blocks, 16, *entry), stored, device)
    dst = noise((batch.rows, *entry), dtype, device)
    scale = torch.tensor([0.37], device=device)
    args = (batch.table, batch.cu, batch.token_to_seq)
    for source in (src, src.view(torch.uint8)) if stored.itemsize == 1 else (src,):
        for tokens in (batch.tokens, batch.tokens // 2):
            call = (source, dst, *args, tokens, kv_cache_dtype, scale, batch.starts)
            want = reference.gather_and_maybe_dequant_cache(*call)
            vllm_kernels.gather_and_maybe_dequant_cache(*call)
            assert torch.equal(bits(dst), bits(want))
            dst.fill_(-1)


def paged(batch: Batch, layout: str, stored: torch.dtype, device: str, *, heads=2, size=64,
          block=16) -> list[Tensor]:  # fmt: skip
    shape = (batch.num_blocks, block, heads, size)
    return [to_layout(noise(shape, stored, device), layout, is_key) for is_key in (True, False)]


def check_kv(batch: Batch, caches: list[Tensor], rows: list[Tensor], layout: str,
             scales: tuple[Tensor | None, Tensor | None] = (None, None),
             zeros: tuple[Tensor | None, Tensor | None] = (None, None)) -> None:  # fmt: skip
    args = (*rows, *caches, batch.table, batch.cu)
    named = {"seq_starts": batch.starts, "k_scale": scales[0], "v_scale": scales[1]}
    named |= {"k_zero": zeros[0], "v_zero": zeros[1]}
    want = reference.gather_paged_kv(*args, **named, layout=layout)
    vllm_kernels.gather_paged_kv(*args, **named, layout=layout)
    assert torch.equal(bits(rows[0]), bits(want[0])), "key"
    assert torch.equal(bits(rows[1]), bits(want[1])), "value"


def rows_for(batch: Batch, heads: int, size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [noise((batch.rows, heads, size), dtype, device) for _ in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "block"), [(64, 16), (80, 8), (256, 32), (16, 5), (128, 64)])
def test_gather_paged_kv(device, dtype, batch_name, layout, size, block):
    batch = Batch(device, *BATCHES[batch_name], block)
    caches = paged(batch, layout, dtype, device, size=size, block=block)
    check_kv(batch, caches, rows_for(batch, 2, size, dtype, device), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", EIGHT_BITS.values(), ids=EIGHT_BITS)
@pytest.mark.parametrize("scale", ["one", "head", "token"])
def test_gather_paged_kv_of_8_bits(device, dtype, layout, stored, scale):
    for name, size in (("ragged", 64), ("starts", 80)):
        batch = Batch(device, *BATCHES[name])
        shape = {"one": (), "head": (3,), "token": (batch.num_blocks, 3, 16)}[scale]
        scales = torch.rand(2, *shape, device=device) + 0.1
        caches = paged(batch, layout, stored, device, heads=3, size=size)
        check_kv(batch, caches, rows_for(batch, 3, size, dtype, device), layout, tuple(scales))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_gather_paged_kv_of_head_sizes_that_fit_no_vector(device, dtype, layout):
    batch = Batch(device, *BATCHES["starts"])
    for stored in (dtype, torch.int8):
        caches = paged(batch, layout, stored, device, size=7)
        one = None if stored == dtype else torch.full((1,), 0.3, device=device)
        check_kv(batch, caches, rows_for(batch, 2, 7, dtype, device), layout, (one, one))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_paged_kv_of_strided_tensors(device, dtype, layout):
    batch = Batch(device, *BATCHES["starts"])
    packed = [torch.stack([c, c + 1], 1) for c in paged(batch, layout, dtype, device)]
    qkv = noise((batch.rows, 5, 64), dtype, device)
    check_kv(batch, [p[:, 1] for p in packed], [qkv[:, 1:3], qkv[:, 3:]], layout)
    unaligned = noise((2, batch.rows, 2 * 64 + 1), dtype, device)[..., 1:].unflatten(-1, (2, 64))
    check_kv(batch, [p[:, 0] for p in packed], list(unaligned), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "block"), [(64, 16), (96, 8), (128, 32), (192, 5), (256, 64)])
def test_gather_int4(device, dtype, batch_name, layout, size, block):
    """Bit for bit; scales and zeros of unused blocks may be anything."""
    batch = Batch(device, *BATCHES[batch_name], block)
    pages = paged(batch, layout, torch.int8, device, size=size // 2, block=block)
    caches = [torch.randint_like(x.view(torch.uint8), 256) for x in pages]
    scales, zeros = torch.randn(2, 2, batch.num_blocks, 2, block, device=device)
    unused = torch.ones(batch.num_blocks, dtype=torch.bool)
    unused[batch.table[batch.table < batch.num_blocks].long().cpu()] = False
    scales[:, unused] = zeros[:, unused] = float("nan")
    check_kv(batch, caches, rows_for(batch, 2, size, dtype, device), layout, (*scales,), (*zeros,))


def test_bad_input_of_gathered_int4():
    batch = Batch("cpu", [20])
    rows = rows_for(batch, 2, 64, torch.float32, "cpu")
    caches = paged(batch, "NHD", torch.uint8, "cpu", size=32)
    of_tokens = torch.ones(4, batch.num_blocks, 2, 16)
    good = dict(zip(("k_scale", "v_scale", "k_zero", "v_zero"), of_tokens))
    narrow = [rows[0][..., :48], rows[1][..., :48]]
    cases = [
        (rows, caches, {"v_zero": None}, "k_zero: expected all of k_scale, v_scale, k_zero and v_"),
        (rows, caches, {"k_scale": None}, "k_zero: expected all of k_scale, v_scale, k_zero and v"),
        (rows, caches, {"k_zero": None, "v_zero": None}, "key_cache: expected .* got uint8"),
        (rows, caches, {"k_scale": torch.ones(1), "v_scale": torch.ones(1)},
         r"k_scale: expected 3 dimensions, got shape \[1\]"),
        (rows, caches, {"v_zero": of_tokens[3, :1]}, "v_zero: expected shape"),
        (rows, [x.view(torch.int8) for x in caches], {}, "key_cache: expected uint8, got int8"),
        (narrow, caches, {}, "key: expected a head_size of 32 to 256 in steps of 32 for an int"),
    ]  # fmt: skip
    for to, pages, changes, message in cases:
        with raises("^gather_paged_kv: " + message):
            vllm_kernels.gather_paged_kv(
                *to, *pages, batch.table, batch.cu, layout="NHD", **good | changes
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_what_the_writers_wrote(device, dtype, layout):
    """reshape_and_cache_per_token_quant, then gather_paged_kv: the error of the rounding alone."""
    batch = Batch(device, [40, 3, 17], spare_rows=0)
    key, value = (noise((60, 2, 64), dtype, device) for _ in range(2))
    caches = paged(batch, layout, torch.int8, device)
    scales = torch.zeros(2, batch.num_blocks, 2, 16, device=device)
    place = torch.arange(60, device=device) - batch.cu[batch.token_to_seq]
    slots = batch.table[batch.token_to_seq, place // 16].long() * 16 + place % 16
    vllm_kernels.reshape_and_cache_per_token_quant(
        key, value, *caches, scales[0], scales[1], slots, layout
    )
    rows = rows_for(batch, 2, 64, dtype, device)
    vllm_kernels.gather_paged_kv(
        *rows, *caches, batch.table, batch.cu, k_scale=scales[0], v_scale=scales[1], layout=layout
    )
    for x, got in zip((key, value), rows):
        allowed = x.double().abs().amax(-1, keepdim=True) * (0.51 / 127 + torch.finfo(dtype).eps)
        assert ((got.double() - x.double()).abs() <= allowed).all()


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=["no sequences", "no tokens"])
@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_gather(device, lengths, rows):
    """No rows are read, and those there are keep what they hold."""
    batch = Batch(device, lengths, spare_rows=rows)
    check_cp(batch, *(noise((n, *size), torch.bfloat16, device)
                      for n, size in ((batch.num_blocks, (16, 576)), (rows, (576,)))))  # fmt: skip
    check_kv(batch, paged(batch, "NHD", torch.bfloat16, device),
             rows_for(batch, 2, 64, torch.bfloat16, device), "NHD")  # fmt: skip
    src = noise((batch.num_blocks, 16, 576), torch.uint8, device)
    dst = noise((rows, 576), torch.bfloat16, device)
    want, one = dst.clone(), torch.ones(1, device=device)
    vllm_kernels.gather_and_maybe_dequant_cache(
        src, dst, batch.table, batch.cu, batch.token_to_seq, 0, "fp8", one
    )
    assert torch.equal(bits(dst), bits(want))


def test_garbage_behind_the_lengths_is_not_looked_at(device):
    batch = Batch(device, *BATCHES["starts"])
    before = batch.table.clone()
    before[1] = -5  # a sequence of no tokens
    batch.table = before
    check_cp(batch, noise((batch.num_blocks, 16, 64), torch.half, device),
             noise((batch.rows, 64), torch.half, device))  # fmt: skip


def test_nan_stays_in_its_row(device, dtype):
    batch = Batch(device, [40, 20], spare_rows=0)
    keys, values = paged(batch, "vllm", dtype, device)
    block = int(batch.table[0, 1])
    values[block, 1, :, 3] = float("nan")
    keys[block, 1, :, 3] = float("nan")
    rows = rows_for(batch, 2, 64, dtype, device)
    vllm_kernels.gather_paged_kv(*rows, keys, values, batch.table, batch.cu)
    for got in rows:
        assert got[19, 1].isnan().all() and got.isnan().sum() == 64


FAULTS = {
    "block": (lambda b: b.table[1].__setitem__(1, b.num_blocks),
              r"block_tables?\[1, 1\] = \d+: expected a block in \[0, \d+\)$"),
    "negative": (lambda b: b.table[1].__setitem__(0, -1),
                 r"block_tables?\[1, 0\] = -1: expected a block in \[0, \d+\)$"),
    "falls": (lambda b: b.cu.__setitem__(2, 1), r"cu_seq_lens\[2\] = 1: expected a row in \[\d+, "),
    "past": (lambda b: b.cu.__setitem__(3, 10**6), r"cu_seq_lens\[3\] = 1000000: expected a row"),
    "start": (lambda b: b.starts.__setitem__(1, -1), r"seq_starts\[1\] = -1: expected a token in"),
    "end": (lambda b: b.starts.__setitem__(1, b.table.size(1) * 16 - 4),
            r"seq_starts\[1\] = \d+: expected at most \d+, for the sequence has 33 tokens and"),
}  # fmt: skip


@pytest.mark.parametrize("op", ["cp", "dequant", "kv"])
@pytest.mark.parametrize("fault", FAULTS)
def test_bad_indices(device, op, fault):
    batch = Batch(device, [18, 33, 40], [0, 2, 3])
    good = Batch.__new__(Batch)
    good.__dict__ = {k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(batch).items()}
    spoil, message = FAULTS[fault]
    spoil(batch)
    one = torch.ones(1, device=device)
    src = noise((batch.num_blocks, 16, 2, 64), torch.half, device)

    def call(b: Batch) -> Tensor:
        dst = torch.full((batch.rows, 2, 64), -1.0, device=device, dtype=torch.half)
        if op == "cp":
            vllm_kernels.cp_gather_cache(src, dst, b.table, b.cu, b.batch, b.starts)
        elif op == "dequant":
            vllm_kernels.gather_and_maybe_dequant_cache(
                src, dst, b.table, b.cu, b.token_to_seq, b.tokens, "auto", one, b.starts
            )
        else:
            vllm_kernels.gather_paged_kv(
                dst, dst.clone(), src, src, b.table, b.cu, seq_starts=b.starts, layout="NHD"
            )
        return dst

    want = call(good)
    if device == "cpu":
        name = {"cp": "cp_gather_cache", "dequant": "gather_and_maybe_dequant_cache",
                "kv": "gather_paged_kv"}[op]  # fmt: skip
        with raises(rf"^{name}: {message}"):
            call(batch)
        return
    got = call(batch)  # contained: sequence 0 as before, the rows of a bad block zeros
    torch.cuda.synchronize()
    assert torch.equal(got[:18], want[:18])
    if fault == "block":
        zeros = slice(18 + 14, 18 + 30)  # tokens 16 to 31, the first two of which are not gathered
        assert not got[zeros].any() and want[zeros].any()
        assert torch.equal(got[18:32], want[18:32]) and torch.equal(got[48:], want[48:])


def test_bad_sequences(device):
    batch = Batch(device, [18, 33])
    src = noise((batch.num_blocks, 16, 64), torch.half, device)
    dst = torch.full((batch.rows, 64), -1.0, device=device, dtype=torch.half)
    seqs = batch.token_to_seq.clone()
    seqs[5], seqs[6], seqs[7] = 2, -1, 1
    args = (src, dst, batch.table, batch.cu, seqs, 51, "auto", torch.ones(1, device=device))
    if device == "cpu":
        with raises(r"^gather_and_.*: token_to_seq\[5\] = 2: expected a sequence in \[0, 2\)$"):
            vllm_kernels.gather_and_maybe_dequant_cache(*args)
        assert (dst == -1).all()
    else:
        want = reference.cp_gather_cache(src, dst, batch.table, batch.cu, 2)
        want[5:7], want[7] = 0, -1
        vllm_kernels.gather_and_maybe_dequant_cache(*args)
        assert torch.equal(dst, want)


def test_bad_input_of_cp_gather_cache(device):
    batch = Batch(device, [18, 33], [0, 1])
    src = noise((batch.num_blocks, 16, 64), torch.half, device)
    dst = noise((batch.rows, 64), torch.half, device)
    good = {"src_cache": src, "dst": dst, "block_table": batch.table, "cu_seq_lens": batch.cu,
            "batch_size": 2, "seq_starts": batch.starts}  # fmt: skip
    cases = [
        ({"dst": dst.float()}, r"dst: expected float16 \(from src_cache\), got float32$"),
        (
            {"dst": dst[:, :32]},
            r"dst: expected entries of 64 elements \(from src_cache\), got shape",
        ),
        (
            {"dst": dst[:1].expand(54, -1)},
            r"dst: is written, so its elements must not share memory",
        ),
        ({"dst": src.flatten(0, 1)[: batch.rows]}, r"dst and src_cache overlap in memory$"),
        (
            {"src_cache": src[..., ::2], "dst": dst[:, :32]},
            r"src_cache: expected contiguous entries",
        ),
        ({"block_table": batch.table.long()}, r"block_table: expected int32, got int64; cast it"),
        (
            {"block_table": batch.table[:1]},
            r"block_table: expected at least num_seqs = 2 \(from cu_",
        ),
        ({"cu_seq_lens": batch.cu.long()}, r"cu_seq_lens: expected int32, got int64; cast it"),
        (
            {"batch_size": 3},
            r"cu_seq_lens: expected batch_size \+ 1 = 4 elements, got shape \[3\]$",
        ),
        (
            {"seq_starts": batch.starts[:1]},
            r"seq_starts: expected num_seqs = 2 \(from cu_seq_lens\)",
        ),
    ]
    for change, message in cases:
        for op in (vllm_kernels.cp_gather_cache, vllm_kernels.gather_cache):
            with raises(rf"^{op.__name__}: {message}"):
                op(**{**good, **change})
    with raises(r"^cp_gather_cache: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.cp_gather_cache(**{**good, "src_cache": src.requires_grad_()})


def test_bad_input_of_gather_and_maybe_dequant_cache(device):
    batch = Batch(device, [18, 33])
    src = noise((batch.num_blocks, 16, 64), torch.int8, device)
    dst = noise((batch.rows, 64), torch.half, device)
    good = {"src_cache": src, "dst": dst, "block_table": batch.table, "cu_seq_lens": batch.cu,
            "token_to_seq": batch.token_to_seq, "num_tokens": 51, "kv_cache_dtype": "int8",
            "scale": torch.ones(1, device=device)}  # fmt: skip
    cases = [
        ({"kv_cache_dtype": "fp8_ds_mla"},
         r'kv_cache_dtype: expected "auto", "fp8", "fp8_e4m3", "fp8_e5m2" or "int8", got "fp8_ds_'),
        ({"kv_cache_dtype": "auto"}, r"src_cache: expected float16 \(from kv_cache_dtype = "),
        ({"scale": torch.ones(2, device=device)}, r"scale: expected one element, got shape \[2\]$"),
        ({"scale": 0.5}, r"scale: expected a float32 tensor of one element, got 0\.5$"),
        ({"token_to_seq": batch.token_to_seq.long()}, r"token_to_seq: expected int32, got int64"),
        ({"num_tokens": 52}, r"num_tokens: expected one in \[0, 51\] \(rows of dst, elements of"),
        ({"num_tokens": -1}, r"num_tokens: expected one in \[0, 51\]"),
    ]  # fmt: skip
    for change, message in cases:
        with raises(rf"^gather_and_maybe_dequant_cache: {message}"):
            vllm_kernels.gather_and_maybe_dequant_cache(**{**good, **change})


def test_bad_input_of_gather_paged_kv(device):
    batch = Batch(device, [18, 33])
    keys, values = paged(batch, "NHD", torch.int8, device)
    key, value = rows_for(batch, 2, 64, torch.half, device)
    one = torch.ones(1, device=device)
    good = {"key": key, "value": value, "key_cache": keys, "value_cache": values,
            "block_tables": batch.table, "cu_seq_lens": batch.cu, "k_scale": one, "v_scale": one,
            "layout": "NHD"}  # fmt: skip
    cases = [
        ({"layout": "nhd"}, r'layout: expected "vllm", "NHD" or "HND", got "nhd"$'),
        ({"layout": "HND"}, r"key_cache: expected num_kv_heads = 2 \(from key\) at dimension 1"),
        ({"value": value[:-1]}, r"value: expected num_rows = 54 \(from key\) at dimension 0"),
        ({"value": value.float()}, r"value: expected float16 \(from key\), got float32$"),
        ({"value": key}, r"key and value overlap in memory$"),
        ({"key_cache": keys.view(torch.uint8)}, r"key_cache: expected float16 \(from key\), float"),
        ({"k_scale": 0.5},
         r"k_scale: expected a float32 tensor of one element, \[num_kv_heads\] or "
         r"\[num_blocks, num_kv_heads, block_size\], got 0\.5$"),
        ({"v_scale": torch.ones(3, device=device)},
         r"v_scale: expected one element, num_kv_heads = 2 or \[num_blocks, num_kv_heads, block"),
        ({"v_scale": torch.ones(2, device=device)}, r"v_scale: expected 1 elements \(from k_sc"),
        ({"v_scale": torch.ones(batch.num_blocks, 2, 8, device=device)},
         r"v_scale: expected block_size = 16 \(from key_cache\) at dimension 2"),
        ({"key_cache": keys.half(), "value_cache": values.half()},
         r"k_scale: expected None: only 8-bit caches have scales, this one is float16$"),
    ]  # fmt: skip
    for change, message in cases:
        with raises(rf"^gather_paged_kv: {message}"):
            vllm_kernels.gather_paged_kv(**{**good, **change})


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_no_scales_are_1(device, dtype, layout, stored):
    batch = Batch(device, *BATCHES["starts"])
    caches = paged(batch, layout, stored, device)
    one, quarter = torch.ones(1, device=device), torch.tensor([0.25], device=device)
    call = (*caches, batch.table, batch.cu)
    options = {"seq_starts": batch.starts, "layout": layout}
    for given in ({}, {"k_scale": quarter}, {"v_scale": quarter}):
        rows, want = (rows_for(batch, 2, 64, dtype, device) for _ in range(2))
        for a, b in zip(rows, want):
            a.copy_(b)
        vllm_kernels.gather_paged_kv(*rows, *call, **given, **options)
        both = {"k_scale": one, "v_scale": one, **given}
        vllm_kernels.gather_paged_kv(*want, *call, **both, **options)
        assert torch.equal(bits(rows[0]), bits(want[0]))
        assert torch.equal(bits(rows[1]), bits(want[1]))


def test_bad_scales_on_the_cpu():
    batch = Batch("cpu", [18, 33])
    caches = paged(batch, "NHD", torch.int8, "cpu")
    rows = rows_for(batch, 2, 64, torch.half, "cpu")
    call = (*rows, *caches, batch.table, batch.cu)
    for value, text in ((float("nan"), "nan"), (float("inf"), "inf"), (0.0, "0"), (-1.0, "-1")):
        bad = torch.tensor([1.0, value])
        with raises(rf"^gather_paged_kv: v_scale\[1\] = {text}: expected a finite number > 0$"):
            vllm_kernels.gather_paged_kv(*call, k_scale=torch.ones(2), v_scale=bad, layout="NHD")
        with raises(rf"^gather_and_maybe_dequant_cache: scale\[0\] = {text}: expected a finite n"):
            vllm_kernels.gather_and_maybe_dequant_cache(
                caches[0], rows[0], batch.table, batch.cu, batch.token_to_seq, batch.tokens,
                "int8", bad[1:],
            )  # fmt: skip
    # A token's own scale may be anything: a row of zeros has 0.
    own = torch.zeros(batch.num_blocks, 2, 16)
    vllm_kernels.gather_paged_kv(*call, k_scale=own, v_scale=own, layout="NHD")
    assert not rows[0][: batch.tokens].any()


def test_sizes_beyond_32_bits(device):
    """Expanded tensors: huge sizes, little memory."""
    rows = torch.full((4, 1, 32), 7.0, device=device)
    cache = torch.ones(1, 1, 1, 32, device=device)
    ints = torch.zeros(1, 1, dtype=torch.int32, device=device)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    for shape, message in (
        (
            (1, 2**31, 1, 32),
            r"key_cache: expected block_size < 2\^31, got shape \[1, 2147483648, 1,",
        ),
        (
            (1, 2**32 + 4, 1, 32),
            r"key_cache: expected block_size < 2\^31, got shape \[1, 4294967300",
        ),
        (
            (2**31, 4, 1, 32),
            r"key_cache: expected num_blocks \* block_size < 2\^31, got 2147483648 ",
        ),
        ((2**52, 16, 1, 32), r"key_cache: expected num_blocks \* block_size < 2\^31, got "),
    ):
        large = cache.expand(shape)
        with raises(rf"^gather_paged_kv: {message}"):
            vllm_kernels.gather_paged_kv(rows, rows.clone(), large, large, ints, cu, layout="NHD")
    assert (rows == 7).all()
    with raises(r"^cp_gather_cache: src_cache: expected block_size < 2\^31, got shape"):
        vllm_kernels.cp_gather_cache(cache[0].expand(1, 2**32, 32), rows[:, 0], ints, cu, 1)
    table = torch.empty(1, 2**31, dtype=torch.int32, device="meta")
    with raises(
        r"^cp_gather_cache: block_table: expected blocks_per_seq < 2\^31, got shape \[1, 2"
    ):
        torch.ops.vllm_kernels.cp_gather_cache(
            cache[0].to("meta"), rows[:, 0].to("meta"), table, cu.to("meta"), 1
        )


# Schema and fake kernels do not depend on the dtype.
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_and_compile(device, dtype, layout):
    batch = Batch(device, *BATCHES["starts"])
    caches, rows = paged(batch, layout, dtype, device), rows_for(batch, 2, 64, dtype, device)
    args = (*rows, *caches, batch.table, batch.cu, batch.starts, None, None, layout)
    opcheck("gather_paged_kv", *args)
    assert_compiles(
        lambda *a: vllm_kernels.gather_paged_kv(*a, layout=layout),
        *rows, *caches, batch.table, batch.cu,
    )  # fmt: skip
    src, dst = noise((batch.num_blocks, 16, 64), dtype, device), rows[0][:, 0].contiguous()
    call = (src, dst, batch.table, batch.cu, batch.batch, batch.starts)
    for name in ("cp_gather_cache", "gather_cache"):
        opcheck(name, *call)
        assert_compiles(getattr(vllm_kernels, name), *call)
    one = torch.ones(1, device=device)
    call = (*call[:4], batch.token_to_seq, batch.tokens, "auto", one, batch.starts)
    opcheck("gather_and_maybe_dequant_cache", *call)
    assert_compiles(vllm_kernels.gather_and_maybe_dequant_cache, *call)


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_replay(dtype, layout):
    batch = Batch("cuda", [300, 0, 500, 20])
    caches = paged(batch, layout, dtype, "cuda", heads=8, size=128)
    rows = rows_for(batch, 8, 128, dtype, "cuda")

    def call() -> None:
        vllm_kernels.gather_paged_kv(*rows, *caches, batch.table, batch.cu, layout=layout)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths in ([300, 0, 500, 20], [1, 299, 3, 4], [0, 0, 0, 0]):
        ends = torch.tensor([0, *lengths]).cumsum(0)
        batch.cu.copy_(ends)
        batch.table.clamp_(max=batch.num_blocks - 1)
        for r in rows:
            r.normal_()
        want = reference.gather_paged_kv(*rows, *caches, batch.table, batch.cu, layout=layout)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(rows[0], want[0]) and torch.equal(rows[1], want[1])


def test_offsets_beyond_32_bits(device):
    """A block stride of 2^31 elements over memory that is reserved and hardly touched."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    memory = torch.empty(2 * 2**31 + 16 * 64, dtype=torch.half, device=device)
    src = memory.as_strided((3, 16, 64), (2**31, 64, 1))
    src.copy_(noise((3, 16, 64), torch.half, device))
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
    dst = torch.zeros(20, 64, dtype=torch.half, device=device)
    vllm_kernels.cp_gather_cache(src, dst, table, cu, 1)
    assert torch.equal(dst, torch.cat([src[2], src[0, :4]]))
