"""Checks the arguments of requests, and converts prompts to token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from numbers import Integral
from operator import index
from reprlib import repr as short_repr

from transformers import PreTrainedTokenizerBase

from ..errors import InvalidArgument, InvalidType
from .request import SamplingParams

__all__ = ["Prompt", "checked_params", "params_of_prompts", "prompt_tokens"]

Prompt = str | Items[int]


def checked_params(
    params: SamplingParams | None,
    salt: str | bytes | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> SamplingParams:
    """Checks the parameters and the salt of a request. None means the default parameters.

    Raises:
        TypeError: params or salt has the wrong type.
        ValueError: There are stop strings but no tokenizer.
    """
    if params is None:
        params = SamplingParams()
    if not isinstance(params, SamplingParams):
        hint = ": give SamplingParams(**params)" if isinstance(params, Mapping) else ""
        raise InvalidType(
            f"Engine: sampling_params: expected SamplingParams, got {short_repr(params)}{hint}"
        )
    if params.stop and tokenizer is None:
        raise InvalidArgument("Engine: stop: expected a tokenizer with the engine, got none")
    if not isinstance(salt, str | bytes | None):
        raise InvalidType(f"Engine: salt: expected text, bytes or None, got {salt!r}")
    return params


def params_of_prompts(
    prompts: Items[Prompt], params: SamplingParams | Items[SamplingParams] | None
) -> list[SamplingParams | None]:
    """Returns the parameters of each prompt.

    Raises:
        TypeError: ``prompts`` is not a list of prompts.
        ValueError: There are more or fewer parameters than prompts.
    """
    _refuse_no_list(prompts)
    chosen: list[SamplingParams | None]
    chosen = list(params) if isinstance(params, Items) else [params] * len(prompts)
    if len(chosen) != len(prompts):
        raise InvalidArgument(
            f"Engine: sampling_params: expected {len(prompts)} (from prompts), got {len(chosen)}"
        )
    return chosen


def _refuse_no_list(prompts: object) -> None:
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Collection):
        raise InvalidType(
            f"Engine: prompts: expected a list of prompts, got {short_repr(prompts)}"
            f"{_hint(prompts)}"
        )
    first = next(iter(prompts), None)
    if isinstance(first, Integral) or getattr(first, "ndim", None) == 0:
        raise InvalidType(
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
        raise InvalidArgument(
            "Engine: prompt: expected token ids (there is no tokenizer), got text"
        )
    else:
        _refuse_surrogates(prompt)
        tokens = tokenizer(prompt)["input_ids"]
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise InvalidArgument(
                f"Engine: prompt: expected tokens from 0 to {vocabulary - 1}, got {token}"
            )
    return tokens


def _refuse_surrogates(prompt: str) -> None:
    """Raises ValueError for a lone surrogate, which UTF-8 cannot encode."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"Engine: prompt: expected text without lone surrogates, got {short_repr(prompt)} with "
            f"{prompt[error.start]!r} at {error.start}"
        ) from None


def _token_ids(prompt: Items[int]) -> list[int]:
    if not isinstance(prompt, bytes | Mapping):
        try:
            tokens = list(prompt)
            if set(map(type, tokens)) == {int}:
                return tokens
            if not any(map(_is_bool, tokens)):
                return list(map(index, tokens))
        except TypeError:
            pass
    raise InvalidType(
        f"Engine: prompt: expected text or a list of token ids, got {short_repr(prompt)}"
        f"{_hint(prompt)}"
    )


def _is_bool(token: object) -> bool:
    """Whether it is a boolean of Python, numpy or torch. ``operator.index`` takes True for 1."""
    return isinstance(token, bool) or "bool" in str(getattr(token, "dtype", ""))


def _hint(prompt: object) -> str:
    """Says how to turn ``prompt`` into a prompt. Empty if unknown."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    if isinstance(first, Mapping):
        if "input_ids" in first:
            return ': give its ["input_ids"]'
        return ": make text of chat messages by tokenizer.apply_chat_template(tokenize=False)"
    return ": decode() it" if isinstance(prompt, bytes) else ""
