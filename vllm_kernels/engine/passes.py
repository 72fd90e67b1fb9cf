"""The passes of an engine, and the components that run them."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..hf.attention_interface import (
    ENGINES,
    kv_shape,
    stop_paged_attention,
    use_paged_attention,
)
from ..kv_cache import KVCacheManager
from ..kv_cache.tensors import KVCache
from .config import EngineConfig
from .fused_llama import refuse_changing_rotary
from .layer_groups import LayerGroups
from .model_runner import ModelRunner, layer_options
from .open_requests import OpenRequests
from .output_processor import OutputProcessor
from .plan import Plan, SchedulerStatistics
from .recovery import Recovery, name_requests
from .refusals import num_logits
from .sampling.pending_tokens import PendingTokens
from .sampling.sampler import Sampler
from .sampling.step import StepLogits, sample_step
from .scheduler import Scheduler
from .sparse import PageSelection
from .speculative.drafters import drafter_of
from .tensor_parallel import Ranks

__all__ = ["Passes"]


class Passes:
    """Builds the components of an engine, and runs one pass after the other.

    Args:
        model: The model. It gets paged attention.
        tokenizer: Its tokenizer, or None.
        config: The engine's options.
        ranks: The ranks of a model that several processes share.
        on_device: It selects the engine's stream and device.
        cleanup: It gets the calls that undo the construction.

    Attributes:
        manager, cache, scheduler, packed, drafter, recovery, open_requests: The components.
        overlap: Whether the next pass starts before the host reads the last tokens.
        pending: Tokens of the last pass, not fetched yet.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: EngineConfig,
        ranks: Ranks | None,
        on_device: AbstractContextManager[object],
        cleanup: ExitStack,
    ) -> None:
        on_gpu = model.device.type == "cuda"
        self.ranks = ranks
        self._on_device = on_device
        self.overlap = config.overlap or (
            on_gpu and config.overlap is None and config.speculative is None
        )
        self.pending: PendingTokens | None = None
        shape = kv_shape(model, config.block_size, config.layout, config.cache_dtype)
        refuse_changing_rotary(model)
        cleanup.callback(ENGINES.pop, model, None)
        use_paged_attention(model)
        cleanup.callback(stop_paged_attention, model)
        layers = layer_options(model, shape)
        groups = LayerGroups.of([layer.sliding_window for layer in layers])
        shape = replace(
            shape,
            num_layers=groups.num_tensors,
            page_bounds=isinstance(config.sparse, PageSelection) and not shape.has_token_scales,
        )
        cuda_graphs = on_gpu if config.cuda_graphs is None else config.cuda_graphs
        # First, because the cache may take the rest of the memory.
        with on_device:
            self.drafter = drafter_of(config, model, groups.windows, cuda_graphs, cleanup)
        num_blocks = config.cache_blocks(model, shape, len(groups.windows))
        if ranks is not None:
            num_blocks = ranks.smallest(num_blocks)
        self.manager = KVCacheManager(
            num_blocks,
            config.block_size,
            num_host_blocks=config.host_bytes // shape.block_bytes,
            windows=groups.windows,
            prefix_caching=config.prefix_caching,
        )
        limits = config.limits(model, self.manager, layers)
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
        with on_device:
            self._sampler = Sampler(config.max_rows, num_logits(model), model.device)
            self.packed = ModelRunner(
                model,
                self.cache,
                groups,
                **limits,
                cuda_graphs=cuda_graphs,
                cascade=config.cascade and any(layer.can_cascade for layer in layers),
                backend="inductor" if config.compile is True else config.compile or None,
                fused=config.fused,
                sampler=self._sampler,
                sparse=config.sparse,
            )
        cleanup.callback(self.packed.close)
        self.scheduler = Scheduler(
            self.manager,
            self.packed.host_buffers,
            **limits,
            prefix_caching=config.prefix_caching,
            may_cascade=self.packed.may_cascade,
        )
        self.recovery = Recovery(self.scheduler)
        outputs = OutputProcessor(model, tokenizer, self.scheduler)
        self.open_requests = OpenRequests(outputs, self.scheduler)

    def advance(self) -> None:
        """Runs one pass and queues its tokens, or with ``overlap`` those of the last pass.

        A request that is known to make passes fail ends.

        Raises:
            Exception: The pass failed for another reason, or it is not known yet which request
                makes it fail. The next call recomputes the unfinished sequences.
        """
        self.recovery.next_trial()
        try:
            if self.ranks is not None:
                self.ranks.begin(self)
            with self._on_device:
                if self.pending is None:
                    self._pass()
                else:
                    self._pass_ahead()
        except BaseException as error:
            self._sampler.invalidate()
            if self.drafter is not None:
                self.drafter.reset()
            self.scheduler.failed(self.open_requests.by_id.values())
            if self.ranks is not None:
                self._fail(self.ranks, error)
            if not isinstance(error, Exception) or not self._end_culprit(error):
                raise
        else:
            self.recovery.succeeded()

    def reset(self) -> None:
        """Drops all cached prefixes and sets the statistics to zero. No request is unfinished."""
        self.pending = None  # its sequences were aborted
        self.manager.reset()
        if self.drafter is not None:
            self.drafter.reset()
        self.scheduler.statistics = SchedulerStatistics()

    # Inner workings.

    def _fail(self, ranks: Ranks, error: BaseException) -> None:
        """Ends all requests, because the ranks cannot go on. Raises the first rank's error."""
        raised = ranks.fail(error)
        for request in list(self.open_requests.by_id.values()):
            self.open_requests.end(request, ranks.failure)
        if raised is not error:
            raise raised from error
        raise error

    def _end_culprit(self, error: Exception) -> bool:
        """Ends the request that made a pass fail. Returns False if it is not known yet."""
        ids = getattr(error, "request_ids", ())
        requests = self.open_requests.by_id
        culprit = self.recovery.failed([requests[id] for id in ids if id in requests])
        if culprit is not None:
            self.open_requests.end(culprit, error)
        return culprit is not None

    def _pass(self) -> None:
        """Runs the next pass. All earlier tokens are known."""
        self.packed.wait()
        drafts = None
        if self.drafter is not None:
            drafts = self.drafter.propose(self.scheduler.may_draft())
        plan = self.scheduler.schedule(drafts)
        if plan is None:
            return
        pending = self._sample(plan, self._run(plan))
        if self.overlap and not self.recovery.is_searching:
            self.pending = pending
        else:
            self.open_requests.take(pending)

    def _pass_ahead(self) -> None:
        """Starts the next pass if it is certain, then fetches the tokens of the last pass."""
        pending, self.pending = self.pending, None
        assert pending is not None
        try:
            self.packed.wait()
            plan = self.scheduler.schedule_ahead()
            if plan is not None:
                step = self._run(plan, pending.tokens_of(plan.sequences))
        finally:
            self.open_requests.take(pending)
        if plan is not None:
            self.scheduler.record(plan)
            self.pending = self._sample(plan, step)

    def _run(self, plan: Plan, tokens_before: Tensor | None = None) -> StepLogits:
        try:
            for copies in plan.copies:
                getattr(self.cache, copies.kind)(copies.pairs)
            return self.packed.run(plan, tokens_before)
        except Exception as error:
            name_requests(error, plan.sequences)
            raise

    def _sample(self, plan: Plan, step: StepLogits) -> PendingTokens:
        """Samples the tokens of a pass. They are not fetched yet."""
        ready = self.scheduler.computed(plan)
        try:
            agree = None if self.ranks is None else self.ranks.agree
            pending = sample_step(self._sampler, plan, ready, step, agree)
        except Exception as error:
            name_requests(error, ready)
            raise
        for sequence in ready:
            sequence.num_pending = 1
        return pending
