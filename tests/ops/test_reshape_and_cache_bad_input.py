"""What reshape_and_cache and reshape_and_cache_flash refuse or contain, and check mode."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers import bits, needs_gpu, raises
from reshape_and_cache_cases import caches, scales, tokens

import vllm_kernels
from vllm_kernels import reference


@pytest.mark.parametrize("n", [40, 300, 2000])
def test_bad_slots_do_not_stand_for_good_ones(op, device, n):
    """On a GPU: a later slot that is no slot but has a good one's lower half."""
    if device == "cpu":
        pytest.skip("an error on a CPU")
    key, value = tokens(n, 2, 64, torch.bfloat16, device)
    for slots in (torch.randperm(n // 2, device=device), torch.arange(n // 2, device=device)):
        pools = caches(op, torch.bfloat16, "auto", device, blocks=-(-n // 32))
        args = [key, value, *pools, torch.cat([slots, slots + 2**32]), "auto", *scales(device)]
        want = getattr(reference, op)(*args[:4], torch.cat([slots, slots * 0 - 1]), *args[5:])
        getattr(vllm_kernels, op)(*args)
        assert all(torch.equal(bits(pool), bits(x)) for pool, x in zip(pools, want))


@pytest.mark.parametrize("bad", [-2, 11 * 16, 2**40, -(2**40), 2**32 + 5])
def test_bad_slots(op, device, bad):
    pools = caches(op, torch.float32, "auto", device)
    key, value = tokens(4, 2, 64, torch.float32, device)
    slots = torch.tensor([5, 6, bad, 8], device=device)
    args = (key, value, *pools, slots, "auto", *scales(device))
    if device == "cpu":
        before = [bits(pool).clone() for pool in pools]
        with raises(
            rf"^{op}: slot_mapping\[2\] = {bad}: expected -1 \(skipped\) or a slot in \[0, 176\)$"
        ):
            getattr(vllm_kernels, op)(*args)
        for pool, want in zip(pools, before):
            assert torch.equal(bits(pool), want)
    else:  # contained: the others are written
        good = torch.tensor([5, 6, -1, 8], device=device)
        want = getattr(reference, op)(*args[:4], good, *args[5:])
        getattr(vllm_kernels, op)(*args)
        torch.cuda.synchronize()
        assert torch.equal(bits(pools[0]), bits(want[0]))
        assert torch.equal(bits(pools[1]), bits(want[1]))


def test_bad_scales_on_the_cpu(op):
    key, value = tokens(4, 2, 64, torch.float32, "cpu")
    slots, one = torch.arange(4), torch.ones(1)
    for value_, text in ((float("nan"), "nan"), (float("inf"), "inf"), (0.0, "0"), (-1.0, "-1")):
        for shape in ((1,), (), (2,)):
            bad, good = torch.full(shape, value_), torch.ones(shape)
            for kind in ("fp8", "fp8_e5m2", "int8"):
                caches_ = caches(op, torch.float32, kind, "cpu")
                before = [bits(cache).clone() for cache in caches_]
                for name, given in (("k_scale", (bad, good)), ("v_scale", (good, bad))):
                    with raises(rf"^{op}: {name}\[0\] = {text}: expected a finite number > 0$"):
                        getattr(vllm_kernels, op)(key, value, *caches_, slots, kind, *given)
                assert all(torch.equal(bits(a), b) for a, b in zip(caches_, before))
        unused = torch.tensor([value_])  # with "auto" scales are not read
        plain = caches(op, torch.float32, "auto", "cpu")
        getattr(vllm_kernels, op)(key, value, *plain, slots, "auto", unused, one)


def test_bad_input(op, device):
    key, value = tokens(4, 2, 64, torch.float32, device)
    kc, vc = caches(op, torch.float32, "auto", device)
    k8, v8 = caches(op, torch.float32, "fp8", device)
    slots = torch.arange(4, device=device)
    ks, vs = scales(device)
    good = {
        "key": key, "value": value, "key_cache": kc, "value_cache": vc, "slot_mapping": slots,
        "kv_cache_dtype": "auto", "k_scale": ks, "v_scale": vs,
    }  # fmt: skip
    cases: list[tuple[dict[str, object], str]] = [
        ({"key": key.long()}, r"key: expected float32, float16 or bfloat16, got int64"),
        ({"key": key.flatten(1)},
         r"key: expected shape \[num_tokens, num_kv_heads, head_size\], got shape \[4, 128\]"),
        ({"key": key.transpose(1, 2).contiguous().transpose(1, 2)},
         r"key: expected stride 1 in the last dimension"),
        ({"value": value.half()}, r"value: expected float32 \(from key\), got float16"),
        ({"value": value[:3]}, r"value: expected num_tokens = 4 \(from key\) at dimension 0"),
        ({"value": value[:, :1]}, r"value: expected num_kv_heads = 2 \(from key\)"),
        ({"kv_cache_dtype": "int4"},
         r'kv_cache_dtype: expected "auto", "fp8", "fp8_e4m3", "fp8_e5m2" or "int8", got "int4"$'),
        ({"kv_cache_dtype": "fp8"}, r"_cache: expected uint8 or float8_e4m3fn \(from kv_cache"),
        ({"key_cache": k8, "value_cache": v8}, r"_cache: expected float32 \(from kv_cache_dtype"),
        ({"key_cache": kc[:10]}, r"_cache: expected num_blocks = 1"),
        ({"key_cache": kc.flatten(2)}, r"key_cache: expected shape \[num_blocks, "),
        ({"value_cache": vc[:1].expand(11, -1, -1, -1)}, r"value_cache: is written, so"),
        ({"value_cache": kc.flatten()[: vc.numel()].view(vc.shape)},
         r"key_cache and value_cache overlap in memory"),
        ({"key": kc.flatten()[:512].view(4, 2, 64)}, r"key_cache and key overlap in memory"),
        ({"slot_mapping": slots.int()},
         r"slot_mapping: expected int64, got int32; cast it with .long\(\)"),
        ({"slot_mapping": slots[None]}, r"slot_mapping: expected 1 dimensions, got shape \[1, 4\]"),
        ({"slot_mapping": torch.arange(5, device=device)},
         r"slot_mapping: expected at most num_tokens = 4 \(from key\) slots, got shape \[5\]"),
        ({"slot_mapping": torch.arange(8, device=device)[::2]},
         r"slot_mapping: expected stride 1 in the last dimension"),
        ({"k_scale": ks.double()}, r"k_scale: expected float32, got float64; cast it"),
        ({"v_scale": torch.ones(3, device=device)},
         r"v_scale: expected one element, or num_kv_heads = 2, got shape \[3\]$"),
        ({"v_scale": torch.ones(2, device=device)},
         r"v_scale: expected 1 elements \(from k_scale\), got shape \[2\]$"),
        ({"k_scale": torch.ones(4, device=device)[::2], "v_scale": torch.ones(2, device=device)},
         r"k_scale: expected a contiguous tensor, got strides \[2\]"),
        ({"k_scale": 1.0},
         r"k_scale: expected a float32 tensor of one element or \[num_kv_heads\], got 1\.0$"),
        ({"v_scale": None}, r"v_scale: expected a tensor, got None$"),
    ]  # fmt: skip
    if op == "reshape_and_cache":
        cases += [
            ({"key_cache": kc.transpose(2, 3).contiguous().transpose(2, 3)},
             r"key_cache: expected the page of a head to be contiguous"),
            ({"key_cache": kc.view(11, 2, 8, 16, 8)}, r"key_cache: expected head_size / x = 16"),
        ]  # fmt: skip
    for change, message in cases:
        before = bits(kc).clone(), bits(vc).clone()
        with raises(rf"^{op}: .*{message}"):
            getattr(vllm_kernels, op)(**{**good, **change})
        assert torch.equal(bits(kc), before[0]) and torch.equal(bits(vc), before[1])
    for name in ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale"):
        with pytest.raises((RuntimeError, TypeError)):
            getattr(torch.ops.vllm_kernels, op)(**{**good, name: None})


def test_sizes_of_0(op, device):
    key, value = tokens(4, 2, 64, torch.float32, device)
    slots = torch.full((4,), -1, device=device)
    empty = caches(op, torch.float32, "auto", device, block=0)
    with raises(rf"^{op}: key_cache: expected block_size >= 1, got shape \[11, "):
        getattr(vllm_kernels, op)(key, value, *empty, slots, "auto", *scales(device))
    for heads, size in ((0, 64), (2, 0), (0, 0)):  # nothing to write
        none = torch.empty(4, heads, size, device=device)
        getattr(vllm_kernels, op)(
            none, none, *caches(op, torch.float32, "auto", device, heads=heads, size=size),
            slots, "auto", *scales(device),
        )  # fmt: skip


def test_8_bit_cache_of_odd_head_size(device):
    key, value = tokens(4, 2, 40, torch.float32, device)
    kc = torch.zeros(11, 2, 2, 16, 16, dtype=torch.uint8, device=device)
    vc = torch.zeros(11, 2, 40, 16, dtype=torch.uint8, device=device)
    with raises(r"expected head_size to be a multiple of 16 for a float8_e4m3fn cache, got 40$"):
        vllm_kernels.reshape_and_cache(
            key, value, kc, vc, torch.arange(4, device=device), "fp8", *scales(device)
        )


def test_inference_only(op, device):
    key, value = tokens(4, 2, 64, torch.float32, device)
    pools = caches(op, torch.float32, "auto", device)
    args = (value, *pools, torch.arange(4, device=device), "auto", *scales(device))
    with raises(rf"^{op}: \w+: requires grad, .*no_grad\(\)$"):
        getattr(vllm_kernels, op)(key.requires_grad_(), *args)
    with torch.no_grad():
        getattr(vllm_kernels, op)(key, *args)
    for index in (-2, -1):
        call = [key.detach(), *args[:5], *scales(device)]
        call[index].requires_grad_()
        with raises(rf"^{op}: \w+: requires grad, .*no_grad\(\)$"):
            getattr(vllm_kernels, op)(*call)


# VLLM_KERNELS_CHECK is read once a process.
CHECK_MODE = """
import torch, vllm_kernels
def call(slots):
    key = torch.randn(4, 2, 64, device="cuda")
    cache = torch.zeros(11, 16, 2, 64, device="cuda")
    one = torch.ones(1, device="cuda")
    slots = torch.tensor(slots, device="cuda")
    vllm_kernels.reshape_and_cache_flash(key, key, cache, cache.clone(), slots, "auto", one, one)
def message(run):
    try:
        run()
    except RuntimeError as error:
        return str(error)
op = "reshape_and_cache_flash: "
bad = op + "slot_mapping[2] = 999: expected -1 (skipped) or a slot in [0, 176)"
twice = op + "slot_mapping[3] = 6: expected a slot that no earlier element names"
call([5, -1, 7, 8])
vllm_kernels.check()
call([5, 6, 999, 8])
assert message(vllm_kernels.check) == bad
vllm_kernels.check()  # reported once
others = range(1, torch.cuda.device_count())
assert not any(torch._C._cuda_hasPrimaryContext(device) for device in others)
many = torch.arange(3000, device="cuda")  # more than the scan's block has threads
many[2900] = many[1700]
wide, pages = torch.randn(3000, 1, 64, device="cuda"), torch.zeros(200, 16, 1, 64, device="cuda")
vllm_kernels.reshape_and_cache_flash(
    wide, wide, pages, pages.clone(), many, "auto", *torch.ones(2, 1, device="cuda")
)
assert message(vllm_kernels.check) == (
    op + "slot_mapping[2900] = 1700: expected a slot that no earlier element names"
)
call([5, 6, 999, -7])
torch.cuda.synchronize()
assert message(lambda: call([1, 2, 3, 4])) == bad
x = torch.randn(4, 64, device="cuda")
call([5, 6, 999, -7])
torch.cuda.synchronize()
assert message(lambda: vllm_kernels.rms_norm(x, x.clone(), x[0].clone(), 1e-6)) == bad
call([5, 6, 7, 6])
assert message(vllm_kernels.check) == twice
slots = torch.tensor([5, 6, 7, 8], device="cuda")
key = torch.randn(4, 2, 64, device="cuda")
cache, one = torch.zeros(11, 16, 2, 64, device="cuda"), torch.ones(1, device="cuda")
args = (key, key, cache, cache.clone(), slots, "auto", one, one)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    vllm_kernels.reshape_and_cache_flash(*args)
graph.replay()
vllm_kernels.check()
slots[2] = 999
graph.replay()
assert message(vllm_kernels.check) == bad
print("fine")
"""


@needs_gpu
def test_check_mode():
    done = subprocess.run(
        [sys.executable, "-c", CHECK_MODE], capture_output=True, text=True, timeout=120,
        env={**os.environ, "VLLM_KERNELS_CHECK": "1"},
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stderr[-2000:]
