"""Lists of tokens and counts, to which a step adds a token a row."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, needs_gpu, opcheck, raises

import vllm_kernels
from vllm_kernels import reference

OP = vllm_kernels.append_token_counts
ROOMS = [700, 0, 3, 90, 0, 1]


def random_lists(device: str) -> dict[str, torch.Tensor]:
    """Rows of ROOMS entries, some in use, each with few distinct tokens."""
    indptr = torch.tensor([0, *ROOMS]).cumsum(0).int()
    tokens = torch.full((int(indptr[-1]) + 5,), -1, dtype=torch.int32)  # 5 belong to no row
    lengths = torch.tensor([max(0, room - 2) for room in ROOMS], dtype=torch.int32)
    for row, used in enumerate(lengths.tolist()):
        tokens[indptr[row] : indptr[row] + used] = torch.randperm(used + 9)[:used].int()
    counts = torch.where(tokens >= 0, torch.randint(0, 9, tokens.shape), 0).int()
    names = ("tokens", "counts", "lengths", "indptr")
    return dict(zip(names, (x.to(device) for x in (tokens, counts, lengths, indptr)), strict=True))


def assert_steps(lists: dict[str, torch.Tensor], steps: list[dict[str, torch.Tensor]]) -> None:
    """The op after each step, and the reference, have the same lists."""
    state = {name: x.cpu().clone() for name, x in lists.items()}
    for step in steps:
        want = reference.append_token_counts(**state, **{n: x.cpu() for n, x in step.items()})
        OP(**lists, **step)
        state |= dict(zip(("tokens", "counts", "lengths"), want, strict=False))
        for name, x in state.items():
            assert torch.equal(lists[name].cpu(), x), name


def test_matches_reference(device):
    for _ in range(20):
        new = torch.randint(-1, 12, (2, len(ROOMS)), device=device)
        new[:, -1] = 4  # one entry, and then it is found again
        assert_steps(random_lists(device), [{"new_tokens": tokens} for tokens in new])


def test_a_position_counts_once(device):
    lists = random_lists(device)
    counted = torch.full((len(ROOMS),), 10, device=device)
    positions = torch.tensor([9, 10, 10, 12, 3, 10], device=device)
    new = torch.full_like(positions, 3)
    OP(**lists, new_tokens=new, positions=positions, next_positions=counted)
    assert counted.tolist() == [10, 11, 11, 13, 10, 11]
    once = {name: x.clone() for name, x in lists.items()}
    OP(**lists, new_tokens=new, positions=positions, next_positions=counted)
    assert all(torch.equal(lists[name], x) for name, x in once.items())
    again = {"new_tokens": new, "positions": positions + 5, "next_positions": counted}
    assert_steps(lists, [again])


def test_sample_reads_the_lists(device):
    """A token that came is penalized, one that did not is not."""
    tokens = torch.full((2, 8), -1, dtype=torch.int32, device=device)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    indptr = torch.tensor([0, 8], dtype=torch.int32, device=device)
    OP(tokens[0], tokens[1].zero_(), lengths, indptr, torch.tensor([2], device=device))
    logits = torch.tensor([[0.0, 1.0, 1.5, 0.0]], device=device)
    got = vllm_kernels.sample(
        logits,
        token_counts=(indptr, tokens[0], tokens[1]),
        presence=torch.ones(1, device=device),
    )
    assert got.tolist() == [1]


def test_bad_input(device):
    lists, new = random_lists(device), torch.zeros(len(ROOMS), dtype=torch.int64, device=device)
    cases = [
        ({"new_tokens": new.int()}, r"new_tokens: expected int64, got int32; cast it with .long"),
        ({"indptr": lists["indptr"][:-1]}, r"indptr: expected num_rows \+ 1 = 7 \(from new_tokens"),
        ({"counts": lists["counts"][1:]}, r"counts: expected entries = \d+ \(from tokens\) at dim"),
        (
            {"positions": new},
            r"positions: expected positions and next_positions together, got one ",
        ),
        ({"counts": lists["tokens"]}, r"counts and tokens overlap in memory$"),
    ]
    for change, message in cases:
        with raises(f"^append_token_counts: {message}"):
            OP(**{**lists, "new_tokens": new, **change})


def full_list(device: str) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([5, 6, -1], dtype=torch.int32, device=device),
        "counts": torch.tensor([1, 1, 0], dtype=torch.int32, device=device),
        "lengths": torch.tensor([2], dtype=torch.int32, device=device),
        "indptr": torch.tensor([0, 2], dtype=torch.int32, device=device),
    }


def test_a_full_list():
    lists = full_list("cpu")
    OP(**lists, new_tokens=torch.tensor([6]))  # it has this token
    before = lists["counts"].clone()
    with raises(
        r"^append_token_counts: lengths: expected a free entry in the list of row 0, got 2"
    ):
        OP(**lists, new_tokens=torch.tensor([7]))
    assert torch.equal(lists["counts"], before)


@needs_gpu
def test_a_full_list_is_contained():
    lists = full_list("cuda")
    OP(**lists, new_tokens=torch.tensor([7], device="cuda"))
    assert lists["tokens"].tolist() == [5, 6, -1] and lists["lengths"].tolist() == [2]


@pytest.mark.parametrize("name, bad", [("lengths", 9), ("lengths", -1), ("indptr", 99)])
def test_bad_numbers_are_named_on_the_cpu(name, bad):
    lists = full_list("cpu")
    lists[name][-1] = bad
    with raises(rf"^append_token_counts: {name}\[\d\] = {bad}: expected "):
        OP(**lists, new_tokens=torch.tensor([5]))


def test_opcheck_and_compile(device):
    lists, new = random_lists(device), torch.zeros(len(ROOMS), dtype=torch.int64, device=device)
    opcheck("append_token_counts", *lists.values(), new)
    opcheck("append_token_counts", *lists.values(), new, new, new.clone())

    def step(*arguments: torch.Tensor) -> torch.Tensor:
        OP(*arguments)
        return arguments[1] + 0

    assert_compiles(step, *lists.values(), new)


@needs_gpu
def test_graph_replay():
    lists, new = random_lists("cuda"), torch.zeros(len(ROOMS), dtype=torch.int64, device="cuda")
    start = {name: x.clone() for name, x in lists.items()}

    def run() -> None:
        for name, x in start.items():
            lists[name].copy_(x)
        OP(**lists, new_tokens=new)

    def again() -> torch.Tensor:
        copies = {name: x.clone() for name, x in start.items()}
        OP(**copies, new_tokens=new)
        return copies["counts"]

    assert_graph_replays(run, lambda: new.fill_(3), lists["counts"], again)
