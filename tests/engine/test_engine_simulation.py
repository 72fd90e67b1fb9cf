"""Random requests, cancellations, threads, tiny memory and injected faults.

Whatever finishes has the tokens that the request gets alone, whatever does not has the first ones,
and no block is leaked. VLLM_KERNELS_FUZZ=seconds makes it long. A seed that fails is printed.
"""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import FUZZ_SECONDS, by_transformers, prompts
from test_engine_threads import check_no_leak
from tiny_models import VOCABULARY, tiny_model
from transformers import PreTrainedModel

from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.outputs import TokenOutput
from vllm_kernels.engine.request import FinishReason, SamplingParams
from vllm_kernels.kv_cache import KVCacheManager

SECONDS = FUZZ_SECONDS or 20
MAX_TOKENS = 24
OFFSET = 0x4E00


class FaultError(Exception):
    """What the simulation injects."""


INJECTED = (FaultError, MemoryError, KeyboardInterrupt)


class Tokenizer:
    """A character per token. Some calls fail."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) - OFFSET for character in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self._faults.maybe(0.002, FaultError)
        return text_of(tokens)


def text_of(tokens: list[int]) -> str:
    return "".join(chr(OFFSET + token) for token in tokens)


class Faults:
    """Injects faults at random. One lock, because several threads ask."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.is_on = True

    def maybe(self, rate: float, *kinds: type[BaseException]) -> None:
        with self._lock:
            happens = self.is_on and self._random.random() < rate
            kind = self._random.choice(kinds)
        if happens:
            raise kind("injected")

    def around(self, owner: object, name: str, rate: float, *kinds: type[BaseException]) -> None:
        """Makes a method fail before or after its work."""
        call: Callable[..., Any] = getattr(owner, name)

        def failing(*arguments: Any, **options: Any) -> Any:
            self.maybe(rate / 2, *kinds)
            result = call(*arguments, **options)
            self.maybe(rate / 2, *kinds)
            return result

        setattr(owner, name, failing)


class FaultyManager:
    """A manager whose calls fail before or after their work."""

    def __init__(self, manager: KVCacheManager, faults: Faults, rate: float) -> None:
        self._manager = manager
        for name in ("allocate", "fork", "record_tokens", "step", "swap_in", "swap_out"):
            setattr(self, name, getattr(manager, name))
            faults.around(self, name, rate, MemoryError, KeyboardInterrupt)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class Simulation:
    """One engine, and what its requests got."""

    def __init__(
        self, model: PreTrainedModel, expected: list[list[int]], poison: int, seed: int
    ) -> None:
        rng = random.Random(seed)
        self.expected = expected
        self.poison = rng.choice((None, poison))
        self.faults = Faults(seed)
        self.engine = Engine(
            model,
            rng.choice((None, Tokenizer(self.faults))),
            num_blocks=rng.choice((14, 20, 60)),
            block_size=8,
            host_bytes=rng.choice((0, 1 << 18)),
            max_length=104,
            max_batch_size=rng.randint(2, 6),
            max_batch_tokens=rng.choice((6, 24, 100)),
            prefix_caching=rng.random() < 0.7,
            overlap=rng.random() < 0.5,
            check=False,
        )
        rate = rng.choice((0, 0.02, 0.1))
        for owner, name, kinds in (
            (self.engine._packed, "run", (FaultError, MemoryError, KeyboardInterrupt)),
            (self.engine.scheduler, "schedule", (MemoryError, KeyboardInterrupt)),
            (self.engine.scheduler, "schedule_ahead", (MemoryError, KeyboardInterrupt)),
            (self.engine.scheduler, "computed", (MemoryError, KeyboardInterrupt)),
            (self.engine.cache, "swap_in", (FaultError,)),
            (self.engine.cache, "swap_out", (FaultError,)),
            (self.engine._passes, "_sample", (FaultError,)),
        ):
            self.faults.around(owner, name, rate, *kinds)
        scheduler = self.engine.scheduler
        manager: Any = FaultyManager(self.engine.manager, self.faults, rate / 2)
        scheduler.manager = scheduler._admission.manager = manager
        self.num_finished = 0
        self._lock = threading.Lock()
        self._ids: dict[int, tuple[int, int]] = {}  # request: (text, max_tokens)
        self._stepped: dict[int, list[TokenOutput]] = {}

    def run(self, texts: list[list[int]], threads: int, seed: int) -> None:
        handle = self.engine.model.get_input_embeddings().register_forward_pre_hook(self._refuse)
        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda at: self._client(texts, seed + at), range(threads)))
            self.faults.is_on = False
            while self.engine.has_unfinished:
                self._step()
        finally:
            handle.remove()
        for request, outputs in self._stepped.items():
            at, max_tokens = self._ids[request]
            for index in {output.index for output in outputs}:
                self._check([one for one in outputs if one.index == index], at, max_tokens)
        check_no_leak(self.engine)
        self.engine.close()

    def _refuse(self, _: object, arguments: Any) -> None:
        if self.poison is not None and (arguments[0] == self.poison).any():
            raise FaultError("poison")

    def _client(self, texts: list[list[int]], seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(10):
            with suppress(*INJECTED):  # its requests are ended
                rng.choice((self._add, self._add, self._stream, self._generate))(texts, rng)

    def _add(self, texts: list[list[int]], rng: random.Random) -> None:
        at = rng.randrange(len(texts))
        prompt, params = self._request(texts[at], rng)
        is_poisoned = self.poison is not None and rng.random() < 0.1
        if is_poisoned:
            prompt = [*texts[at], self.poison]
        with self._lock:  # no step may return its tokens before it is known
            request = self.engine.add_request(prompt, params)
            self._ids[request] = (-1 if is_poisoned else at, params.max_tokens)
        for _ in range(rng.randint(0, 12)):
            self._step()
        if rng.random() < 0.2:
            with suppress(KeyError):  # it has finished
                self.engine.abort(request)

    def _step(self) -> None:
        with suppress(*INJECTED), self._lock:
            for output in self.engine.step():
                self._stepped.setdefault(output.request_id, []).append(output)

    def _stream(self, texts: list[list[int]], rng: random.Random) -> None:
        at = rng.randrange(len(texts))
        prompt, params = self._request(texts[at], rng, n=1)
        outputs = []
        stream = self.engine.stream(prompt, params)
        read = rng.choice((0, 1, 5, MAX_TOKENS + 1))
        try:
            for output, _ in zip(stream, range(read)):
                outputs.append(output)
        finally:
            self._check(outputs, at, params.max_tokens)
        if rng.random() < 0.5:
            stream.close()  # else it is deleted

    def _generate(self, texts: list[list[int]], rng: random.Random) -> None:
        chosen = [rng.randrange(len(texts)) for _ in range(rng.randint(1, 4))]
        pairs = [self._request(texts[at], rng) for at in chosen]
        outputs = self.engine.generate(*map(list, zip(*pairs)))
        for at, (_, params), output in zip(chosen, pairs, outputs):
            for one in output.completions:
                wanted = self.expected[at][: params.max_tokens]
                if one.finish_reason is FinishReason.LENGTH:
                    assert one.tokens == wanted
                    self.num_finished += 1
                    assert one.text == (text_of(wanted) if self.engine.tokenizer else "")
                else:
                    assert one.finish_reason is FinishReason.ERROR
                    assert isinstance(output.error, FaultError | MemoryError)
                    assert one.tokens == wanted[: len(one.tokens)]

    def _request(self, text: list[int], rng: random.Random, n: int | None = None) -> Any:
        params = SamplingParams(max_tokens=rng.randint(1, MAX_TOKENS), n=n or rng.choice((1, 1, 2)))
        as_text = self.engine.tokenizer is not None and rng.random() < 0.5
        return text_of(text) if as_text else text, params

    def _check(self, outputs: list[TokenOutput], at: int, max_tokens: int) -> None:
        tokens = [one.token for one in outputs if one.finish_reason is not FinishReason.ERROR]
        if at < 0:
            assert not tokens  # whether the poison or an injected fault has ended it
            return
        wanted = self.expected[at][:max_tokens]
        assert tokens == wanted[: len(tokens)]
        if outputs and outputs[-1].finish_reason is FinishReason.LENGTH:
            assert tokens == wanted
            self.num_finished += 1


def test_simulation() -> None:
    model = tiny_model()
    texts = prompts((5, 19, 33, 8, 70, 3, 40))
    texts += [texts[6][:32] + text[:4] for text in texts[:3]]  # common prefixes
    expected = [by_transformers(model, text, MAX_TOKENS) for text in texts]
    poison = min(set(range(1, VOCABULARY)).difference(*texts, *expected))
    end = time.monotonic() + SECONDS
    seed, runs = time.time_ns() if FUZZ_SECONDS else 0, 0
    num_finished = 0
    while time.monotonic() < end:
        seed += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                simulation = Simulation(model, expected, poison, seed)
                simulation.run(texts, threads=1 if seed % 3 == 0 else 4, seed=seed * 1000)
            except BaseException:
                print(f"seed {seed}")
                raise
        num_finished += simulation.num_finished
        runs += 1
    print(f"{runs} simulations, {num_finished} sequences finished")
    assert num_finished > 5 * runs  # most of them, in spite of the faults
