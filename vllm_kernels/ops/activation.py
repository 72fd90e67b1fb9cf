"""Activations."""

from __future__ import annotations

from torch import Tensor

from ._common import calls

__all__ = [
    "fatrelu_and_mul",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "mul_and_silu",
    "silu_and_mul",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_quant",
    "silu_and_mul_split",
    "silu_and_mul_with_clamp",
    "swigluoai_and_mul",
]

call = calls(__all__)


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """SwiGLU's product: ``out = round(silu(gate)) * up`` (Shazeer 2020, arXiv:2002.05202).

    ``silu(x) = x / (1 + exp(-x))``, in float32 and rounded to the dtype before the product.

    Args:
        out: [..., d], written, apart from ``input``. Rows may be strided.
        input: [..., 2 * d], gate then up; float32, float16 or bfloat16. Rows may be strided.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.silu_and_mul(out, torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
        >>> out
        tensor([[0.0000, 1.4621]])
    """
    call.silu_and_mul(out, input)


def mul_and_silu(out: Tensor, input: Tensor) -> None:
    """``out = up * round(silu(gate))``: up is the first half of ``input``, gate the second.

    Shapes as ``silu_and_mul``.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.mul_and_silu(out, torch.tensor([[5.0, 2.0, 0.0, 1.0]]))
        >>> out
        tensor([[0.0000, 1.4621]])
    """
    call.mul_and_silu(out, input)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    """GeGLU's product: ``out = round(gelu(gate)) * up``, gelu(x) = x (1 + erf(x / sqrt 2)) / 2.

    Shapes as ``silu_and_mul``.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.gelu_and_mul(out, torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
        >>> out
        tensor([[0.0000, 1.6827]])
    """
    call.gelu_and_mul(out, input)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """``out = round(gelu(gate)) * up`` with the tanh form of gelu, as ``gelu_new``.

    Shapes as ``silu_and_mul``.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.gelu_tanh_and_mul(out, torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
        >>> out
        tensor([[0.0000, 1.6824]])
    """
    call.gelu_tanh_and_mul(out, input)


def silu_and_mul_split(out: Tensor, gate: Tensor, up: Tensor) -> None:
    """``silu_and_mul`` of two tensors: ``out = round(silu(gate)) * up``.

    Args:
        out: [..., d], written; may be ``gate`` or ``up`` itself. Rows may be strided.
        gate, up: [..., d], of one dtype: float32, float16 or bfloat16. Rows may be strided, each
            tensor's in its own way.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> gate, up = torch.tensor([[0.0, 1.0], [5.0, 2.0]])
        >>> vllm_kernels.silu_and_mul_split(gate, gate, up)
        >>> gate
        tensor([0.0000, 1.4621])
    """
    call.silu_and_mul_split(out, gate, up)


def fatrelu_and_mul(out: Tensor, input: Tensor, threshold: float) -> None:
    """``out = (gate if gate > threshold else 0) * up``, the FATReLU of sparse models.

    (Kurtz et al. 2020, ICML.) vLLM's op of the same name, but for a NaN gate, which stays one.
    Shapes as ``silu_and_mul``.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.fatrelu_and_mul(out, torch.tensor([[0.1, 1.0, 5.0, 2.0]]), 0.5)
        >>> out
        tensor([[0., 2.]])
    """
    call.fatrelu_and_mul(out, input, threshold)


def silu_and_mul_with_clamp(out: Tensor, input: Tensor, limit: float) -> None:
    """``out = round(silu(min(gate, limit))) * min(max(up, -limit), limit)``.

    vLLM's op of the same name, but for NaNs, which stay NaNs. ``limit`` >= 0 bounds in float32.
    Shapes as ``silu_and_mul``.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.silu_and_mul_with_clamp(out, torch.tensor([[0.0, 1.0, 5.0, 9.0]]), 2.0)
        >>> out
        tensor([[0.0000, 1.4621]])
    """
    call.silu_and_mul_with_clamp(out, input, limit)


def swigluoai_and_mul(out: Tensor, input: Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """gpt-oss' gated activation: ``out = g * sigmoid(alpha * g) * (u + 1)``.

    ``g = min(gate, limit)`` and ``u = min(max(up, -limit), limit)``. In float32, rounded once.
    vLLM's op of the same name, but for NaNs, which stay NaNs.

    Args:
        out: [..., d], written, apart from ``input``. Rows may be strided.
        input: [..., 2 * d], gate in the even elements, up in the odd ones; float32, float16 or
            bfloat16. Rows may be strided.
        alpha: not NaN.
        limit: >= 0.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.swigluoai_and_mul(out, torch.tensor([[0.0, 5.0, 1.0, 1.0]]))
        >>> out
        tensor([[0.0000, 1.6916]])
    """
    call.swigluoai_and_mul(out, input, alpha, limit)


def silu_and_mul_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """``out = e4m3(silu_and_mul(input) * (1 / scale))``, the product rounded to the dtype before.

    To nearest even, saturating; a NaN stays one. vLLM's op of the same name.

    Args:
        out: [..., d], float8_e4m3fn, written, apart from ``input``. Rows may be strided.
        input: [..., 2 * d], gate then up; float32, float16 or bfloat16. Rows may be strided.
        scale: float32 of one element, on the device of ``input``.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2, dtype=torch.float8_e4m3fn)
        >>> x = torch.tensor([[0.0, 1.0, 5.0, 2.0]])
        >>> vllm_kernels.silu_and_mul_quant(out, x, torch.tensor([0.25]))
        >>> out.float() * 0.25
        tensor([[0.0000, 1.5000]])
    """
    call.silu_and_mul_quant(out, input, scale)


def silu_and_mul_per_block_quant(
    out: Tensor,
    input: Tensor,
    scales: Tensor,
    group_size: int,
    scale_ub: Tensor | None = None,
    is_scale_transposed: bool = False,
) -> None:
    """``silu(gate) * up``, quantized with a scale for every ``group_size`` neighbours of a row.

    As vLLM's op of the same name: the product stays in float32 (neither factor is rounded; on a GPU
    silu of 16-bit values is taken to about 2^-20), and
    ``scale = max(min(magnitude / largest, scale_ub), min_scale)``, with the group's largest
    magnitude, largest 448 and min_scale 1 / (448 * 512) for e4m3, 127 and 2**-23 for int8. An
    element is product / scale, to nearest even, saturating. A NaN makes the group's scale NaN.

    Args:
        out: [..., d], float8_e4m3fn or int8, written, apart from ``input``; ``group_size`` divides
            d. Rows may be strided.
        input: [..., 2 * d], gate then up; float32, float16 or bfloat16. Rows may be strided.
        scales: [rows, d / group_size], float32, written; as in ``rms_norm_per_block_quant``.
        group_size: 64 or 128.
        scale_ub: float32 of one element: no scale exceeds it. For float8_e4m3fn only.
        is_scale_transposed: which dimension of ``scales`` has stride 1: the last, or the first.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out, scales = torch.empty(1, 64, dtype=torch.int8), torch.empty(1, 1)
        >>> vllm_kernels.silu_and_mul_per_block_quant(out, torch.ones(1, 128), scales, 64)
        >>> out[0, 0].item(), round(127 * scales.item(), 4)
        (127, 0.7311)
    """
    call.silu_and_mul_per_block_quant(out, input, scales, group_size, scale_ub, is_scale_transposed)


def gelu_new(out: Tensor, input: Tensor) -> None:
    """gelu by tanh: ``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`` (arXiv:1606.08415).

    Computed in float32 and rounded once.

    Args:
        out: [..., d], written; may be ``input`` itself. Rows may be strided.
        input: [..., d], float32, float16 or bfloat16. Rows may be strided.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.gelu_new(out, torch.tensor([[-1.0, 1.0]]))
        >>> out
        tensor([[-0.1588,  0.8412]])
    """
    call.gelu_new(out, input)


def gelu_fast(out: Tensor, input: Tensor) -> None:
    """The function of ``gelu_new``, under the other name that Hugging Face models give it.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.gelu_fast(out, torch.tensor([[-1.0, 1.0]]))
        >>> out
        tensor([[-0.1588,  0.8412]])
    """
    call.gelu_fast(out, input)


def gelu_quick(out: Tensor, input: Tensor) -> None:
    """gelu by sigmoid: ``x / (1 + exp(-1.702 x))`` (arXiv:1606.08415). Shapes as ``gelu_new``.

    Raises:
        RuntimeError: as :func:`silu_and_mul`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> vllm_kernels.gelu_quick(out, torch.tensor([[-1.0, 1.0]]))
        >>> out
        tensor([[-0.1542,  0.8458]])
    """
    call.gelu_quick(out, input)
