"""The shape of a paged KV cache's blocks: sizes, layout and the type of what is stored."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch

from .._types import CacheDType, Layout
from ..errors import Error, InvalidArgument, InvalidType, Unsupported

__all__ = ["CACHE_DTYPES", "LAYOUTS", "KVShape"]

LAYOUTS = ("vllm", "NHD", "HND")
CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int8_per_token": torch.int8,
    "int4_per_token": torch.uint8,
}
"""Names of caches with fewer bits, and what stores them; "auto" is the model's dtype."""

_MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_VECTOR_BYTES = 16  # of layout "vllm": bytes of a key per load


def check_ints(function: str, **values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral):
            raise InvalidType(f"{function}: {name}: expected an int, got {value!r:.40}")


@dataclass(frozen=True)
class KVShape:
    """The shape of a block of the cache.

    Args:
        num_layers: whose keys and values a block holds, all layers of a group (of all, where there
            is one group).
        num_kv_heads: key/value heads of a layer.
        head_size: a multiple of 8 from 32 to 256 (of 16 for an 8-bit cache, of 32 for
            int4).
        dtype: of keys, values and queries: float32, float16 or bfloat16.
        block_size: tokens of a block, a power of two from 1 to 256.
        layout: "vllm", "NHD" or "HND", as :func:`vllm_kernels.paged_attention` has them.
        cache_dtype: "auto" (dtype), or one of CACHE_DTYPES. "int8_per_token", "int4_per_token":
            every token and KV head has a scale (int4: and a zero) of its own, which the writer
            finds.
        page_bounds: whether a block has bounds of its keys, which select_pages reads; not where
            tokens have scales.

    Raises:
        Unsupported: a shape that the kernels do not support; it names the argument.
        InvalidArgument: a wrong word or number.
        InvalidType: a size that is no int, or a dtype that is none.

    Example:
        >>> from vllm_kernels.kv_cache.tensors import KVShape
        >>> shape = KVShape(num_layers=2, num_kv_heads=2, head_size=64, dtype=torch.float16)
        >>> shape.block_bytes, shape.cache_shapes(8)[1]
        (16384, (8, 2, 64, 16))
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_size: int = 16
    layout: Layout = "vllm"
    cache_dtype: CacheDType = "auto"
    page_bounds: bool = False

    def __post_init__(self) -> None:
        def check(
            holds: bool, name: str, expected: str, got: object, kind: type[Error] = Unsupported
        ) -> None:
            if not holds:
                raise kind(f"KVShape: {name}: expected {expected}, got {got}")

        check_ints(
            "KVShape",
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size=self.block_size,
        )
        for name in ("num_layers", "num_kv_heads"):
            number = getattr(self, name)
            check(number >= 1, name, "at least 1", number, InvalidArgument)
        dtype = f"the {type(self.dtype).__name__} {self.dtype!r}"
        check(isinstance(self.dtype, torch.dtype), "dtype", "a torch.dtype", dtype, InvalidType)
        of_int4 = " for int4_per_token" if self.has_token_zeros else ""
        step = 32 if self.has_token_zeros else 8 if self.cache_dtype == "auto" else 16
        check(
            self.head_size in range(32, 257, step),
            "head size", f"a multiple of {step} from 32 to 256{of_int4}", self.head_size,
        )  # fmt: skip
        check(self.dtype in _MODEL_DTYPES, "dtype", "float32, float16 or bfloat16", self.dtype)
        check(
            self.block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256),
            "block_size", "a power of two from 1 to 256", self.block_size,
        )  # fmt: skip
        layout = f"{self.layout!r:.40}"
        check(self.layout in LAYOUTS, "layout", " or ".join(LAYOUTS), layout, InvalidArgument)
        check(
            self.cache_dtype == "auto" or self.cache_dtype in CACHE_DTYPES,
            "cache_dtype", f"auto, {', '.join(CACHE_DTYPES)}", self.cache_dtype, InvalidArgument,
        )  # fmt: skip
        with_scales = f"False with {self.cache_dtype}"
        check(not (self.page_bounds and self.has_token_scales), "page_bounds", with_scales, "True")

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the cache's elements."""
        return CACHE_DTYPES.get(self.cache_dtype, self.dtype)

    @property
    def has_token_scales(self) -> bool:
        """Whether every token and KV head has scales of its own."""
        return self.cache_dtype.endswith("_per_token")

    @property
    def has_token_zeros(self) -> bool:
        """Whether they have zeros, too: those of int4 caches."""
        return self.cache_dtype == "int4_per_token"

    @property
    def row_elements(self) -> int:
        """Of the cache, for a token's head_size values: int4 has two in an element."""
        return self.head_size // 2 if self.has_token_zeros else self.head_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys, values, scales, zeros and bounds of its layers."""
        bounds = 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize
        layer = self.block_size * self.token_bytes + (bounds if self.page_bounds else 0)
        return self.num_layers * layer

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in one layer, and its scales and zeros."""
        head = self.row_elements * self.stored_dtype.itemsize
        floats = self.has_token_scales + self.has_token_zeros
        return 2 * self.num_kv_heads * (head + floats * torch.float32.itemsize)

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one layer's key cache and value cache."""
        heads, size, block = self.num_kv_heads, self.row_elements, self.block_size
        if self.layout == "vllm":
            pack = _VECTOR_BYTES // self.stored_dtype.itemsize
            return (num_blocks, heads, size // pack, block, pack), (num_blocks, heads, size, block)
        if self.layout == "NHD":
            both = (num_blocks, block, heads, size)
        else:
            both = (num_blocks, heads, block, size)
        return both, both
