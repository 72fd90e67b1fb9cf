"""fused_decode_attention: bit for bit rope_and_cache and paged_attention, near its reference.

The caches are those of test_paged_attention_general.py, NaN in every slot that no sequence has
(8-bit integers: large), and NaN in the new token's slots too: what is not stored shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers import (
    EPSILON,
    assert_close,
    assert_compiles,
    assert_graph_replays,
    bits,
    opcheck,
    opcheck_float8,
    raises,
    to_layout,
)
from test_paged_attention_general import EIGHT_BITS, LAYOUTS, NAN, per_head
from test_paged_attention_general import make_case as make_pages
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass
class Case:
    """The arguments of one call, in the op's own words."""

    qkv: Tensor
    positions: Tensor
    cos_sin_cache: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    heads: tuple[int, int] = (8, 2)  # num_heads, num_kv_heads
    options: dict[str, object] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(list(self.__dict__.values())[:8])

    def copy(self) -> Case:
        """With tensors of its own for what the op writes; qkv keeps its strides."""
        qkv = self.qkv.new_empty_strided(self.qkv.shape, self.qkv.stride()).copy_(self.qkv)
        return replace(
            self, qkv=qkv, key_cache=self.key_cache.clone(), value_cache=self.value_cache.clone()
        )

    def with_options(self, **options: object) -> Case:
        return replace(self, options={**self.options, **options})

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        num_heads, kv_heads = self.heads
        heads = qkv.unflatten(1, (num_heads + 2 * kv_heads, -1))
        return heads.split([num_heads, kv_heads, kv_heads], dim=1)

    def run(self) -> Tensor:
        """In place, as the op is."""
        query, *before = (part.clone() for part in self.split(self.qkv))
        out = torch.full_like(query, NAN)
        got = vllm_kernels.fused_decode_attention(*self.tensors(), **self.options, out=out)
        assert got is out
        for part, old in zip(self.split(self.qkv)[1:], before):
            assert torch.equal(bits(part), bits(old)), "key and value are only read"
        return got

    def run_apart(self) -> Tensor:
        """By the ops it stands for. Where the norm's weights are, the bias comes before them."""
        options = dict(self.options)
        bias = options.pop("bias", None)
        if bias is not None:
            self.qkv += bias
        names = ("k_scale", "v_scale", "q_weight", "k_weight", "epsilon")
        query, key, value = self.split(self.qkv)
        layout = options["layout"]
        vllm_kernels.rope_and_cache(
            self.positions, query, key, value, self.cos_sin_cache, options.pop("is_neox", True),
            self.key_cache, self.value_cache, self.slot_mapping, layout,
            **{name: options[name] for name in names if name in options},
        )  # fmt: skip
        for name in names[2:]:
            options.pop(name, None)
        return vllm_kernels.paged_attention(
            query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens, **options
        )


def make_case(
    device: str,
    dtype: torch.dtype,
    lens: list[int],
    heads: int = 8,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    stored: torch.dtype | None = None,
    layout: str = "vllm",
    rotary: int | None = None,
    cosines: torch.dtype | None = None,
    bias: bool = False,
    norm: bool = False,
    scales_per_head: bool = False,
    **options: object,
) -> Case:
    """See the module's docstring; a sequence of length 0 is a padded row."""
    rotary = rotary or head_size
    pages = make_pages(
        device, dtype, lens, None, heads, kv_heads, head_size, block_size, stored, layout,
        scales_per_head, **options,
    )  # fmt: skip
    last = (pages.seq_lens.long() - 1).clamp_min(0)
    blocks = pages.block_tables.long().gather(1, last[:, None] // block_size).squeeze(1)
    slots = torch.where(pages.seq_lens > 0, blocks * block_size + last % block_size, -1)
    # Positions that are not the places: a prefix may have been dropped.
    positions = torch.where(pages.seq_lens > 0, last + 3, 0)
    angle = torch.arange(max([1, *lens]) + 3)[:, None] * 100.0 ** -(
        torch.arange(0, rotary, 2) / rotary
    )

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    width = (heads + 2 * kv_heads) * head_size
    options = dict(pages.options)
    if bias:
        options["bias"] = randn(width)
    if norm:
        options |= {"q_weight": randn(head_size), "k_weight": randn(head_size), "epsilon": 1e-5}
    none = torch.full((len(lens), kv_heads, head_size), NAN, device=device)
    if stored == torch.int8:
        none = torch.full_like(none, 127)

    def emptied(cache: Tensor) -> Tensor:
        return reference.write_tokens(cache, none, slots, layout, None)

    return Case(
        qkv=randn(len(lens), width),
        positions=positions,
        cos_sin_cache=torch.cat([angle.cos(), angle.sin()], -1).to(device, cosines or dtype),
        key_cache=emptied(pages.key_cache),
        value_cache=emptied(pages.value_cache),
        slot_mapping=slots,
        block_tables=pages.block_tables,
        seq_lens=pages.seq_lens,
        heads=(heads, kv_heads),
        options=options,
    )


def assert_like_apart(got: Tensor, want: Tensor) -> None:
    """Bit for bit where the launches are the same. In one launch the new token is added last."""
    if got.is_cuda and got.dtype != torch.float32:
        assert torch.equal(got.isnan(), want.isnan())
        error = (got.double() - want.double()).norm(dim=-1)
        most = EPSILON[got.dtype] * want.double().norm(dim=-1)
        assert not (error > most).any(), "out differs from that of the ops apart"
    else:
        assert torch.equal(bits(got), bits(want)), "out is not that of the ops apart"


def check(case: Case) -> Tensor:
    """Against the ops apart (the caches bit for bit) and the reference; gives what it gave."""
    ours, apart = case.copy(), case.copy()
    got = ours.run()
    assert_like_apart(got, apart.run_apart())
    assert torch.equal(bits(ours.key_cache), bits(apart.key_cache)), "key_cache"
    assert torch.equal(bits(ours.value_cache), bits(apart.value_cache)), "value_cache"

    options = {name: value for name, value in case.options.items() if name != "split_tokens"}
    naive, keys, values = reference.fused_decode_attention(*case.tensors(), **options)
    assert torch.equal(bits(ours.value_cache), bits(values)), "value_cache of the reference"
    eight_bits = case.key_cache.dtype.itemsize == 1
    dtype = case.qkv.dtype
    if not eight_bits:
        largest = keys.nan_to_num(0).abs().max().item() if keys.numel() else 0
        floor = 2 * EPSILON[dtype] * largest  # the norm's sum has an order of its own
        assert_close(ours.key_cache.nan_to_num(7), keys.nan_to_num(7), 4, floor)
    assert got.dtype == dtype and got.shape == naive.shape and not got.isnan().any()
    nothing = naive.norm(dim=-1) == 0
    assert not got[nothing].any()
    error = (got.double() - naive).norm(dim=-1) / naive.norm(dim=-1).clamp_min(1e-30)
    # A rounding of the key may move it by a step of 8 bits.
    most = (2e-5 if dtype == torch.float32 else EPSILON[dtype]) + (4e-3 if eight_bits else 0)
    worst = error[~nothing].max().item() if not nothing.all() else 0.0
    assert worst <= most, f"relative error {worst:.2e} of a head, allowed {most:.2e}"
    return got


LENS = [1, 15, 16, 17, 0, 53, 300]


# --- right results


@pytest.mark.parametrize("eight", [None, *EIGHT_BITS], ids=lambda x: str(x).split(".")[-1])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_dtypes(device, dtype, layout, eight, bias, norm):
    check(make_case(device, dtype, LENS, stored=eight, layout=layout, bias=bias, norm=norm))


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_block_sizes(device, layout, block_size):
    b = block_size
    lens = [1, max(b - 1, 1), b, b + 1, 2 * b + 5, 300]
    for dtype, stored in ((torch.float32, None), (torch.bfloat16, torch.int8)):
        check(make_case(device, dtype, lens, block_size=b, stored=stored, layout=layout))


@pytest.mark.parametrize("head_size", [32, 40, 64, 72, 80, 96, 128, 192, 256])
def test_head_sizes(device, layout, head_size):
    """The other axes are drawn along."""
    for index, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        shapes = {"head_size": head_size, "block_size": [8, 16, 32][index], "layout": layout}
        check(make_case(device, dtype, [37, 1, 64], bias=True, **shapes))
        if head_size % 16 == 0:
            check(make_case(device, dtype, [37, 1, 64], stored=EIGHT_BITS[index], **shapes))


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (8, 2), (5, 1), (14, 2), (16, 1), (64, 1),
                                             (71, 1), (32, 8)])  # fmt: skip
def test_groups(device, layout, heads, kv_heads):
    shapes = {"heads": heads, "kv_heads": kv_heads, "layout": layout, "bias": True}
    check(make_case(device, torch.float32, [140, 23], **shapes))
    check(make_case(device, torch.bfloat16, [140, 23], head_size=128, **shapes))
    check(make_case(device, torch.float16, [40, 23], stored=torch.int8, norm=True, **shapes))


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary", [2, 16, 30, 48, 64])
def test_rotations(device, dtype, layout, is_neox, rotary):
    for cosines in (dtype, torch.float32):
        case = make_case(device, dtype, [37, 1], rotary=rotary, layout=layout, cosines=cosines)
        check(case.with_options(is_neox=is_neox))


@pytest.mark.parametrize("names", [["alibi_slopes"], ["sliding_window"], ["softcap"], ["sinks"],
                                   ["scale"], ["alibi_slopes", "sliding_window", "softcap",
                                               "sinks"]],
                         ids=lambda names: "+".join(names))  # fmt: skip
def test_options(device, dtype, layout, names):
    options = {
        "alibi_slopes": per_head(8, 0.01, 0.4),
        "sliding_window": 21,
        "softcap": 2.0,
        "sinks": per_head(8, -3.0, 4.0),
        "scale": 0.3,
    }
    chosen = {name: options[name] for name in names}
    check(make_case(device, dtype, [5, 16, 0, 65, 200], layout=layout, bias=True, **chosen))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 2**40])
def test_windows(device, layout, window):
    """A window of 1 leaves the new token alone."""
    shapes = {"layout": layout, "sliding_window": window}
    case = make_case(device, torch.float32, [1, 16, 17, 300], **shapes)
    got = check(case)
    if window == 1:
        value = case.split(case.qkv)[2].repeat_interleave(4, dim=1)
        assert torch.equal(got, value)


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=lambda x: str(x).split(".")[-1])
def test_scales(device, dtype, layout, stored):
    shapes = {"stored": stored, "layout": layout, "kv_heads": 4}
    check(make_case(device, dtype, [7, 100], scales_per_head=True, **shapes))
    plain = make_case(device, dtype, [7, 100], **shapes)
    only_k = plain.with_options(v_scale=None)
    check(only_k)
    if stored != torch.int8:
        check(only_k.with_options(k_scale=None))


@pytest.mark.parametrize("batch", [1, 2, 33, 130])
def test_batches(device, layout, batch):
    """Long sequences too, which are cut in pieces."""
    lens = [(17 * seq) % 90 for seq in range(batch - 1)] + [3000]
    check(make_case(device, torch.bfloat16, lens, 32, 8, 128, layout=layout))


def test_decoding_step_by_step(device, layout):
    """From empty caches on: what every step stores, the next ones read."""
    steps, num_seqs, block_size = 40, 3, 8
    pages = steps // block_size
    tables = torch.randperm(num_seqs * pages).view(num_seqs, pages).int().to(device)
    rows = torch.full((num_seqs * pages, block_size, 2, 32), NAN, device=device)
    keys, values = (to_layout(rows.clone(), layout, is_key) for is_key in (True, False))
    angle = torch.arange(steps)[:, None] * 100.0 ** -(torch.arange(16) / 16)
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1).to(device)
    qkv = torch.randn(steps, num_seqs, 8 * 32, device=device)
    positions = torch.arange(steps, device=device)[:, None].expand(steps, num_seqs)

    turned = [  # [steps, num_seqs, heads, 32], all tokens at once
        reference.rotary_embedding(positions, part.contiguous(), 32, cos_sin, True).double()
        for part in qkv[..., : 6 * 32].unflatten(-1, (6, 32)).split([4, 2], dim=2)
    ]
    key = turned[1].repeat_interleave(2, dim=2)
    value = qkv[..., 6 * 32 :].unflatten(-1, (2, 32)).double().repeat_interleave(2, dim=2)
    logits = torch.einsum("tshd,ushd->shtu", turned[0], key) * 32**-0.5
    causal = torch.ones(steps, steps, dtype=torch.bool, device=device).tril()
    weights = logits.masked_fill(~causal, -torch.inf).softmax(-1)
    want = torch.einsum("shtu,ushd->tshd", weights, value)

    for step in range(steps):
        slots = tables[:, step // block_size].long() * block_size + step % block_size
        lens = torch.full((num_seqs,), step + 1, dtype=torch.int32, device=device)
        got = vllm_kernels.fused_decode_attention(
            qkv[step].clone(), positions[step].contiguous(), cos_sin, keys, values, slots, tables,
            lens, layout=layout,
        )  # fmt: skip
        torch.testing.assert_close(got.double(), want[step], rtol=1e-5, atol=1e-5)


# --- rows of a batch


def test_padded_rows(device, dtype, layout):
    """Length 0 and slot -1, as a CUDA graph has them: they give 0 and store nothing."""
    case = make_case(device, dtype, [40, 0, 17, 0], layout=layout, bias=True)
    case.block_tables[1] = -1
    assert case.slot_mapping.tolist()[1::2] == [-1, -1]
    got = check(case)
    assert not got[1::2].any() and got[::2].any(-1).all()
    check(make_case(device, dtype, [0, 0, 0], layout=layout))


def test_token_left_out(device, dtype, layout):
    """Slot -1 with a length: attention reads what the cache holds."""
    case = make_case(device, dtype, [40, 33], layout=layout)
    stored = case.copy()
    stored.run()
    again = replace(case.copy(), key_cache=stored.key_cache, value_cache=stored.value_cache)
    again.slot_mapping = torch.tensor([-1, -1], device=device)
    again.qkv[:, 8 * 64 :] = NAN  # of key and value nothing is used
    before = [bits(cache).clone() for cache in (again.key_cache, again.value_cache)]
    assert_like_apart(again.run(), case.copy().run())
    assert torch.equal(bits(again.key_cache), before[0])
    assert torch.equal(bits(again.value_cache), before[1])


def test_shorter_length_than_the_slot(device, layout):
    """The token is stored where its slot is, and not seen by a length that ends before it."""
    case = make_case(device, torch.float32, [40, 33], layout=layout)
    case.seq_lens -= 1
    assert check(case).isfinite().all()


def test_nan_stays_in_its_sequence(device, dtype, layout):
    case = make_case(device, dtype, [40, 130, 17], layout=layout, bias=True)
    want = case.copy().run()
    case.qkv[1] = NAN
    got = case.run()
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and got[1].isnan().all()


def test_nan_stays_in_its_head(device, dtype, layout):
    case = make_case(device, dtype, [40, 130, 17], layout=layout, norm=True)
    want = case.copy().run()
    broken = case.copy()
    broken.qkv[1, 5 * 64 + 7] = NAN  # query head 5
    got = broken.run()
    keep = torch.ones(3, 8, dtype=torch.bool, device=device)
    keep[1, 5] = False
    assert torch.equal(got[keep], want[keep]) and got[1, 5].isnan().all()
    for head in (9, 11):  # of KV head 1: key, value
        broken = case.copy()
        broken.qkv[1, head * 64 + 7] = NAN
        got = broken.run()
        keep = torch.ones(3, 8, dtype=torch.bool, device=device)
        keep[1, 4:] = False
        assert torch.equal(got[keep], want[keep]) and got[1, 4:].isnan().any(-1).all()


def test_two_runs_agree_bit_for_bit(device, dtype, layout):
    case = make_case(device, dtype, [1000, 3, 513, 77], heads=16, layout=layout)
    assert torch.equal(case.copy().run(), case.copy().run())


def test_split_tokens_make_a_batch_invariant(device, dtype, layout):
    case = make_case(device, dtype, [3000, 45, 700, 1], layout=layout, split_tokens=256)
    got = check(case)
    for seq in range(4):
        rows = slice(seq, seq + 1)
        alone = replace(
            case.copy(),
            **{name: getattr(case, name)[rows].clone() for name in (
                "qkv", "positions", "slot_mapping", "block_tables", "seq_lens"
            )},
        )  # fmt: skip
        assert torch.equal(alone.run(), got[rows]), seq


# --- memory


@pytest.mark.parametrize("first, behind", [(0, 8), (8, 16), (2, 2), (1, 0)])
def test_strided(device, dtype, layout, first, behind):
    """Tokens of qkv and out inside of wider rows; what lies between stays as it is."""
    case = make_case(device, dtype, [40, 17, 3], layout=layout, bias=True)
    want = case.copy().run()
    rows = torch.randn(3, first + 12 * 64 + behind).to(device, dtype)
    inside = rows[:, first : first + 12 * 64]
    inside.copy_(case.qkv)
    before = rows.clone()
    wide = torch.full((3, 9 * 64), NAN, device=device, dtype=dtype)
    out = wide[:, : 8 * 64].unflatten(1, (8, 64))
    strided = replace(case.copy(), qkv=inside)
    got = vllm_kernels.fused_decode_attention(*strided.tensors(), **case.options, out=out)
    assert got is out and wide[:, 8 * 64 :].isnan().all()
    if first % 8 == 0:  # else CUDA may take another kernel
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[dtype])
    assert torch.equal(rows[:, :first], before[:, :first])
    assert torch.equal(rows[:, first + 8 * 64 :], before[:, first + 8 * 64 :])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_caches_of_one_tensor(device, dtype, layout):
    """Key and value caches as slices, with another layer's beside them."""
    case = make_case(device, dtype, [40, 17, 3], layout=layout)
    want = case.copy().run()
    shape = case.key_cache.shape
    packed = torch.full((shape[0], 2, 2, *shape[1:]), 5.0, device=device, dtype=dtype)
    packed[:, 1, 0], packed[:, 1, 1] = case.key_cache, case.value_cache
    slices = replace(case.copy(), key_cache=packed[:, 1, 0], value_cache=packed[:, 1, 1])
    assert torch.equal(slices.run(), want)
    assert (packed[:, 0] == 5).all()


def test_new_out_and_default_scale(device, dtype, layout):
    case = make_case(device, dtype, [40, 17, 3], layout=layout)
    want = case.copy().run()
    ours = case.copy()
    got = vllm_kernels.fused_decode_attention(*ours.tensors(), layout=layout, scale=64**-0.5)
    assert got.shape == (3, 8, 64) and got.is_contiguous() and torch.equal(got, want)


def test_empty_batch(device, dtype, layout):
    case = make_case(device, dtype, [], layout=layout)
    got = vllm_kernels.fused_decode_attention(*case.tensors(), layout=layout)
    assert got.shape == (0, 8, 64)
    assert case.key_cache.isnan().all()


def test_workspace(device):
    case = make_case(device, torch.bfloat16, [3000, 20])
    want = case.copy().run()
    workspace = vllm_kernels.paged_attention_workspace(device)
    for _ in range(2):
        assert torch.equal(case.with_options(workspace=workspace).copy().run(), want)
    if device == "cuda":
        for bad in (workspace[:4096], workspace[1:]):
            ours = case.with_options(workspace=bad).copy()
            with raises(r"^fused_decode_attention: workspace: expected at least 33554432 bytes, "):
                ours.run()
            assert torch.equal(ours.qkv, case.qkv), "written before it was refused"
            assert torch.equal(bits(ours.key_cache), bits(case.key_cache))


# --- bad input


def bad_arguments(case: Case) -> list[tuple[dict[str, object], str]]:
    """(changed arguments, the message after "fused_decode_attention: ")."""
    qkv, key, value, device = case.qkv, case.key_cache, case.value_cache, case.qkv.device
    one, two = torch.ones(1, device=device), torch.ones(2, device=device)
    out = torch.zeros(3, 8, 64, device=device)
    rows = torch.zeros(len(key), 16, 2, 64, device=device)
    int8 = {"key_cache": rows.to(torch.int8), "value_cache": rows.to(torch.int8), "layout": "NHD"}
    wide = torch.zeros(3, 2 * 12 * 64, device=device)
    packed = torch.zeros(3, 13 * 64, device=device)
    return [
        ({"qkv": qkv.double()}, r"qkv: expected float32, float16 or bfloat16, got float64$"),
        ({"qkv": qkv[0]}, r"qkv: expected shape \[num_seqs, \(num_heads \+ 2 \* num_kv_heads\) \* "
                          r"head_size\], got shape \[768\]$"),
        ({"qkv": wide[:, ::2]}, r"qkv: expected stride 1 in the last dimension, got strides "),
        ({"qkv": qkv[:1].expand(3, 768)}, r"qkv: is written, so its elements must not share "),
        *(({"qkv": wide[:, :width]},
           r"qkv: expected \(num_heads \+ 2 \* num_kv_heads\) \* head_size elements a token, "
           r"num_heads a multiple of num_kv_heads = 2 and head_size = 64 \(from key_cache\), got "
           rf"shape \[3, {width}\]$") for width in (0, 100, 4 * 64, 5 * 64, 767)),
        ({"layout": "flat"}, r'layout: expected "vllm", "NHD" or "HND", got "flat"$'),
        ({"layout": "NHD"}, r"key_cache: expected shape \[num_blocks, block_size, num_kv_heads, "
                            r"head_size\] \(from layout = \"NHD\"\), got shape"),
        ({"key_cache": key.half()}, r"key_cache: expected float32 \(from qkv\), float8_e4m3fn, "
                                    r"float8_e5m2 or int8, got float16$"),
        ({"value_cache": value.half()}, r"value_cache: expected float32 \(from key_cache\), got "),
        ({"key_cache": key[:-1]}, r"key_cache: expected num_blocks = \d+ \(from value_cache\) at "),
        ({"key_cache": key[:1].expand_as(key)}, r"key_cache: is written, so its elements must not"),
        ({"value_cache": value[:1].expand_as(value)}, r"value_cache: is written, so its elements"),
        ({"value_cache": value[0]}, r"value_cache: expected shape \[num_blocks, num_kv_heads, "),
        ({"bias": qkv[0, :64]}, r"bias: expected \(num_heads \+ 2 \* num_kv_heads\) \* head_size = "
                                r"768 \(from qkv\) at dimension 0, got shape \[64\]$"),
        ({"bias": qkv[0].half()}, r"bias: expected float32 \(from qkv\), got float16$"),
        ({"bias": qkv[0]}, r"qkv and bias overlap in memory$"),
        ({"q_weight": two}, r"q_weight: expected head_size = 64 \(from value_cache\) at dimension"),
        ({"k_weight": two.half()}, r"k_weight: expected float32 \(from qkv\), got float16$"),
        ({"epsilon": -1.0}, r"epsilon: expected a number >= 0, got -1"),
        ({"positions": case.positions.int()}, r"positions: expected int64, got int32; cast it "),
        ({"positions": case.positions[:2]}, r"positions: expected num_seqs = 3 \(from qkv\) at "
                                            r"dimension 0, got shape \[2\]$"),
        ({"cos_sin_cache": case.cos_sin_cache[:, :63]},
         r"cos_sin_cache: expected an even rotary_size from 2 to head_size = 64 at dimension 1, "),
        ({"slot_mapping": case.slot_mapping.int()}, r"slot_mapping: expected int64, got int32; "),
        ({"slot_mapping": case.slot_mapping[:2]}, r"slot_mapping: expected num_seqs = 3 \(from "
                                                  r"qkv\) at dimension 0, got shape \[2\]$"),
        ({"block_tables": case.block_tables.long()}, r"block_tables: expected int32, got int64; "),
        ({"block_tables": case.block_tables[:2]}, r"block_tables: expected num_seqs = 3 \(from "),
        ({"seq_lens": case.seq_lens.long()}, r"seq_lens: expected int32, got int64; cast it with"),
        ({"seq_lens": case.seq_lens[:1]}, r"seq_lens: expected num_seqs = 3 \(from qkv\) at dimen"),
        ({"k_scale": one}, r"k_scale: expected None: only 8-bit caches have scales, this one is "),
        ({**int8, "k_scale": torch.ones(3, device=device)},
         r"k_scale: expected one element, or num_kv_heads = 2, got shape \[3\]$"),
        ({**int8, "k_scale": two, "v_scale": one}, r"v_scale: expected 2 elements \(from k_scale"),
        ({"alibi_slopes": two}, r"alibi_slopes: expected num_heads = 8 \(from qkv\) at dimension "),
        ({"sinks": one}, r"sinks: expected num_heads = 8 \(from qkv\) at dimension 0, got shape"),
        ({"sinks": out[0, :, 0].half()}, r"sinks: expected float32, got float16"),
        ({"sliding_window": -1}, r"sliding_window: expected a number of tokens >= 0 \(0: none\), "),
        ({"softcap": -1.0}, r"softcap: expected a finite number >= 0 \(0: none\), got -1"),
        ({"split_tokens": -1}, r"split_tokens: expected a number of tokens >= 0 \(0: as suits "),
        ({"workspace": one}, r"workspace: expected uint8, got float32$"),
        ({"out": out[:2]}, r"out: expected num_seqs = 3 \(from qkv\) at dimension 0, got shape "),
        ({"out": out[:, :4]}, r"out: expected num_heads = 8 \(from qkv\) at dimension 1, got "),
        ({"out": out.half()}, r"out: expected float32 \(from qkv\), got float16$"),
        ({"out": out[:1].expand(3, 8, 64)}, r"out: is written, so its elements must not share"),
        ({"out": out.new_zeros(3, 64, 8).transpose(1, 2)},
         r"out: expected contiguous heads \(only the stride of num_seqs is free\), got shape "),
        ({"qkv": packed[:, :768], "out": packed[:, 64 : 9 * 64].unflatten(1, (8, 64))},
         r"out and qkv overlap in memory$"),
        ({"key_cache": rows, "value_cache": rows, "layout": "NHD"},
         r"key_cache and value_cache overlap in memory$"),
    ]  # fmt: skip


def test_bad_input(device):
    case = make_case(device, torch.float32, [5, 40, 60])
    names = list(case.__dict__)[:8]
    for change, message in bad_arguments(case):
        arguments = {**dict(zip(names, case.tensors())), **change}
        with raises(rf"^fused_decode_attention: {message}"):
            vllm_kernels.fused_decode_attention(**arguments)


def test_no_tensor(device):
    case = make_case(device, torch.float32, [5])
    for name in ("qkv", "value_cache"):
        with raises(rf"^fused_decode_attention: {name}: expected a tensor, got None$"):
            vllm_kernels.fused_decode_attention(*replace(case, **{name: None}).tensors())
    with pytest.raises((RuntimeError, TypeError), match="key_cache"):
        vllm_kernels.fused_decode_attention(*replace(case, key_cache=None).tensors())


def test_bad_head_size(device):
    for head_size, stored in ((24, None), (264, None), (60, None), (72, torch.int8)):
        rows = torch.zeros(4, 16, 2, head_size, device=device, dtype=stored or torch.float32)
        qkv = torch.zeros(1, 12 * head_size, device=device)
        ints = torch.ones(1, 1, device=device, dtype=torch.int32)
        step = 8 if stored is None else 16
        with raises(
            rf"^fused_decode_attention: key_cache: expected a head_size of 32 to 256 in steps of "
            rf"{step} for a .* cache, got {head_size}$"
        ):
            vllm_kernels.fused_decode_attention(
                qkv, ints[0].long(), torch.ones(9, 16, device=device), rows, rows.clone(),
                ints[0].long(), ints, ints[0], layout="NHD",
            )  # fmt: skip


def test_bad_rows_on_the_cpu(layout):
    """Indices are looked at before anything is computed; what is written stays as it was."""
    fits = r"expected a length that fits block_tables in \[0, 641\)$"
    cases = [
        ("positions", (1,), -1, r"positions\[1\] = -1: expected a position in \[0, 603\)$"),
        ("positions", (2,), 603, r"positions\[2\] = 603: expected a position in \[0, 603\)$"),
        ("slot_mapping", (0,), 720, r"slot_mapping\[0\] = 720: expected -1 \(skipped\) or a slot "
                                    r"in \[0, 720\)$"),
        ("slot_mapping", (2,), -2, r"slot_mapping\[2\] = -2: expected -1 \(skipped\) or a slot "),
        ("seq_lens", (1,), -3, rf"seq_lens\[1\] = -3: {fits}"),
        ("seq_lens", (2,), 641, rf"seq_lens\[2\] = 641: {fits}"),
        ("block_tables", (2, 37), -1, r"block_tables\[2, 37\] = -1: expected a block in \[0, 45\)"),
    ]  # fmt: skip
    for name, at, value, message in cases:
        case = make_case("cpu", torch.float32, [5, 40, 600], layout=layout)
        getattr(case, name)[at] = value
        before = case.copy()
        out = torch.zeros(3, 8, 64)
        with raises(rf"^fused_decode_attention: {message}"):
            vllm_kernels.fused_decode_attention(*case.tensors(), **case.options, out=out)
        assert not out.any() and torch.equal(case.qkv, before.qkv)
        assert torch.equal(bits(case.key_cache), bits(before.key_cache))
        assert torch.equal(bits(case.value_cache), bits(before.value_cache))


def test_inference_only(device):
    case = make_case(device, torch.float32, [5])
    bias = torch.zeros(768, device=device, requires_grad=True)
    with raises(r"^fused_decode_attention: inference only: use torch.no_grad\(\)$"):
        case.with_options(bias=bias).run()
    with torch.no_grad():
        case.with_options(bias=bias).run()


# --- torch


def schema_arguments(case: Case, **given: object) -> list[object]:
    """As torch.ops.vllm_kernels.fused_decode_attention takes them."""
    out = torch.zeros_like(case.split(case.qkv)[0], memory_format=torch.contiguous_format)
    values = {
        **dict(zip(list(case.__dict__)[:8], case.tensors())),
        **{"out": out, "bias": None, "is_neox": True, "scale": 0.125},
        **case.options, **given,
    }  # fmt: skip
    schema = torch.ops.vllm_kernels.fused_decode_attention.default._schema
    return [values.get(argument.name, argument.default_value) for argument in schema.arguments]


# Schema and fake kernels do not depend on the dtype.
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_opcheck(device, dtype, layout):
    case = make_case(
        device, dtype, [5, 0, 40], layout=layout, bias=True, norm=True, sinks=per_head(8, -1, 1)
    )
    workspace = vllm_kernels.paged_attention_workspace(device)
    opcheck("fused_decode_attention", *schema_arguments(case, workspace=workspace))
    case = make_case(device, dtype, [5, 0, 40], layout=layout, stored=torch.float8_e4m3fn)
    opcheck_float8("fused_decode_attention", *schema_arguments(case))


def test_compiles(device, dtype, layout):
    case = make_case(device, dtype, [5, 0, 40], layout=layout, bias=True, norm=True)

    def call(*tensors: Tensor) -> Tensor:
        return vllm_kernels.fused_decode_attention(*tensors, **case.options)

    ours, compiled = case.copy(), case.copy()
    want = call(*ours.tensors())
    assert_compiles(call, *case.copy().tensors())
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*compiled.tensors())
    assert torch.equal(got, want)
    assert torch.equal(bits(compiled.key_cache), bits(ours.key_cache))
    assert torch.equal(bits(compiled.value_cache), bits(ours.value_cache))


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=["", "fp8"])
def test_graph_replays(device, dtype, layout, stored):
    """Captured at one set of rows, replayed at others: the next step, with rows padded."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    case = make_case(device, dtype, [700, 40, 1200, 8], layout=layout, stored=stored, bias=True)
    fresh = case.copy()
    out = torch.empty(4, 8, 64, device=device, dtype=dtype)

    def call() -> None:
        vllm_kernels.fused_decode_attention(*case.tensors(), **case.options, out=out)

    def refill() -> None:
        fresh.qkv.normal_()
        case.qkv.copy_(fresh.qkv)
        case.seq_lens.copy_(torch.tensor([699, 0, 1199, 0], device=device))
        last = (case.seq_lens - 1).clamp_min(0).long()
        blocks = case.block_tables.gather(1, last[:, None] // 16).squeeze(1)
        slots = torch.where(case.seq_lens > 0, blocks * 16 + last % 16, -1)
        case.slot_mapping.copy_(slots)
        case.positions.copy_(last)

    def want() -> Tensor:
        return replace(case.copy(), qkv=fresh.qkv.clone()).run()

    assert_graph_replays(call, refill, out, want)
    check(replace(case.copy(), qkv=fresh.qkv.clone()))


def test_threads_give_right_results(layout):
    """Work is cut by the number of threads; every cut must be right."""
    before = torch.get_num_threads()
    case = make_case("cpu", torch.float32, [2000, 0, 129, 1, 400], heads=4, layout=layout)
    try:
        for threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(threads)
            check(case)
    finally:
        torch.set_num_threads(before)
