"""What the op tests share: error bounds, graph capture, compile and opcheck calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import vllm_kernels

LAYOUTS = ["vllm", "NHD", "HND"]  # of a paged cache
# Distance between neighbouring values at 1.0.
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Below this magnitude a dtype's values are evenly spaced (float16 is denormal there).
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_cuda_library = pytest.mark.skipif(
    not (torch.cuda.is_available() and vllm_kernels.cuda_loaded),
    reason="needs a GPU and the CUDA library",
)


def ints(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def bits(x: Tensor) -> Tensor:
    """The elements as integers, so that NaNs compare, too."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])


def to_layout(rows: Tensor, layout: str, is_key: bool) -> Tensor:
    """[num_blocks, block_size, num_kv_heads, head_size] -> the cache tensor, contiguous."""
    if layout == "NHD":
        return rows.contiguous()
    if layout == "HND":
        return rows.transpose(1, 2).contiguous()
    if is_key:
        chunks = rows.unflatten(-1, (-1, 16 // rows.dtype.itemsize))
        return chunks.permute(0, 2, 3, 1, 4).contiguous()
    return rows.permute(0, 2, 3, 1).contiguous()


def assert_close(got: Tensor, want: Tensor, ulps: float, floor: float = 0.0) -> None:
    """|got - want| <= ulps units in the last place of want's value in got's dtype, plus floor."""
    assert got.shape == want.shape, f"shape {list(got.shape)}, expected {list(want.shape)}"
    assert not torch.isnan(got.float()).any(), "NaN in the result"
    want64 = want.double().to(got.device)
    magnitude = want64.abs().clamp_min(SMALLEST[got.dtype])
    ulp = torch.exp2(torch.floor(torch.log2(magnitude))) * EPSILON[got.dtype]
    error = (got.double() - want64).abs()
    worst = ((error - floor) / ulp).max().item() if got.numel() else 0.0
    assert worst <= ulps, f"off by {worst:.2f} ulp (allowed {ulps}), max |error| {error.max():.3e}"


def opcheck(op: str, *args: object, **kwargs: object) -> None:
    """torch's own checks: schema, declared mutation, fake kernel, autograd registration."""
    torch.library.opcheck(getattr(torch.ops.vllm_kernels, op).default, args, kwargs)


def opcheck_float8(op: str, *args: object) -> None:
    """As opcheck. In place of torch's test of the schema, for which float8 tensors lack a product:
    a call writes what the schema calls written and nothing else, and returns nothing given."""
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    call = getattr(torch.ops.vllm_kernels, op).default
    torch.library.opcheck(call, args, test_utils=kinds)
    given = [x.clone() if isinstance(x, Tensor) else x for x in args]
    returned = call(*given)
    for argument, x, before in zip(call._schema.arguments, given, args):
        if isinstance(x, Tensor) and not (argument.alias_info and argument.alias_info.is_write):
            assert torch.equal(bits(x), bits(before)), f"{op} writes {argument.name}"
    results = returned if isinstance(returned, (tuple, list)) else (returned,)
    pointers = {x.data_ptr() for x in given if isinstance(x, Tensor) and x.numel()}
    assert not any(isinstance(x, Tensor) and x.data_ptr() in pointers for x in results)


def assert_compiles(call: Callable[..., object], *args: object) -> None:
    """Traces under torch.compile(fullgraph=True): fails where a fake kernel is missing."""
    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend="aot_eager")(*args)


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `call`, which ran once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def assert_graph_replays(
    call: Callable[[], object],
    refill: Callable[[], object],
    out: Tensor,
    want: Callable[[], Tensor],
) -> None:
    """Captures `call` in a CUDA graph, then replays it on other inputs."""
    graph = capture(call)
    refill()
    expected = want()
    out.fill_(float("nan")) if out.is_floating_point() else out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected), "a replayed graph gave another result than a plain call"


def raises(message: str) -> pytest.RaisesContext:  # type: ignore[name-defined]
    """The op refuses with exactly this text (a regular expression)."""
    return pytest.raises(RuntimeError, match=message)
