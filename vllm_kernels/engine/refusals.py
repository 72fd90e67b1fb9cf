"""What an engine refuses to serve, and the names in its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from ..errors import Error, InvalidArgument, Unsupported
from ..hf.attention_interface import ENGINES

__all__ = ["Closed", "named_engine", "num_logits", "refuse_unserved"]


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
        raise type(error)(f"Engine: {text}") from None


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
