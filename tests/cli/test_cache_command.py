"""`localllm cache` lists the stored KV and clears it.

It clears only on request, and without harm to a running engine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.drive import GREEDY, run, settle
from localllm import paths
from localllm.cli.all_commands import app
from localllm.cli.commands import cache
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.errors import LocalLLMError, ModelNotFoundError, UsageError
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

PROMPT = [259, *[40 + i % 50 for i in range(700)], 259, 60]


def engine_of(model: str) -> Engine:
    backend = ScriptedBackend(n_ctx=2048, n_batch=64)
    object.__setattr__(backend.info, "fingerprint", f"weights-of-{model}")
    folder = str(paths.prefixes_dir())
    return Engine(
        backend,
        EngineSettings(disk_dir=folder, disk_bytes=10**9, headroom_bytes=0, model_name=model),
    )


def ask(engine: Engine, key: str = "a", prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    outcome = run(engine, request_for(key, prompt, max_tokens=8, sampling=GREEDY, ignore_eos=True))
    settle(engine)
    assert engine.pool.kv.disk is not None
    engine.pool.kv.disk.flush()
    settle(engine)
    return outcome.tokens[key], outcome.finish(key).usage.cached_tokens


def filled(*names: str) -> None:
    for name in names:
        engine = engine_of(name)
        ask(engine)
        engine.close()


def said(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["cache", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    body: dict[str, Any] = json.loads(result.stdout)
    return body


def kv_files() -> list[Path]:
    return sorted(paths.prefixes_dir().glob("*/*.kv"))


def test_an_empty_cache_is_reported_as_empty() -> None:
    assert said()["models"] == []
    assert "no prefix is stored yet" in CliRunner().invoke(app, ["cache"]).stdout
    assert said("clear") == {"removed_files": 0, "freed_bytes": 0, "left_files": 0}


def test_files_bytes_and_bytes_written_today_are_listed_per_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE_DISK_DAILY_GB", "3")
    filled("alpha", "beta")
    body = said()
    sizes = [f.stat().st_size for f in kv_files()]
    assert (body["files"], body["bytes"], body["written_today_bytes"]) == (
        len(sizes),
        sum(sizes),
        sum(sizes),
    )
    assert body["folder"] == str(paths.prefixes_dir())
    assert body["limits"] == {
        "capacity_bytes": 8 * 10**9,
        "daily_bytes": 3 * 10**9,
        "free_bytes": 2 * 10**9,
    }
    assert sorted(m["model"] for m in body["models"]) == ["alpha", "beta"]
    assert not body["daily_limit_used_up"]
    shown = CliRunner().invoke(app, ["cache"]).stdout
    assert "alpha" in shown
    assert "of 3.0 GB a day" in shown


def test_a_used_up_daily_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    filled("alpha")
    monkeypatch.setenv("LOCALLLM_CACHE_DISK_DAILY_GB", "0.000001")
    assert said()["daily_limit_used_up"]
    assert "stay in memory until tomorrow" in CliRunner().invoke(app, ["cache"]).stdout


def test_clear_without_a_terminal_requires_yes() -> None:
    filled("alpha")
    before = kv_files()
    result = CliRunner().invoke(app, ["cache", "clear"])
    assert isinstance(result.exception, UsageError)
    assert "--yes" in str(result.exception.hint)
    assert kv_files() == before


def test_a_declined_confirmation_removes_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    filled("alpha")
    before, asked = kv_files(), []
    monkeypatch.setattr(cache, "confirmed", lambda question: asked.append(question))
    assert CliRunner().invoke(app, ["cache", "clear"]).exit_code == 0
    assert kv_files() == before
    assert "alpha" in asked[0]


def test_one_models_prefixes_can_be_cleared() -> None:
    filled("alpha", "beta")
    with pytest.raises(ModelNotFoundError, match="gamma"):
        CliRunner().invoke(
            app, ["cache", "clear", "--model", "gamma", "--yes"], catch_exceptions=False
        )
    cleared = said("clear", "--model", "Alpha", "--yes")
    assert cleared["removed_files"] > 0
    assert cleared["freed_bytes"] > 0
    body = said()
    assert {m["model"]: m["files"] > 0 for m in body["models"]} == {"alpha": False, "beta": True}
    assert body["written_today_bytes"] > body["bytes"], "what was written today stays counted"


def test_a_folder_without_a_model_name_is_listed_by_its_own_name() -> None:
    filled("")
    (folder,) = paths.prefixes_dir().iterdir()
    assert said()["models"][0]["model"] is None
    assert folder.name in CliRunner().invoke(app, ["cache"]).stdout
    assert said("clear", "--model", folder.name, "--yes")["removed_files"] > 0


@pytest.mark.parametrize("whole_folder", [False, True])
def test_clearing_the_cache_of_a_running_engine_costs_only_one_prefill(
    whole_folder: bool,
) -> None:
    filled("alpha")
    engine = engine_of("alpha")
    assert said("clear", "--yes")["removed_files"] > 0
    if whole_folder:
        (folder,) = paths.prefixes_dir().iterdir()
        shutil.rmtree(folder)
    fresh = engine_of("beta")
    answer, _ = ask(fresh)
    fresh.close()
    again, cached = ask(engine)
    assert (again, cached) == (answer, 0)
    engine.check_integrity()
    engine.close()
    restarted, cached = ask(engine_of("alpha"))
    assert (restarted, cached) == (answer, len(PROMPT) - 1), "it is kept on disk again"
    assert "alpha" in [m["model"] for m in said()["models"]]


def test_partially_written_files_are_cleared_too() -> None:
    filled("alpha")
    (folder,) = paths.prefixes_dir().iterdir()
    (folder / "half.part").write_bytes(b"x" * 100)
    n_files = said()["files"]
    assert said("clear", "--yes")["removed_files"] == n_files
    assert not list(folder.glob("*.part"))


def test_a_file_that_cannot_be_removed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    filled("alpha")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "in use", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(LocalLLMError, match="could not be removed"):
        CliRunner().invoke(app, ["cache", "clear", "--yes"], catch_exceptions=False)
    assert kv_files()
