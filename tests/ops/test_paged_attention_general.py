"""paged_attention against a float64 reference: every axis of the contract.

As in test_paged_attention.py queries and keys have unit variance, pools are NaN outside the used
slots (8-bit integers: large), tables are permuted and hold garbage past the used part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers import EPSILON, assert_compiles, opcheck, raises, to_layout
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

NAN = float("nan")
GARBAGE = (-1, 2**30, -(2**31), 2**31 - 1)
LAYOUTS = ["vllm", "NHD", "HND"]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


@pytest.fixture
def device(device: str) -> str:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if device == "cuda" and not has_kernel("vllm_kernels::paged_attention", "CUDA"):
        pytest.skip("paged_attention has no CUDA implementation")
    return device


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass
class Case:
    """The arguments of one call, in the op's own words."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    block_size: int
    options: dict[str, object] = field(default_factory=dict)
    max_query_len: int | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens

    def run(self) -> Tensor:
        out = torch.full_like(self.query, NAN)
        got = vllm_kernels.paged_attention(
            *self.tensors(), **self.options, max_query_len=self.max_query_len, out=out
        )
        assert got is out
        return got

    def run_with_lse(self) -> tuple[Tensor, Tensor]:
        return vllm_kernels.paged_attention(
            *self.tensors(), **self.options, max_query_len=self.max_query_len, return_lse=True
        )

    def naive(self) -> tuple[Tensor, Tensor]:
        return reference.paged_attention(*self.tensors(), **self.options)

    def spread(self) -> Tensor:
        """sum w |v|."""
        absolute = replace(self, value_cache=self.value_cache.float().abs())
        return absolute.naive()[0]

    def with_options(self, **options: object) -> Case:
        return replace(self, options={**self.options, **options})


def quantized(rows: Tensor, stored: torch.dtype, scale: Tensor | None) -> Tensor:
    """rows [.., num_kv_heads, head_size] as the cache stores them."""
    if scale is not None:
        rows = rows / scale.reshape(-1, 1)
    if stored == torch.int8:
        rows = rows.nan_to_num(127).round().clamp(-128, 127)
    return rows.to(stored)


def scales_of(stored: torch.dtype, kv_heads: int, per_head: bool) -> tuple[Tensor, Tensor]:
    """k_scale and v_scale of an 8-bit cache."""
    unit = 1 / 32 if stored == torch.int8 else 0.5
    if per_head:
        return unit * torch.linspace(1, 1.5, kv_heads), unit * torch.linspace(2, 1, kv_heads)
    return torch.tensor([unit]), torch.tensor(1.75 * unit)


def make_case(
    device: str,
    dtype: torch.dtype,
    lens: list[int],
    queries: list[int] | None = None,
    heads: int = 8,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    stored: torch.dtype | None = None,
    layout: str = "vllm",
    scales_per_head: bool = False,
    spare_blocks: int = 3,
    **options: object,
) -> Case:
    """See the module's docstring. queries: the sequences' numbers of query tokens, or one each."""
    stored = stored or dtype
    pages = [-(-length // block_size) for length in lens]
    num_blocks = sum(pages) + spare_blocks
    key = torch.randn(num_blocks, block_size, kv_heads, head_size)
    value = torch.randn(num_blocks, block_size, kv_heads, head_size)
    order = torch.randperm(num_blocks)
    width = max([1, *pages]) + 2
    tables = torch.tensor(GARBAGE * width)[:width].repeat(max(1, len(lens)), 1)[: len(lens)]
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    taken = 0
    for seq, length in enumerate(lens):
        mine = order[taken : taken + pages[seq]]
        taken += pages[seq]
        tables[seq, : pages[seq]] = mine
        used[mine] = torch.arange(pages[seq] * block_size).view(-1, block_size) < length
    key[~used] = NAN
    value[~used] = NAN
    k_scale = v_scale = None
    if stored in EIGHT_BITS:
        k_scale, v_scale = scales_of(stored, kv_heads, scales_per_head)
        options |= {"k_scale": k_scale.to(device), "v_scale": v_scale.to(device)}
    key, value = quantized(key, stored, k_scale), quantized(value, stored, v_scale)
    num_tokens = len(lens)
    longest = None
    if queries is not None:
        num_tokens, longest = sum(queries), max([0, *queries])
        starts = torch.tensor([0, *queries]).cumsum(0)
        options["query_start_loc"] = starts.to(device, torch.int32)
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    return Case(
        query=torch.randn(num_tokens, heads, head_size).to(device, dtype),
        key_cache=to_layout(key, layout, True).to(device),
        value_cache=to_layout(value, layout, False).to(device),
        block_tables=tables.to(device, torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_size=block_size,
        options={"layout": layout, **options},
        max_query_len=longest,
    )


def assert_right(case: Case, got: Tensor, lse: Tensor | None = None) -> None:
    """Within what the dtype and the length explain: see assert_near()."""
    want, want_lse = case.naive()
    scale = case.options.get("scale", case.query.shape[-1] ** -0.5)
    lses = None if lse is None else (lse, want_lse)
    assert got.dtype == case.query.dtype
    assert_near(got, want, case.spread(), case.query, scale, case.seq_lens.tolist(), lses)


def assert_near(
    got: Tensor,
    want: Tensor,
    spread: Tensor,
    query: Tensor,
    scale: float,
    lens: list[int],
    lses: tuple[Tensor, Tensor] | None,
) -> None:
    """Within what the dtype and the length explain: see test_paged_attention.assert_right().

    spread: sum w |v|; lses: what was got and what was to be.
    """
    assert got.shape == want.shape
    assert not got.isnan().any(), "NaN in the result"
    if got.numel() == 0:
        return
    norm = query.double().norm(dim=-1).amax().item()
    logit = scale * norm * math.sqrt(query.shape[-1]) * 1.5
    unit32 = EPSILON[torch.float32] * (8 + 2 * logit + 0.25 * math.sqrt(max([1, *lens])))
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
    if lses is not None:
        assert lses[0].shape == lses[1].shape and lses[0].dtype == torch.float32
        torch.testing.assert_close(lses[0].double(), lses[1], rtol=2.0**-22, atol=unit32)


def check(case: Case) -> None:
    """Without lse (on the CPU another kernel may run) and with it."""
    assert_right(case, case.run())
    assert_right(case, *case.run_with_lse())


def per_head(heads: int, low: float, high: float) -> Tensor:
    return torch.linspace(low, high, heads)


# --- right results


@pytest.mark.parametrize("eight", [None, *EIGHT_BITS], ids=lambda x: str(x).split(".")[-1])
def test_dtypes(device, dtype, layout, eight):
    check(make_case(device, dtype, [1, 15, 16, 17, 53, 300], stored=eight, layout=layout))
    check(make_case(device, dtype, [20, 130], [3, 7], stored=eight, layout=layout))
    check(make_case(device, dtype, [20, 9, 700], [1, 0, 1], stored=eight, layout=layout))


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_block_sizes(device, layout, block_size):
    b = block_size
    lens = [1, max(b - 1, 1), b, b + 1, 2 * b + 5, 300]
    for dtype, stored in ((torch.float32, None), (torch.bfloat16, torch.int8)):
        check(make_case(device, dtype, lens, block_size=b, stored=stored, layout=layout))
        queries = [1, 1, min(b, 6), 4, 9, 2]
        check(make_case(device, dtype, lens, queries, block_size=b, stored=stored, layout=layout))


@pytest.mark.parametrize("head_size", [32, 40, 64, 72, 80, 96, 128, 192, 256])
def test_head_sizes(device, layout, head_size):
    """The other axes are drawn along."""
    for index, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        shapes = {"head_size": head_size, "block_size": [8, 16, 32][index], "layout": layout}
        check(make_case(device, dtype, [37, 1, 64], **shapes))
        check(make_case(device, dtype, [37, 5, 64], [2, 5, 3], **shapes))
        if head_size % 16 == 0:
            check(make_case(device, dtype, [37, 1, 64], stored=EIGHT_BITS[index], **shapes))


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (8, 2), (5, 1), (14, 2), (16, 2), (16, 1),
                                             (64, 1), (71, 1)])  # fmt: skip
def test_groups(device, layout, heads, kv_heads):
    shapes = {"heads": heads, "kv_heads": kv_heads, "layout": layout}
    check(make_case(device, torch.float32, [140, 23], **shapes))
    check(make_case(device, torch.bfloat16, [140, 23], [11, 2], head_size=128, **shapes))
    check(make_case(device, torch.float16, [40, 23], [3, 2], stored=torch.int8, **shapes))


@pytest.mark.parametrize("heads", [12, 16, 32, 64], ids=lambda heads: f"{heads}_rows")
@pytest.mark.parametrize("stored", [None, *EIGHT_BITS], ids=str)
def test_pieces_of_many_rows(device, layout, heads, stored):
    """Long sequences beside short ones: pieces, blocks that take several of them, ends of pages."""
    lens, dtype = [2900, 0, 130, 64, 65, 1, 777], torch.bfloat16
    shapes = {"heads": heads, "kv_heads": 1, "layout": layout, "stored": stored}
    check(make_case(device, dtype, lens, head_size=128, **shapes))
    queries = [3, 0, 2, 1, 5, 1, 2]
    check(make_case(device, dtype, lens, queries, head_size=64, block_size=32, **shapes))
    check(make_case(device, dtype, lens, queries, head_size=96, sliding_window=70, **shapes))


@pytest.mark.parametrize("queries", [None, [1, 9, 17, 4]], ids=["decode", "several"])
@pytest.mark.parametrize("names", [["alibi_slopes"], ["sliding_window"], ["softcap"], ["sinks"],
                                   ["alibi_slopes", "sliding_window", "softcap", "sinks"]],
                         ids=lambda names: "+".join(names))  # fmt: skip
def test_options(device, dtype, layout, names, queries):
    options = {
        "alibi_slopes": per_head(8, 0.01, 0.4),
        "sliding_window": 21,
        "softcap": 2.0,
        "sinks": per_head(8, -3.0, 4.0),
    }
    chosen = {name: options[name] for name in names}
    check(make_case(device, dtype, [5, 16, 65, 200], queries, layout=layout, **chosen))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 10**6, 2**40])
def test_windows(device, layout, window):
    shapes = {"layout": layout, "sliding_window": window}
    check(make_case(device, torch.float32, [1, 15, 16, 17, 33, 300], **shapes))
    check(make_case(device, torch.float32, [40, 17, 200], [5, 17, 33], **shapes))


@pytest.mark.parametrize("window", [17, 2**40])
def test_windows_of_negative_positions(device, layout, window):
    """More query tokens than tokens; as many as the kernel for prompts takes."""
    case = {"layout": layout, "sliding_window": window}
    check(make_case(device, torch.bfloat16, [290, 3], [300, 5], **case))


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=lambda x: str(x).split(".")[-1])
def test_scales(device, layout, stored):
    for per in (False, True):
        check(
            make_case(
                device, torch.float32, [7, 100], kv_heads=4, stored=stored, layout=layout,
                scales_per_head=per,
            )
        )  # fmt: skip
    plain = make_case(device, torch.float32, [7, 100], stored=stored, layout=layout)
    only_k = plain.with_options(v_scale=None)
    check(only_k)
    if stored != torch.int8:
        check(only_k.with_options(k_scale=None))


@pytest.mark.parametrize("count", range(1, 18))
def test_several_query_tokens(device, layout, count):
    check(make_case(device, torch.float32, [count, 60, 16], [count] * 3, layout=layout))


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e4])
def test_softcaps(device, softcap):
    case = make_case(device, torch.float32, [40, 130], layout="NHD", softcap=softcap, scale=0.3)
    check(case)


def test_ragged_and_longer_than_context(device, dtype, layout):
    """The first query tokens of a sequence shorter than them have negative positions."""
    lens, queries = [0, 3, 30, 9, 100], [2, 7, 0, 9, 70]
    case = make_case(device, dtype, lens, queries, layout=layout)
    check(case)
    out, lse = case.run_with_lse()
    assert not out[:6].any() and (lse[:6] == -torch.inf).all()
    assert (lse[6:] > -torch.inf).all()


def test_prefill(device, dtype, layout):
    check(make_case(device, dtype, [150, 70], [150, 70], heads=4, kv_heads=4, layout=layout))


@pytest.mark.parametrize("right", [-1, 0, 1, 20, 2**40])
def test_tokens_after_the_position(device, layout, right):
    """causal=False: all tokens, or some, with and without a window before the position."""
    lens, queries = [40, 17, 200, 3, 1], [5, 17, 33, 7, 1]
    for index, window in enumerate((0, 1, 25)):
        options = {"causal": False, "window_right": right, "sliding_window": window}
        dtype = (torch.float32, torch.float16, torch.bfloat16)[index]
        check(make_case(device, dtype, lens, queries, layout=layout, **options))
    options |= {"alibi_slopes": per_head(8, 0.01, 0.4), "sinks": per_head(8, -3.0, 4.0)}
    check(make_case(device, torch.float32, lens, queries, layout=layout, **options))
    check(make_case(device, torch.bfloat16, lens, layout=layout, **options))


def test_context_0(device, dtype, layout):
    sinks = per_head(8, -1.0, 1.0)
    for given in (None, sinks):
        case = make_case(device, dtype, [0, 5, 0], layout=layout, sinks=given)
        check(case)
        out, lse = case.run_with_lse()
        assert not out[[0, 2]].any()
        nothing = torch.full((8,), -torch.inf) if given is None else given
        assert torch.equal(lse[[0, 2]].cpu(), nothing.expand(2, 8))


def test_sinks_at_the_ends(device):
    """A sink of -inf is none; a very large one takes everything."""
    case = make_case(device, torch.float32, [40, 0], layout="NHD")
    want, want_lse = case.run_with_lse()
    none = torch.full((8,), -torch.inf, device=device)
    got, lse = case.with_options(sinks=none).run_with_lse()
    assert torch.equal(got, want) and torch.equal(lse, want_lse)
    got, lse = case.with_options(sinks=torch.full((8,), 1e30, device=device)).run_with_lse()
    assert not got.any() and (lse == 1e30).all()


def test_large_scores_stay_finite(device, dtype, layout):
    case = make_case(device, dtype, [33, 600], layout=layout, scale=2e4)
    out, lse = case.run_with_lse()
    assert not out.isnan().any() and lse.isfinite().all()
    clear = ((out.double() - case.naive()[0]).abs().amax(-1) < 0.05).float().mean().item()
    assert clear > 0.9  # near ties may fall either way


def test_long_context(device, layout):
    check(make_case(device, torch.float32, [20_000, 5], heads=4, kv_heads=1, layout=layout))


def test_as_v1(device, dtype):
    """One query token a sequence, layout vllm and nothing else: the very result of v1."""
    case = make_case(device, dtype, [1, 40, 700])
    one = torch.ones(1, device=device)
    want = torch.empty_like(case.query)
    vllm_kernels.paged_attention_v1(
        want, case.query, case.key_cache, case.value_cache, 2, 0.125, case.block_tables,
        case.seq_lens, 16, 700, None, "auto", one, one,
    )  # fmt: skip
    assert_right(case, want)
    if device == "cpu":
        assert torch.equal(case.run(), want)


def test_halves_merge_to_the_whole(device, dtype, layout):
    """Attention to the first pages and to the others, merged by their log-sum-exp."""
    case = make_case(device, dtype, [200, 97, 48, 350], layout=layout)
    first = torch.full_like(case.seq_lens, 48)
    halves = []
    for lens, tables in (
        (first, case.block_tables),
        (case.seq_lens - first, case.block_tables[:, 3:]),
    ):
        half = replace(case, seq_lens=lens, block_tables=tables)
        halves.append(half.run_with_lse())
    (prefix, prefix_lse), (suffix, suffix_lse) = halves
    merged = torch.empty_like(case.query)
    lse = torch.empty_like(prefix_lse.t().contiguous())
    vllm_kernels.merge_attn_states(
        merged, prefix, prefix_lse.t().contiguous(), suffix, suffix_lse.t().contiguous(), lse
    )
    want, want_lse = case.naive()
    torch.testing.assert_close(lse.t().double(), want_lse, rtol=1e-5, atol=1e-5)
    error = (merged.double() - want).norm() / want.norm()
    assert error <= max(EPSILON[dtype], 2e-6)


# --- memory


@pytest.mark.parametrize("queries", [None, [3, 1, 9]], ids=["decode", "several"])
def test_strided_query_and_out(device, dtype, layout, queries):
    case = make_case(device, dtype, [5, 90, 200], queries, layout=layout)
    want, want_lse = case.run_with_lse()
    packed = torch.full((want.shape[0], 12, 64), NAN, device=device, dtype=dtype)
    packed[:, :8] = case.query
    out = torch.full((want.shape[0], 20, 64), 7.0, device=device, dtype=dtype)
    got, lse = vllm_kernels.paged_attention(
        packed[:, :8], *case.tensors()[1:], **case.options, max_query_len=case.max_query_len,
        out=out[:, 4:12], return_lse=True,
    )  # fmt: skip
    assert torch.equal(got, want) and torch.equal(lse, want_lse)
    assert (out[:, :4] == 7).all() and (out[:, 12:] == 7).all()


@pytest.mark.parametrize("queries", [None, [3, 1, 9]], ids=["decode", "several"])
def test_cache_slices_of_a_packed_tensor(device, dtype, layout, queries):
    case = make_case(device, dtype, [5, 90, 200], queries, layout=layout)
    want = case.run()
    both = torch.stack([case.key_cache.flatten(2), case.value_cache.flatten(2)])  # [2, blocks, ..]
    shape = case.key_cache.shape[2:], case.value_cache.shape[2:]
    first = replace(
        case, key_cache=both[0].unflatten(-1, shape[0]), value_cache=both[1].unflatten(-1, shape[1])
    )
    assert torch.equal(first.run(), want)
    # One layer of three with K beside V, and more heads than are looked at.
    layers = torch.full((both.shape[1], 3, 2, both.shape[2] + 1, both.shape[3]), NAN)
    layers = layers.to(device, dtype)
    layers[:, 1, :, :-1] = both.transpose(0, 1)
    key, value = layers[:, 1, 0, :-1], layers[:, 1, 1, :-1]
    second = replace(
        case, key_cache=key.unflatten(-1, shape[0]), value_cache=value.unflatten(-1, shape[1])
    )
    assert not second.key_cache.is_contiguous()
    assert torch.equal(second.run(), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_any_outer_strides(device, layout):
    """NHD is HND with two dimensions swapped, and tokens may lie anywhere."""
    case = make_case(device, torch.float32, [5, 90, 200], [3, 1, 9], layout=layout)
    want = case.run()
    other = "HND" if layout == "NHD" else "NHD"
    swapped = replace(
        case.with_options(layout=other),
        key_cache=case.key_cache.transpose(1, 2),
        value_cache=case.value_cache.transpose(1, 2),
    )
    assert torch.equal(swapped.run(), want)
    wide = [cache.new_full((*cache.shape[:-1], 67), NAN) for cache in case.tensors()[1:3]]
    for to, cache in zip(wide, case.tensors()[1:3]):
        to[..., 2:66] = cache
    padded = replace(case, key_cache=wide[0][..., 2:66], value_cache=wide[1][..., 2:66])
    assert torch.equal(padded.run(), want)


@pytest.mark.parametrize("queries", [None, [3]], ids=["decode", "several"])
def test_strides_past_int32(device, layout, queries):
    """Block strides of more than 2^31 elements: a few pages at the ends of a sparse mapping."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    stride = 2**31 + 64
    case = make_case(
        device, torch.float16, [40], queries, heads=2, kv_heads=1, layout=layout, spare_blocks=0
    )
    want = case.run()
    # The CPU maps untouched pages lazily; only three pages of each cache become real.
    storage = torch.empty(2 * stride + 4096, device=device, dtype=torch.float16)
    key, value = case.key_cache, case.value_cache
    far_key = storage.as_strided(key.shape, (stride, *key.stride()[1:]))
    far_value = storage[2048:].as_strided(value.shape, (stride, *value.stride()[1:]))
    far_key.copy_(key)
    far_value.copy_(value)
    assert torch.equal(replace(case, key_cache=far_key, value_cache=far_value).run(), want)


def test_table_with_row_stride(device, layout):
    case = make_case(device, torch.float32, [5, 90, 200], [1, 2, 3], layout=layout)
    wide = torch.nn.functional.pad(case.block_tables, (0, 7), value=-1)
    strided = replace(case, block_tables=wide[:, : case.block_tables.shape[1]])
    assert not strided.block_tables.is_contiguous()
    assert torch.equal(strided.run(), case.run())


# --- what must not matter


@pytest.mark.parametrize("queries", [None, [1, 4, 9, 2]], ids=["decode", "several"])
def test_unused_slots_and_ids_have_no_influence(device, dtype, layout, queries):
    case = make_case(device, dtype, [1, 15, 17, 313], queries, layout=layout)
    want = case.run()
    for poison, garbage in ((float("inf"), -5), (0.0, 7), (-float("inf"), 2**31 - 1)):
        caches = [cache.nan_to_num(poison) for cache in case.tensors()[1:3]]
        tables = case.block_tables.clone()
        for seq, length in enumerate(case.seq_lens.tolist()):
            tables[seq, -(-length // 16) :] = garbage
        mutated = replace(case, key_cache=caches[0], value_cache=caches[1], block_tables=tables)
        assert torch.equal(mutated.run(), want)


@pytest.mark.parametrize("queries", [None, [5, 2]], ids=["decode", "several"])
def test_pages_before_the_window_are_not_read(device, layout, queries):
    """Their slots may hold NaN, and the table anything: engines give such pages back."""
    case = make_case(device, torch.float32, [100, 50], queries, layout=layout, sliding_window=20)
    want, want_lse = case.run_with_lse()
    for seq, length in enumerate(case.seq_lens.tolist()):
        first = length - (queries[seq] if queries else 1) - 20 + 1  # token of the first query token
        gone = case.block_tables[seq, : first // 16].long()
        assert gone.numel() > 0
        case.key_cache[gone] = NAN
        case.value_cache[gone] = NAN
        case.block_tables[seq, : first // 16] = -1
    got, lse = case.run_with_lse()
    assert torch.equal(got, want) and torch.equal(lse, want_lse)


def test_tokens_a_query_does_not_see_have_no_influence(device, layout):
    """Later tokens, and those before the window, may be NaN within pages that are read."""
    case = make_case(device, torch.float32, [37], [6], layout=layout, sliding_window=9)
    want = case.run()
    rows = [reference.token_rows(cache, layout).clone() for cache in case.tensors()[1:3]]
    page = case.block_tables[0].tolist()
    for token in [*range(23), 34, 35, 36]:  # query token 2 at position 33 sees 25 .. 33
        for cache in rows:
            cache[page[token // 16], token % 16] = NAN
    poisoned = replace(
        case,
        key_cache=to_layout(rows[0], layout, True),
        value_cache=to_layout(rows[1], layout, False),
    )
    got = poisoned.run()
    assert torch.equal(got[:3], want[:3])
    assert got[3:].isnan().any(-1).all()


def test_nan_of_a_later_query_token_stays_in_its_kv_head(device, dtype, layout):
    """K never reaches the query tokens before it; V in 16 bits on CUDA may, for 0 * NaN is NaN."""
    case = make_case(device, dtype, [37, 40], [6, 3], layout=layout)
    want = case.run()
    block = case.block_tables[0, 2]
    for name in ("key_cache", "value_cache"):
        rows = reference.token_rows(getattr(case, name), layout).clone()
        rows[block, 36 % 16, 0] = NAN  # the last of the 6, KV head 0
        poisoned = {name: to_layout(rows, layout, name == "key_cache")}
        got = replace(case, **poisoned).run()
        assert got[5, :4].isnan().all()
        assert torch.equal(got[:, 4:], want[:, 4:]) and torch.equal(got[6:], want[6:])
        if name == "key_cache" or dtype == torch.float32 or device == "cpu":
            assert torch.equal(got[:5], want[:5])


def test_nan_stays_in_its_row(device, dtype, layout):
    case = make_case(device, dtype, [40, 130, 70], [2, 1, 3], layout=layout)
    want, want_lse = case.run_with_lse()
    case.query[3, 5, 7] = NAN
    got, lse = case.run_with_lse()
    assert got[3, 5].isnan().all() and lse[3, 5].isnan()
    keep = torch.ones(6, 8, dtype=torch.bool, device=device)
    keep[3, 5] = False
    assert torch.equal(got[keep], want[keep]) and torch.equal(lse[keep], want_lse[keep])


def test_two_runs_agree_bit_for_bit(device, dtype, layout):
    case = make_case(device, dtype, [1000, 3, 513, 77], [1, 3, 9, 70], heads=16, layout=layout)
    assert torch.equal(case.run(), case.run())


@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [2, 3, 9, 40]], ids=["decode", "several"])
def test_split_tokens_make_a_batch_invariant(device, dtype, layout, queries):
    """A sequence alone gives bit for bit what it gives between others."""
    lens = [3000, 45, 700, 1]
    queries = [min(pair) for pair in zip(queries, lens, strict=True)]
    case = make_case(device, dtype, lens, queries, heads=8, layout=layout)
    plain = replace(case, max_query_len=max(queries))
    case = plain.with_options(split_tokens=256)
    got = case.run()
    assert_right(plain, got)
    first = 0
    for seq, count in enumerate(queries):
        rows = slice(first, first + count)
        alone = replace(
            case,
            query=case.query[rows],
            block_tables=case.block_tables[seq : seq + 1],
            seq_lens=case.seq_lens[seq : seq + 1],
        ).with_options(query_start_loc=case.query.new_tensor([0, count], dtype=torch.int32))
        assert torch.equal(alone.run(), got[rows]), seq
        first += count


def test_early_pages_change_nothing(device, dtype, layout):
    case = make_case(device, dtype, [900, 3, 0, 77], heads=8, layout=layout)
    assert torch.equal(case.with_options(early_pages=True).run(), case.run())


@pytest.mark.parametrize("queries", [None, []], ids=["decode", "several"])
def test_empty_batch(device, dtype, layout, queries):
    case = make_case(device, dtype, [], queries, layout=layout)
    out, lse = case.run_with_lse()
    assert out.shape == (0, 8, 64) and lse.shape == (0, 8)


@pytest.mark.parametrize("queries", [None, [3, 90]], ids=["decode", "several"])
def test_empty_pool(device, layout, queries):
    """No blocks: no tokens to see."""
    case = make_case(device, torch.bfloat16, [0, 0], queries, layout=layout, spare_blocks=0)
    case.key_cache, case.value_cache = (
        torch.empty_like(cache, memory_format=torch.contiguous_format)
        for cache in (case.key_cache, case.value_cache)
    )
    check(case)


@pytest.mark.parametrize("queries", [[1, 0, 1, 0], [2, 0, 5, 0]], ids=["decode", "several"])
def test_sequences_without_query_tokens(device, layout, queries):
    """Padded rows of a CUDA graph; what lies in query past the last sequence stays as it is."""
    case = make_case(device, torch.float32, [30, 40, 300, 0], queries, layout=layout)
    case.block_tables[1] = -1
    check(case)
    more = replace(case, query=torch.cat([case.query, torch.randn_like(case.query)]))
    got = more.run()
    assert torch.equal(got[: sum(queries)], case.run())
    assert got[sum(queries) :].isnan().all()


# --- bad input


def bad_arguments(case: Case) -> list[tuple[str, dict[str, object], str]]:
    """(layout, changed arguments, the message after "paged_attention: ")."""
    q, key, value, device = case.query, case.key_cache, case.value_cache, case.query.device
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    rows = torch.zeros(9, 16, 2, 64, device=device)
    large = torch.zeros(1, 2, 512, 64, device=device)
    one, two = torch.ones(1, device=device), torch.ones(2, device=device)
    int8 = {"key_cache": rows.to(torch.int8), "value_cache": rows.to(torch.int8)}
    return [
        ("vllm", {"query": q.double()}, r"query: expected float32, float16 or bfloat16, got float"),
        ("vllm", {"query": q[0]}, r"query: expected shape \[num_tokens, num_heads, head_size\], "),
        ("vllm", {"query": q.transpose(1, 2).contiguous().transpose(1, 2)},
         r"query: expected contiguous heads \(only the stride of num_tokens is free\), got shape"),
        ("vllm", {"query": q[:, :7]}, r"query: expected num_heads to be a multiple of num_kv_heads "
                                      r"= 2 \(from key_cache\), got shape \[3, 7, 64\]$"),
        ("vllm", {"split_tokens": -1}, r"split_tokens: expected a number of tokens >= 0 \(0: as "
                                       r"suits the batch\), got -1$"),
        ("flat", {}, r'layout: expected "vllm", "NHD" or "HND", got "flat"$'),
        ("NHD", {}, r"key_cache: expected shape \[num_blocks, block_size, num_kv_heads, head_size\]"
                    r' \(from layout = "NHD"\), got shape \[.*; give layout="vllm", "NHD" or '),
        ("vllm", {"key_cache": rows, "value_cache": rows},
         r"key_cache: expected shape \[num_blocks, num_kv_heads, head_size / x, block_size, x\] "
         r'\(from layout = "vllm"\), got shape \[\d+, 16, 2, 64\]; give layout='),
        ("vllm", {"key_cache": key.half()}, r"key_cache: expected float32 \(from query\), "
                                            r"float8_e4m3fn, float8_e5m2 or int8, got float16$"),
        ("vllm", {"key_cache": key.to(torch.uint8)},
         r"key_cache: expected .* got uint8; say what its bytes are with "
         r"\.view\(torch\.float8_e4m3fn\)$"),
        ("vllm", {"value_cache": value.half()}, r"value_cache: expected float32 \(from key_cache\)"
                                                r", got float16$"),
        ("vllm", {"key_cache": key[:-1]}, r"key_cache: expected num_blocks = \d+ \(from value_cac"),
        ("vllm", {"value_cache": value.transpose(2, 3).contiguous().transpose(2, 3)},
         r"value_cache: expected the page of a head to be contiguous"),
        ("NHD", {"key_cache": rows[:, :12], "value_cache": rows[:, :12]},
         r"key_cache: expected a block_size of 1, 2, 4, 8, 16, 32, 64, 128 or 256, got 12 in sha"),
        ("HND", {"key_cache": large, "value_cache": large},
         r"key_cache: expected a block_size of .* got 512 in shape"),
        ("NHD", {"key_cache": rows[..., ::2], "value_cache": rows[..., ::2], "query": q[..., :32]},
         r"query: expected contiguous heads"),
        ("NHD", {"key_cache": rows.transpose(2, 3), "value_cache": rows.transpose(2, 3)},
         r"key_cache: expected head_size = 64 \(from query\) at dimension 3"),
        ("NHD", {"key_cache": rows.repeat(1, 1, 1, 2)[..., ::2], "value_cache": rows},
         r"key_cache: expected stride 1 in the last dimension"),
        ("vllm", {"k_scale": one}, r"k_scale: expected None: only 8-bit caches have scales, this "
                                   r"one is float32$"),
        ("NHD", {**int8, "k_scale": torch.ones(3, device=device)},
         r"k_scale: expected one element, or num_kv_heads = 2, got shape \[3\]$"),
        ("NHD", {**int8, "k_scale": two, "v_scale": one},
         r"v_scale: expected 2 elements \(from k_scale\), got shape \[1\]$"),
        ("NHD", {**int8, "v_scale": one.half()}, r"v_scale: expected float32, got float16"),
        ("vllm", {"block_tables": case.block_tables.long()},
         r"block_tables: expected int32, got int64; cast it with .int\(\)"),
        ("vllm", {"block_tables": case.block_tables[:2]},
         r"block_tables: expected num_seqs = num_tokens = 3 \(from query\) at dimension 0, got "),
        ("vllm", {"seq_lens": case.seq_lens.long()}, r"seq_lens: expected int32, got int64; cast"),
        ("vllm", {"seq_lens": case.seq_lens[:1], "query_start_loc": starts},
         r"seq_lens: expected num_seqs = 3 \(from query_start_loc\) at dimension 0"),
        ("vllm", {"query_start_loc": starts.long()}, r"query_start_loc: expected int32, got int64"),
        ("vllm", {"query_start_loc": starts[:0]}, r"query_start_loc: expected num_seqs \+ 1 ele"),
        ("vllm", {"query_start_loc": starts[:, None]}, r"query_start_loc: expected 1 dimensions"),
        ("vllm", {"alibi_slopes": two}, r"alibi_slopes: expected num_heads = 8 \(from query\) at "),
        ("vllm", {"sinks": q[0, :, 0].half()}, r"sinks: expected float32, got float16"),
        ("vllm", {"sinks": one}, r"sinks: expected num_heads = 8 \(from query\) at dimension 0"),
        ("vllm", {"sliding_window": -1}, r"sliding_window: expected a number of tokens >= 0"),
        ("vllm", {"window_right": -2, "causal": False},
         r"window_right: expected a number of tokens >= 0 \(-1: all\), got -2$"),
        ("vllm", {"softcap": -1.0}, r"softcap: expected a finite number >= 0 \(0: none\), got -1"),
        ("vllm", {"softcap": NAN}, r"softcap: expected a finite number >= 0"),
        ("vllm", {"max_query_len": -1}, r"max_query_len: expected a length >= 0, got -1$"),
        ("vllm", {"workspace": one}, r"workspace: expected uint8, got float32"),
        ("vllm", {"out": q[:2].clone()}, r"out: expected shape \[3, 8, 64\] \(from query\), got "),
        ("vllm", {"out": q.half()}, r"out: expected float32 \(from query\), got float16$"),
        ("vllm", {"out": q}, r"out and query overlap in memory$"),
        ("vllm", {"out": q[:1].clone().expand(3, 8, 64)}, r"out: is written, so its elements must"),
        ("vllm", {"out": q.new_zeros(3, 64, 8).transpose(1, 2)}, r"out: expected contiguous heads"),
    ]  # fmt: skip


def test_bad_input(device):
    case = make_case(device, torch.float32, [5, 40, 60])
    names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
    for layout, change, message in bad_arguments(case):
        arguments = {**dict(zip(names, case.tensors())), "layout": layout, **change}
        with raises(rf"^paged_attention: {message}"):
            vllm_kernels.paged_attention(**arguments)


def test_bad_head_size(device):
    for head_size, stored in ((24, None), (264, None), (60, None), (72, torch.int8)):
        rows = torch.zeros(4, 16, 2, head_size, device=device, dtype=stored or torch.float32)
        query = torch.zeros(1, 8, head_size, device=device)
        ints = torch.ones(1, 1, device=device, dtype=torch.int32)
        step = 8 if stored is None else 16
        with raises(
            rf"^paged_attention: query: expected a head_size of 32 to 256 in steps of {step} for a "
            rf".* cache, got {head_size}$"
        ):
            vllm_kernels.paged_attention(query, rows, rows, ints, ints[0], layout="NHD")


def test_bad_rows_on_the_cpu(layout):
    """Lengths, ids and starts are looked at before anything is computed; out stays as it was."""

    def broken(name: str, at: tuple[int, ...], value: int, **options: object) -> Case:
        case = make_case("cpu", torch.float32, [5, 40, 600], [2, 3, 1], layout=layout, **options)
        tensors = {
            "seq_lens": case.seq_lens,
            "block_tables": case.block_tables,
            "query_start_loc": case.options["query_start_loc"],
        }
        tensors[name][at] = value
        return case

    fits = r"expected a length that fits block_tables in \[0, 641\)$"
    block = r"expected a block in \[0, 45\)$"
    start = "expected a token of query, at most max_query_len past the one before, in"
    cases = [
        (broken("seq_lens", (1,), -3), rf"seq_lens\[1\] = -3: {fits}"),
        (broken("seq_lens", (2,), 641), rf"seq_lens\[2\] = 641: {fits}"),
        (broken("block_tables", (2, 37), -1), rf"block_tables\[2, 37\] = -1: {block}"),
        (broken("block_tables", (1, 2), 45), rf"block_tables\[1, 2\] = 45: {block}"),
        (broken("block_tables", (1, 1), 45, sliding_window=7),
         rf"block_tables\[1, 1\] = 45: {block}"),
        (broken("query_start_loc", (0,), -1), rf"query_start_loc\[0\] = -1: {start} \[0, 7\)$"),
        (broken("query_start_loc", (1,), 3), rf"query_start_loc\[2\] = 5: {start} \[3, 5\)$"),
        (broken("query_start_loc", (2,), 1), rf"query_start_loc\[2\] = 1: {start} \[2, 6\)$"),
        (broken("query_start_loc", (3,), 7), rf"query_start_loc\[3\] = 7: {start} \[5, 7\)$"),
    ]  # fmt: skip
    cases[6][0].max_query_len = 1
    cases[6] = (cases[6][0], rf"query_start_loc\[1\] = 3: {start} \[0, 2\)$")
    for case, message in cases:
        out = torch.zeros_like(case.query)
        with raises(rf"^paged_attention: {message}"):
            vllm_kernels.paged_attention(
                *case.tensors(), **case.options, max_query_len=case.max_query_len, out=out
            )
        assert not out.any()


def test_required_tensor_is_none(device):
    case = make_case(device, torch.float32, [5])
    with pytest.raises((RuntimeError, TypeError), match="key_cache"):
        vllm_kernels.paged_attention(*replace(case, key_cache=None).tensors())


def test_inference_only(device):
    case = make_case(device, torch.float32, [5])
    case.query.requires_grad_()
    with raises(r"^paged_attention: inference only: use torch.no_grad\(\)$"):
        case.run()
    with torch.no_grad():
        case.run()


# --- torch


# Schema and fake kernels do not depend on the dtype.
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
@pytest.mark.parametrize("queries", [None, [3, 4]], ids=["decode", "several"])
def test_opcheck_and_compile(device, dtype, layout, queries):
    case = make_case(device, dtype, [5, 40], queries, layout=layout, sinks=per_head(8, -1, 1))
    out, lse = case.run_with_lse()
    workspace = vllm_kernels.paged_attention_workspace(device)
    opcheck(
        "paged_attention", torch.empty_like(out), torch.empty_like(lse), *case.tensors(),
        case.options.get("query_start_loc"), 0.125, None, 0, 0.0, case.options["sinks"], None, None,
        layout, 4, workspace,
    )  # fmt: skip
    assert_compiles(lambda: case.run_with_lse())
    compiled = torch.compile(lambda: case.run_with_lse(), fullgraph=True, backend="aot_eager")()
    assert torch.equal(compiled[0], out) and torch.equal(compiled[1], lse)


@pytest.mark.parametrize("queries", [None, [1, 3, 20, 0, 90]], ids=["decode", "several"])
def test_threads_give_right_results(layout, queries):
    """Work is cut by the number of threads; every cut must be right."""
    before = torch.get_num_threads()
    case = make_case(
        "cpu", torch.float32, [2000, 0, 129, 1, 400], queries, heads=4, layout=layout,
        sinks=per_head(4, -1, 1),
    )  # fmt: skip
    try:
        for threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(threads)
            assert_right(case, *case.run_with_lse())
    finally:
        torch.set_num_threads(before)
