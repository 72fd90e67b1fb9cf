"""Text of a sequence as its tokens come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence as Items

from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer"]

_UNFINISHED = "\ufffd"  # what a tokenizer gives for bytes that are no character yet


class Detokenizer:
    """The text of one sequence.

    Decoding a token alone is wrong for most tokenizers (spaces, characters of several tokens), and
    decoding everything each time is slow: a few tokens before the new ones are decoded with them.

    Args:
        tokenizer: of the model.
        prompt: tokens before the first new one.
        stop: strings that end the text.
    """

    _CONTEXT = 5  # tokens of the prompt that are decoded with the first new one

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], stop: Items[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = prompt[-self._CONTEXT :]
        self._shown = len(self._tokens)  # tokens whose text is out
        self._stop = tuple(stop)
        # Text that may be the beginning of a stop string is held back.
        self._held = max((len(string) for string in stop), default=1) - 1
        self._sent = 0
        self.text = ""
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Takes the next token in.

        Returns:
            The text that is certain now and was not returned before.
        """
        self._tokens.append(token)
        new = self._new_text()
        if new and not new.endswith(_UNFINISHED):
            self._take(new)
            # Drop what the next token does not need beside it.
            self._tokens = self._tokens[-self._CONTEXT :]
            self._shown = len(self._tokens)
        return self._send(max(len(self.text) - self._held, self._sent))

    def finish(self) -> str:
        """The text that was held back."""
        if not self.is_stopped:
            self._take(self._new_text())
            self._shown = len(self._tokens)
        return self._send(len(self.text))

    def _new_text(self) -> str:
        """That of the tokens which are not shown yet."""
        known = self._tokenizer.decode(self._tokens[: self._shown], skip_special_tokens=True)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not text.startswith(known):  # they complete a character that the prompt began
            known = known.rstrip(_UNFINISHED)
        return text[len(known) :]

    def _take(self, new: str) -> None:
        searched = max(len(self.text) - self._held, 0)
        self.text += new
        places = [self.text.find(string, searched) for string in self._stop]
        found = [place for place in places if place >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True

    def _send(self, end: int) -> str:
        if self.is_stopped:
            end = len(self.text)
        new, self._sent = self.text[self._sent : end], max(end, self._sent)
        return new
