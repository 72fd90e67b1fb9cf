"""rotary_embedding against its reference: layouts, partial rotary, strides, bad input, graphs."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_compiles, assert_graph_replays, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

MAX_POSITION = 128
# 16-bit: one rounding of a float32 result. float32: a difference of two products, absolute error.
ULPS = {torch.float32: 2, torch.float16: 1.01, torch.bfloat16: 1.01}
FLOOR = 2e-6

both_styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])


def make_cache(rotary_size: int, dtype: torch.dtype, device: str) -> Tensor:
    frequency = 10000.0 ** -(torch.arange(0, rotary_size, 2) / rotary_size)
    angle = torch.arange(MAX_POSITION)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).to(device, dtype)


def positions_of(*shape: int, device: str) -> Tensor:
    return torch.randint(0, MAX_POSITION, shape, device=device)


def check(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cache: Tensor,
    is_neox: bool,
) -> None:
    """Turns query and key in place and compares."""
    want = [
        None if x is None else reference.rotary_embedding(positions, x, head_size, cache, is_neox)
        for x in (query, key)
    ]
    vllm_kernels.rotary_embedding(positions, query, key, head_size, cache, is_neox)
    for got, expected in zip((query, key), want):
        if got is not None:
            assert_close(got, expected, ULPS[got.dtype], FLOOR)


@both_styles
@pytest.mark.parametrize("head_size", [8, 30, 64, 80, 120, 128, 256])
@pytest.mark.parametrize("part", [1, 2, 4])
def test_matches_reference(device, dtype, is_neox, head_size, part):
    rotary_size = head_size // part // 2 * 2
    cache = make_cache(rotary_size, dtype, device)
    for tokens in (1, 7):
        query = torch.randn(tokens, 5 * head_size, device=device, dtype=dtype)
        key = torch.randn(tokens, 2 * head_size, device=device, dtype=dtype)
        check(positions_of(tokens, device=device), query, key, head_size, cache, is_neox)


@both_styles
@pytest.mark.parametrize("leading", [(6,), (2, 3)], ids=["tokens", "batch_seq"])
@pytest.mark.parametrize("split_heads", [False, True])
@pytest.mark.parametrize("with_key", [False, True])
def test_shapes(device, dtype, is_neox, leading, split_heads, with_key):
    def heads(count: int) -> Tensor:
        x = torch.randn(*leading, count, 64, device=device, dtype=dtype)
        return x if split_heads else x.flatten(-2)

    check(
        positions_of(*leading, device=device),
        heads(4),
        heads(1) if with_key else None,
        64,
        make_cache(48, dtype, device),
        is_neox,
    )


@both_styles
def test_cache_of_another_dtype(device, dtype, is_neox):
    for cache_dtype in (torch.float32, torch.float16, torch.bfloat16):
        query, key = torch.randn(2, 7, 128, device=device, dtype=dtype)
        check(
            positions_of(7, device=device),
            query,
            key,
            64,
            make_cache(64, cache_dtype, device),
            is_neox,
        )


@both_styles
@pytest.mark.parametrize("first", [0, 1, 8])
def test_packed_and_padded(device, dtype, is_neox, first):
    """Query and key as slices of one tensor, in all shapes; what lies between stays as it is."""
    size, cache = 64, make_cache(32, dtype, device)
    packed = torch.randn(3, 4, 6 * size + 16, device=device, dtype=dtype)
    before = packed.clone()
    query, key = (packed[..., first + a * size : first + b * size] for a, b in ((0, 4), (4, 5)))
    check(positions_of(3, 4, device=device), query, key, size, cache, is_neox)
    check(positions_of(4, device=device), query[1], key[1], size, cache, is_neox)
    check(
        positions_of(3, 4, device=device),
        query.unflatten(-1, (4, size)),
        key.unflatten(-1, (1, size)),
        size,
        cache,
        is_neox,
    )
    assert torch.equal(packed[..., :first], before[..., :first])
    assert torch.equal(packed[..., first + 5 * size :], before[..., first + 5 * size :])

    padded = torch.randn(3, 4, 5, size + 8, device=device, dtype=dtype)  # head stride 72
    before = padded.clone()
    check(
        positions_of(3, 4, device=device),
        padded[..., :4, :size],
        padded[..., 4:, :size],
        size,
        cache,
        is_neox,
    )
    assert torch.equal(padded[..., size:], before[..., size:])


def test_strided_positions_and_cache(device, dtype):
    cache = torch.cat([make_cache(64, dtype, device)] * 2, dim=-1)[:, :64]
    query = torch.randn(3, 4, 128, device=device, dtype=dtype)
    check(torch.arange(4, device=device).expand(3, 4), query, None, 64, cache, True)
    check(positions_of(3, 8, device=device)[:, 2:6], query, None, 64, cache, True)


@both_styles
def test_many_heads_and_tokens(device, is_neox):
    cache = make_cache(32, torch.float32, device)
    query = torch.randn(3, 1000 * 32, device=device, dtype=torch.bfloat16)
    check(positions_of(3, device=device), query, None, 32, cache, is_neox)
    query = torch.randn(70_000, 32, device=device, dtype=torch.bfloat16)
    check(positions_of(70_000, device=device), query, None, 32, cache, is_neox)
    query = torch.randn(2, 4096, device=device, dtype=torch.bfloat16)  # one head wider than a block
    check(
        positions_of(2, device=device),
        query,
        None,
        4096,
        make_cache(4096, torch.float32, device),
        is_neox,
    )


def test_position_zero_changes_nothing(device, dtype):
    query = torch.randn(5, 64, device=device, dtype=dtype)
    before = query.clone()
    positions = torch.zeros(5, device=device, dtype=torch.int64)
    vllm_kernels.rotary_embedding(positions, query, None, 64, make_cache(64, dtype, device), True)
    assert torch.equal(query, before)


def test_empty(device, dtype):
    cache = make_cache(64, dtype, device)
    none = torch.empty(0, device=device, dtype=torch.int64)
    query = torch.empty(0, 128, device=device, dtype=dtype)
    vllm_kernels.rotary_embedding(none, query, query, 64, cache, True)
    key = torch.empty(3, 0, device=device, dtype=dtype)  # no heads
    check(
        positions_of(3, device=device),
        torch.randn(3, 64, device=device, dtype=dtype),
        key,
        64,
        cache,
        True,
    )


@both_styles
def test_nan_stays_in_its_pair(device, dtype, is_neox):
    cache = make_cache(64, dtype, device)
    query = torch.randn(3, 128, device=device, dtype=dtype)
    clean, positions = query.clone(), positions_of(3, device=device)
    query[1, 2] = float("nan")
    for x in (query, clean):
        vllm_kernels.rotary_embedding(positions, x, None, 64, cache, is_neox)
    bad = query.isnan()
    assert bad.nonzero().tolist() == [[1, 2], [1, 34 if is_neox else 3]]
    assert torch.equal(query[~bad], clean[~bad])


@both_styles
@pytest.mark.parametrize("position", [-1, MAX_POSITION, 2**40, -(2**62)])
def test_position_out_of_range(device, dtype, is_neox, position):
    """An error before anything is written on the CPU; that token is left alone on the GPU."""
    cache = make_cache(64, dtype, device)
    positions = positions_of(2, 3, device=device)
    query = torch.randn(2, 3, 128, device=device, dtype=dtype)
    key = torch.randn(2, 3, 64, device=device, dtype=dtype)
    want, want_key = query.clone(), key.clone()
    if device == "cuda":
        vllm_kernels.rotary_embedding(positions, want, want_key, 64, cache, is_neox)
        want[1, 1], want_key[1, 1] = query[1, 1], key[1, 1]
    positions[1, 1] = position
    if device == "cpu":
        message = rf"positions\[1, 1\] = {position}: expected a position in \[0, 128\)$"
        with raises(f"^rotary_embedding: {message}"):
            vllm_kernels.rotary_embedding(positions, query, key, 64, cache, is_neox)
    else:
        vllm_kernels.rotary_embedding(positions, query, key, 64, cache, is_neox)
    assert torch.equal(query, want) and torch.equal(key, want_key)


def tables_of(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Tables of 32 positions each, one below the other, all different."""
    return torch.randn(32 * count, 64, device=device).to(dtype)


@both_styles
@pytest.mark.parametrize("leading", [(7,), (3, 4)], ids=["tokens", "batch_seq"])
def test_batched(device, dtype, is_neox, leading):
    tables = tables_of(4, dtype, device)
    positions = torch.randint(0, 32, leading, device=device)
    offsets = torch.randint(0, 4, (positions.numel(),), device=device) * 32
    query = torch.randn(*leading, 4 * 80, device=device, dtype=dtype)
    key = torch.randn(*leading, 80, device=device, dtype=dtype)
    for with_key in (True, False):
        pair = (query, key) if with_key else (query, None)
        want = [
            reference.batched_rotary_embedding(positions, x, 80, tables, is_neox, offsets)
            for x in pair
            if x is not None
        ]
        vllm_kernels.batched_rotary_embedding(positions, *pair, 80, tables, is_neox, 64, offsets)
        for got, expected in zip(pair, want):
            assert_close(got, expected, ULPS[got.dtype], 4 * FLOOR)


@both_styles
@pytest.mark.parametrize(("position", "offset", "message"), [
    (3, 128, r"cos_sin_cache_offsets\[2\] = 128: expected a row in \[0, 128\)$"),
    (3, -1, r"cos_sin_cache_offsets\[2\] = -1: expected a row in \[0, 128\)$"),
    (3, 2**62, r"cos_sin_cache_offsets\[2\] = 4611686018427387904: expected a row in \[0, 128\)$"),
    (128, 0, r"positions\[2\] = 128: expected a position in \[0, 128\)$"),
    (100, 28, r"cos_sin_cache_offsets\[2\] = 28: expected at most 27, for the position is 100 and "
              r"cos_sin_cache has 128 rows$"),
])  # fmt: skip
def test_batched_out_of_range(device, dtype, is_neox, position, offset, message):
    tables = tables_of(4, dtype, device)
    positions, offsets = torch.zeros(2, 5, device=device, dtype=torch.int64)
    query = torch.randn(5, 64, device=device, dtype=dtype)
    want = query.clone()
    arguments = (None, 64, tables, is_neox, 64, offsets)
    if device == "cuda":
        vllm_kernels.batched_rotary_embedding(positions, want, *arguments)
        want[2] = query[2]
    positions[2], offsets[2] = position, offset
    if device == "cpu":
        with raises(f"^batched_rotary_embedding: {message}"):
            vllm_kernels.batched_rotary_embedding(positions, query, *arguments)
    else:
        vllm_kernels.batched_rotary_embedding(positions, query, *arguments)
    assert torch.equal(query, want)


def test_batched_bad_input(device):
    positions, offsets = torch.zeros(2, 4, device=device, dtype=torch.int64)
    query, tables = torch.randn(4, 64, device=device), tables_of(2, torch.float32, device)
    good = {"positions": positions, "query": query, "key": None, "head_size": 64,
            "cos_sin_cache": tables, "is_neox": True, "rot_dim": 64,
            "cos_sin_cache_offsets": offsets}  # fmt: skip
    before = query.clone()
    for change, message in (
        ({"rot_dim": 32}, r"rot_dim: expected 64 \(from cos_sin_cache\), got 32$"),
        ({"cos_sin_cache_offsets": offsets[:3]},
         r"cos_sin_cache_offsets: expected tokens = 4 \(from positions\) at dimension 0, got"),
        ({"cos_sin_cache_offsets": offsets.int()},
         r"cos_sin_cache_offsets: expected int64, got int32; cast it with .long\(\)$"),
        ({"cos_sin_cache_offsets": torch.zeros(8, device=device, dtype=torch.int64)[::2]},
         r"cos_sin_cache_offsets: expected a contiguous tensor"),
        ({"cos_sin_cache_offsets": query.view(torch.int64)[0, :4]},
         r"query and cos_sin_cache_offsets overlap in memory$"),
        ({"head_size": 32}, r"cos_sin_cache: expected an even rotary_size from 2 to"),
    ):  # fmt: skip
        with raises(f"^batched_rotary_embedding: {message}"):
            vllm_kernels.batched_rotary_embedding(**{**good, **change})
    assert torch.equal(query, before)


def test_batched_opcheck_and_compile(device, dtype):
    query, key = torch.randn(2, 4, 64, device=device, dtype=dtype)
    positions = torch.zeros(4, device=device, dtype=torch.int64)
    tables = tables_of(2, dtype, device)
    args = (positions, query, key, 64, tables, True, 64, positions.clone())
    opcheck("batched_rotary_embedding", *args)
    assert_compiles(vllm_kernels.batched_rotary_embedding, *args)


def test_bad_input(device):
    query = torch.randn(4, 128, device=device)
    key = torch.randn(4, 64, device=device)
    positions = positions_of(4, device=device)
    cache = make_cache(64, torch.float32, device)
    cases = [
        (
            (positions.int(), query, key, 64, cache, True),
            r"^rotary_embedding: positions: expected int64, got int32; cast it with .long\(\)$",
        ),
        (
            (positions.view(1, 2, 2), query, key, 64, cache, True),
            r"^rotary_embedding: positions: expected 1 to 2 dimensions, got shape \[1, 2, 2\]$",
        ),
        (
            (positions_of(8, device=device)[::2], query, key, 64, cache, True),
            r"^rotary_embedding: positions: expected stride 1 in the last dimension, got strides",
        ),
        (
            (positions[:3], query, key, 64, cache, True),
            r"^rotary_embedding: query: expected tokens = 3 \(from positions\) at dimension 0, "
            r"got shape \[4, 128\]$",
        ),
        (
            (positions, query, key[:3], 64, cache, True),
            r"^rotary_embedding: key: expected tokens = 4 \(from positions\) at dimension 0, "
            r"got shape \[3, 64\]$",
        ),
        (
            (positions, query[:, :100], key, 64, cache, True),
            r"^rotary_embedding: query: expected a multiple of head_size = 64 as last dimension, "
            r"got shape \[4, 100\]$",
        ),
        (
            (positions, query.view(4, 4, 32), key, 64, cache, True),
            r"^rotary_embedding: query: expected head_size = 64 at dimension 2, "
            r"got shape \[4, 4, 32\]$",
        ),
        (
            (positions, query.view(4, 2, 2, 32), key, 64, cache, True),
            r"^rotary_embedding: query: expected 2 to 3 dimensions, got shape \[4, 2, 2, 32\]$",
        ),
        (
            (positions, query.double(), key, 64, cache, True),
            r"^rotary_embedding: query: expected float32, float16 or bfloat16, got float64$",
        ),
        (
            (positions, query, key.half(), 64, cache, True),
            r"^rotary_embedding: key: expected float32 \(from query\), got float16$",
        ),
        (
            (positions, query, key, 0, cache, True),
            r"^rotary_embedding: head_size: expected a number > 0, got 0$",
        ),
        (
            (positions, query, key, 32, cache, True),
            r"^rotary_embedding: cos_sin_cache: expected an even rotary_size from 2 to "
            r"head_size = 32 at dimension 1, got shape \[128, 64\]$",
        ),
        (
            (positions, query, key, 64, cache[:, :63], True),
            r"^rotary_embedding: cos_sin_cache: expected an even rotary_size from 2 to "
            r"head_size = 64 at dimension 1, got shape \[128, 63\]$",
        ),
        (
            (positions, query, key, 64, cache[:, :0], True),
            r"^rotary_embedding: cos_sin_cache: expected an even rotary_size",
        ),
        (
            (positions, query, key, 64, cache[0], True),
            r"^rotary_embedding: cos_sin_cache: expected shape \[max_position, rotary_size\], "
            r"got shape \[64\]$",
        ),
        (
            (positions, query, key, 64, cache.t().contiguous().t(), True),
            r"^rotary_embedding: cos_sin_cache: expected stride 1 in the last dimension",
        ),
        (
            (positions, query, key, 64, cache.long(), True),
            r"^rotary_embedding: cos_sin_cache: expected float32, float16 or bfloat16, got int64$",
        ),
        (
            (positions, query.t().contiguous().t(), key, 64, cache, True),
            r"^rotary_embedding: query: expected stride 1 in the last dimension, got strides",
        ),
        (
            (positions, query[:1].expand(4, 128), key, 64, cache, True),
            r"^rotary_embedding: query: is written, so",
        ),
        (
            (positions, query, key[:1].expand(4, 64), 64, cache, True),
            r"^rotary_embedding: key: is written, so",
        ),
        (
            (positions, query, query[:, 64:], 64, cache, True),
            r"^rotary_embedding: query and key overlap in memory$",
        ),
        (
            (positions, cache[:4], key, 64, cache, True),
            r"^rotary_embedding: query and cos_sin_cache overlap in memory$",
        ),
    ]
    for args, message in cases:
        before, key_before = query.clone(), key.clone()
        with raises(message):
            vllm_kernels.rotary_embedding(*args)
        assert torch.equal(query, before) and torch.equal(key, key_before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_mixed_devices():
    query = torch.randn(4, 64, device="cuda")
    with raises(
        r"^rotary_embedding: query: expected a tensor on cpu \(from positions\), "
        r"got cuda:0$"
    ):
        vllm_kernels.rotary_embedding(
            positions_of(4, device="cpu"),
            query,
            None,
            64,
            make_cache(64, torch.float32, "cuda"),
            True,
        )


def test_required_tensor_is_none(device):
    query = torch.randn(4, 64, device=device)
    with pytest.raises((RuntimeError, TypeError)):
        torch.ops.vllm_kernels.rotary_embedding(None, query, None, 64, query, True)


def test_grad_mode(device):
    query = torch.randn(4, 64, device=device, requires_grad=True)
    args = (
        positions_of(4, device=device),
        query,
        None,
        64,
        make_cache(64, torch.float32, device),
        True,
    )
    with raises(r"^rotary_embedding: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.rotary_embedding(*args)
    with torch.no_grad():
        vllm_kernels.rotary_embedding(*args)


@pytest.mark.parametrize("with_key", [False, True])
def test_opcheck_and_compile(device, dtype, with_key):
    query, key = torch.randn(2, 4, 64, device=device, dtype=dtype)
    args = (
        positions_of(4, device=device),
        query,
        key if with_key else None,
        64,
        make_cache(64, dtype, device),
        True,
    )
    opcheck("rotary_embedding", *args)
    assert_compiles(vllm_kernels.rotary_embedding, *args)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@both_styles
def test_graph_replay(dtype, is_neox):
    cache = make_cache(128, dtype, "cuda")
    positions = positions_of(16, device="cuda")
    source = torch.randn(16, 32 * 128, device="cuda", dtype=dtype)
    query = torch.empty_like(source)

    def call() -> None:
        query.copy_(source)
        vllm_kernels.rotary_embedding(positions, query, None, 128, cache, is_neox)

    def refill() -> None:
        source.normal_()
        positions.random_(0, MAX_POSITION)

    def want() -> Tensor:
        call()
        return query.clone()

    assert_graph_replays(call, refill, query, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_second_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        check(
            positions_of(256, device="cuda"),
            torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16),
            torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16),
            128,
            make_cache(128, torch.bfloat16, "cuda"),
            True,
        )
