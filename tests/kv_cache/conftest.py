"""Assertions of the helpers say as much as those of the tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("manager_machine", "model", "ranks")
