"""concat_and_cache_mla, cp_gather_and_upconvert_fp8_kv_cache and concat_mla_q against their
references, bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, bits, ints, needs_gpu, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

CACHE_DTYPES = ["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"]


@pytest.fixture(params=CACHE_DTYPES)
def kv_cache_dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def empty_cache(kv_cache_dtype, dtype, device, *, blocks=11, block=16, rank=512, pe=64) -> Tensor:
    """Full of noise."""
    ds_mla = kv_cache_dtype == "fp8_ds_mla"
    shape = (blocks, block, 656 if ds_mla else rank + pe)
    if kv_cache_dtype == "auto":
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 127, shape, device=device, dtype=torch.uint8)


def tokens(n: int, dtype: torch.dtype, device: str, rank=512, pe=64) -> tuple[Tensor, Tensor]:
    """Latents whose tiles differ by orders of magnitude."""
    kv_c = (
        torch.randn(n, rank, device=device)
        * 10.0 ** torch.randint(-3, 3, (n, rank), device=device).sort(-1)[0]
    )
    return kv_c.to(dtype), torch.randn(n, pe, device=device, dtype=dtype)


def check(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, kv_cache_dtype: str) -> None:
    args = (kv_c, k_pe, cache, slots, kv_cache_dtype, torch.tensor(0.37, device=cache.device))
    want = reference.concat_and_cache_mla(*args)
    vllm_kernels.concat_and_cache_mla(*args)
    assert torch.equal(bits(cache), bits(want))


def slot_patterns(device: str) -> list[Tensor]:
    random = torch.randperm(11 * 16)
    hole = random.clone()
    hole[5] = -1
    patterns = [random[:1], random[:13], random, hole, torch.arange(3, 99), torch.full((9,), -1)]
    return [slots.to(device) for slots in patterns]


def test_matches_reference(device, dtype, kv_cache_dtype):
    for slots in slot_patterns(device):
        kv_c, k_pe = tokens(len(slots) + 2, dtype, device)
        check(kv_c, k_pe, empty_cache(kv_cache_dtype, dtype, device), slots, kv_cache_dtype)


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES[:-1])
@pytest.mark.parametrize(
    ("rank", "pe"), [(256, 32), (512, 64), (8, 8), (7, 3), (1500, 64), (64, 0)]
)
def test_sizes(device, dtype, kv_cache_dtype, rank, pe):
    slots = torch.tensor([5, 40, 3, -1, 17], device=device)
    kv_c, k_pe = tokens(5, dtype, device, rank, pe)
    cache = empty_cache(kv_cache_dtype, dtype, device, rank=rank, pe=pe)
    check(kv_c, k_pe, cache, slots, kv_cache_dtype)


@pytest.mark.parametrize("n", [300, 2500, 9000])
def test_many_tokens(device, kv_cache_dtype, n):
    for slots in (torch.randperm(n + 100)[:n], torch.randint(-1, 40, (n,))):  # and repeated ones
        kv_c, k_pe = tokens(n, torch.bfloat16, device)
        cache = empty_cache(kv_cache_dtype, torch.bfloat16, device, blocks=(n + 115) // 16)
        check(kv_c, k_pe, cache, slots.to(device), kv_cache_dtype)


@pytest.mark.parametrize("block", [1, 5, 64])
def test_any_block_size(device, dtype, kv_cache_dtype, block):
    slots = torch.randperm(6 * block)[: 3 * block].to(device)
    kv_c, k_pe = tokens(len(slots), dtype, device)
    cache = empty_cache(kv_cache_dtype, dtype, device, blocks=6, block=block)
    check(kv_c, k_pe, cache, slots, kv_cache_dtype)


def test_strided_tensors(device, dtype, kv_cache_dtype):
    slots = torch.randperm(176, device=device)[:40]
    packed = torch.randn(40, 1536 + 512 + 64, device=device).to(dtype)  # q_a, kv_c, k_pe
    unaligned = torch.randn(40, 577, device=device).to(dtype)
    for kv_c, k_pe in (
        (packed[:, 1536:2048], packed[:, 2048:]),
        (unaligned[:, 1:513], unaligned[:, 513:]),
    ):
        layers = torch.stack([empty_cache(kv_cache_dtype, dtype, device)] * 3, 1)
        before = layers.clone()
        check(kv_c, k_pe, layers[:, 1], slots, kv_cache_dtype)
        for untouched in (0, 2):
            assert torch.equal(bits(layers[:, untouched]), bits(before[:, untouched]))


def test_special_values(device, dtype, kv_cache_dtype):
    kv_c, k_pe = tokens(5, dtype, device)
    kv_c[0] = 0
    kv_c[1, 3], kv_c[1, 130], k_pe[1, 0] = float("nan"), float("inf"), float("nan")
    kv_c[2, 256:384] = torch.finfo(dtype).smallest_normal
    kv_c[3], k_pe[3, 5] = torch.finfo(dtype).max, float("-inf")
    cache = empty_cache(kv_cache_dtype, dtype, device).zero_()
    args = (kv_c, k_pe, cache, torch.arange(5, device=device), kv_cache_dtype)
    want = reference.concat_and_cache_mla(*args, torch.ones(1, device=device))
    vllm_kernels.concat_and_cache_mla(*args, torch.ones(1, device=device))
    if kv_cache_dtype == "fp8_ds_mla":  # a NaN of the rope keeps no payload
        assert cache[0, 1, 528:530].view(torch.bfloat16).isnan()
        cache[0, 1, 528:530], want[0, 1, 528:530] = 0, 0
    assert torch.equal(bits(cache), bits(want))


def table_for(lengths: list[int], device: str, block: int = 16) -> tuple[Tensor, int]:
    pages = [-(-n // block) for n in lengths]
    ids = torch.randperm(sum(pages) + 2)
    table = torch.full((len(lengths) + 1, max(pages) + 1), -7)
    for seq, count in enumerate(pages):
        table[seq, :count] = ids[sum(pages[:seq]) : sum(pages[: seq + 1])]
    return table.int().to(device), len(ids)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([40], [0]), ([5, 0, 16, 33, 1], [3, 60, 20, 40, 8]), ([0], [0]), ([300, 2], [2, 0])],
)
def test_upconvert_matches_reference(device, dtype, lengths, starts):
    table, blocks = table_for(lengths, device)
    kv_c, k_pe = tokens(blocks * 16, torch.bfloat16, device)
    cache = empty_cache("fp8_ds_mla", dtype, device, blocks=blocks)
    check(kv_c, k_pe, cache, torch.randperm(blocks * 16, device=device), "fp8_ds_mla")
    rows = max(s + n for s, n in zip(starts, lengths)) + 4
    for dst in (
        torch.randn(rows, 576, device=device).to(dtype),
        torch.randn(rows, 2, 576, device=device).to(dtype)[:, 1],
    ):
        args = (cache, dst, table, ints(lengths, device), ints(starts, device), len(lengths))
        want = reference.cp_gather_and_upconvert_fp8_kv_cache(*args)
        vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(*args)
        assert torch.equal(dst, want)


def test_round_trip_error(device):
    """An e4m3 value has 3 mantissa bits below its leading one: at most 1/16 of it is lost."""
    kv_c, k_pe = tokens(64, torch.bfloat16, device)
    cache = empty_cache("fp8_ds_mla", torch.bfloat16, device)
    one = torch.ones(1, device=device)
    slots = torch.arange(64, device=device)
    vllm_kernels.concat_and_cache_mla(kv_c, k_pe, cache, slots, "fp8_ds_mla", one)
    dst = torch.zeros(64, 576, device=device)
    vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(
        cache, dst, ints([[0, 1, 2, 3]], device), ints([64], device), ints([0], device), 1
    )
    want = kv_c.double()
    tile_max = want.unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, 128)
    smallest = tile_max.flatten(1) / 448 * 2.0**-10  # half a step of the denormals
    assert ((dst[:, :512].double() - want).abs() <= want.abs() / 15.9 + smallest).all()
    assert torch.equal(dst[:, 512:], k_pe.float())


FAULTS = {
    "block": ((0, 1, 99), r"block_table\[1, 0\] = 99: expected a block in \[0, "),
    "length": (
        (1, 1, 10**6),
        r"seq_lens\[1\] = 1000000: expected a length that fits block_table",
    ),
    "negative": (
        (1, 1, -4),
        r"seq_lens\[1\] = -4: expected a length that fits block_table in",
    ),
    "row": ((2, 1, -3), r"workspace_starts\[1\] = -3: expected a row in \[0, "),
    "past": (
        (2, 1, 50),
        r"workspace_starts\[1\] = 50: expected at most 40, for the sequence has",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_upconvert_bad_indices(device, fault):
    (which, seq, value), message = FAULTS[fault]
    table, blocks = table_for([18, 20], device)
    cache = empty_cache("fp8_ds_mla", torch.bfloat16, device, blocks=blocks)
    cache[..., 512:528] = torch.ones(4).view(torch.uint8).to(device)
    arguments = [table, ints([18, 20], device), ints([0, 20], device)]
    dst = torch.full((60, 576), -1.0, device=device, dtype=torch.bfloat16)
    want = reference.cp_gather_and_upconvert_fp8_kv_cache(cache, dst, *arguments, 2)
    arguments[which][seq if which else (seq, 0)] = value
    if device == "cpu":
        with raises(rf"^cp_gather_and_upconvert_fp8_kv_cache: {message}"):
            vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(cache, dst, *arguments, 2)
        assert (dst == -1).all()
        return
    vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(cache, dst, *arguments, 2)
    torch.cuda.synchronize()
    assert torch.equal(dst[:18], want[:18])
    if fault == "block":
        assert not dst[20:36].any() and torch.equal(dst[36:], want[36:])


@pytest.mark.parametrize("bad", [-2, 11 * 16, 2**40])
def test_bad_slots(device, kv_cache_dtype, bad):
    kv_c, k_pe = tokens(4, torch.bfloat16, device)
    cache = empty_cache(kv_cache_dtype, torch.bfloat16, device)
    before = bits(cache).clone()
    slots = torch.tensor([5, 6, bad, 8], device=device)
    one = torch.ones(1, device=device)
    call = (kv_c, k_pe, cache, slots, kv_cache_dtype, one)
    if device == "cpu":
        with raises(
            rf"^concat_and_cache_mla: slot_mapping\[2\] = {bad}: expected -1 \(skipped\) or a slot"
        ):
            vllm_kernels.concat_and_cache_mla(*call)
        assert torch.equal(bits(cache), before)
    else:
        good = torch.tensor([5, 6, -1, 8], device=device)
        want = reference.concat_and_cache_mla(*call[:3], good, *call[4:])
        vllm_kernels.concat_and_cache_mla(*call)
        assert torch.equal(bits(cache), bits(want))


def test_bad_scales_on_the_cpu():
    kv_c, k_pe = tokens(4, torch.bfloat16, "cpu")
    cache = empty_cache("fp8", torch.bfloat16, "cpu")
    before = bits(cache).clone()
    slots = torch.arange(4)
    for value, text in ((float("nan"), "nan"), (float("inf"), "inf"), (0.0, "0"), (-1.0, "-1")):
        call = (kv_c, k_pe, cache, slots, "fp8", torch.tensor(value))
        with raises(rf"^concat_and_cache_mla: scale\[0\] = {text}: expected a finite number > 0$"):
            vllm_kernels.concat_and_cache_mla(*call)
        assert torch.equal(bits(cache), before)
        for name in ("auto", "fp8_ds_mla"):  # their scale is not read
            other = empty_cache(name, torch.bfloat16, "cpu")
            vllm_kernels.concat_and_cache_mla(kv_c, k_pe, other, slots, name, call[-1])


def test_sizes_beyond_32_bits(device):
    """Expanded tensors: huge sizes, little memory. (2^32 tokens a block once divided by 0.)"""
    one = torch.zeros(1, dtype=torch.int32, device=device)
    dst = torch.empty(4, 576, dtype=torch.bfloat16, device=device)
    for size in (2**31, 2**32):
        source = torch.zeros(1, 1, 656, dtype=torch.uint8, device=device).expand(1, size, 656)
        with raises(
            rf"^cp_gather_and_upconvert_fp8_kv_cache: src_cache: expected block_size < 2\^31, got "
            rf"shape \[1, {size}, 656\]$"
        ):
            vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(
                source, dst, one[None], one + 4, one, 1
            )


def test_bad_input(device):
    kv_c, k_pe = tokens(4, torch.bfloat16, device)
    cache = empty_cache("auto", torch.bfloat16, device)
    ds_mla = empty_cache("fp8_ds_mla", torch.bfloat16, device)
    slots, one = torch.arange(4, device=device), torch.ones(1, device=device)
    good = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": cache, "slot_mapping": slots,
            "kv_cache_dtype": "auto", "scale": one}  # fmt: skip
    small = kv_c[:, :256].contiguous()
    cases = [
        ({"kv_c": kv_c.long()}, r"kv_c: expected float32, float16 or bfloat16, got int64$"),
        ({"k_pe": k_pe.float()}, r"k_pe: expected bfloat16 \(from kv_c\), got float32$"),
        ({"k_pe": k_pe[:3]}, r"k_pe: expected num_tokens = 4 \(from kv_c\) at dimension 0"),
        ({"kv_c": small}, r"kv_cache: expected kv_lora_rank \+ pe_dim = 320 \(from kv_c and"),
        ({"kv_cache_dtype": "int8"},
         r'kv_cache_dtype: expected "auto", "fp8", "fp8_e4m3" or "fp8_e5m2", got "int8"$'),
        ({"kv_cache_dtype": "fp8"}, r"kv_cache: expected uint8 or float8_e4m3fn \(from kv_"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, r"kv_cache: expected uint8, got bfloat16$"),
        ({"kv_cache_dtype": "fp8_ds_mla", "kv_cache": ds_mla[..., :640]},
         r"kv_cache: expected fp8_ds_mla entry = 656 at dimension 2, got shape \[11, 16, 640\]$"),
        ({"kv_cache_dtype": "fp8_ds_mla", "kv_cache": ds_mla, "kv_c": small},
         r"kv_c: expected kv_lora_rank = 512 \(from fp8_ds_mla\) at dimension 1"),
        ({"kv_cache_dtype": "fp8_ds_mla",
          "kv_cache": torch.zeros(11, 16, 660, dtype=torch.uint8, device=device)[..., :656]},
         r"kv_cache: expected entries at multiples of 16 bytes, got strides 10560, 660$"),
        ({"scale": torch.ones(2, device=device)}, r"scale: expected one element, got shape \[2\]$"),
        ({"scale": 0.5}, r"scale: expected a float32 tensor of one element, got 0\.5$"),
        ({"slot_mapping": torch.arange(5, device=device)}, r"slot_mapping: expected at most "),
        ({"kv_cache": cache[:1].expand(11, -1, -1)}, r"kv_cache: is written, so its elements must"),
        ({"kv_c": cache.flatten()[:2048].view(4, 512)}, r"kv_cache and kv_c overlap in memory$"),
    ]  # fmt: skip
    for change, message in cases:
        with raises(rf"^concat_and_cache_mla: {message}"):
            vllm_kernels.concat_and_cache_mla(**{**good, **change})
    with raises(r"^concat_and_cache_mla: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.concat_and_cache_mla(**{**good, "kv_c": kv_c.requires_grad_()})


def test_upconvert_bad_input(device):
    cache = empty_cache("fp8_ds_mla", torch.bfloat16, device)
    dst = torch.zeros(20, 576, device=device, dtype=torch.bfloat16)
    two = ints([1, 1], device)
    good = {"src_cache": cache, "dst": dst, "block_table": ints([[0], [1]], device),
            "seq_lens": two, "workspace_starts": two.clone(), "batch_size": 2}  # fmt: skip
    cases = [
        ({"src_cache": cache[..., :640]}, r"src_cache: expected fp8_ds_mla entry = 656 at dim"),
        ({"src_cache": cache.view(torch.int8)}, r"src_cache: expected uint8, got int8$"),
        ({"dst": dst[:, :512]}, r"dst: expected kv_lora_rank \+ pe_dim = 576 \(from fp8_ds_mla\)"),
        ({"dst": torch.zeros(20, 577, device=device)[:, :576]},
         r"dst: expected rows at multiples of 16 bytes, got stride 577$"),
        ({"block_table": ints([[0]], device)}, r"block_table: expected at least batch_size = 2 "),
        ({"seq_lens": two.long()}, r"seq_lens: expected int32, got int64; cast it with .int\(\)$"),
        ({"batch_size": 1}, r"seq_lens: expected batch_size = 1 \(from the argument"),
        ({"batch_size": -1}, r"batch_size: expected one >= 0, got -1$"),
    ]  # fmt: skip
    for change, message in cases:
        with raises(rf"^cp_gather_and_upconvert_fp8_kv_cache: {message}"):
            vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(**{**good, **change})


@pytest.mark.parametrize(("tokens_", "heads", "nope", "rope"), [
    (5, 16, 512, 64), (1, 128, 512, 64), (3, 2, 7, 3), (0, 4, 512, 64), (4, 3, 64, 0),
])  # fmt: skip
def test_concat_mla_q(device, dtype, tokens_, heads, nope, rope):
    ql_nope = torch.randn(heads, tokens_, nope, device=device, dtype=dtype).transpose(0, 1)
    q_pe = torch.randn(tokens_, heads, 2 * rope + 1, device=device, dtype=dtype)[..., 1 : 1 + rope]
    for pe in (q_pe, q_pe.contiguous()):
        wide = torch.zeros(tokens_, heads + 2, nope + rope, device=device, dtype=dtype)
        vllm_kernels.concat_mla_q(ql_nope, pe, wide[:, :heads])
        assert torch.equal(wide[:, :heads], reference.concat_mla_q(ql_nope, pe))
        assert not wide[:, heads:].any()


def test_concat_mla_q_bad_input(device):
    nope, rope = torch.randn(3, 4, 512, device=device), torch.randn(3, 4, 64, device=device)
    out = torch.zeros(3, 4, 576, device=device)
    for args, message in (
        ((nope, rope[:2], out), r"q_pe: expected num_tokens = 3 \(from ql_nope\) at dimension 0"),
        ((nope, rope.half(), out), r"q_pe: expected float32 \(from ql_nope\), got float16$"),
        ((nope, rope, out[..., :512]),
         r"q_out: expected nope_dim \+ pe_dim = 576 \(from ql_nope and q_pe\) at dimension 2"),
        ((out[..., :512], rope, out), r"q_out and ql_nope overlap in memory$"),
    ):  # fmt: skip
        with raises(rf"^concat_mla_q: {message}"):
            vllm_kernels.concat_mla_q(*args)


# Schema and fake kernels do not depend on the dtype.
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_opcheck_and_compile(device, dtype, kv_cache_dtype):
    kv_c, k_pe = tokens(4, dtype, device)
    cache = empty_cache(kv_cache_dtype, dtype, device)
    slots, one = torch.arange(4, device=device), torch.ones(1, device=device)
    args = (kv_c, k_pe, cache, slots, kv_cache_dtype, one)
    opcheck("concat_and_cache_mla", *args)
    assert_compiles(vllm_kernels.concat_and_cache_mla, *args)
    nope, out = torch.randn(2, 4, 512, device=device), torch.zeros(2, 4, 576, device=device)
    args = (nope, nope[..., :64].contiguous(), out)
    opcheck("concat_mla_q", *args)
    assert_compiles(vllm_kernels.concat_mla_q, *args)
    cache = empty_cache("fp8_ds_mla", dtype, device)
    cache[..., 512:528] = 0
    dst = torch.zeros(20, 576, device=device, dtype=dtype)
    two = ints([1, 1], device)
    args = (cache, dst, ints([[0], [1]], device), two, ints([0, 5], device), 2)
    opcheck("cp_gather_and_upconvert_fp8_kv_cache", *args)
    assert_compiles(vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache, *args)


@needs_gpu
def test_graph_replay(kv_cache_dtype):
    kv_c, k_pe = tokens(80, torch.bfloat16, "cuda")
    cache = empty_cache(kv_cache_dtype, torch.bfloat16, "cuda")
    slots = torch.randperm(176, device="cuda")[:80]
    args = (kv_c, k_pe, cache, slots, kv_cache_dtype, torch.ones(1, device="cuda"))
    vllm_kernels.concat_and_cache_mla(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vllm_kernels.concat_and_cache_mla(*args)
    for refill in (torch.randperm(176)[:80], torch.arange(5, 85), torch.full((80,), -1)):
        slots.copy_(refill)
        kv_c.normal_()
        want = reference.concat_and_cache_mla(*args)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(cache), bits(want))
