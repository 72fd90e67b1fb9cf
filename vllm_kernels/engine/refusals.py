"""What an engine refuses to serve, and the names in its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from transformers import PreTrainedModel

from ..errors import Error, InvalidArgument, InvalidType, Unsupported
from ..hf.attention_interface import ENGINES
from ..ops._refusals import renamed

__all__ = ["Closed", "check_integers", "named_engine", "num_logits", "refuse_unserved"]


class Closed(Error):
    """A call of an engine that is closed."""

    def __init__(self) -> None:
        super().__init__("Engine: it was closed: make a new one")


@contextmanager
def named_engine() -> Iterator[None]:
    """Lets errors of the engine's parts begin with the name of what the user called."""
    try:
        yield
    except Error as error:
        part, _, text = str(error).partition(": ")
        if part == "Engine" or not text:
            raise
        raise renamed(error, "Engine", {}) from None


def check_integers(options: object, **minimums: int) -> None:
    """Raises TypeError or ValueError unless these fields are integers of at least their minimum."""
    for name, minimum in minimums.items():
        value, kind = getattr(options, name), type(options).__name__
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise InvalidType(f"{kind}: {name}: expected an integer, got {value!r}")
        if value < minimum:
            raise InvalidArgument(f"{kind}: {name}: expected at least {minimum}, got {value}")


def num_logits(model: PreTrainedModel) -> int:
    """Returns the number of logits of a row. It may exceed the vocabulary."""
    head: Any = model.get_output_embeddings()
    return head.out_features


def refuse_unserved(model: PreTrainedModel) -> None:
    """Raises if the model is in training mode, has another engine, or has no logits."""
    if model.training:
        raise InvalidArgument("Engine: model: expected one in eval mode: call model.eval()")
    other = ENGINES.get(model)
    if other is not None and other() is not None:
        raise InvalidArgument("Engine: model: another engine has it: close() that one first")
    if model.get_output_embeddings() is None:
        raise Unsupported(
            f"Engine: model: expected one with a language-model head, got {type(model).__name__}"
        )
