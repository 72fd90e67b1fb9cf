"""What the attention functions of this package share: options, caches, log-sum-exps in base 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import InvalidArgument, InvalidType, Unsupported
from ...ops._common import refuse_8_bit_query
from .._checks import check_tensors, refuse

KvLayout = Literal["NHD", "HND"]
PagedKvCache = Tensor | tuple[Tensor, Tensor]
"""[pages, 2, ...] with keys and values, or one tensor each: pages of NHD are [page_size,
num_kv_heads, head_dim], of HND [num_kv_heads, page_size, head_dim]."""

LN2 = math.log(2)


class NotServed(Unsupported, AttributeError):
    """A name that a module of this package lacks, so that hasattr() is False."""


def not_served(module: str, name: str, served: list[str]) -> NotServed:
    return NotServed(f"{module}.{name}: not supported: there are {', '.join(served)}")


def check_layout(function: str, kv_layout: str) -> None:
    if kv_layout not in ("NHD", "HND"):
        raise InvalidArgument(f"{function}: kv_layout: expected NHD or HND, got {kv_layout!r:.40}")


def split_cache(function: str, cache: PagedKvCache) -> tuple[Tensor, Tensor]:
    """Keys and values of a paged cache, both of rank 4."""
    if isinstance(cache, Tensor):
        if cache.dim() != 5 or cache.shape[1] != 2:
            raise InvalidArgument(
                f"{function}: paged_kv_cache: expected shape [pages, 2, ...] of rank 5 or a tuple, "
                f"got shape {list(cache.shape)}"
            )
        return cache[:, 0], cache[:, 1]
    if not isinstance(cache, tuple) or len(cache) != 2:
        raise InvalidType(
            f"{function}: paged_kv_cache: expected a tensor or a tuple of two, got "
            f"{type(cache).__name__}"
        )
    return cache


@dataclass
class Scores:
    """How scores are computed, from the arguments that all functions have."""

    sm_scale: float | None
    window_left: int
    softcap: float

    @classmethod
    def read(
        cls,
        function: str,
        pos_encoding_mode: str,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        **unsupported: object,
    ) -> Scores:
        if pos_encoding_mode != "NONE":
            raise Unsupported(
                f"{function}: pos_encoding_mode: expected NONE, got {pos_encoding_mode!r:.40}: "
                "rotate with vllm_kernels.rope_and_cache"
            )
        refuse(function, **unsupported)
        return cls(sm_scale, window_left, logits_soft_cap or 0.0)

    def options(self, q: Tensor, *factors: float | None) -> dict[str, Any]:
        """Those of paged_attention for queries of this head size. A factor of None is 1."""
        scale = q.shape[-1] ** -0.5 if self.sm_scale is None else self.sm_scale
        for factor in factors:
            scale *= 1.0 if factor is None else factor
        return {"scale": scale, "softcap": self.softcap}


def finish(
    result: Tensor | tuple[Tensor, Tensor],
    v_scale: float | None = None,
    given_lse: Tensor | None = None,
) -> Any:
    """Scales out or (out, lse), and gives the log-sum-exp in base 2."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    if v_scale is not None and v_scale != 1.0:
        out *= v_scale
    if lse is None:
        return out
    lse /= LN2
    return out, lse if given_lse is None else given_lse.copy_(lse)


def same_dtype(function: str, name: str, wanted: torch.dtype | str | None, q: Tensor) -> None:
    """The result has the dtype of the query."""
    wanted = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    if wanted is not None and wanted != q.dtype:
        raise Unsupported(f"{function}: {name}: expected {q.dtype} (from q), got {wanted}")


class Wrapper:
    """What the wrappers share: the options of the last plan(), and short forms of run()."""

    run: Callable[..., Any]
    forward: Callable[..., Any]
    _scores: Scores | None = None
    _o_dtype: torch.dtype | str | None = None

    def _options(self, name: str) -> Scores:
        if self._scores is None:
            raise InvalidArgument(f"{name}: expected a plan() before it")
        return self._scores

    def _planned(self, args: tuple[object, ...], **tensors: Tensor) -> Scores:
        """The options for a call of run() with these tensors, q first."""
        name = f"{type(self).__name__}.run"
        refuse(name, args=args or None)
        scores = self._options(name)
        check_tensors(name, **tensors)
        refuse_8_bit_query(name, "q", tensors["q"])
        same_dtype(name, "o_data_type", self._o_dtype, tensors["q"])
        return scores

    def _replan(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
    ) -> None:
        """Replaces the options of plan(), as forward() does."""
        name = f"{type(self).__name__}.forward"
        self._options(name)
        self._scores = Scores.read(name, pos_encoding_mode, sm_scale, window_left, logits_soft_cap)

    def run_return_lse(self, q: Tensor, *keys: Any, **options: Any) -> Any:
        """``run`` with return_lse."""
        return self.run(q, *keys, **options, return_lse=True)

    def forward_return_lse(self, q: Tensor, *keys: Any, **options: Any) -> Any:
        """``forward`` with return_lse."""
        return self.forward(q, *keys, **options, return_lse=True)

    def end_forward(self) -> None:
        """Does nothing."""

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Does nothing: there is no workspace."""
