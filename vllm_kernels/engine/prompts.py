"""Converts prompts to token ids, and refuses other types with a hint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from numbers import Integral
from operator import index
from reprlib import repr as short_repr

from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "prompt_tokens", "refuse_no_list"]

Prompt = str | Items[int]


def refuse_no_list(prompts: object) -> None:
    """Raises TypeError if ``prompts`` is not a list of prompts."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Collection):
        raise TypeError(
            f"Engine: prompts: expected a list of prompts, got {short_repr(prompts)}"
            f"{_hint(prompts)}"
        )
    first = next(iter(prompts), None)
    if isinstance(first, Integral) or getattr(first, "ndim", None) == 0:
        raise TypeError(
            "Engine: prompts: expected a list of prompts, such as [[2, 3, 4]], got token ids, "
            f"{short_repr(prompts)}: put them into a list"
        )


def prompt_tokens(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int
) -> list[int]:
    """Returns the token ids of a prompt.

    Args:
        prompt: Text, or token ids.
        tokenizer: The engine's tokenizer. Text needs one.
        vocabulary: Number of tokens in the vocabulary.

    Raises:
        TypeError: The prompt has another type. The message says how to convert it.
        ValueError: There is text without a tokenizer, or a token outside the vocabulary.
    """
    if not isinstance(prompt, str):
        tokens = _token_ids(prompt)
    elif tokenizer is None:
        raise ValueError("Engine: prompt: expected token ids (there is no tokenizer), got text")
    else:
        tokens = tokenizer(prompt)["input_ids"]
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"Engine: prompt: expected tokens from 0 to {vocabulary - 1}, got {token}"
            )
    return tokens


def _token_ids(prompt: Items[int]) -> list[int]:
    if not isinstance(prompt, bytes | Mapping):
        try:
            return list(map(index, prompt))
        except TypeError:
            pass
    raise TypeError(
        f"Engine: prompt: expected text or a list of token ids, got {short_repr(prompt)}"
        f"{_hint(prompt)}"
    )


def _hint(prompt: object) -> str:
    """Says how to turn ``prompt`` into a prompt. Empty if unknown."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    if isinstance(first, Mapping):
        if "input_ids" in first:
            return ': give its ["input_ids"]'
        return ": make text of chat messages by tokenizer.apply_chat_template(tokenize=False)"
    return ": decode() it" if isinstance(prompt, bytes) else ""
