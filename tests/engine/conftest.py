from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether an engine starts a pass before the tokens of the last one are known."""
    return request.param
