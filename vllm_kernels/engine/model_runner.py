"""Runs a model over packed tokens. The tokens of all sequences form one row.

:class:`ModelRunner` runs the plans of a scheduler. It uploads the buffers that the manager filled
and calls the model. It returns logits of the sequences that get a token. Decode passes replay CUDA
graphs on a GPU, which draw the tokens, too.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .. import cascade_pays
from ..errors import Unsupported
from ..hf.attention_interface import AttentionOptions, LayerCall, PagedLayer
from ..hf.tensor_parallel import heads_of_rank
from ..kv_cache import BatchBuffers
from ..kv_cache.tensors import KVCache, KVShape
from .fused_llama import FusedLlama, can_be_packed
from .layer_groups import LayerGroups, PackedPages, StepInputs
from .plan import Plan
from .sampling.sampler import Sampler
from .sampling.step import StepLogits
from .sparse import Sparse
from .upload import upload

__all__ = ["ModelRunner", "layer_options"]


class _OptionsRecorder:
    """Replaces the pages in a pass that only records each layer's attention options."""

    length = 0

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.options: dict[int, AttentionOptions] = {}

    def forward(self, call: LayerCall) -> Tensor:
        self.options[call.layer] = call.options
        return torch.zeros_like(call.query.transpose(1, 2))


def layer_options(model: PreTrainedModel, shape: KVShape) -> list[AttentionOptions]:
    """Runs one token through the model and returns the attention options of every layer.

    Args:
        model: The model to serve.
        shape: Shape of one block over all layers.

    Raises:
        NotImplementedError: The attention is not supported, or a layer did not call it.
    """
    config = model.config.get_text_config(decoder=True)
    recorder = _OptionsRecorder(shape)
    layers = range(shape.num_layers)
    cache = Cache(layers=[PagedLayer(recorder, config, index) for index in layers])
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        positions = {"position_ids": token} if takes_positions(model) else {}
        model(input_ids=token, past_key_values=cache, use_cache=True, **positions)
    missing = [layer for layer in layers if layer not in recorder.options]
    if missing:
        raise Unsupported(
            f"Engine: {config.model_type}: layers {missing} do not attend through a cache of theirs"
        )
    return [recorder.options[layer] for layer in layers]


class _Buffers:
    """Input buffers of a pass. The manager fills the host ones; the device has copies."""

    def __init__(
        self, groups: int, sequences: int, blocks: int, tokens: int, device: torch.device
    ) -> None:
        pinned = device.type == "cuda"
        self.host = [
            BatchBuffers.zeros(sequences, blocks, tokens, pin_memory=pinned) for _ in range(groups)
        ]
        self.host_input_ids = torch.zeros(tokens, dtype=torch.int64, pin_memory=pinned)
        self.host_common = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        first = self.host[0]
        host = [
            self.host_input_ids, first.positions, first.seq_lens, first.query_start_loc,
            self.host_common,
            *(group.slot_mapping for group in self.host),
            *(group.block_tables for group in self.host),
        ]  # fmt: skip
        self._uploaded = torch.cuda.Event() if pinned else None
        self._host = host
        self._device = [x.to(device) for x in host] if pinned else host
        self.input_ids, self.positions, self.seq_lens, self.starts, self.common = self._device[:5]
        self.slot_mappings = self._device[5 : 5 + groups]
        self.block_tables = self._device[5 + groups :]

    def upload(self, tokens: int, sequences: int, input_ids: Tensor | None = None) -> None:
        """Starts the copy to the device. Call :meth:`wait` before you refill the host buffers.

        Args:
            tokens: Number of tokens to copy.
            sequences: Number of sequences to copy.
            input_ids: Token ids on the device. They replace the first host ids.
        """
        if self._uploaded is not None:
            groups = len(self.host)
            sizes = [tokens, tokens, sequences, sequences + 1, 1, *[tokens] * groups]
            sizes += [sequences] * groups
            for device, host, size in zip(self._device, self._host, sizes):
                device[:size].copy_(host[:size], non_blocking=True)
            self._uploaded.record()
        if input_ids is not None:
            self.input_ids[: len(input_ids)] = input_ids

    def clear(self) -> None:
        """Turns all rows on the device into padding."""
        for tensor in (self.input_ids, self.positions, self.seq_lens, self.common):
            tensor.zero_()
        for slots in self.slot_mappings:
            slots.fill_(-1)
        for group in self.host:  # on a CPU, host and device tensors are the same
            group.invalidate()

    def wait(self) -> None:
        """Waits until the host buffers may be refilled."""
        if self._uploaded is not None:
            self._uploaded.synchronize()


class ModelRunner:
    """Runs the plans of a scheduler.

    Args:
        model: The model, after ``use_paged_attention``.
        cache: Cache tensors of all layers.
        groups: Layer groups.
        max_batch_size: Maximum number of sequences per pass.
        max_batch_tokens: Maximum number of tokens per pass.
        max_length: Maximum number of tokens per sequence.
        cuda_graphs: Whether decode passes are captured. There is one graph per batch size.
        cascade: Whether decoding sequences may use cascade attention.
        backend: Backend of torch.compile. None calls the model directly.
        fused: Whether Llama-like models run as :class:`FusedLlama`.
        sampler: Draws tokens within CUDA graphs.
        sparse: What decoding sequences attend to. None is everything.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        groups: LayerGroups,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        max_length: int,
        cuda_graphs: bool,
        cascade: bool,
        backend: str | None,
        fused: bool,
        sampler: Sampler,
        sparse: Sparse | None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.max_length = max_length
        heads = heads_of_rank(model, "num_attention_heads", config.num_attention_heads)
        if sparse is not None:
            sparse.refuse(cache.shape, heads)
        self.pages = PackedPages(cache, groups, heads, sparse)
        layers = range(len(groups.group_of_layer))
        self._cache = Cache(layers=[PagedLayer(self.pages, config, index) for index in layers])
        blocks = -(-max_length // cache.shape.block_size)
        self._buffers = _Buffers(
            len(groups.windows), max_batch_size, blocks, max_batch_tokens, cache.device
        )
        self._llama: FusedLlama | None = None
        if fused and can_be_packed(model):
            windows = [groups.windows[group] for group in groups.group_of_layer]
            self._llama = FusedLlama(model, self.pages, windows, max_length)
        self._cascades = (
            cascade and not cache.shape.has_token_scales and self._pays(max_batch_size, blocks)
        )
        self._is_sparse = sparse is not None
        self._takes_positions = takes_positions(model)
        self._graph_sizes = graph_sizes(max_batch_size) if cuda_graphs else []
        self._capture_stream: torch.cuda.Stream | None = None
        self._sampler = sampler
        self._sampler_generation = sampler.generation
        # The key is (batch size, whether the pass uses cascade attention, whether it counts tokens
        # for penalties). The values are the graph, its logits, and what it draws.
        self._graphs: dict[
            tuple[int, bool, bool], tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, Tensor]]
        ] = {}
        # Passed so that the model does not build one. Attention uses slots and lengths instead.
        self._mask = torch.ones(1, max_batch_tokens, dtype=torch.bool, device=cache.device)
        call: Callable[..., Any] = self._llama or model
        if backend is not None:
            call = torch.compile(call, dynamic=True, backend=backend)
        self._call: Callable[..., Any] = call

    @property
    def host_buffers(self) -> list[BatchBuffers]:
        """Host buffers for the manager to fill, one per layer group."""
        return self._buffers.host

    def may_cascade(self) -> bool:
        """Whether a pass may use cascade attention. A failed graph capture turns it off."""
        return self._cascades

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Captures the graphs of all batch sizes, over padding.

        Graphs that count tokens for penalties are captured on first use.
        """
        self._buffers.clear()
        self._sampler.prepare([])
        blocks = self._buffers.block_tables[0].shape[1]
        for size in reversed(self._graph_sizes):  # largest first: the others reuse its memory
            for cascade in (False, True):
                if cascade and not self._common_blocks(size, blocks):
                    continue
                if self._replay(size, cascade) is None:
                    return

    def wait(self) -> None:
        """Waits until the manager may refill the host buffers."""
        self._buffers.wait()

    def close(self) -> None:
        """Drops the graphs, frees the cache and restores the model's weights.

        The order matters because the last step needs memory.
        """
        self._graphs.clear()
        self.pages.cache.free()
        if self._llama is not None:
            self._llama.close()

    @torch.inference_mode()
    def run(self, plan: Plan, tokens_before: Tensor | None = None) -> StepLogits:
        """Runs the pass of a plan. The manager must have filled the buffers for it.

        Args:
            plan: The plan.
            tokens_before: Token ids for a plan without input_ids: int64 [sequences], on the
                device.

        Returns:
            Logits of the tokens that ``plan.num_logits`` names, valid until the next pass. A CUDA
            graph also draws the next tokens.
        """
        buffers = self._buffers
        tokens, sequences = plan.num_tokens, len(plan.sequences)
        single = plan.num_decoding if self._is_sparse else plan.num_single  # prompts are dense
        common = self._common_blocks(single, plan.num_common_blocks)
        buffers.host_common[0] = common
        if plan.input_ids is not None:
            buffers.host_input_ids[:tokens] = torch.from_numpy(plan.input_ids)
        if single == sequences:
            size = next((size for size in self._graph_sizes if size >= sequences), None)
            if size is not None:
                buffers.upload(size, size, tokens_before)
                self._sampler.prepare(plan.sequences)
                captured = self._replay(size, common > 0)
                if captured is not None:
                    logits, (drawn, highest) = captured
                    drawn_now = drawn[:sequences], highest[:sequences]
                    return self._ready(logits[:sequences], plan, drawn_now)
            buffers.upload(tokens, sequences, tokens_before)
            step = self._single_step(sequences, common > 0, self._columns(sequences))
            return self._ready(self._forward(step, tokens), plan)
        buffers.upload(tokens, sequences)
        columns = self._columns(sequences)
        step = StepInputs(
            slot_mappings=[slots[:tokens] for slots in buffers.slot_mappings],
            block_tables=[tables[:sequences, :columns] for tables in buffers.block_tables],
            seq_lens=buffers.seq_lens[:sequences],
            num_single=single,
            starts=buffers.starts[: sequences + 1],
            max_query_len=max(plan.counts),
            num_common_blocks=buffers.common[0] if common else None,
        )
        ends = np.cumsum(plan.counts)
        rows = [np.arange(end - size, end) for end, size in zip(ends, plan.num_logits)]
        last = upload(np.concatenate(rows), buffers.input_ids.device)
        logits = self._forward(step, tokens, last)
        return StepLogits(logits, buffers.input_ids[last], buffers.positions[last])

    # Inner workings.

    def _ready(
        self, logits: Tensor, plan: Plan, drawn: tuple[Tensor, Tensor] | None = None
    ) -> StepLogits:
        """Returns the rows of a pass with one token per sequence that need logits."""
        sequences = len(plan.sequences)
        input_ids, positions = self._buffers.input_ids, self._buffers.positions
        if all(plan.num_logits):
            return StepLogits(logits, input_ids[:sequences], positions[:sequences], drawn)
        rows = upload(np.flatnonzero(plan.num_logits), logits.device)
        return StepLogits(logits[rows], input_ids[rows], positions[rows])

    def _common_blocks(self, sequences: int, blocks: int) -> int:
        """Returns ``blocks`` if cascade attention over so many shared blocks pays, else 0."""
        return blocks if self._cascades and self._pays(sequences, blocks) else 0

    def _pays(self, sequences: int, blocks: int) -> bool:
        shape = self.pages.shape
        tokens = blocks * shape.block_size
        return cascade_pays(sequences, tokens, shape.token_bytes, self.pages.cache.device)

    def _columns(self, sequences: int) -> int:
        """Returns the number of block_tables columns to use, rounded up to a power of two.

        Few distinct sizes keep torch.compile from recompiling. Fewer columns make cascades cheaper.
        """
        longest = int(self._buffers.host[0].seq_lens[:sequences].max())
        blocks = -(-longest // self.pages.shape.block_size)
        return max(2, 1 << (blocks - 1).bit_length())

    def _single_step(
        self, sequences: int, cascade: bool = False, columns: int | None = None
    ) -> StepInputs:
        """Returns inputs of a decode pass. A CUDA graph needs all ``columns``, which is None."""
        buffers = self._buffers
        return StepInputs(
            slot_mappings=[slots[:sequences] for slots in buffers.slot_mappings],
            block_tables=[tables[:sequences, :columns] for tables in buffers.block_tables],
            seq_lens=buffers.seq_lens[:sequences],
            num_single=sequences,
            starts=None,
            max_query_len=1,
            num_common_blocks=buffers.common[0] if cascade else None,
        )

    def _forward(self, step: StepInputs, tokens: int, last: Tensor | None = None) -> Tensor:
        """Returns logits [n, vocabulary] of the tokens ``last``, or of all tokens."""
        buffers = self._buffers
        self.pages.begin(step)
        if self._llama is not None:
            return self._call(buffers.input_ids[:tokens], buffers.positions[:tokens], last)
        options = {} if last is None else {"logits_to_keep": last}
        if self._takes_positions:
            options["position_ids"] = buffers.positions[None, :tokens]
        out = self._call(
            input_ids=buffers.input_ids[None, :tokens],
            attention_mask=self._mask[:, :tokens],
            past_key_values=self._cache,
            use_cache=True,
            **options,
        )
        return out.logits[0]

    def _replay(self, size: int, cascade: bool) -> tuple[Tensor, tuple[Tensor, Tensor]] | None:
        """Replays the graph of ``size`` sequences, and captures it first if needed.

        Returns:
            Logits [size, vocabulary] and what ``Sampler.draw`` returned, or None if the model
            cannot be captured.

        Raises:
            torch.OutOfMemoryError: There is no memory for the graph.
        """
        if self._sampler_generation != self._sampler.generation:  # graphs read freed lists
            self._graphs.clear()
            self._sampler_generation = self._sampler.generation
        key = size, cascade, self._sampler.has_penalties
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(self._single_step(size, cascade))
            except RuntimeError as error:
                if cascade:  # try again without cascade attention
                    warnings.warn(f"Engine: no more cascades: {error}", stacklevel=2)
                    self._cascades = False
                    return self._replay(size, False)
                if _is_out_of_memory(error):
                    raise torch.OutOfMemoryError(
                        f"Engine: no memory for the CUDA graph of {size} sequences: give a smaller "
                        f"cache_bytes, or cuda_graphs=False: {error}"
                    ) from error
                warnings.warn(
                    f"Engine: {self.model.config.model_type} runs without CUDA graphs: {error}",
                    stacklevel=2,
                )
                self._graph_sizes = []
                return None
        graph, logits, drawn = self._graphs[key]
        graph.replay()
        return logits, drawn

    def _forward_and_draw(self, step: StepInputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns logits and drawn tokens of a decode pass. CUDA graphs contain this."""
        size, buffers = step.num_single, self._buffers
        logits = self._forward(step, size)
        input_ids, positions = buffers.input_ids[:size], buffers.positions[:size]
        return logits, self._sampler.draw(logits, input_ids, positions, is_captured=True)

    def _capture(
        self, step: StepInputs
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, Tensor]]:
        """Captures the pass over the first rows of the device buffers.

        The warm-up runs compute the same pass that is replayed next. They write the same keys, and
        the sampler counts no token twice.
        """
        if self._capture_stream is None:  # one stream, because each has its own workspace
            self._capture_stream = torch.cuda.Stream()
        stream = self._capture_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # first calls may allocate, compile or synchronise
                self._forward_and_draw(step)
        torch.cuda.current_stream().wait_stream(stream)
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            logits, drawn = self._forward_and_draw(step)
        return graph, logits, drawn


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error or one of its causes is an out-of-memory error.

    An interrupted capture raises an error of its own on top.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def graph_sizes(max_batch_size: int) -> list[int]:
    """Returns the batch sizes that passes are padded to. Small sizes are dense."""
    sizes = {1, 2, 4, max_batch_size, *range(8, 65, 8), *range(80, 257, 16)}
    sizes |= set(range(288, max_batch_size, 32))
    return sorted(size for size in sizes if size <= max_batch_size)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model's forward takes position_ids. ALiBi models do not."""
    return "position_ids" in inspect.signature(model.forward).parameters
