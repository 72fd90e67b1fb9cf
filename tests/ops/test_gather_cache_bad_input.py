"""What cp_gather_cache, gather_and_maybe_dequant_cache and gather_paged_kv refuse or contain."""

from __future__ import annotations

import pytest
import torch
from gather_cache_cases import Batch, noise, paged, rows_for
from helpers import raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

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
