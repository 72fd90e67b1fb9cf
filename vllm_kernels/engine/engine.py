"""Continuous batching of a transformers model over a paged KV cache::

engine = Engine(model, tokenizer)
params = SamplingParams(max_tokens=20)
for output in engine.generate(["The for statement", "A class"], params):
    print(output.completions[0].text)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from reprlib import repr as short_repr
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vllm_kernels.engine.config import EngineConfig
from vllm_kernels.engine.detokenizer import Detokenizer
from vllm_kernels.engine.fused_llama import refuse_changing_rotary
from vllm_kernels.engine.layer_groups import LayerGroups
from vllm_kernels.engine.model_runner import ModelRunner, layer_options
from vllm_kernels.engine.outputs import (
    EngineStatistics,
    RequestOutput,
    TokenOutput,
    output_of,
)
from vllm_kernels.engine.pending_tokens import PendingTokens
from vllm_kernels.engine.prompts import Prompt, prompt_tokens, refuse_no_list
from vllm_kernels.engine.request import FinishReason, Request, SamplingParams, Sequence
from vllm_kernels.engine.sampler import sample
from vllm_kernels.engine.scheduler import Plan, Scheduler, SchedulerStatistics
from vllm_kernels.engine.self_check import verify
from vllm_kernels.engine.upload import upload
from vllm_kernels.hf.attention_interface import (
    ENGINES,
    kv_shape,
    refuse_no_model,
    stop_paged_attention,
    use_paged_attention,
)
from vllm_kernels.kv_cache import KVCacheManager
from vllm_kernels.kv_cache.tensors import KVCache

__all__ = ["Engine"]


class Engine:
    """Serves many requests with one model, by continuous batching.

    Each :meth:`step` is one forward pass over packed tokens. It has the next token of every
    decoding sequence and chunks of new prompts. Sequences with a common prefix share its blocks.

    While the engine exists, it owns the model and replaces its attention. :meth:`close`, or the end
    of a ``with`` block, gives the model and the memory back. Call :meth:`reset` after you change
    weights or adapters, because cached prefixes depend on them.

    Args:
        model: A transformers decoder model in eval mode, on a CPU or one GPU.
        tokenizer: The model's tokenizer. None serves token ids only, without text and stop strings.
        block_size: Number of tokens per block, a power of two from 1 to 256.
        num_blocks: Number of cache blocks. None fills ``cache_bytes``.
        cache_bytes: Size of the cache in bytes. None takes 90% of the free memory on a GPU. On a
            CPU it takes room for ``max_batch_size`` sequences of ``max_length`` tokens, and at
            most a quarter of the free memory.
        host_bytes: Size in bytes of the host pool for swapped sequences. 0 recomputes instead.
        layout: Cache layout: "vllm", "NHD" or "HND".
        cache_dtype: "auto" (the model's dtype), "fp8", "fp8_e5m2" or "int8".
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

    Raises:
        NotImplementedError: The model cannot be served. The message names the reason.
        TypeError: ``model`` is not a transformers model, or a size is not an integer.
        ValueError: An argument is out of range, or another engine owns the model.
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
        layout: str = "vllm",
        cache_dtype: str = "auto",
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
    ) -> None:
        refuse_no_model("Engine", model)
        config = EngineConfig.of(locals())
        _refuse_unserved(model)
        self.model = model
        self.tokenizer = tokenizer
        self._requests: dict[int, Request] = {}
        self._texts: dict[int, Detokenizer] = {}  # by sequence id
        self._next_id = count()
        self._end_tokens = _end_tokens(model)
        on_gpu = model.device.type == "cuda"
        # CUDA streams, events and graphs belong to the current device.
        self._on_device = torch.cuda.device(model.device) if on_gpu else nullcontext()
        self._overlap = on_gpu if config.overlap is None else config.overlap
        self._pending: PendingTokens | None = None  # tokens of the last pass, not fetched yet
        self._undelivered: list[TokenOutput] = []  # the next step() returns these
        # Outputs for stream() and generate(), by request id.
        self._queues: dict[int, deque[TokenOutput]] = {}
        with ExitStack() as cleanup:  # runs if the constructor fails; otherwise close() runs it
            self._build(config, cleanup)
            if config.check:
                with self._on_device:
                    verify(self._packed, self.manager)
            ENGINES[model] = ref(self)
            self._cleanup = cleanup.pop_all()

    def _build(self, config: EngineConfig, cleanup: ExitStack) -> None:
        """Builds all components. Registers the calls that undo this with ``cleanup``."""
        model = self.model
        shape = kv_shape(model, config.block_size, config.layout, config.cache_dtype)
        refuse_changing_rotary(model)
        cleanup.callback(ENGINES.pop, model, None)
        use_paged_attention(model)
        cleanup.callback(stop_paged_attention, model)
        layers = layer_options(model, shape)
        groups = LayerGroups.of([layer.sliding_window for layer in layers])
        shape = replace(shape, num_layers=groups.num_tensors)
        num_blocks = config.cache_blocks(model, shape, len(groups.windows))
        limits = config.limits(model, num_blocks, layers)
        self.manager = KVCacheManager(
            num_blocks,
            config.block_size,
            num_host_blocks=config.host_bytes // shape.block_bytes,
            windows=groups.windows,
            prefix_caching=config.prefix_caching,
        )
        self.cache = KVCache(
            shape,
            num_blocks,
            device=model.device,
            num_host_blocks=self.manager.num_host_blocks,
            tensor_of_layer=groups.tensor_of_layer,
            k_scale=config.k_scale,
            v_scale=config.v_scale,
        )
        cleanup.callback(self.cache.free)
        on_gpu = model.device.type == "cuda"
        with self._on_device:
            self._packed = ModelRunner(
                model,
                self.cache,
                groups,
                **limits,
                cuda_graphs=on_gpu if config.cuda_graphs is None else config.cuda_graphs,
                cascade=config.cascade and any(layer.can_cascade for layer in layers),
                backend="inductor" if config.compile is True else config.compile or None,
                fused=config.fused,
            )
        cleanup.callback(self._packed.close)
        self.scheduler = Scheduler(
            self.manager,
            self._packed.host_buffers,
            **limits,
            prefix_caching=config.prefix_caching,
            may_cascade=self._packed.may_cascade,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def warm_up(self) -> None:
        """Captures the CUDA graphs of all batch sizes now, which takes seconds.

        Otherwise each graph is captured on first use. Without CUDA graphs this does nothing.

        Raises:
            RuntimeError: There are unfinished requests.
        """
        self._refuse_unfinished("warm_up")
        with self._on_device:
            self._packed.capture_all()

    def close(self) -> None:
        """Restores the model's attention and frees the cache. The engine cannot serve again."""
        if self.cache.is_freed:
            return
        self._pending = None
        self._cleanup.close()

    # Requests.

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> int:
        """Adds a request. :meth:`step` serves it.

        Args:
            prompt: Text, which needs a tokenizer, or token ids.
            params: Sampling parameters. None means greedy with 16 tokens.
            salt: Only requests with the same salt share cached prefixes. Give each tenant its own,
                so that response times reveal nothing about others' prompts. The name of the
                current adapter is another use.

        Returns:
            The request's id.

        Raises:
            TypeError: prompt, params or salt has the wrong type.
            ValueError: The request cannot be served. Nothing has changed.
            RuntimeError: The engine is closed.
        """
        self._refuse_closed()
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            hint = ": give SamplingParams(**params)" if isinstance(params, Mapping) else ""
            raise TypeError(
                f"Engine: params: expected SamplingParams, got {short_repr(params)}{hint}"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("Engine: stop: expected a tokenizer with the engine, got none")
        if not isinstance(salt, str | bytes | None):
            raise TypeError(f"Engine: salt: expected text, bytes or None, got {salt!r}")
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        request = Request(
            next(self._next_id),
            prompt_tokens(prompt, self.tokenizer, vocabulary),
            params,
            time.perf_counter(),
            salt,
        )
        self.scheduler.add(request)
        self._requests[request.id] = request
        return request.id

    def abort(self, request_id: int) -> None:
        """Ends a request and frees its blocks.

        Raises:
            KeyError: The request is unknown or finished.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            raise KeyError(f"Engine: abort: there is no unfinished request {request_id!r}")
        self.scheduler.abort(request)
        for sequence in request.sequences:
            self._texts.pop(sequence.id, None)
        self._undelivered = [one for one in self._undelivered if one.request_id != request_id]

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has work to do or tokens to return."""
        return self.scheduler.num_unfinished > 0 or bool(self._undelivered)

    def step(self) -> list[TokenOutput]:
        """Runs one forward pass.

        If it fails, the next call recomputes the running sequences. If the tokenizer fails, only
        its request ends.

        Returns:
            New tokens of requests from :meth:`add_request`. They include tokens that came while
            :meth:`stream` or :meth:`generate` ran. The list is empty after a pass with prompt
            chunks only. With ``overlap``, the tokens are one pass old.
        """
        self._advance()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _advance(self) -> None:
        """Runs one pass and queues its tokens."""
        self._refuse_closed()
        with self._on_device:
            try:
                if self._pending is None:
                    self._pass()
                else:
                    self._pass_ahead()
            except BaseException:
                self.scheduler.failed()
                raise

    def _pass(self) -> None:
        """Runs the next pass. All earlier tokens are known."""
        self._packed.wait()
        plan = self.scheduler.schedule()
        if plan is None:
            return
        pending = self._sample(plan, self._run(plan))
        if self._overlap:
            self._pending = pending
        else:
            self._take(pending)

    def _pass_ahead(self) -> None:
        """Starts the next pass if it is certain, then fetches the tokens of the last pass."""
        pending, self._pending = self._pending, None
        assert pending is not None
        try:
            self._packed.wait()
            plan = self.scheduler.schedule_ahead()
            if plan is not None:
                logits = self._run(plan, pending.tokens_of(plan.sequences))
        finally:
            self._take(pending)
        if plan is not None:
            self.scheduler.record(plan)
            self._pending = self._sample(plan, logits)

    def generate(
        self,
        prompts: Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> list[RequestOutput]:
        """Serves all prompts and returns their outputs in the same order.

        Args:
            prompts: Texts or lists of token ids.
            params: Sampling parameters for all prompts, or a list with one per prompt.
            salt: Salt for all prompts. See :meth:`add_request`.

        Raises:
            TypeError: ``prompts`` is not a list of prompts. :meth:`add_request` lists others.
        """
        refuse_no_list(prompts)
        chosen = [params] * len(prompts) if not isinstance(params, Items) else list(params)
        if len(chosen) != len(prompts):
            raise ValueError(
                f"Engine: params: expected {len(prompts)} (from prompts), got {len(chosen)}"
            )
        requests = []
        try:
            for prompt, one in zip(prompts, chosen):
                requests.append(self._requests[self.add_request(prompt, one, salt=salt)])
                self._queues[requests[-1].id] = deque(maxlen=0)  # the requests hold it all
            while not all(request.is_finished for request in requests):
                self._advance()
        finally:
            for request in requests:
                self._queues.pop(request.id, None)
                if request.id in self._requests:
                    self.abort(request.id)
        return [output_of(request) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> Iterator[TokenOutput]:
        """Serves one prompt and yields each token as soon as it is known.

        Other requests make progress meanwhile. Leaving the loop early ends the request.
        """
        request_id = self.add_request(prompt, params, salt=salt)
        queue = self._queues[request_id] = deque()
        try:
            while queue or request_id in self._requests:
                if queue:
                    yield queue.popleft()
                else:
                    self._advance()
        finally:
            del self._queues[request_id]
            if request_id in self._requests:
                self.abort(request_id)

    def reset(self) -> None:
        """Drops all cached prefixes and sets the statistics to zero.

        Call it after you change weights or adapters, because cached keys depend on them.

        Raises:
            RuntimeError: There are unfinished requests.
        """
        self._refuse_unfinished("reset")
        self._pending = None  # its sequences were aborted
        self.manager.reset()
        self.scheduler.statistics = SchedulerStatistics()

    def statistics(self) -> EngineStatistics:
        """Returns counters since the last reset, and the current use of the cache."""
        scheduler = self.scheduler
        return EngineStatistics(
            scheduler.statistics,
            self.manager.statistics(),
            scheduler.num_running,
            scheduler.num_unfinished,
        )

    # Inner workings.

    def _refuse_closed(self) -> None:
        if self.cache.is_freed:
            raise RuntimeError("Engine: it was closed: make a new one")

    def _refuse_unfinished(self, what: str) -> None:
        if self.scheduler.num_unfinished:
            raise RuntimeError(
                f"Engine: {what}: {self.scheduler.num_unfinished} sequences are unfinished"
            )

    def _run(self, plan: Plan, tokens_before: Tensor | None = None) -> Tensor:
        for copies in plan.copies:
            getattr(self.cache, copies.kind)(copies.pairs)
        return self._packed.run(plan, tokens_before)

    def _sample(self, plan: Plan, logits: Tensor) -> PendingTokens:
        """Samples the tokens of a pass. They are not fetched yet."""
        ready = self.scheduler.computed(plan)
        if len(ready) > len(logits):  # forked sequences share the logits of their prompt
            ran = set(plan.sequences)
            rows = np.cumsum([sequence in ran for sequence in ready]) - 1
            logits = logits[upload(rows, logits.device)]
        pending = PendingTokens(ready, sample(logits, ready))
        for sequence in ready:
            sequence.num_pending = 1
        return pending

    def _take(self, pending: PendingTokens) -> None:
        """Fetches the tokens of a pass and appends them to their sequences.

        If the tokenizer fails, its request ends. The error is raised after all tokens are appended.
        """
        tokens = pending.fetch()
        now = time.perf_counter()
        failure: Exception | None = None
        for sequence, token in zip(pending.sequences, tokens):
            sequence.num_pending = 0
            if sequence.finish_reason is not None:  # it ended meanwhile: drop the token
                continue
            request_id = sequence.request.id
            try:
                output = self._add_token(sequence, token, now)
            except Exception as error:
                failure = error
                self.abort(request_id)
            else:
                self._queues.get(request_id, self._undelivered).append(output)
        if failure is not None:
            raise failure

    def _add_token(self, sequence: Sequence, token: int, now: float) -> TokenOutput:
        """Appends a token to its sequence, and ends the sequence if a stop condition holds."""
        request = sequence.request
        params = request.params
        if request.first_token_time is None:
            request.first_token_time = now
        tokens = sequence.tokens
        tokens.append(token)
        reason = None
        if (token in self._end_tokens and not params.ignore_eos) or token in params.stop_token_ids:
            reason = FinishReason.STOP
        elif (
            len(tokens) - len(request.prompt) >= params.max_tokens
            or len(tokens) >= self.scheduler.max_length
        ):
            reason = FinishReason.LENGTH
        text = ""
        if self.tokenizer is not None:
            text, reason = self._add_text(sequence, token, reason)
        if reason is not None:
            self.scheduler.finish(sequence, reason)
            self._texts.pop(sequence.id, None)
            if request.is_finished:
                request.finish_time = now
                self._requests.pop(request.id)
        return TokenOutput(request.id, sequence.index, token, text, reason)

    def _add_text(
        self, sequence: Sequence, token: int, reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """Returns the text that a token makes final, and the finish reason if the sequence ends."""
        assert self.tokenizer is not None
        detokenizer = self._texts.get(sequence.id)
        if detokenizer is None:
            request = sequence.request
            detokenizer = Detokenizer(self.tokenizer, request.prompt, request.params.stop)
            self._texts[sequence.id] = detokenizer
        text = detokenizer.add(token)
        if reason is not None:
            text += detokenizer.finish()
        sequence.text = detokenizer.text
        return text, FinishReason.STOP if detokenizer.is_stopped else reason


def _refuse_unserved(model: PreTrainedModel) -> None:
    """Raises if the model is in training mode, has another engine, or has no logits."""
    if model.training:
        raise ValueError("Engine: model: expected one in eval mode: call model.eval()")
    other = ENGINES.get(model)
    if other is not None and other() is not None:
        raise ValueError("Engine: model: another engine has it: close() that one first")
    if model.get_output_embeddings() is None:
        raise NotImplementedError(
            f"Engine: model: expected one with a language-model head, got {type(model).__name__}"
        )


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    end = getattr(model.generation_config, "eos_token_id", None)
    if end is None:
        return frozenset()
    return frozenset([end] if isinstance(end, int) else end)
