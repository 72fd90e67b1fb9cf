"""cp_gather_cache, gather_and_maybe_dequant_cache and gather_paged_kv against their references."""

from __future__ import annotations

import pytest
import torch
from gather_cache_cases import (
    BATCHES,
    EIGHT_BITS,
    Batch,
    check_cp,
    check_kv,
    noise,
    paged,
    rows_for,
)
from helpers import LAYOUTS, assert_compiles, bits, needs_gpu, opcheck

import vllm_kernels
from vllm_kernels import reference


@pytest.fixture(params=BATCHES)
def batch_name(request: pytest.FixtureRequest) -> str:
    return request.param


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
