"""rope_and_cache: as rms_norm, rotary_embedding and the cache writer one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from helpers import (
    EPSILON,
    LAYOUTS,
    assert_close,
    assert_compiles,
    bits,
    opcheck,
    raises,
    to_layout,
)
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

MAX_POSITION = 64
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
# One rounding of a float32 result.
ULPS = {torch.float32: 4, torch.float16: 1.01, torch.bfloat16: 1.01}
FLOOR = 4e-6


@dataclass
class Case:
    """The arguments of one call, in the op's own words."""

    positions: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    cos_sin_cache: Tensor
    is_neox: bool
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    layout: str
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    epsilon: float = 1e-6

    def arguments(self) -> list[object]:
        return list(self.__dict__.values())

    def tensors(self) -> list[Tensor]:
        return [x for x in self.arguments() if isinstance(x, Tensor)]

    def run(self) -> None:
        vllm_kernels.rope_and_cache(*self.arguments())

    def check(self) -> None:
        """Runs the op. Key and value stay as they are; unnamed slots keep their bits."""
        want_query, want_keys, want_values = reference.rope_and_cache(*self.arguments())
        key, value = self.key.clone(), self.value.clone()
        self.run()
        ulps, floor = ULPS[self.query.dtype], FLOOR
        if (self.q_weight is not None or self.k_weight is not None) and self.query.numel() > 0:
            # The norm's sum has an order of its own, so that a normalized value may be the
            # neighbour of the reference's: an error of the pair's size.
            ulps, floor = 2, 2 * EPSILON[self.query.dtype] * want_query.abs().max().item()
        assert_close(self.query, want_query, ulps, floor)
        assert torch.equal(self.key, key) and torch.equal(self.value, value)
        assert torch.equal(bits(self.value_cache), bits(want_values)), "value_cache"
        if self.key_cache.dtype == self.query.dtype:
            assert_close(self.key_cache.nan_to_num(7), want_keys.nan_to_num(7), ulps, floor)
        else:  # a rounding of the key may move it by a step of 8 bits
            step = {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2, torch.int8: 1.0}
            got, want = self.key_cache.float(), want_keys.float()
            steps = step[self.key_cache.dtype]
            bound = steps * want.abs() + 2**-6 if self.key_cache.dtype != torch.int8 else steps
            assert ((got - want).abs() <= bound).all()
            assert (got != want).float().mean() < 0.02


def pool(blocks: int, block: int, heads: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """[blocks, block, heads, size], NaN or, in 8 bits, a pattern that is none of the results."""
    if dtype.itemsize == 1:
        return (
            torch.full((blocks, block, heads, size), 0x55, dtype=torch.uint8).to(device).view(dtype)
        )
    return torch.full((blocks, block, heads, size), float("nan"), dtype=dtype, device=device)


def make_case(
    device: str,
    dtype: torch.dtype,
    tokens: int = 7,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 64,
    rotary: int | None = None,
    block: int = 16,
    layout: str = "vllm",
    is_neox: bool = True,
    stored: torch.dtype | None = None,
    norm: bool = False,
    cosines: torch.dtype | None = None,
) -> Case:
    rotary = size if rotary is None else rotary
    angle = torch.arange(MAX_POSITION)[:, None] * 100.0 ** -(torch.arange(0, rotary, 2) / rotary)
    blocks = -(-tokens // block) + 3
    rows = pool(blocks, block, kv_heads, size, stored or dtype, device)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    case = Case(
        positions=torch.randint(0, MAX_POSITION, (tokens,), device=device),
        query=randn(tokens, heads, size),
        key=randn(tokens, kv_heads, size),
        value=randn(tokens, kv_heads, size),
        cos_sin_cache=torch.cat([angle.cos(), angle.sin()], -1).to(device, cosines or dtype),
        is_neox=is_neox,
        key_cache=to_layout(rows, layout, True),
        value_cache=to_layout(rows.clone(), layout, False),
        slot_mapping=torch.randperm(blocks * block)[:tokens].to(device),
        layout=layout,
    )
    if stored is not None and stored.itemsize == 1:
        scale = 0.02 if stored == torch.int8 else 0.5
        case.k_scale = torch.full((1,), scale, device=device)
        case.v_scale = torch.full((1,), 1.5 * scale, device=device)
    if norm:
        case.q_weight, case.k_weight = randn(size), randn(size)
    return case


both_styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
all_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@both_styles
@all_layouts
@pytest.mark.parametrize("size", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("part", [1, 4])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_matches_reference(device, dtype, layout, size, part, is_neox, norm):
    make_case(
        device, dtype, 7 if norm else 40, layout=layout, size=size, rotary=size // part // 2 * 2,
        is_neox=is_neox, norm=norm,
    ).check()  # fmt: skip


@all_layouts
@pytest.mark.parametrize("stored", EIGHT_BITS, ids=["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("per_head", [False, True], ids=["one", "per_head"])
def test_8_bit_caches(device, dtype, layout, stored, per_head):
    for tokens, size in ((7, 64), (40, 80), (70, 128)):
        case = make_case(device, dtype, tokens, layout=layout, stored=stored, size=size, kv_heads=3)
        if per_head:
            case.k_scale = case.k_scale * torch.tensor([0.5, 1, 2], device=device)
            case.v_scale = case.v_scale * torch.tensor([2.0, 1, 3], device=device)
        case.check()
    case = make_case(device, dtype, layout=layout, stored=torch.float8_e4m3fn)
    case.k_scale = case.v_scale = None  # stands for 1
    case.check()


@all_layouts
@pytest.mark.parametrize("block", [1, 8, 16, 32, 256])
@pytest.mark.parametrize("tokens", [1, 70, 1100])
def test_tokens_and_pages(device, dtype, layout, block, tokens):
    case = make_case(device, dtype, tokens, 2, 1, 32, layout=layout, block=block)
    case.check()
    case = make_case(device, dtype, tokens, 2, 1, 32, layout=layout, block=block)
    case.slot_mapping = torch.arange(tokens, device=device)  # runs, as a prompt has them
    case.check()


@all_layouts
@pytest.mark.parametrize("slots", ["random", "repeated", "unaligned", "runs", "runs repeated"])
def test_prompt(device, layout, slots):
    """More tokens than a block takes at a time."""
    case = make_case(device, torch.bfloat16, 1500, 8, 8, 128, layout=layout)
    if slots == "repeated":
        case.slot_mapping = torch.randint(0, 1400, (1500,), device=device)
    if slots.startswith("runs"):  # of whole pages, then of pages entered in their middle
        pages = torch.randperm(1520 // 16, device=device)
        run = (16 * pages[:, None] + torch.arange(16, device=device)).flatten()
        case.slot_mapping = torch.cat([run[:800], run[805:1505]])
    if slots == "runs repeated":
        case.slot_mapping[96:112] = case.slot_mapping[1200:1216]
        case.slot_mapping[40] = -1
    wide = torch.randn(1500, 8, 136, device=device, dtype=torch.bfloat16)
    first = 1 if slots == "unaligned" else 0
    case.key = wide[..., first : first + 128]
    case.check()


@both_styles
@pytest.mark.parametrize("kv_heads", [1, 5, 40])
def test_prompt_of_few_and_many_heads(device, dtype, kv_heads, is_neox):
    """Blocks that store hold many tokens, or a part of one."""
    cosines = torch.float32 if is_neox else dtype
    for stored in (None, torch.float8_e4m3fn):
        case = make_case(device, dtype, 530, 2, kv_heads, 64, 32, layout="NHD", is_neox=is_neox,
                         stored=stored, cosines=cosines)  # fmt: skip
        case.slot_mapping[500] = case.slot_mapping[3]
        case.check()
    case = make_case(device, dtype, 530, 2, kv_heads, 256 // dtype.itemsize, is_neox=is_neox)
    case.check()


@pytest.mark.parametrize("which", ["q_weight", "k_weight"])
def test_one_weight(device, dtype, which):
    case = make_case(device, dtype)
    setattr(case, which, torch.randn(64, device=device, dtype=dtype))
    case.check()


def test_equal_to_the_ops_apart(device, dtype):
    """Bit for bit where no sum is taken."""
    case = make_case(device, dtype, 9, 8, 2, 128)
    query, key = case.query.clone(), case.key.clone()
    keys, values = case.key_cache.clone(), case.value_cache.clone()
    case.run()
    one = torch.ones(1, device=device)
    vllm_kernels.rotary_embedding(case.positions, query, key, 128, case.cos_sin_cache, True)
    slots = case.slot_mapping
    vllm_kernels.reshape_and_cache(key, case.value, keys, values, slots, "auto", one, one)
    assert torch.equal(case.query, query)
    assert torch.equal(bits(case.key_cache), bits(keys))
    assert torch.equal(bits(case.value_cache), bits(values))


@both_styles
@pytest.mark.parametrize("first", [0, 1, 8])
def test_packed(device, dtype, is_neox, first):
    """Query, key and value as slices of one tensor; what lies between stays as it is."""
    case = make_case(device, dtype, 5, is_neox=is_neox)
    packed = torch.randn(5, first + 8 * 64 + 16, device=device, dtype=dtype)
    before = packed.clone()
    parts = packed[:, first : first + 8 * 64].unflatten(-1, (8, 64))
    case.query, case.key, case.value = parts[:, :4], parts[:, 4:6], parts[:, 6:]
    case.check()
    assert torch.equal(packed[:, :first], before[:, :first])
    assert torch.equal(packed[:, first + 4 * 64 :], before[:, first + 4 * 64 :])


def test_cosines_of_another_dtype(device, dtype):
    for cosines in (torch.float32, torch.float16, torch.bfloat16):
        make_case(device, dtype, cosines=cosines).check()


def test_odd_head_size(device, dtype):
    for size, rotary in ((7, 6), (33, 16), (30, 30)):
        for layout in ("NHD", "HND"):
            for is_neox in (True, False):
                make_case(device, dtype, size=size, rotary=rotary, layout=layout, is_neox=is_neox,
                          norm=True).check()  # fmt: skip


def test_many_heads(device, dtype):
    make_case(device, dtype, 3, 128, 128, 128).check()
    make_case(device, dtype, 3, 64, 8, 256, norm=True).check()


def test_slots_left_out_and_shorter_mapping(device, dtype):
    case = make_case(device, dtype)
    case.slot_mapping = case.slot_mapping[:0]  # only the query is turned
    case.check()
    case = make_case(device, dtype)
    case.slot_mapping[2] = -1
    case.slot_mapping = case.slot_mapping[:5]
    case.check()
    for layout in ("NHD", "vllm"):
        case = make_case(device, dtype, 700, 2, 1, 128, layout=layout)
        case.slot_mapping = case.slot_mapping[:530]
        case.check()


@all_layouts
def test_repeated_slots(device, dtype, layout):
    """The last token of a slot, whole."""
    for tokens in (9, 600):
        case = make_case(device, dtype, tokens, layout=layout)
        case.slot_mapping = torch.randint(0, 8, (tokens,), device=device)
        case.check()


def test_empty(device, dtype):
    case = make_case(device, dtype, 0)
    case.run()
    assert case.key_cache.isnan().all()


def test_nan_stays_in_its_head(device, dtype):
    case = make_case(device, dtype, norm=True)
    case.query[2, 1, 3] = case.key[4, 0, 5] = float("nan")
    good = replace(case, query=case.query.nan_to_num(0), key=case.key.nan_to_num(0))
    good = replace(good, key_cache=case.key_cache.clone(), value_cache=case.value_cache.clone())
    case.run()
    good.run()
    rest = torch.ones(7, 4, dtype=torch.bool)
    rest[2, 1] = False
    assert torch.equal(case.query[rest], good.query[rest])
    assert case.query[2, 1].isnan().all()
    block, place = case.slot_mapping[4] // 16, case.slot_mapping[4] % 16
    case.key_cache[block, 0, :, place] = good.key_cache[block, 0, :, place] = 0
    assert torch.equal(bits(case.key_cache), bits(good.key_cache))


def test_more_than_one_launch(device):
    """CUDA takes 8192 tokens a launch, in their order."""
    case = make_case(device, torch.bfloat16, 9000, 1, 1, 16)
    case.slot_mapping[8500] = case.slot_mapping[3]
    case.check()
    case = make_case(device, torch.bfloat16, 9900, 1, 1, 16, layout="NHD")
    case.slot_mapping = case.slot_mapping[:8100]  # none for the second launch
    case.check()


def test_2_31_elements(device):
    if device == "cpu":
        pytest.skip("8 GB of cache")
    case = make_case(device, torch.bfloat16, 2, 2, 8, 128, layout="NHD")
    rows = torch.empty(2**17 + 8, 16, 8, 128, dtype=torch.bfloat16, device=device)
    case.key_cache, case.value_cache = rows, rows.clone()
    case.slot_mapping[:] = torch.tensor([2**21 + 60, 1])
    case.run()
    turned = vllm_kernels.reference.rotary_embedding(
        case.positions, case.key, 128, case.cos_sin_cache, True
    )
    assert_close(rows.flatten(0, 1)[2**21 + 60], turned[0], 1.01, FLOOR)
    assert torch.equal(case.value_cache.flatten(0, 1)[2**21 + 60], case.value[0])


def test_bad_input(device):
    case = make_case(device, torch.bfloat16)

    def bad(message: str, **changes: object) -> None:
        with raises("^rope_and_cache: " + message):
            replace(case, **changes).run()

    bad(r"positions: expected num_tokens = 7 \(from query\) at dimension 0, got shape \[6\]",
        positions=case.positions[:6])  # fmt: skip
    bad(r"positions: expected int64", positions=case.positions.int())
    bad(r"key: expected head_size = 64 \(from query\) at dimension 2", key=case.key[..., :32])
    bad(r"value: expected bfloat16", value=case.value.float())
    bad(r"cos_sin_cache: expected an even rotary_size from 2 to head_size = 64",
        cos_sin_cache=case.cos_sin_cache[:, :63])  # fmt: skip
    bad(r'layout: expected "vllm", "NHD" or "HND", got "x"', layout="x")
    bad(r"slot_mapping: expected at most num_tokens = 7",
        slot_mapping=torch.arange(8, device=device))  # fmt: skip
    bad(
        r"k_scale: expected a float32 tensor of one element or \[num_kv_heads\], got 0\.5$",
        k_scale=0.5,
    )
    bad(r"k_scale: expected None: only 8-bit caches", k_scale=torch.ones(1, device=device))
    bad(r"q_weight: expected head_size = 64", q_weight=case.query[0, 0, :32])
    bad(r"epsilon: expected a number >= 0, got -1", epsilon=-1.0)
    bad(r"query: num_heads: expected 1 to 65536 heads, got 0", query=case.query[:, :0])
    bad(r"key: num_kv_heads: expected 1 to 65536 heads, got 0", key=case.key[:, :0])
    bad(r"query: head_size: expected 1 to 256, got 512",
        query=torch.zeros(7, 4, 512, device=device, dtype=torch.bfloat16))  # fmt: skip
    bad(r"query and key overlap in memory", query=case.key)
    if device == "cpu":
        bad(r"slot_mapping\[0\] = 9999: expected -1",
            slot_mapping=torch.tensor([9999]))  # fmt: skip
        bad(r"positions\[0\] = 64: expected a position in \[0, 64\)",
            positions=torch.full((7,), 64))  # fmt: skip


def test_bad_indices_are_contained(device):
    """On a GPU: no fault, the other tokens are right, and nothing else is written."""
    if device == "cpu":
        pytest.skip("an error on a CPU")
    for layout, tokens in product(LAYOUTS, (7, 100)):
        case = make_case(device, torch.bfloat16, tokens, layout=layout)
        good = replace(case, query=case.query.clone(), key_cache=case.key_cache.clone(),
                       value_cache=case.value_cache.clone(), slot_mapping=case.slot_mapping.clone(),
                       positions=case.positions.clone())  # fmt: skip
        good.slot_mapping[1] = -1
        case.slot_mapping[1] = 2**32 + case.slot_mapping[0]  # the same lower half
        case.slot_mapping[3] = good.slot_mapping[3] = -1
        query = case.query.clone()
        case.positions[3] = MAX_POSITION
        case.positions[5] = -1
        good.run()
        case.run()
        turned = [token for token in range(tokens) if token not in (3, 5)]
        assert torch.equal(case.query[turned], good.query[turned])
        assert torch.equal(case.query[[3, 5]], query[[3, 5]])
        assert torch.equal(bits(case.value_cache), bits(good.value_cache))
        # Token 5's key is not stored: its slot alone differs.
        rows = [reference.token_rows(x, layout) for x in (case.key_cache, good.key_cache)]
        slot = case.slot_mapping[5]
        rows[1] = rows[1].clone()
        rows[1][slot // 16, slot % 16] = float("nan")
        assert torch.equal(rows[0].nan_to_num(9), rows[1].nan_to_num(9))


def test_inference_only(device):
    case = make_case(device, torch.float32)
    with raises("rope_and_cache: .*inference only"):
        replace(case, query=case.query.requires_grad_()).run()


def test_opcheck(device, dtype):
    opcheck("rope_and_cache", *make_case(device, dtype, norm=True).arguments())


def test_compiles(device):
    case = make_case(device, torch.float32)
    assert_compiles(vllm_kernels.rope_and_cache, *case.arguments())


def test_graph_replays(device, dtype):
    """With other tensors' contents; query and both caches are compared."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    for layout, tokens in product(("vllm", "NHD"), (7, 100)):
        case = make_case(device, dtype, tokens, layout=layout)
        fresh = make_case(device, dtype, tokens, layout=layout)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            case.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.run()
        for x, other in zip(case.tensors(), fresh.tensors()):
            x.copy_(other)
        graph.replay()
        fresh.run()
        torch.cuda.synchronize()
        assert torch.equal(case.query, fresh.query)
        assert torch.equal(bits(case.key_cache), bits(fresh.key_cache))
        assert torch.equal(bits(case.value_cache), bits(fresh.value_cache))
