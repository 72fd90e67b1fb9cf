"""Continuous batching of a transformers model over a paged KV cache::

engine = Engine(model, tokenizer)
params = SamplingParams(max_tokens=20)
for output in engine.generate(["The for statement", "A class"], params):
    print(output.completions[0].text)
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._types import CacheDType, Layout
from ..errors import EngineBusy, Error, InvalidArgument, InvalidType, UnknownRequest
from ..hf.attention_interface import ENGINES, refuse_no_model
from .config import EngineConfig
from .engine_lock import Exclusive
from .output_processor import end_tokens
from .outputs import EngineStatistics, RequestOutput, TokenOutput, output_of, raise_if_all_failed
from .passes import Passes
from .prompts import Prompt, checked_params, params_of_prompts, prompt_tokens
from .refusals import Closed, named_engine, num_logits, refuse_unserved
from .request import FinishReason, Request, SamplingParams
from .sampling.constraints import constraints_of
from .self_check import verify
from .sparse import Sparse
from .speculative.options import DraftModel, PromptLookup
from .tensor_parallel import Ranks

__all__ = ["Engine"]


class Engine:
    """Serves many requests with one model, by continuous batching.

    Each :meth:`step` is one forward pass over packed tokens. It has the next token of every
    decoding sequence and chunks of new prompts. Sequences with a common prefix share its blocks.

    While the engine exists, it owns the model and replaces its attention. :meth:`close`, or the end
    of a ``with`` block, gives the model and the memory back. Call :meth:`reset` after you change
    weights or adapters, because cached prefixes depend on them.

    Threads: calls from several threads run one after the other, in order of arrival. A pass serves
    the requests of all threads. Each :meth:`stream` and :meth:`generate` gets its own tokens. A
    call from inside a step, such as by a hook of the model, raises EngineBusy. A call in a forked
    process raises RuntimeError. An engine cannot be pickled or copied.

    Failures: a request that cannot be served ends with ``FinishReason.ERROR``, and the others go
    on. The reasons are NaN or infinite logits, a tokenizer that fails, or a forward pass that fails
    because of the request. The engine recomputes failed passes. After 3 failures in a row it
    divides the batch until the request fails alone 3 times.

    Args:
        model: A transformers decoder model in eval mode, on a CPU or one GPU, or a rank's part of
            a tensor-parallel one. See docs/tensor_parallel.md.
        tokenizer: The model's tokenizer. None serves token ids only, without text and stop strings.
        block_size: Number of tokens per block, a power of two from 1 to 256.
        num_blocks: Number of cache blocks. None fills ``cache_bytes``.
        cache_bytes: Size of the cache in bytes. None takes 90% of the free memory on a GPU. On a
            CPU it takes room for ``max_batch_size`` sequences of ``max_length`` tokens, and at
            most a quarter of the free memory.
        host_bytes: Size in bytes of the host pool for swapped sequences. 0 recomputes instead.
        layout: Cache layout: "vllm", "NHD" or "HND".
        cache_dtype: "auto" (the model's dtype), "fp8", "fp8_e5m2", "int8", "int8_per_token" or
            "int4_per_token". Tokens of the last two have scales of their own, so that none need be
            found; they use no cascades.
        k_scale, v_scale: Scales of an 8-bit cache. See
            :class:`~vllm_kernels.kv_cache.tensors.KVCache`.
        max_batch_size: Maximum number of sequences per pass.
        max_batch_tokens: Maximum number of tokens per pass. Longer prompts run in chunks. None
            means 2048, or max_batch_size if that is larger.
        max_length: Maximum number of tokens per sequence. None takes the model's
            max_position_embeddings, or 4096 if the config has none. A value above the model's
            positions warns.
        prefix_caching: Whether sequences reuse cached blocks of a common prefix.
        cuda_graphs: Whether decode passes replay CUDA graphs. None means on a GPU. A model that
            cannot be captured runs without graphs, and a warning says why. Mixtures of experts in
            float32 or float16, or before Hopper, are such models: torch's grouped_mm reads offsets
            on the CPU there. ``model.set_experts_implementation("batched_mm")`` avoids this, but it
            copies the experts' weights for every token.
        cascade: Whether decoding sequences read blocks that all of them share once per pass, if
            :func:`vllm_kernels.cascade_pays`. Results agree within rounding.
        overlap: Whether the next pass starts before the host reads the last tokens, so that a GPU
            does not wait for Python. :meth:`step` then returns tokens one call later. A sequence
            that ends by a stop token or string computes one token too many. None means on a GPU.
        compile: Whether to call the model through torch.compile. A string names the backend.
        fused: Whether this library's ops run Llama, Mistral, Qwen 2 and 3, except for the matrix
            products. False runs transformers' modules.
        check: Whether the constructor compares a few logits with the model's own attention.
        speculative: :class:`PromptLookup` or :class:`DraftModel` drafts tokens, which one pass
            verifies. The tokens are those of an engine without it. None drafts nothing. It excludes
            ``overlap`` and models with sliding windows.
        sparse: :class:`PageSelection` or :class:`SparQ`: decoding sequences attend to a part of
            their tokens, so long contexts are faster and texts may differ. A sequence that is
            preempted and computed again may go on differently. None attends to all tokens.

    Raises:
        NotImplementedError: The model cannot be served. The message names the reason.
        TypeError: ``model`` is not a transformers model, or an option has the wrong type.
        ValueError: An argument is out of range, or another engine owns the model.
        MemoryError: The cache does not fit. The message has both sizes.

    Example:
        >>> from pathlib import Path
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from vllm_kernels.integrations.transformers import Engine, SamplingParams
        >>> folder = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        >>> tokenizer = AutoTokenizer.from_pretrained(folder)
        >>> with Engine(model, tokenizer, max_length=256) as engine:
        ...     outputs = engine.generate(["The for statement"], SamplingParams(max_tokens=8))
        >>> text = outputs[0].completions[0].text
        >>> outputs[0].completions[0].finish_reason.value
        'length'
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        cache_bytes: int | None = None,
        host_bytes: int = 0,
        layout: Layout = "vllm",
        cache_dtype: CacheDType = "auto",
        k_scale: Tensor | float = 1.0,
        v_scale: Tensor | float = 1.0,
        max_batch_size: int = 64,
        max_batch_tokens: int | None = None,
        max_length: int | None = None,
        prefix_caching: bool = True,
        cuda_graphs: bool | None = None,
        cascade: bool = True,
        overlap: bool | None = None,
        compile: bool | str = False,
        fused: bool = True,
        check: bool = True,
        speculative: PromptLookup | DraftModel | None = None,
        sparse: Sparse | None = None,
    ) -> None:
        refuse_no_model("Engine", model)
        config = EngineConfig.of(locals())
        refuse_unserved(model)
        self.model = model
        self.tokenizer = tokenizer
        self._next_id = count()
        on_gpu = model.device.type == "cuda"
        # One stream for the calls of all threads. It selects the device, too.
        stream = torch.cuda.current_stream(model.device) if on_gpu else None
        self._on_device = nullcontext() if stream is None else torch.cuda.stream(stream)
        self._ranks: Ranks | None = None  # of a model that several processes share
        with ExitStack() as cleanup:  # runs if the constructor fails; otherwise close() runs it
            with named_engine():
                self._ranks = Ranks.of(model, config)
                if self._ranks is not None:
                    cleanup.enter_context(self._ranks)
                passes = Passes(model, tokenizer, config, self._ranks, self._on_device, cleanup)
            self._passes = passes
            self.manager, self.cache = passes.manager, passes.cache
            self.scheduler, self._recovery = passes.scheduler, passes.recovery
            self._packed = passes.packed
            self._open = passes.open_requests
            self._requests, self._queues = self._open.by_id, self._open.queues
            self._exclusive = Exclusive(self._open, self._ranks)
            if config.check:
                with self._on_device:
                    verify(self._packed, self.manager)
            ENGINES[model] = ref(self)
            if isinstance(speculative, DraftModel):
                ENGINES[speculative.model] = ref(self)
            self._cleanup = cleanup.pop_all()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._ranks is not None and error[1] is not None:
            self._ranks.fail(error[1])
        self.close()

    def __reduce__(self) -> Any:
        raise InvalidType(
            "Engine: expected no pickling or copying, which cannot share a model and its cache: "
            "make an engine in each process"
        )

    def warm_up(self) -> None:
        """Captures the CUDA graphs of all batch sizes now, which takes seconds.

        Otherwise each graph is captured on first use. Without CUDA graphs this does nothing.

        Raises:
            EngineBusy: There are unfinished requests, of any thread.
        """
        with self._exclusive:
            self._refuse_unfinished("warm_up")
            if self._ranks is not None:
                self._ranks.begin(self._passes, "warm_up")
            with self._on_device:
                self._packed.capture_all()

    def close(self) -> None:
        """Restores the model's attention and frees the cache. The engine cannot serve again.

        It waits for the pass of another thread. Then :meth:`stream` and :meth:`generate` of other
        threads raise RuntimeError.
        """
        with self._exclusive:
            if self.cache.is_freed:
                return
            if self._ranks is not None:
                self._cleanup.callback(self._ranks.end, self._passes)
            for request in list(self._requests.values()):
                self._open.end(request, Closed())
            self._open.undelivered.clear()
            self._passes.pending = None
            self._cleanup.close()

    # Requests.

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> int:
        """Adds a request. :meth:`step` serves it.

        Args:
            prompt: Text, which needs a tokenizer, or token ids.
            sampling_params: None means greedy with 16 tokens.
            salt: Only requests with the same salt share cached prefixes. Give each tenant its own,
                so that response times reveal nothing about others' prompts. The name of the
                current adapter is another use.

        Returns:
            The request's id.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The request cannot be served. Nothing has changed.
            RuntimeError: The engine is closed, or the model is in training mode.
        """
        return self._add(prompt, sampling_params, salt).id

    def abort(self, request_id: int) -> None:
        """Ends a request and frees its blocks.

        Raises:
            UnknownRequest: The request is unknown or finished. It is a KeyError.
        """
        with self._exclusive:
            request = self._requests.get(request_id)
            if request is None:
                raise UnknownRequest(f"Engine: abort: unknown or finished request {request_id!r}")
            self._note("abort", request_id)
            self._open.end(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has work to do or tokens to return."""
        with self._exclusive:
            return self.scheduler.num_unfinished > 0 or bool(self._open.undelivered)

    def step(self) -> list[TokenOutput]:
        """Runs one forward pass.

        Returns:
            New tokens of requests from :meth:`add_request`. They include tokens that came while
            :meth:`stream` or :meth:`generate` ran. The list is empty after a pass with prompt
            chunks only. With ``overlap``, the tokens are one pass old. A request that cannot be
            served has an output with ``FinishReason.ERROR``.

        Raises:
            RuntimeError: The engine is closed, or the model is in training mode.
            Exception: The pass failed. ``request_ids`` lists its requests. The next call
                recomputes the running sequences.
        """
        with self._exclusive:
            self._refuse_unusable()
            self._passes.advance()
            outputs, self._open.undelivered = self._open.undelivered, []
            return outputs

    def generate(
        self,
        prompts: Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> list[RequestOutput]:
        """Serves all prompts and returns their outputs in the same order.

        A request that cannot be served has ``FinishReason.ERROR`` and ``RequestOutput.error``. A
        failed pass warns with RuntimeWarning and is recomputed.

        Args:
            prompts: Texts or lists of token ids.
            sampling_params: For all prompts, or a list with one per prompt.
            salt: Salt for all prompts. See :meth:`add_request`.

        Raises:
            TypeError: ``prompts`` is not a list of prompts. :meth:`add_request` lists others.
            RuntimeError: Another thread closed the engine.
            Exception: No request could be served. This is the error of the first one.
        """
        requests: list[Request] = []
        try:
            for prompt, one in zip(prompts, params_of_prompts(prompts, sampling_params)):
                requests.append(self._add(prompt, one, salt, deque(maxlen=0)))
            is_finished = False
            while not is_finished:
                with self._exclusive:
                    is_finished = all(request.is_finished for request in requests)
                    if not is_finished:
                        self._advance_or_recover()
        finally:
            self._exclusive.cancel(request.id for request in requests)
        for request in requests:
            if isinstance(request.error, Closed):
                raise request.error
        outputs = [output_of(request) for request in requests]
        raise_if_all_failed(outputs)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> Iterator[TokenOutput]:
        """Serves one prompt and yields each token as soon as it is known.

        Other requests make progress meanwhile. Leaving the loop early ends the request, and so
        does deleting the iterator. One thread at a time may use the iterator.

        Raises:
            RuntimeError: Another thread closed the engine.
            Exception: The request could not be served. The tokens before the error were yielded.
        """
        queue: deque[TokenOutput] = deque()
        request = self._add(prompt, sampling_params, salt, queue)
        try:
            while True:
                if not queue:
                    with self._exclusive:
                        if not queue:
                            if request.is_finished:
                                return
                            self._advance_or_recover()
                    continue
                output = queue.popleft()
                if output.error is not None:
                    raise output.error
                if output.finish_reason is not FinishReason.ABORT:
                    yield output
        finally:
            self._exclusive.cancel([request.id])

    def follow(self) -> None:
        """Serves rank 0's requests on another rank of a tensor-parallel model.

        It returns when rank 0 closes its engine. Rank 0 alone takes requests then, also through
        ``AsyncEngine``. Without it, all ranks make the same calls.

        Raises:
            ValueError: The model is whole, or this is rank 0.
            Exception: A pass failed, on any rank.
        """
        if self._ranks is None:
            raise InvalidArgument(
                "Engine: follow: expected a tensor-parallel model, got a whole one"
            )
        self._ranks.follow(self)

    def reset(self) -> None:
        """Drops all cached prefixes and sets the statistics to zero.

        Call it after you change weights or adapters, because cached keys depend on them.

        Raises:
            EngineBusy: There are unfinished requests, of any thread.
        """
        with self._exclusive:
            self._refuse_unfinished("reset")
            self._note("reset")
            self._passes.reset()

    def statistics(self) -> EngineStatistics:
        """Returns counters since the last reset, and the current use of the cache."""
        with self._exclusive:
            scheduler = self.scheduler
            return EngineStatistics(
                replace(scheduler.statistics),
                self.manager.statistics(),
                scheduler.num_running,
                scheduler.num_unfinished,
            )

    # Inner workings.

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        salt: str | bytes | None,
        queue: deque[TokenOutput] | None = None,
    ) -> Request:
        """Adds a request. Its outputs go to ``queue``, or to :meth:`step` if that is None."""
        with self._exclusive:
            self._refuse_unusable()
            params = checked_params(params, salt, self.tokenizer)
            vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
            tokens = prompt_tokens(prompt, self.tokenizer, vocabulary)
            constraints = constraints_of(
                params, self.tokenizer, end_tokens(self.model), num_logits(self.model)
            )
            if self._ranks is not None:
                self._ranks.refuse_functions(params)
            own_salt = salt
            if params.prompt_logprobs is not None:
                own_salt = os.urandom(16)  # all of the prompt is computed
            request = Request(
                next(self._next_id), tokens, params, time.perf_counter(), own_salt, constraints
            )
            self.scheduler.add(request)
            self._open.add(request, queue)
            self._note("_add", request.id, tokens, params, salt)
            return request

    def _set_paused(self, request_id: int, is_paused: bool) -> None:
        """Keeps a request out of passes, or lets it run again. It loses its blocks meanwhile."""
        with self._exclusive:
            request = self._requests.get(request_id)
            if request is not None:
                self._note("_set_paused", request_id, is_paused)
                request.is_paused = is_paused
                self.scheduler.regroup()

    @property
    def _can_advance(self) -> bool:
        """Whether a pass has something to do. Paused requests do not count."""
        return self.scheduler.has_runnable or self._recovery.is_searching

    def _refuse_unusable(self) -> None:
        if self.cache.is_freed:
            raise Closed()
        if self._ranks is not None and self._ranks.failure is not None:
            raise self._ranks.failure
        if self.model.training:
            raise Error("Engine: model: expected one in eval mode: call model.eval()")

    def _refuse_unfinished(self, what: str) -> None:
        if self.scheduler.num_unfinished:
            raise EngineBusy(
                f"Engine: {what}: expected no unfinished sequences, got "
                f"{self.scheduler.num_unfinished}"
            )

    def _advance_or_recover(self) -> None:
        """Runs one pass. A failure warns, and is raised only if recovery gives up."""
        self._refuse_unusable()
        try:
            self._passes.advance()
        except Exception as error:
            if self._recovery.is_hopeless or self._ranks is not None:
                raise
            text = f"Engine: a pass failed and is computed again: {type(error).__name__}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _note(self, name: str, *arguments: Any) -> None:
        """Records a call that other ranks must make before the next pass."""
        if self._ranks is not None:
            self._ranks.note(name, *arguments)
