"""Which kernel a call runs, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from .._ops import library_ops
from ..errors import InvalidArgument
from .fused_decode_attention import fused_decode_attention
from .paged_attention import paged_attention
from .paged_attention_v1_v2 import paged_attention_v1, paged_attention_v2
from .sparq import sparq_attention
from .varlen_attention import varlen_attention

__all__ = ["explain"]

_EXPLAINED = {
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    varlen_attention,
    fused_decode_attention,
    sparq_attention,
}
_TEXT_BYTES = 1 << 14


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def explain(op: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Says which kernel ``op(*args, **kwargs)`` runs on its device, and why no faster one.

    Every argument is checked as by the call itself. Nothing is launched and nothing is written.
    With ``VLLM_KERNELS_LOG=1`` in the environment every new choice is printed to stderr instead,
    while the calls run.

    Args:
        op: paged_attention, paged_attention_v1, paged_attention_v2, varlen_attention,
            fused_decode_attention or sparq_attention.
        args, kwargs: the op's arguments.

    Returns:
        A line a launch, after the op whose kernels run (v1, v2 and varlen_attention run
        paged_attention's): the kernel, its instantiation, grid, warps, pipeline stages and bytes of
        shared memory. After "because" comes what each faster kernel lacked, for example an
        unaligned stride.

    Raises:
        ValueError: for another function, or without a tensor.
        RuntimeError: as the op.

    Example:
        >>> query, cache = torch.randn(1, 2, 64), torch.zeros(1, 16, 2, 64)
        >>> table = length = torch.ones(1, dtype=torch.int32)
        >>> print(
        ...     vllm_kernels.explain(
        ...         vllm_kernels.paged_attention, query, cache, cache, table[None] - 1, length,
        ...         layout="NHD",
        ...     )
        ... )
        paged_attention: ...
    """
    if op not in _EXPLAINED:
        names = ", ".join(sorted(known.__name__ for known in _EXPLAINED))
        raise InvalidArgument(f"explain: op: expected one of {names}, got {op!r}")
    on = next(_tensors([*args, *kwargs.values()]), None)
    if on is None:
        raise InvalidArgument(f"explain: expected tensors among the arguments of {op.__name__}")
    text = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    library_ops.start_explaining.default(on)
    try:
        op(*args, **kwargs)
    finally:
        library_ops.take_explanation.default(on, text)
    return bytes(text.tolist()).rstrip(b"\0").decode()
