"""Activations in 8 bits, with a scale that is given or computed.

An element stands for ``(element - azp) * scale``; azp is the zero point, 0 if there is none. The
arithmetic is float32. It rounds to nearest even and saturates.

===================  ======================================  =====================================
result               element                                 computed scale
===================  ======================================  =====================================
e4m3, of the tensor  ``e4m3(x * (1 / scale))``               ``max(magnitude / 448, 2**-9 / 448)``
e4m3, of a row       ``e4m3(x / scale)``                     the same, of the row
int8, given          ``int8(x / scale)``                     none
int8, of a row       ``int8(x * (127 / magnitude))``         ``magnitude / 127``
int8, zero points    ``int8(round(x * (1 / scale)) + azp)``  below
===================  ======================================  =====================================

Computed zero points are ``round(-128 - min / scale)``, with the scale
``max((max - min) / 255, magnitude * 2**-21)``. A NaN or infinity in a row or tensor
makes the computed scale NaN or infinite. Its int8 elements are then 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import Error, InvalidArgument
from ._common import calls, check_tensors

__all__ = [
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_scaled_int8_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "static_scaled_fp8_quant",
    "static_scaled_int8_quant",
]

call = calls(name for name in __all__ if not name.startswith("scaled"))


def static_scaled_fp8_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """``out = e4m3(input * (1 / scale))``, with one given scale.

    Args:
        out: [..., width] float8_e4m3fn, written. Rows may be strided.
        input: [..., width], float32, float16 or bfloat16. Rows may be strided.
        scale: float32 of one element, finite and > 0, on the device of ``input``.

    Raises:
        InvalidArgument: for a dtype or shape other than above, or tensors that overlap.
        InvalidIndex: for a scale that is not finite or not above 0. On CUDA only with
            VLLM_KERNELS_CHECK=1.

    Example:
        >>> x = torch.tensor([[1.0, -3.0, 2000.0]])
        >>> out = torch.empty(1, 3, dtype=torch.float8_e4m3fn)
        >>> vllm_kernels.static_scaled_fp8_quant(out, x, torch.tensor([0.5]))
        >>> out.float()
        tensor([[  2.,  -6., 448.]])

    Source: ``torch.ops._C.static_scaled_fp8_quant`` of vLLM.
    """
    call.static_scaled_fp8_quant(out, input, scale)


def dynamic_scaled_fp8_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """:func:`static_scaled_fp8_quant` with the scale computed from the whole tensor.

    ``scale = max(max|input| / 448, 2**-9 / 448)``. CUDA takes three launches and reads the input
    twice.

    Args:
        out, input: as :func:`static_scaled_fp8_quant`.
        scale: float32 of one element, written, unless ``input`` is empty.

    Raises:
        InvalidArgument: for a dtype or shape other than above, or tensors that overlap.

    Example:
        >>> x = torch.tensor([[1.0, -3.0], [0.0, 896.0]])
        >>> out, scale = torch.empty(2, 2, dtype=torch.float8_e4m3fn), torch.empty(1)
        >>> vllm_kernels.dynamic_scaled_fp8_quant(out, x, scale)
        >>> scale.item(), out.float().tolist()
        (2.0, [[0.5, -1.5], [0.0, 448.0]])

    Source: ``torch.ops._C.dynamic_scaled_fp8_quant`` of vLLM. Its maximum skips NaN.
    """
    call.dynamic_scaled_fp8_quant(out, input, scale)


def dynamic_per_token_scaled_fp8_quant(
    out: Tensor, input: Tensor, scales: Tensor, scale_ub: Tensor | None = None
) -> None:
    """``out = e4m3(input / scale)`` with a scale computed for each row.

    Args:
        out, input: as :func:`static_scaled_fp8_quant`.
        scales: float32, contiguous, one element per row, such as [rows, 1]; written.
        scale_ub: float32 of one element: a row's magnitude counts as at most this, and larger
            elements saturate.

    Raises:
        InvalidArgument: for a dtype or shape other than above, or tensors that overlap.
        InvalidIndex: for a ``scale_ub`` that is not finite or not above 0. On CUDA only with
            VLLM_KERNELS_CHECK=1.

    Example:
        >>> x = torch.tensor([[1.0, -448.0], [0.5, 224.0]])
        >>> out, scales = torch.empty(2, 2, dtype=torch.float8_e4m3fn), torch.empty(2, 1)
        >>> vllm_kernels.dynamic_per_token_scaled_fp8_quant(out, x, scales)
        >>> scales.flatten().tolist(), out.float().tolist()
        ([1.0, 0.5], [[1.0, -448.0], [1.0, 448.0]])

    Source: ``torch.ops._C.dynamic_per_token_scaled_fp8_quant`` of vLLM. Its maximum skips NaN.
    """
    call.dynamic_per_token_scaled_fp8_quant(out, input, scales, scale_ub)


def static_scaled_int8_quant(
    out: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None = None
) -> None:
    """``out = int8(input / scale)``, or ``int8(round(input * (1 / scale)) + azp)``.

    Args:
        out: [..., width] int8, written. Rows may be strided.
        input: [..., width], float32, float16 or bfloat16. Rows may be strided.
        scale: float32 of one element, finite and > 0, on the device of ``input``.
        azp: int32 of one element, the zero point, within 2**21 + 128 of 0.

    Raises:
        InvalidArgument: for a dtype or shape other than above, or tensors that overlap.
        InvalidIndex: for a scale that is not finite or not above 0, or an ``azp`` out of range. On
            CUDA only with VLLM_KERNELS_CHECK=1.

    Example:
        >>> x = torch.tensor([[0.0, 1.0, -300.0]])
        >>> out = torch.empty(1, 3, dtype=torch.int8)
        >>> vllm_kernels.static_scaled_int8_quant(out, x, torch.tensor([0.5]))
        >>> out.tolist()
        [[0, 2, -128]]

    Source: ``torch.ops._C.static_scaled_int8_quant`` of vLLM.
    """
    call.static_scaled_int8_quant(out, input, scale, azp)


def dynamic_scaled_int8_quant(
    out: Tensor, input: Tensor, scales: Tensor, azp: Tensor | None = None
) -> None:
    """Each row in int8 with a scale of its own, and with ``azp`` a zero point of its own.

    Args:
        out, input: as :func:`static_scaled_int8_quant`.
        scales: float32, contiguous, one element per row, such as [rows, 1]; written.
        azp: int32, contiguous, one element per row, written; or None for symmetric rows.

    Raises:
        InvalidArgument: for a dtype or shape other than above, or tensors that overlap.

    Example:
        >>> x = torch.tensor([[0.0, 127.0, 255.0]])
        >>> out, scales = torch.empty(1, 3, dtype=torch.int8), torch.empty(1, 1)
        >>> azp = torch.empty(1, 1, dtype=torch.int32)
        >>> vllm_kernels.dynamic_scaled_int8_quant(out, x, scales, azp)
        >>> scales.item(), azp.item(), out.tolist()
        (1.0, -128, [[-128, -1, 127]])

    Source: ``torch.ops._C.dynamic_scaled_int8_quant`` of vLLM. Its extremes skip NaN, and a row of
    equal elements has scale 0 there.
    """
    call.dynamic_scaled_int8_quant(out, input, scales, azp)


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes to e4m3, and allocates what is not given.

    Args:
        input: [..., width], float32, float16 or bfloat16. Rows may be strided.
        scale: float32 of one element, finite and > 0: :func:`static_scaled_fp8_quant`. None: the
            scale is computed.
        num_token_padding: the least number of rows of the result, for ``input`` [rows, width]. The
            added rows, and their scales, are not initialized.
        scale_ub: bounds the magnitude of a row; used with ``use_per_token_if_dynamic`` only.
        use_per_token_if_dynamic: whether a computed scale is one per row
            (:func:`dynamic_per_token_scaled_fp8_quant`) or of the tensor
            (:func:`dynamic_scaled_fp8_quant`).
        output: as ``input``, float8_e4m3fn, written; not together with ``num_token_padding``.

    Returns:
        The e4m3 tensor, and ``scale`` or the computed scales: [1], or [rows, 1].

    Raises:
        InvalidArgument: for a dtype or shape other than above, or ``output`` with
            ``num_token_padding``.
        InvalidIndex: for a given scale that is not finite or not above 0. On CUDA only with
            VLLM_KERNELS_CHECK=1.

    Example:
        >>> x = torch.tensor([[1.0, -448.0], [0.5, 224.0]])
        >>> elements, scales = vllm_kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        >>> torch.equal(elements.float() * scales, x)
        True

    Source: ``vllm._custom_ops.scaled_fp8_quant``, without its ``group_shape``.
    """
    check_tensors("scaled_fp8_quant", input=input)
    rows, padded = input.shape[:-1].numel(), input.shape
    if num_token_padding:
        if output is not None:
            raise InvalidArgument("scaled_fp8_quant: output: expected None with num_token_padding")
        if input.dim() != 2:
            raise InvalidArgument(
                "scaled_fp8_quant: input: expected 2 dimensions with num_token_padding, got shape "
                f"{list(input.shape)}"
            )
        padded = torch.Size((max(num_token_padding, rows), input.shape[1]))
    if output is None:
        output = torch.empty(padded, device=input.device, dtype=torch.float8_e4m3fn)
    out = output[:rows] if num_token_padding else output
    if scale is not None:
        _run("scaled_fp8_quant", static_scaled_fp8_quant, out, input, scale)
    elif use_per_token_if_dynamic:
        scale = input.new_empty((padded[:-1].numel(), 1), dtype=torch.float32)
        quantize = dynamic_per_token_scaled_fp8_quant
        _run("scaled_fp8_quant", quantize, out, input, scale[:rows], scale_ub)
    else:
        scale = input.new_empty(1, dtype=torch.float32)
        _run("scaled_fp8_quant", dynamic_scaled_fp8_quant, out, input, scale)
    return output, scale


def scaled_int8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    symmetric: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantizes to int8, and allocates the results.

    Args:
        input: [..., width], float32, float16 or bfloat16. Rows may be strided.
        scale: float32 of one element, finite and > 0: :func:`static_scaled_int8_quant`. None:
            :func:`dynamic_scaled_int8_quant`, with a scale per row.
        azp: the zero point of a given scale, int32 of one element; None if ``symmetric``.
        symmetric: whether there are no zero points.

    Returns:
        The int8 tensor; ``scale`` or the computed scales [rows, 1]; ``azp``, or the computed zero
        points [rows, 1] int32, or None.

    Raises:
        InvalidArgument: for a dtype or shape other than above, an ``azp`` that ``symmetric``
            contradicts, or an ``azp`` without ``scale``.
        InvalidIndex: for a given scale that is not finite or not above 0, or an ``azp`` out of
            range. On CUDA only with VLLM_KERNELS_CHECK=1.

    Example:
        >>> x = torch.tensor([[0.0, 127.0, 255.0]])
        >>> elements, scales, azp = vllm_kernels.scaled_int8_quant(x, symmetric=False)
        >>> ((elements - azp) * scales).tolist()
        [[0.0, 127.0, 255.0]]

    Source: ``vllm._custom_ops.scaled_int8_quant``.
    """
    check_tensors("scaled_int8_quant", input=input)
    if azp is not None and (scale is None or symmetric):
        without = "scale" if scale is None else "symmetric=False"
        raise InvalidArgument(f"scaled_int8_quant: azp: expected None without {without}")
    out = torch.empty(input.shape, device=input.device, dtype=torch.int8)
    if scale is not None:
        if azp is None and not symmetric:
            raise InvalidArgument(
                "scaled_int8_quant: azp: expected a tensor for symmetric=False with a scale, "
                "got None"
            )
        _run("scaled_int8_quant", static_scaled_int8_quant, out, input, scale, azp)
        return out, scale, azp
    rows = input.shape[:-1].numel()
    scale = input.new_empty((rows, 1), dtype=torch.float32)
    if not symmetric:
        azp = input.new_empty((rows, 1), dtype=torch.int32)
    _run("scaled_int8_quant", dynamic_scaled_int8_quant, out, input, scale, azp)
    return out, scale, azp


def _run(function: str, op: Callable[..., None], *arguments: object) -> None:
    """Calls an op. Its errors get the name of the function and of its arguments."""
    try:
        op(*arguments)
    except Error as error:
        text = str(error).removeprefix(op.__name__)
        text = text.replace(": out:", ": output:", 1)
        raise type(error)(function + text) from None
