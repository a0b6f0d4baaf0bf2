"""What is the same for every build that is tried: the processor's answer with the installed one."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from localllm.setup import builds, trial

_asked = trial.reference


@cache
def _answer(model: Path) -> trial.ReferenceAnswer | str:
    environment = dict(os.environ)
    builds.apply(builds.OWN, environment)
    return _asked(model, environment)


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own computes it, as ever: the first time."""
    monkeypatch.setattr(trial, "reference", lambda model, _environment, **_: _answer(model))
