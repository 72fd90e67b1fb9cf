"""Classes and texts of errors: each is a RuntimeError, and blames the right argument."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import vllm_kernels as vk
from vllm_kernels import kv_cache
from vllm_kernels.kv_cache.tensors import KVCache, KVShape
from vllm_kernels.ops import _refusals

QUERY = torch.zeros(2, 4, 64)
PAGES = torch.zeros(4, 16, 2, 64)
TABLE = torch.zeros(2, 1, dtype=torch.int32)
LENS = torch.tensor([3, 4], dtype=torch.int32)
STARTS = torch.tensor([0, 2], dtype=torch.int32)
WEIGHT = torch.ones(64)
SHAPE = KVShape(1, 1, 64, torch.float32)


def attend(table: object = TABLE, query: object = QUERY, **options: object) -> object:
    return vk.paged_attention(query, PAGES, PAGES, table, LENS, **{"layout": "NHD", **options})


def like_vllm(**options: object) -> None:
    keys, one = torch.zeros(4, 2, 16, 16, 4), torch.ones(1)
    vk.paged_attention_v1(
        QUERY.clone(), QUERY, keys, torch.zeros(4, 2, 64, 16), 2, 0.1, TABLE, LENS, 16, 16, None,
        "auto", one, one, **options,
    )  # fmt: skip


def varlen(**options: object) -> object:
    return vk.varlen_attention(QUERY, QUERY, QUERY, STARTS, STARTS, **options)


def sparq(query: object = QUERY, **options: object) -> object:
    return vk.sparq_attention(
        query, PAGES, PAGES, TABLE, LENS, **{"r": 16, "k": 16, "layout": "NHD", **options}
    )


def cascade(
    query: object = QUERY,
    table: object = TABLE,
    common: object = 1,
    values: object = PAGES,
    lens: object = LENS,
    **options: object,
) -> object:
    return vk.cascade_attention(
        query, PAGES, values, table, lens, common, **{"layout": "NHD", **options}
    )


def plan(table: object = TABLE, lens: object = LENS, **options: object) -> object:
    sizes = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2}
    return vk.cascade_plan(table, lens, 1, **sizes, **options)


KINDS = {
    "list": (lambda: attend([[0]]), "paged_attention: block_tables: expected a tensor, got list"),
    "numpy": (lambda: attend(np.zeros(2)), "block_tables: expected a tensor, got ndarray"),
    "None": (lambda: attend(None), "paged_attention: block_tables: expected a tensor, got None"),
    "str": (lambda: attend("0"), "paged_attention: block_tables: expected a tensor, got str"),
    "query": (lambda: attend(query=[1]), "paged_attention: query: expected a tensor, got list"),
    "out": (lambda: attend(out=[1]), "paged_attention: out: expected a tensor, got list"),
    "no int": (lambda: attend(sliding_window=None), "sliding_window: expected an int, got None"),
    "float": (lambda: attend(sliding_window=2.5), "sliding_window: expected an int, got 2.5"),
    "huge": (lambda: attend(sliding_window=2**70), "sliding_window: expected an int, got 11805"),
    "no str": (lambda: attend(layout=3), "paged_attention: layout: expected a str, got 3"),
    "no bool": (lambda: attend(kv_ready="1"), "kv_ready: expected a bool, got '1'"),
    "scale": (
        lambda: attend(k_scale=1.0),
        "k_scale: expected a float32 tensor of one element or [num_kv_heads], got 1.0",
    ),
    "an lse": (lambda: attend(return_lse=STARTS), "return_lse: expected a bool, got a tensor"),
    "varlen": (lambda: varlen(return_lse=STARTS), "return_lse: expected a bool, got a tensor"),
    "sparq": (lambda: sparq(return_lse=STARTS), "sparq_attention: return_lse: expected a bool"),
    "sparq query": (
        lambda: sparq(QUERY.numpy()),
        "sparq_attention: query: expected a tensor, got ndarray",
    ),
    "sparq mean": (
        lambda: sparq(QUERY.numpy(), mean_value=QUERY[:, :2]),
        "query: expected a tensor, got nda",
    ),
    "window": (lambda: varlen(window=4), "window: expected (left, right), got 4"),
    "short window": (
        lambda: varlen(window=(4,), causal=False),
        "varlen_attention: window: expected (left, right), got (4,)",
    ),
    "short window of a causal call": (
        lambda: varlen(window=(4,)),
        "varlen_attention: window: expected (left, right), got (4,)",
    ),
    "long window": (
        lambda: varlen(window=(1, 2, 3), causal=False),
        "varlen_attention: window: expected (left, right), got (1, 2, 3)",
    ),
    "long window of a causal call": (
        lambda: varlen(window=(1, 2, 3)),
        "varlen_attention: window: expected (left, right), got (1, 2, 3)",
    ),
    "by position": (
        lambda: vk.rms_norm(QUERY, QUERY, [1], 1e-6),
        "rms_norm: weight: expected a tensor, got list",
    ),
    "no float": (
        lambda: vk.rms_norm(QUERY, QUERY, WEIGHT, "x"),
        "rms_norm: epsilon: expected a float, got 'x'",
    ),
    "no list": (
        lambda: vk.copy_blocks([QUERY], [1], STARTS),
        "copy_blocks: value_caches: expected a list of tensors, got [1]",
    ),
    "no number of tensors": (
        lambda: vk.copy_blocks_mla(None, STARTS),
        "copy_blocks_mla: kv_caches: expected a list of tensors, one a layer, got NoneType",
    ),
    "a tensor for a float": (
        lambda: vk.rms_norm(QUERY, QUERY, WEIGHT, WEIGHT),
        "rms_norm: epsilon: expected a float, got a tensor",
    ),
    "no float64": (
        lambda: vk.rms_norm(QUERY, QUERY, WEIGHT, 10**400),
        "rms_norm: epsilon: expected a float, got 1000",
    ),
    "no stride": (
        lambda: like_vllm(blocksparse_vert_stride=None),
        "paged_attention_v1: blocksparse_vert_stride: expected an int, got None",
    ),
    "cascade": (lambda: cascade(table=[[1]]), "block_tables: expected a tensor, got list"),
    "cascade query": (lambda: cascade(query=None), "query: expected a tensor, got None"),
    "cascade values": (
        lambda: cascade(values=[1]),
        "cascade_attention: value_cache: expected a tensor, got list",
    ),
    "cascade lengths": (
        lambda: cascade(lens=[3, 4]),
        "cascade_attention: seq_lens: expected a tensor, got list",
    ),
    "cascade starts": (
        lambda: cascade(query_start_loc=[0, 2]),
        "cascade_attention: query_start_loc: expected a tensor, got list",
    ),
    "plan": (lambda: plan([[0]]), "cascade_plan: block_tables: expected a tensor, got list"),
    "plan lengths": (
        lambda: plan(lens=[3, 4]),
        "cascade_plan: seq_lens: expected a tensor, got list",
    ),
    "plan starts": (
        lambda: plan(query_start_loc=[0]),
        "cascade_plan: query_start_loc: expected a tensor, got list",
    ),
    "fp8": (
        lambda: vk.scaled_fp8_quant([1]),
        "scaled_fp8_quant: input: expected a tensor, got list",
    ),
    "int8": (
        lambda: vk.scaled_int8_quant([1]),
        "scaled_int8_quant: input: expected a tensor, got list",
    ),
    "layers": (
        lambda: KVShape("1", 1, 64, torch.float32),
        "KVShape: num_layers: expected an int, got '1'",
    ),
    "head size": (
        lambda: KVShape(1, 1, "64", torch.float32),
        "KVShape: head_size: expected an int, got '64'",
    ),
    "blocks": (lambda: KVCache(SHAPE, "4"), "KVCache: num_blocks: expected an int, got '4'"),
    "bytes": (
        lambda: KVCache.from_bytes(SHAPE, "10"),
        "KVCache: num_bytes: expected an int, got '10'",
    ),
    "no count": (lambda: cascade(common=1.5), "num_common_blocks: expected an int, a tensor or a"),
    "dtype": (
        lambda: KVShape(1, 1, 64, "float32"),
        "KVShape: dtype: expected a torch.dtype, got the str 'float32'",
    ),
    "compat": (
        lambda: vk_flash([1]),
        "flash_attn_func: q: expected a tensor, got list",
    ),
}


def vk_flash(query: object) -> object:
    from vllm_kernels.compat.flash_attn import flash_attn_func

    return flash_attn_func(query, QUERY[None], QUERY[None])


@pytest.mark.parametrize("call, text", KINDS.values(), ids=KINDS)
def test_wrong_kind(call: Callable[[], object], text: str):
    with pytest.raises(vk.InvalidType) as raised:
        call()
    assert text in str(raised.value) and len(str(raised.value)) < 120
    assert isinstance(raised.value, TypeError) and isinstance(raised.value, RuntimeError)


def test_errors_of_a_cascade_have_its_name():
    for options, message in (
        ({"table": TABLE.long()}, "block_tables: expected int32, got int64"),
        ({"table": TABLE.long(), "common": 0}, "block_tables: expected int32, got int64"),
        ({"layout": "nhd"}, 'layout: expected "vllm", "NHD" or "HND", got "nhd"'),
        ({"query": QUERY[0]}, "query: expected shape "),
        ({"out": QUERY.half()}, "out: expected float32"),
    ):
        with pytest.raises(vk.InvalidArgument, match=f"^cascade_attention: {message}"):
            cascade(**options)
    with pytest.raises(vk.InvalidArgument, match=r"^cascade_plan: block_tables: expected shape "):
        plan(TABLE[0])


def test_wrong_value():
    with pytest.raises(ValueError, match=r'layout: expected "vllm", "NHD" or "HND", got "nhd"'):
        attend(layout="nhd")
    with pytest.raises(ValueError, match=r"^KVShape: layout: expected vllm or NHD or HND, got 'nh"):
        KVShape(1, 1, 64, torch.float32, layout="nhd")
    with pytest.raises(vk.InvalidArgument, match=r"inference only") as raised:
        vk.rms_norm(QUERY.clone(), QUERY.clone().requires_grad_(), WEIGHT, 1e-6)
    assert str(raised.value).startswith("rms_norm: input: requires grad")


@pytest.mark.parametrize(
    ("query", "kind"),
    [
        (QUERY.to_sparse(), "torch.sparse_coo"),
        (torch.nested.nested_tensor([QUERY[0], QUERY[1]]), "a nested one"),
        (torch.quantize_per_tensor(QUERY, 0.1, 3, torch.quint8), "a quantized one"),
    ],
)
def test_what_is_no_dense_tensor(query: torch.Tensor, kind: str):
    for call in (attend, lambda query: vk.rms_norm(QUERY.clone(), query, WEIGHT, 1e-6)):
        with pytest.raises(vk.Unsupported, match=rf": expected a dense tensor, got {kind}$"):
            call(query=query)


def test_a_nested_tree():
    tree = torch.nested.nested_tensor([TABLE[0], TABLE[1]])
    with pytest.raises(vk.Unsupported, match=r"tree_mask: expected a dense tensor, got a nested"):
        attend(tree_mask=tree)


def test_a_negated_view():
    """torch makes a tensor of one that is read, and cannot write one."""
    negated = torch._neg_view(torch.ones(4, 64))
    out = torch.empty(4, 64)
    vk.rms_norm(out, negated, WEIGHT, 1e-6)
    torch.testing.assert_close(out, torch.full((4, 64), -1.0))
    with pytest.raises(vk.Unsupported, match=r"^rms_norm: out: .* a negated view; call .resolve"):
        vk.rms_norm(negated, torch.ones(4, 64), WEIGHT, 1e-6)


def test_a_query_without_dimensions():
    shape = r"query: expected shape \[num_tokens, num_heads, head_size\], got shape \[\]$"
    with pytest.raises(vk.InvalidArgument, match=rf"^paged_attention: {shape}"):
        attend(query=torch.tensor(1.0))
    with pytest.raises(vk.InvalidArgument, match=rf"^varlen_attention: {shape}"):
        vk.varlen_attention(torch.tensor(1.0), QUERY, QUERY, STARTS, STARTS)


def test_the_one_that_requires_grad_is_named():
    with pytest.raises(vk.InvalidArgument, match=r"^paged_attention: sinks: requires grad"):
        attend(sinks=torch.zeros(4, requires_grad=True))
    caches = [torch.zeros(2, 4), torch.zeros(2, 4, requires_grad=True)]
    with pytest.raises(vk.InvalidArgument, match=r"^copy_blocks: value_caches: requires grad"):
        vk.copy_blocks(caches[:1], caches[1:], torch.tensor([[0, 1]]))


def test_float_ids_get_no_advice_to_cast():
    with pytest.raises(ValueError, match=r"block_tables: expected int32, got float32$"):
        attend(TABLE.float())
    with pytest.raises(ValueError, match=r"block_tables: expected int32, got int64; cast it"):
        attend(TABLE.long())


def test_bad_index():
    with pytest.raises(IndexError, match=r"^paged_attention: block_tables\[0, 0\] = 9: expected"):
        attend(TABLE + 9)
    assert issubclass(vk.InvalidIndex, vk.Error)


def test_query_on_another_device_is_blamed():
    with pytest.raises(ValueError, match=r"^paged_attention: query: expected a tensor on cpu \(fr"):
        attend(query=QUERY.to("meta"))
    with pytest.raises(ValueError, match=r"^paged_attention: out: expected a tensor on cpu"):
        attend(out=QUERY.to("meta"))


def test_unsupported():
    with pytest.raises(NotImplementedError, match=r"^paged_attention: query: expected a dense"):
        attend(query=QUERY.to_sparse())
    with pytest.raises(NotImplementedError, match=r"^KVShape: head size: expected a multiple"):
        KVShape(1, 1, 20, torch.float32)
    assert issubclass(vk.Unsupported, vk.Error)


def test_other_errors_stay_as_they_are():
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert _refusals.refused("rms_norm", error, {}) is error
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert _refusals.refused("rms_norm", error, {}) is error


def test_what_the_gpu_refuses_is_no_bad_argument():
    for text, kind in (
        ("vllm_kernels: built for sm_90a, this GPU is sm_89: build with", vk.Unsupported),
        ("rms_norm: kernel launch refused: invalid configuration argument", vk.Error),
    ):
        error = _refusals.refused("rms_norm", RuntimeError(text), {"input": QUERY})
        assert type(error) is kind and str(error) == text


def test_a_renamed_error_keeps_its_text():
    for text, want in (("op: q: bad", "caller: qkv: bad"), ("no name", "caller: no name")):
        error = _refusals.renamed(vk.InvalidArgument(text), "caller", {"q": "qkv"})
        assert type(error) is vk.InvalidArgument and str(error) == want


def test_a_cache_that_does_not_fit_says_how_much():
    shape = KVShape(1, 64, 256, torch.float32)
    with pytest.raises(MemoryError, match=r"KVCache: .* blocks: need [\d,]+ bytes on cpu, free"):
        KVCache(shape, 10**9)
    assert issubclass(vk.OutOfMemory, vk.Error)


def test_the_managers_errors_have_the_base():
    manager = kv_cache.KVCacheManager(8, 16, num_host_blocks=4)
    for call in (manager.swap_out, manager.swap_in):
        with pytest.raises(vk.Error, match=rf"^{call.__name__}: .* got unknown id 99"):
            call([99])
    with pytest.raises(vk.InvalidArgument) as raised:
        kv_cache.KVCacheManager(0, 16)
    assert isinstance(raised.value, kv_cache.InvalidArgument | ValueError)
    assert issubclass(kv_cache.KVCacheError, vk.Error)


def test_errors_under_compile_are_the_same():
    compiled = torch.compile(attend, backend="eager", dynamic=False)
    assert torch.equal(compiled(), attend())
    with pytest.raises(RuntimeError, match="block_tables"):
        compiled(TABLE.to("meta"))
