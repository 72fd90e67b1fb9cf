"""docs/troubleshooting.md has the messages of natural mistakes, as the library writes them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vllm_kernels as vk
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

PAGE = (Path(__file__).parent.parent / "docs/troubleshooting.md").read_text()
NOT_CAUSED_HERE = ("VLLM_KERNELS_ISA", "expected use in the process", "one a group of layers")
"""Messages of the two sections that other tests cause."""


def patterns(section: str) -> list[str]:
    """The messages of a section, as regular expressions."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    messages = []
    for cell in re.findall(r"^\| (`.+?) \|", text, re.M):
        messages += [message for message in re.findall("`([^`]+)`", cell) if " " in message]
    return [re.escape(message).replace(r"\.\.\.", ".+") for message in messages]


def attend(**changed: object) -> object:
    """A correct call of paged_attention, but for the arguments given."""
    arguments: dict[str, object] = {
        "query": torch.randn(2, 8, 64),
        "key_cache": torch.zeros(4, 16, 2, 64),
        "value_cache": torch.zeros(4, 16, 2, 64),
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 5], dtype=torch.int32),
        "layout": "NHD",
    }
    return vk.paged_attention(**{**arguments, **changed})


def write(**changed: object) -> None:
    """The same for reshape_and_cache_flash."""
    cache = torch.zeros(4, 16, 2, 64)
    arguments: dict[str, object] = {
        "key": torch.randn(3, 2, 64),
        "value": torch.randn(3, 2, 64),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": torch.arange(3),
        "kv_cache_dtype": "auto",
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
    }
    vk.reshape_and_cache_flash(**{**arguments, **changed})


def caches(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name in ("key_cache", "value_cache")}


def out_is_query() -> object:
    query = torch.randn(2, 8, 64)
    return attend(query=query, out=query)


def rotate() -> None:
    rows = torch.randn(2, 128)
    vk.rotary_embedding(torch.tensor([0, 99]), rows, rows.clone(), 64, torch.randn(10, 64), True)


def step(tokens: int, *sizes: int) -> object:
    manager = KVCacheManager(8, 16)
    manager.allocate_batch([1, 2], 0)
    return manager.step([1, 2], tokens, BatchBuffers.zeros(*sizes))


def manager(*calls: Callable[[KVCacheManager], object]) -> object:
    one = KVCacheManager(4, 16)
    return [call(one) for call in calls]


def copy(*pairs: tuple[int, int]) -> None:
    cache = torch.zeros(4, 16)
    vk.copy_blocks_mla([cache], torch.tensor(pairs))


def vllm_decode(max_seq_len: int, block_size: int = 16) -> None:
    """A call of paged_attention_v2 with room for one partition."""
    query, one = torch.randn(2, 8, 64), torch.ones(1)
    cache = torch.zeros(4, 2, 64, block_size)
    vk.paged_attention_v2(
        query.clone(), torch.empty(2, 8, 1), torch.empty(2, 8, 1), torch.empty(2, 8, 1, 64), query,
        cache.view(4, 2, 16, block_size, 4), cache, 2, 0.125, torch.zeros(2, 100, **INT32),
        torch.tensor([20, 5], **INT32), block_size, max_seq_len, None, "auto", one, one,
    )  # fmt: skip


INT32 = {"dtype": torch.int32}
TENSORS: list[Callable[[], object]] = [
    lambda: attend(query=torch.randn(2, 8, 64, requires_grad=True)),
    lambda: attend(block_tables=torch.zeros(2, 2, dtype=torch.int64)),
    lambda: write(slot_mapping=torch.arange(3, **INT32)),
    lambda: attend(seq_lens=[20, 5]),
    lambda: attend(layout="vllm"),
    lambda: write(**caches(4, 2, 16, 64)),  # HND
    lambda: attend(layout="nhd"),
    lambda: attend(query=torch.randn(2, 8, 64).half()),
    lambda: attend(**caches(4, 16, 2, 64, dtype=torch.uint8)),
    lambda: attend(query=torch.randn(2, 8, 50), **caches(4, 16, 2, 50)),
    lambda: attend(**caches(4, 12, 2, 64)),
    lambda: attend(query=torch.randn(2, 7, 64)),
    lambda: attend(query=torch.randn(6, 8, 64)),
    lambda: attend(
        query=torch.randn(6, 8, 64),
        query_start_loc=torch.tensor([0, 5, 6], **INT32),
        max_query_len=3,
    ),
    lambda: attend(query=torch.randn(6, 8, 64), query_start_loc=torch.tensor([0, 5, 9], **INT32)),
    lambda: attend(seq_lens=torch.tensor([40, 5], **INT32)),
    lambda: attend(block_tables=torch.full((2, 2), 9, **INT32)),
    lambda: write(slot_mapping=torch.tensor([0, 1, 999])),
    lambda: copy((0, 1), (2, 1)),
    lambda: copy((0, 1), (1, 2)),
    lambda: vk.swap_blocks(torch.zeros(2, 4), torch.zeros(2, 4), 16, torch.tensor([[0, 1]])),  # type: ignore[call-arg]
    lambda: vk.scaled_fp8_quant(torch.randn(2, 64), group_shape=(1, 64)),  # type: ignore[call-arg]
    lambda: vllm_decode(20, block_size=64),
    lambda: vllm_decode(600),
    rotate,
    lambda: write(k_scale=1.0),
    lambda: attend(k_scale=torch.ones(1)),
    lambda: write(kv_cache_dtype="fp8"),
    lambda: vk.silu_and_mul(torch.empty(4, 2), torch.randn(4, 4).t()),
    lambda: attend(query=torch.randn(2, 64, 8).transpose(1, 2)),
    out_is_query,
    lambda: attend(key_cache=torch.zeros(4, 16, 2, 64, device="meta")),
]
MANAGER: list[Callable[[], object]] = [
    lambda: manager(lambda one: one.allocate(1, 100)),
    lambda: manager(lambda one: one.free(3)),
    lambda: manager(lambda one: one.allocate(1, 5), lambda one: one.allocate(1, 5)),
    lambda: step(20, 2, 2, 8),
    lambda: step(1, 1, 2, 8),
    lambda: step(20, 2, 1, 64),
    lambda: manager(pickle.dumps),
]


@pytest.mark.parametrize(
    "section, calls", [("Tensors", TENSORS), ("KV-cache manager", MANAGER)], ids=["ops", "manager"]
)
def test_messages_are_on_the_page(section: str, calls: list[Callable[[], object]]) -> None:
    expected = patterns(section)
    met = set()
    for call in calls:
        with pytest.raises((RuntimeError, TypeError)) as error:
            call()
        found = [pattern for pattern in expected if re.search(pattern, str(error.value))]
        assert found, f"{section}: the page lacks: {error.value}"
        met.update(found)
    missing = [
        pattern
        for pattern in expected
        if pattern not in met and not any(re.escape(word) in pattern for word in NOT_CAUSED_HERE)
    ]
    assert not missing, f"{section}: nothing says: {missing}"
