"""The reference answer of the installed build on the processor, computed once for all tests."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from localllm.setup import build_check, builds

_asked = build_check.reference


@cache
def _answer(model: Path) -> build_check.ReferenceAnswer | str:
    environment = dict(os.environ)
    builds.apply(builds.OWN, environment)
    return _asked(model, environment)


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the reference answer. The first call computes it in its own process, as the product
    does."""
    monkeypatch.setattr(build_check, "reference", lambda model, _environment, **_: _answer(model))
