from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether an engine starts a pass before the tokens of the last one are known."""
    return request.param


@pytest.fixture(params=[False, True], ids=["", "graphs"])
def graphs(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether passes run as CUDA graphs do, on a CPU."""
    if request.param and device != "cpu":
        pytest.skip("imitates CUDA graphs on a CPU")
    if request.param:
        from engines import replayed  # needs transformers

        from vllm_kernels.engine.model_runner import ModelRunner

        monkeypatch.setattr(ModelRunner, "_capture", replayed)
    return request.param
