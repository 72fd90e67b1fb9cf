"""Incremental detokenization, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence as Items

from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer"]

_UNFINISHED = "\ufffd"  # a tokenizer decodes an incomplete UTF-8 character to this


class Detokenizer:
    """Turns the tokens of one sequence into text.

    Most tokenizers decode a lone token wrongly: spaces and multi-token characters depend on
    context. Decoding the whole sequence for each token is slow. So each new token is decoded
    together with a few tokens before it.

    Args:
        tokenizer: The model's tokenizer.
        prompt: Prompt token ids.
        stop: Strings that end the text.
    """

    _CONTEXT = 5  # number of earlier tokens to decode with a new one

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], stop: Items[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = prompt[-self._CONTEXT :]
        self._shown = len(self._tokens)  # the text of these tokens is already in self.text
        self._stop = tuple(stop)
        # A stop string may begin in the last characters, so they are held back.
        self._held = max((len(string) for string in stop), default=1) - 1
        self._sent = 0
        self.text = ""
        self.is_stopped = False

    def add(self, token: int, may_stop: bool = True) -> str:
        """Appends a token.

        Args:
            token: The token id.
            may_stop: Whether stop strings count that end in its text.

        Returns:
            New text that no later token can change.
        """
        self._tokens.append(token)
        new = self._new_text()
        if new and not new.endswith(_UNFINISHED):
            self._take(new, may_stop)
            # The next token needs only a short context.
            self._tokens = self._tokens[-self._CONTEXT :]
            self._shown = len(self._tokens)
        return self._send(max(len(self.text) - self._held, self._sent))

    def finish(self) -> str:
        """Returns the text that was held back."""
        if not self.is_stopped:
            self._take(self._new_text(), True)
            self._shown = len(self._tokens)
        return self._send(len(self.text))

    def _new_text(self) -> str:
        """Decodes the tokens that are not in self.text yet."""
        known, text = self._decode(self._tokens[: self._shown]), self._decode(self._tokens)
        if not text.startswith(known):  # the new tokens complete a character
            known = known.rstrip(_UNFINISHED)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)  # a list of strings for a list of lists
        return text

    def _take(self, new: str, may_stop: bool) -> None:
        before = len(self.text)
        self.text += new
        if not may_stop:
            return
        # A string counts if it ends in the new text.
        starts = [max(before - len(string) + 1, 0) for string in self._stop]
        places = [self.text.find(string, at) for string, at in zip(self._stop, starts)]
        found = [place for place in places if place >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True

    def _send(self, end: int) -> str:
        if self.is_stopped:
            end = len(self.text)
        new, self._sent = self.text[self._sent : end], max(end, self._sent)
        return new
