"""Random changes of a call's arguments: dtypes, shapes, strides, aliases, values, kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import choice
from typing import Any

import torch
from guarded_memory import is_plain
from torch import Tensor

Call = dict[str, Any]

LARGEST = 2**20  # elements of a tensor that is changed further

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.complex64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
]
NEGATED = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
HUGE = [2**16, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**32 + 1, 2**33 + 7, 2**40]
WHOLE = [0, -1, 1, 2, 3, -2, 7, 127, 2**31 - 1, 2**31, -(2**31), 2**32, 2**32 + 1, 2**62]
INTS = [*WHOLE, 2**63 - 1, -(2**63), 2**64, True, 1.5, None, "1", 10**30]
NAN, INF = float("nan"), float("inf")
NUMBERS = [0.0, -0.0, NAN, INF, -INF, -1.0, 1e-45, 1e-320, 3.5e38, 1e39, 1e308, 10**400, 3, True]
FLOATS = [*NUMBERS, None, "x", 1j]
STRINGS = ["", "auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "fp8_ds_mla", "vllm", "NHD", "HND"]
TEXTS = [*STRINGS, "nhd", "fp8\0", "x" * 5000, "\u2028", None, 3, b"fp8"]


def change(call: Call) -> str:
    """Changes one argument. Returns what was done: "argument change"."""
    name = choice(list(call))
    value = call[name]
    if isinstance(value, list):
        call[name], what = change_list(value, call)
    elif isinstance(value, Tensor):
        what = choice(TENSOR_CHANGES)
        call[name] = apply(what, value, call)
        what = what.__name__
    else:
        call[name], what = change_scalar(value, call)
    return f"{name} {what}"


def apply(function: Callable[..., Any], x: Tensor, call: Call) -> Any:
    """torch itself refuses some changes: then the tensor stays as it is."""
    if not isinstance(x, Tensor) or not is_plain(x) or x.numel() > LARGEST:  # changed before
        return x
    try:
        return function(x, call)
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        return x


def change_list(value: list[Any], call: Call) -> tuple[Any, str]:
    kind = random.randrange(6)
    if len(tensors_of({"": value})) < len(value):  # torch prints lists that it refuses, so no more
        return choice([[], None]), "kind"
    if kind == 0 or not value:
        return choice([[], None, *value, tuple(value), [*value, None], [*value, 3]]), "kind"
    if kind == 1:
        return value[1:], "shorter"
    if kind == 2:
        return [*value, value[0]], "twice"
    what = choice(TENSOR_CHANGES)
    place = random.randrange(len(value))
    changed = apply(what, value[place], call)
    return [*value[:place], changed, *value[place + 1 :]], what.__name__


def change_scalar(value: Any, call: Call) -> tuple[Any, str]:
    if value is None:
        return choice([no_tensor(value, call), *tensors_of(call)]), "given"
    if isinstance(value, bool):
        return choice([not value, 2, 0, None, "yes", 1.0]), "bool"
    if isinstance(value, int):
        return choice([value - 1, value + 1, 2 * value, *INTS]), "int"
    if isinstance(value, float):
        return choice(FLOATS), "float"
    return choice(TEXTS), "text"


def tensors_of(call: Call) -> list[Tensor]:
    lists = (value if isinstance(value, list) else [value] for value in call.values())
    return [x for values in lists for x in values if isinstance(x, Tensor) and is_plain(x)]


# --- changes of a tensor; `call` has the others


def no_tensor(x: Any, call: Call) -> Any:
    return choice([None, 1, 0.5, "cpu", [1.0, 2.0], (), torch.float32])


def dtype(x: Tensor, call: Call) -> Tensor:
    return x.to(choice(DTYPES))


def bytes_as(x: Tensor, call: Call) -> Tensor:
    return x.view(choice([one for one in DTYPES if one.itemsize == x.itemsize]))


def size(x: Tensor, call: Call) -> Tensor:
    """One dimension shorter or longer, with new elements."""
    sizes = list(x.shape)
    place = random.randrange(len(sizes))
    sizes[place] = max(0, choice([0, 1, sizes[place] - 1, sizes[place] + 1, 2 * sizes[place]]))
    new = torch.zeros(sizes, dtype=x.dtype)
    shared = tuple(slice(0, min(a, b)) for a, b in zip(x.shape, sizes))
    new[shared] = x[shared]
    return new


def rank(x: Tensor, call: Call) -> Tensor:
    kind = random.randrange(5)
    if kind == 0:
        return x[0]
    if kind == 1:
        return x.unsqueeze(choice([0, -1]))
    if kind == 2:
        return x.flatten(0, 1)
    if kind == 3:
        return x.flatten()[0]
    return x.reshape(*[1] * random.randrange(1, 9), *x.shape)


def expanded(x: Tensor, call: Call) -> Tensor:
    sizes = list(x.shape)
    place = random.randrange(len(sizes))
    sizes[place] = choice([*HUGE, sizes[place], 2 * sizes[place]])
    return x.narrow(place, 0, 1).expand(sizes)


def expanded_to(x: Tensor, call: Call) -> Tensor:
    """A new dimension, or one of the same size, of stride 0."""
    if random.random() < 0.5:
        return x.expand(choice(HUGE), *x.shape)
    place = random.randrange(x.dim())
    return x.narrow(place, 0, 1).expand(x.shape)


def gaps(x: Tensor, call: Call) -> Tensor:
    """The same elements with other strides; canaries between them."""
    order = random.sample(range(x.dim()), x.dim()) if random.random() < 0.4 else range(x.dim())
    steps = [random.choice([1, 1, 2]) for _ in order]
    sizes = [x.shape[d] * step + choice([0, 0, 1, 3, 8]) for d, step in zip(order, steps)]
    storage = torch.full(sizes, 0, dtype=x.dtype)
    storage.view(torch.uint8).fill_(0xFF)
    view = storage[tuple(slice(0, x.shape[d] * s, s) for d, s in zip(order, steps))]
    back = sorted(range(x.dim()), key=list(order).__getitem__)
    return view.permute(back).copy_(x)


def outer_gaps(x: Tensor, call: Call) -> Tensor:
    """Longer rows: the form that most ops take."""
    place = random.randrange(x.dim())
    sizes = list(x.shape)
    sizes[place] += choice([1, 8, 16])
    storage = torch.full(sizes, 0, dtype=x.dtype)
    storage.view(torch.uint8).fill_(0xFF)
    return storage.narrow(place, choice([0, sizes[place] - x.shape[place]]), x.shape[place]).copy_(
        x
    )


def transposed(x: Tensor, call: Call) -> Tensor:
    first, second = random.sample(range(x.dim()), 2)
    return x.transpose(first, second)


def overlapping(x: Tensor, call: Call) -> Tensor:
    strides = [choice([stride, 1, max(0, stride - 1), 0]) for stride in x.stride()]
    return x.as_strided(x.shape, strides)


def reversed_slice(x: Tensor, call: Call) -> Tensor:
    return x[..., ::2] if random.random() < 0.5 else x[::2]


def shifted(x: Tensor, call: Call) -> Tensor:
    """Off its alignment."""
    shift = choice([1, 2, 3, 8])
    storage = torch.zeros(x.numel() + shift, dtype=x.dtype)
    return storage[shift:].view(x.shape).copy_(x)


def alias(x: Tensor, call: Call) -> Tensor:
    """Another argument, or a view of its memory in this one's shape."""
    other = choice(tensors_of(call))
    if random.random() < 0.4:
        return other
    flat = torch.empty(0, dtype=x.dtype).set_(other.untyped_storage())
    room = flat.numel() - x.numel()
    return flat[choice([0, max(0, room), room // 2]) :][: x.numel()].view(x.shape)


def neighbours(x: Tensor, call: Call) -> Tensor:
    """This and another argument become slices of one packed tensor, which may overlap."""
    name, other = choice([pair for pair in call.items() if isinstance(pair[1], Tensor)])
    if not is_plain(other):
        return x
    width, more = x.shape[-1], other.shape[-1]
    packed = torch.zeros(*x.shape[:-1], width + more, dtype=x.dtype)
    start = choice([width, width, width - 1])
    call[name] = packed[..., start : start + more].copy_(other)
    return packed[..., :width].copy_(x)


def meta(x: Tensor, call: Call) -> Tensor:
    return x.to("meta")


def meta_all(x: Tensor, call: Call) -> Tensor:
    for name, value in call.items():
        if isinstance(value, Tensor):
            call[name] = value.to("meta")
    return x.to("meta")


def freed(x: Tensor, call: Call) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(choice([0, x.untyped_storage().nbytes() // 2]))
    return x


def special(x: Tensor, call: Call) -> Any:
    kind = random.randrange(7)
    if kind == 0:
        return x.to_sparse()
    if kind == 1:
        return x.clone().requires_grad_()
    if kind == 2:
        return torch.nn.Parameter(x, requires_grad=False)
    if kind == 3:
        return torch._neg_view(x) if x.dtype in NEGATED else x
    if kind == 4:
        return torch.quantize_per_tensor(x.float(), 0.1, 3, torch.quint8)
    if kind == 5:
        return torch.nested.nested_tensor([x, x])
    return x.numpy()


def values(x: Tensor, call: Call) -> Tensor:
    """Some elements of any value."""
    x = x.clone()
    odd = NUMBERS[:10] if x.is_floating_point() else [*WHOLE, x.numel(), 31, 32, 63, 64]
    for _ in range(choice([1, 1, 3])):
        value = choice(odd)
        if not x.is_floating_point():
            bits = 8 * x.itemsize
            value = (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
        x.view(-1)[random.randrange(x.numel())] = value
    return x


def off_by_one(x: Tensor, call: Call) -> Tensor:
    """An index tensor's element, larger or smaller."""
    x = x.clone()
    x.view(-1)[random.randrange(x.numel())] += choice([-1, 1, 1, 5])
    return x


def any_bits(x: Tensor, call: Call) -> Tensor:
    return (
        torch.randint(0, 256, (*x.shape, x.itemsize), dtype=torch.uint8).view(x.dtype).squeeze(-1)
    )


TENSOR_CHANGES = [
    no_tensor, dtype, dtype, bytes_as, size, size, rank, expanded, expanded, expanded_to, gaps,
    outer_gaps, outer_gaps, outer_gaps, transposed, overlapping, reversed_slice, shifted, alias,
    alias, neighbours, neighbours, meta, meta_all, freed, special, values, values, off_by_one,
    any_bits,
]  # fmt: skip
NUMERIC = {"values", "off_by_one", "any_bits", "float", "int", "given", "bytes_as", "dtype"}
