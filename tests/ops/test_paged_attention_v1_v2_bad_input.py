"""What paged_attention_v1 and _v2 refuse, and what their CUDA kernels skip."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from helpers import raises
from paged_attention_v1_v2_cases import STORED, Case, assert_right, make_case
from torch import Tensor

import vllm_kernels

# --- arguments


def bad_arguments(case: Case) -> list[tuple[dict[str, object], str]]:
    """(changed arguments, the message after "<op>: ")."""
    q, key, value = case.query, case.key_cache, case.value_cache
    return [
        ({"query": q.double()}, r"query: expected float32, float16 or bfloat16, got float64"),
        ({"query": q[0]}, r"query: expected shape \[num_seqs, num_heads, head_size\], "
                          r"got shape \[8, 64\]"),
        ({"query": q.transpose(1, 2).contiguous().transpose(1, 2)},
         r"query: expected contiguous heads \(only the stride of num_seqs is free\)"),
        *[({"scale": scale}, r"scale: expected a number that is finite in float32, got")
          for scale in (torch.nan, torch.inf, 1e39)],
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
        ({"k_scale": 0.5}, r"k_scale: expected a float32 tensor of one element, got 0\.5$"),
        ({"v_scale": None}, r"v_scale: expected a tensor, got None$"),
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
    with raises(rf"^paged_attention_v{version}: \w+: requires grad, .*no_grad\(\)$"):
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
        with raises(rf"^paged_attention_v{version}: \w+: requires grad, .*no_grad\(\)$"):
            op(*outputs, *case.arguments())


# --- lengths and ids


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
