"""A small engine: continuous batching of a Llama model, with prefix caching and preemption.

It is a program to read and to change. `vllm_kernels.integrations.transformers.Engine` is the one
to use. The tokens equal those of transformers' generate, so the last line is True.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import embedding, linear
from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_kernels as vk
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager, OutOfBlocks
from vllm_kernels.kv_cache.tensors import KVCache, KVShape


class Llama:
    """The forward pass over packed tokens, with the weights of a transformers model."""

    def __init__(self, model, num_blocks):
        config = model.config
        self.heads = [config.num_attention_heads] + 2 * [config.num_key_value_heads]
        self.head_size, self.epsilon = config.head_dim, config.rms_norm_eps
        shape = KVShape(config.num_hidden_layers, self.heads[1], self.head_size, torch.float32)
        self.cache = KVCache(shape, num_blocks)
        exponents = torch.arange(0, self.head_size, 2) / self.head_size
        positions = torch.arange(config.max_position_embeddings)
        angles = positions[:, None] / config.rope_parameters["rope_theta"] ** exponents
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
        self.embeddings = model.model.embed_tokens.weight
        self.layers = [self.layer_weights(layer) for layer in model.model.layers]
        self.norm, self.head = model.model.norm.weight, model.lm_head.weight

    @staticmethod
    def layer_weights(layer):
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return {
            "norm_1": layer.input_layernorm.weight,
            "qkv": torch.cat([projection.weight for projection in projections]),
            "out": attention.o_proj.weight,
            "norm_2": layer.post_attention_layernorm.weight,
            "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "down": mlp.down_proj.weight,
        }

    def forward(self, tokens, batch, num_rows, max_query_len):
        """Returns the logits of each sequence's last token: [num_rows, vocabulary]."""
        new = slice(0, len(tokens))
        starts = batch.query_start_loc[: num_rows + 1]
        x = embedding(tokens, self.embeddings)
        residual = torch.zeros_like(x)
        for layer, w in enumerate(self.layers):
            vk.fused_add_rms_norm(x, residual, w["norm_1"], self.epsilon)
            qkv = linear(x, w["qkv"]).unflatten(1, (-1, self.head_size))
            query, key, value = qkv.split(self.heads, 1)
            self.cache.rope_and_write(
                layer, batch.positions[new], query, key, value, self.cos_sin,
                batch.slot_mapping[new],
            )  # fmt: skip
            out = self.cache.attend(
                layer, query, batch.block_tables[:num_rows], batch.seq_lens[:num_rows],
                query_start_loc=starts, max_query_len=max_query_len,
            )  # fmt: skip
            x = linear(out.flatten(1), w["out"])
            vk.fused_add_rms_norm(x, residual, w["norm_2"], self.epsilon)
            gate_up = linear(x, w["gate_up"])
            activated = gate_up.new_empty(len(x), gate_up.shape[1] // 2)
            vk.silu_and_mul(activated, gate_up)
            x = linear(activated, w["down"])
        vk.fused_add_rms_norm(x, residual, self.norm, self.epsilon)
        return linear(x[starts[1:] - 1], self.head)


@dataclass
class Request:
    """A prompt, and the tokens that were generated behind it."""

    id: int
    tokens: list[int]
    end: int  # length at which it is finished


class SmallEngine:
    """Greedy decoding of many requests, which join and leave between passes."""

    def __init__(self, model, num_blocks, max_batch_size=8, max_batch_tokens=32):
        self.model = Llama(model, num_blocks)
        self.end_token = model.generation_config.eos_token_id
        block_size = self.model.cache.shape.block_size
        self.manager = KVCacheManager(num_blocks, block_size)
        self.batch = BatchBuffers.zeros(max_batch_size, num_blocks, max_batch_tokens)
        self.max_batch_size, self.max_batch_tokens = max_batch_size, max_batch_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_cached = self.num_preempted = 0

    def add(self, request):
        self.waiting.append(request)

    def admit(self):
        """Moves requests from waiting to running while there is room for them."""
        while self.waiting and len(self.running) < self.max_batch_size:
            request = self.waiting[0]
            if self.running and not self.manager.can_allocate(request.tokens):
                return
            # Blocks that earlier requests computed are shared; the rest follows step by step.
            self.num_cached += self.manager.allocate(request.id, request.tokens, num_new=0)
            self.running.append(self.waiting.popleft())

    def preempt(self):
        """The youngest request gives its blocks back, and is computed again later."""
        if len(self.running) == 1:
            raise RuntimeError("the cache is too small for one request")
        request = self.running.pop()
        self.manager.free(request.id)
        self.waiting.appendleft(request)
        self.num_preempted += 1

    def plan(self):
        """Chooses the next tokens of each running request, and gives them slots."""
        while True:
            rows, tokens, budget = [], [], self.max_batch_tokens
            for request in self.running:
                computed = self.manager.num_tokens(request.id)
                new = request.tokens[computed : computed + budget]  # long prompts come in chunks
                if new:
                    rows.append((request, len(new)))
                    tokens += new
                    budget -= len(new)
            ids, counts = [request.id for request, _ in rows], [count for _, count in rows]
            try:
                copies = self.manager.step(ids, counts, self.batch, tokens=tokens)
            except OutOfBlocks:  # nothing has changed
                self.preempt()
                continue
            self.model.cache.copy(copies)  # before the pass writes to the cache
            return rows, torch.tensor(tokens)

    def step(self):
        """One pass. Returns the requests that it finished."""
        self.admit()
        rows, tokens = self.plan()
        logits = self.model.forward(tokens, self.batch, len(rows), max(n for _, n in rows))
        finished = []
        for (request, _), token in zip(rows, logits.argmax(-1).tolist()):
            if self.manager.num_tokens(request.id) < len(request.tokens):
                continue  # a chunk of a prompt; its logits are of no use
            request.tokens.append(token)
            if token == self.end_token or len(request.tokens) == request.end:
                self.running.remove(request)
                self.manager.free(request.id)  # its blocks stay findable until they are needed
                finished.append(request)
        return finished

    def run(self):
        """Runs passes until every request is finished, and returns their tokens in order."""
        finished = []
        while self.waiting or self.running:
            finished += self.step()
        return [request.tokens for request in sorted(finished, key=lambda request: request.id)]


def main():
    folder = Path(vk.__file__).parent / "toy_model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    preamble = "The following sections describe statements. A simple statement is "
    texts = [preamble + end for end in ("a single line", "one suite", "a class", "a module")]
    prompts = [tokenizer(text)["input_ids"] for text in texts]

    with torch.inference_mode():
        engine = SmallEngine(model, num_blocks=14)
        for id, prompt in enumerate(prompts):
            engine.add(Request(id, list(prompt), len(prompt) + 40))
        results = engine.run()
        expected = [
            model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
            for prompt in prompts
        ]
    for prompt, tokens in zip(prompts, results):
        print(repr(tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)))
    print(engine.num_cached, "prompt tokens cached,", engine.num_preempted, "preemptions")
    print("the tokens of transformers:", results == expected)


if __name__ == "__main__":
    main()
