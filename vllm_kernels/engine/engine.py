"""Continuous batching of a model of transformers over a paged KV cache::

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
    """Serves many requests with one model at a time.

    Every :meth:`step` is one forward pass over packed tokens: the next token of each sequence that
    is being decoded, and parts of the prompts of new ones. Their keys and values lie in blocks that
    sequences with a common prefix share.

    While the engine exists the model belongs to it (its attention is replaced); :meth:`close`, or
    the end of a ``with`` block, gives the model and the memory back. Call :meth:`reset` after
    changing weights or adapters: cached prefixes are those of the weights before.

    Args:
        model: a decoder model of transformers, in eval mode, on a CPU or one GPU.
        tokenizer: its tokenizer, for prompts, stop strings and text. None: tokens only.
        block_size: tokens of a block, a power of two from 1 to 256.
        num_blocks: of the cache. None: as many as fit into ``cache_bytes``.
        cache_bytes: of the cache. None: 0.9 of what is free on a GPU; on a CPU what
            ``max_batch_size`` sequences of ``max_length`` need, and at most a quarter of what is
            free.
        host_bytes: of a second pool in host memory, to which sequences are swapped out when blocks
            run short. 0: they are computed again.
        layout: of the cache: "vllm", "NHD" or "HND".
        cache_dtype: "auto" (the model's), "fp8", "fp8_e5m2" or "int8".
        k_scale, v_scale: of an 8-bit cache, as
            :class:`~vllm_kernels.kv_cache.tensors.KVCache` has them.
        max_batch_size: sequences in one pass.
        max_batch_tokens: tokens in one pass: longer prompts are computed in parts. None: 2048, or
            max_batch_size if that is more.
        max_length: tokens of a sequence. None: the model's max_position_embeddings (4096 without).
            More than the model has positions for is served with a warning.
        prefix_caching: whether blocks of finished or running sequences are found by later ones with
            the same beginning.
        cuda_graphs: whether passes that only decode replay CUDA graphs. None: on a GPU. Models that
            cannot be captured run without, and a warning says why. (Mixtures of experts in float32
            or float16, and before Hopper: torch's grouped_mm reads its offsets on the CPU there.
            ``model.set_experts_implementation("batched_mm")`` does not, but copies the weights of
            every token's experts: for small ones.)
        cascade: whether sequences that are being decoded attend together to the blocks that all of
            them share (of a prompt, or of its beginning), so that these are read once a pass, where
            that pays (:func:`vllm_kernels.cascade_pays`). Results are the same within rounding.
        overlap: whether the next pass is started before the tokens of the last one are looked at,
            so that a GPU does not wait for Python. :meth:`step` then returns tokens one call later,
            and a sequence that ends by a stop token or string is computed one pass too far. None:
            on a GPU.
        compile: whether the model is called through torch.compile; a name: of its backend.
        fused: whether Llama-like models (Llama, Mistral, Qwen 2 and 3) run by this library's ops
            for everything but the matrix products, instead of through transformers' modules.
        check: whether the first thing is to compare a few logits with the model's own attention.

    Raises:
        NotImplementedError: a model that cannot be served, naming what is not.
        TypeError: a model that is none, or a size that is no integer.
        ValueError: an argument that does not fit, or a model that another engine has.
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
        # Streams, events and graphs are those of the current device.
        self._on_device = torch.cuda.device(model.device) if on_gpu else nullcontext()
        self._overlap = on_gpu if config.overlap is None else config.overlap
        self._pending: PendingTokens | None = None  # the last pass, until its tokens are fetched
        self._undelivered: list[TokenOutput] = []  # what step() returns next
        # What stream() and generate() have still to look at, by the ids of their requests.
        self._queues: dict[int, deque[TokenOutput]] = {}
        with ExitStack() as cleanup:  # runs if the constructor fails; otherwise close() runs it
            self._build(config, cleanup)
            if config.check:
                with self._on_device:
                    verify(self._packed, self.manager)
            ENGINES[model] = ref(self)
            self._cleanup = cleanup.pop_all()

    def _build(self, config: EngineConfig, cleanup: ExitStack) -> None:
        """Takes the model and makes all parts. ``cleanup`` gets the calls that undo this."""
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
        """Captures the CUDA graphs of all batch sizes now, which takes seconds, instead of each
        when it is first needed. Nothing without CUDA graphs.

        Raises:
            RuntimeError: there are unfinished requests.
        """
        self._refuse_unfinished("warm_up")
        with self._on_device:
            self._packed.capture_all()

    def close(self) -> None:
        """Gives the model its attention and the cache's memory back. The engine cannot be used
        afterwards."""
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
        """Takes a request in; :meth:`step` works on it.

        Args:
            prompt: text (needs a tokenizer), or token ids.
            params: of its sampling; None: greedy, 16 tokens.
            salt: cached prefixes are found by requests with the same salt alone: of a tenant, who
                is not to learn by the time it takes what others have asked; or the name of the
                adapter that the model has now.

        Returns:
            The request's id.

        Raises:
            TypeError: a prompt, params or salt that is none.
            ValueError: a request that cannot be served, saying why; nothing has changed.
            RuntimeError: the engine was closed.
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
        """Ends a request; its blocks are free. Raises KeyError for an id that is not there (any
        more: it is finished)."""
        request = self._requests.pop(request_id, None)
        if request is None:
            raise KeyError(f"Engine: abort: there is no unfinished request {request_id!r}")
        self.scheduler.abort(request)
        for sequence in request.sequences:
            self._texts.pop(sequence.id, None)
        self._undelivered = [one for one in self._undelivered if one.request_id != request_id]

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return self.scheduler.num_unfinished > 0 or bool(self._undelivered)

    def step(self) -> list[TokenOutput]:
        """Moves on by one forward pass.

        Returns:
            New tokens, also those that came while :meth:`stream` or :meth:`generate` served other
            requests; theirs are not among them. None while only parts of prompts were computed.
            With ``overlap`` they are those of the pass before, fetched while the next one runs.

        If it fails, the running sequences are computed again by the next call. A request whose text
        fails (by its tokenizer) is ended.
        """
        self._advance()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _advance(self) -> None:
        """What :meth:`step` does, but for the return of the tokens."""
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
        """Runs the pass that the scheduler wants next, all tokens being known."""
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
        """Starts the next pass if it is certain, and takes the tokens of the one before."""
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
        """Serves all prompts and returns their outputs, in their order.

        Args:
            prompts: texts or lists of token ids.
            params: for all, or one for each.
            salt: of all, as :meth:`add_request` has it.

        Raises:
            TypeError: prompts is no list of prompts; and as :meth:`add_request` does.
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
        """Serves one prompt and yields its tokens as they come; other requests go on meanwhile
        (their tokens come by :meth:`step`, or by streams of their own). Leaving the loop early ends
        the request."""
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
        """Forgets all cached prefixes and sets the statistics to zero. Call it after changing
        weights or adapters: keys and values in the cache are those of the weights before.

        Raises:
            RuntimeError: there are unfinished requests.
        """
        self._refuse_unfinished("reset")
        self._pending = None  # of sequences that were aborted
        self.manager.reset()
        self.scheduler.statistics = SchedulerStatistics()

    def statistics(self) -> EngineStatistics:
        """What it did so far, and how full its cache is now."""
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
        """Draws the tokens that a pass gives; they are not fetched yet."""
        ready = self.scheduler.computed(plan)
        if len(ready) > len(logits):  # sequences that share a prompt share its logits
            ran = set(plan.sequences)
            rows = np.cumsum([sequence in ran for sequence in ready]) - 1
            logits = logits[upload(rows, logits.device)]
        pending = PendingTokens(ready, sample(logits, ready))
        for sequence in ready:
            sequence.num_pending = 1
        return pending

    def _take(self, pending: PendingTokens) -> None:
        """Adds the tokens of a pass to their sequences.

        Raises what a tokenizer raised, after all: its requests are ended, and the others are well.
        """
        tokens = pending.fetch()
        now = time.perf_counter()
        failure: Exception | None = None
        for sequence, token in zip(pending.sequences, tokens):
            sequence.num_pending = 0
            if sequence.finish_reason is not None:  # it ended meanwhile, and this was in vain
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
        """Adds a token to its sequence and ends the sequence where it must end."""
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
        """The text that a token makes certain, and why the sequence ends, if it does."""
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
    """Raises for a model that trains, that another engine has, or that gives no logits."""
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
