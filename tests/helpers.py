"""What the op tests share: error bounds, graph capture, compile and opcheck calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

# Distance between neighbouring values at 1.0.
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Below this magnitude a dtype's values are evenly spaced (float16 is denormal there).
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}


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
    """Without the schema's test, whose products torch has not for float8 tensors."""
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    call = getattr(torch.ops.vllm_kernels, op).default
    torch.library.opcheck(call, args, test_utils=kinds)


def assert_compiles(call: Callable[..., object], *args: object) -> None:
    """Traces under torch.compile(fullgraph=True): fails where a fake kernel is missing."""
    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend="aot_eager")(*args)


def assert_graph_replays(
    call: Callable[[], object],
    refill: Callable[[], object],
    out: Tensor,
    want: Callable[[], Tensor],
) -> None:
    """Captures `call` in a CUDA graph, then replays it on other inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    refill()
    expected = want()
    out.fill_(float("nan")) if out.is_floating_point() else out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected), "a replayed graph gave another result than a plain call"


def raises(message: str) -> pytest.RaisesContext:  # type: ignore[name-defined]
    """The op refuses with exactly this text (a regular expression)."""
    return pytest.raises(RuntimeError, match=message)
