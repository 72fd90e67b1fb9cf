"""Norms with 8-bit results: ``rms_norm`` or ``fused_add_rms_norm``, then quantized, in one pass.

The normed row is what ``rms_norm`` (with a residual: ``fused_add_rms_norm``) would have stored,
rounded to the dtype. An element stands for element * scale:

- with a given scale: ``e4m3(x * (1 / scale))``;
- with a scale of each row or group, computed from its largest magnitude:
  ``scale = max(magnitude / 448, 1 / (448 * 512))`` and ``e4m3(x / scale)``, or for int8
  ``scale = max(magnitude / 127, 2**-23)`` and ``int8(x * (1 / scale))``.

All float32 arithmetic, as in vLLM's ops of the same names; both conversions round to nearest even
and saturate. A NaN in a row makes the scale and the row's e4m3 elements NaN (int8: 0). With a
residual vLLM's ops of computed scales norm the sum as it is, these the sum rounded to the dtype.
"""

from __future__ import annotations

from torch import Tensor

from ._common import calls

__all__ = [
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
]

call = calls(__all__)


def rms_norm_static_fp8_quant(
    out: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    """``out = e4m3(rms_norm(input) * (1 / scale))``.

    Args:
        out: [..., hidden_size], float8_e4m3fn, written. Rows may be strided.
        input: [..., hidden_size], float32, float16 or bfloat16. Rows may be strided.
        weight: [hidden_size], dtype of ``input``.
        scale: float32 of one element, on the device of ``input``.
        epsilon: finite, >= 0.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> out = torch.empty(1, 2, dtype=torch.float8_e4m3fn)
        >>> x, scale = torch.tensor([[3.0, -3.0]]), torch.tensor([0.5])
        >>> vllm_kernels.rms_norm_static_fp8_quant(out, x, torch.ones(2), scale, 1e-6)
        >>> out.float()
        tensor([[ 2., -2.]])
    """
    call.rms_norm_static_fp8_quant(out, input, weight, scale, epsilon)


def fused_add_rms_norm_static_fp8_quant(
    out: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    """``residual = round(residual + input)``; ``out = e4m3(rms_norm(residual) * (1 / scale))``.

    ``input`` stays as it is. Its shape and dtype are those of ``residual``, which is written; the
    rest as ``rms_norm_static_fp8_quant``.

    Raises:
        RuntimeError: as :func:`rms_norm_static_fp8_quant`.

    Example:
        >>> out = torch.empty(1, 2, dtype=torch.float8_e4m3fn)
        >>> x, residual = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, -2.0]])
        >>> scale = torch.tensor([0.5])
        >>> vllm_kernels.fused_add_rms_norm_static_fp8_quant(
        ...     out, x, residual, torch.ones(2), scale, 1e-6
        ... )
        >>> out.float(), residual
        (tensor([[ 2., -2.]]), tensor([[ 3., -3.]]))
    """
    call.fused_add_rms_norm_static_fp8_quant(out, input, residual, weight, scale, epsilon)


def rms_norm_dynamic_per_token_quant(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    scales: Tensor,
    epsilon: float,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """``rms_norm(input)``, quantized with a scale a row.

    With ``residual``: ``residual = round(residual + input)`` first, whose norm it then is.

    Args:
        out: [..., hidden_size], float8_e4m3fn or int8, written. Rows may be strided.
        input, weight, epsilon: as ``rms_norm_static_fp8_quant``.
        scales: float32, contiguous, an element a row ([rows, 1] or the like), written.
        scale_ub: float32 of one element: a row's magnitude counts as at most this (larger elements
            saturate). For float8_e4m3fn only.
        residual: shape and dtype of ``input``, written, apart from it. Rows may be strided.

    Raises:
        RuntimeError: as :func:`rms_norm_static_fp8_quant`.

    Example:
        >>> out, scales = torch.empty(1, 2, dtype=torch.int8), torch.empty(1, 1)
        >>> x = torch.tensor([[3.0, -3.0]])
        >>> vllm_kernels.rms_norm_dynamic_per_token_quant(out, x, torch.ones(2), scales, 1e-6)
        >>> out
        tensor([[ 127, -127]], dtype=torch.int8)
    """
    call.rms_norm_dynamic_per_token_quant(out, input, weight, scales, epsilon, scale_ub, residual)


def rms_norm_per_block_quant(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    scales: Tensor,
    epsilon: float,
    scale_ub: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    is_scale_transposed: bool = False,
) -> None:
    """``rms_norm(input)``, quantized with a scale for every ``group_size`` neighbours of a row.

    Args:
        out, input, weight, epsilon, scale_ub, residual: as ``rms_norm_dynamic_per_token_quant``;
            ``group_size`` divides hidden_size.
        scales: [rows, hidden_size / group_size], float32, written. Of stride 1 in the last
            dimension, or where ``is_scale_transposed`` in the first, as is
            ``torch.empty(groups, rows).t()``; any stride in the other.
        group_size: 64 or 128.
        is_scale_transposed: which dimension of ``scales`` has stride 1.

    Raises:
        RuntimeError: as :func:`rms_norm_static_fp8_quant`.

    Example:
        >>> out, scales = torch.empty(1, 128, dtype=torch.int8), torch.empty(1, 2)
        >>> x, weight = torch.ones(1, 128), torch.ones(128)
        >>> vllm_kernels.rms_norm_per_block_quant(out, x, weight, scales, 1e-6, None, None, 64)
        >>> (127 * scales).round()
        tensor([[1., 1.]])
    """
    call.rms_norm_per_block_quant(
        out, input, weight, scales, epsilon, scale_ub, residual, group_size, is_scale_transposed
    )
