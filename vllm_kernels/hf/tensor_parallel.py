"""Models whose weights transformers has divided over ranks (``DistributedConfig(tp_size=n)``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import Unsupported

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["group_of_model", "heads_of_rank", "local_tensor"]

_OTHER_SIZES = ("pp_size", "dp_replicate_size", "fsdp_size", "ep_size")


def group_of_model(model: PreTrainedModel) -> ProcessGroup | None:
    """Returns the group of the ranks that share ``model``. None means that it is whole.

    Raises:
        NotImplementedError: Something but tensor parallelism divides the model, too, or
            transformers is too old.
    """
    manager = getattr(model, "_mesh_manager", None)
    if manager is None:
        if (getattr(model, "_tp_size", None) or 1) > 1:
            raise _older_transformers()
        return None
    config = model.config.distributed_config
    for name in _OTHER_SIZES:
        if (getattr(config, name, None) or 1) > 1:
            raise Unsupported(
                f"PagedCache: distributed_config: expected tensor parallelism alone, got {name}="
                f"{getattr(config, name)}"
            )
    return manager.get_mesh("tp").get_group()


def heads_of_rank(model: PreTrainedModel, name: str, heads: int) -> int:
    """Returns how many of ``heads`` this rank computes. ``name`` is theirs in the config.

    Raises:
        NotImplementedError: The ranks would hold parts of heads, or transformers is too old.
    """
    group = group_of_model(model)
    if group is None:
        return heads
    try:
        from transformers.distributed.tensor_parallel import get_kv_heads_per_rank
    except ImportError:
        raise _older_transformers() from None
    local: Any = get_kv_heads_per_rank(model.tp_plan, heads, group.size())
    if local is None:
        raise Unsupported(
            f"PagedCache: {name}: expected a multiple of {group.size()} (from tp_size), got {heads}"
        )
    return int(local)


def _older_transformers() -> Unsupported:
    return Unsupported(
        "PagedCache: tensor parallelism: expected transformers 5.23, got "
        f"{transformers.__version__}"
    )


def local_tensor(tensor: Any) -> Tensor:
    """Returns the part of a parameter that this rank holds. Its ``data`` may be replaced."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # under autograd it would be a view
        return tensor.to_local()
