"""The version, and the commit that setup.py stamped; git is not needed."""

from __future__ import annotations

from . import _C

try:
    from . import _commit  # type: ignore[attr-defined,unused-ignore]

    commit: str = _commit.COMMIT
    is_release: bool = _commit.RELEASE
except ImportError:  # a source tree whose `_C` was built in another way
    commit, is_release = "", False

version: str = _C.version if is_release or not commit else f"{_C.version}.dev0+g{commit[:8]}"
