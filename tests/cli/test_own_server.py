"""The chat's own server: its worker imports the engine while the chat plans the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from localllm.cli.chat.own_server import OwnEngine, loaded
from localllm.errors import UsageError
from localllm.load import load_plan
from localllm.settings import Settings
from models.tiny_bert import write_bert


def workers() -> list[psutil.Process]:
    """Return the workers of this process."""
    children = psutil.Process().children()
    return [child for child in children if "localllm.engine.worker.worker" in child.cmdline()]


def test_the_worker_starts_before_the_plan_is_made(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    make = load_plan.make_load_plan

    def planned(*args: Any, **more: Any) -> load_plan.LoadPlan:
        if not seen:
            seen.extend(worker.pid for worker in workers())
        return make(*args, **more)

    monkeypatch.setattr(load_plan, "make_load_plan", planned)
    with loaded(OwnEngine(str(tiny_model), Settings({"context": 512}))):
        assert [worker.pid for worker in workers()] == seen
    assert len(seen) == 1
    assert workers() == []


def test_a_model_that_writes_no_text_leaves_no_worker(tmp_path: Path) -> None:
    engine = OwnEngine(str(write_bert(tmp_path / "embedder.gguf")), Settings({}))
    with pytest.raises(UsageError, match="generates embeddings"), loaded(engine):
        pass
    assert workers() == []
