"""A chat finds the server that runs on this machine.

It uses the file that the server keeps while it runs, and the models that the server lists.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.chat import engines
from localllm.cli.serve import running
from localllm.cli.serve.api_keys import stored_or_new_key
from localllm.errors import ModelNotFoundError, ServerUnreachableError, UsageError
from localllm.server.http.settings import ServerSettings
from localllm.settings import Settings
from tui.scripted_sse import ScriptedServer

MODELS: list[dict[str, Any]] = [
    {"id": "vectors", "capabilities": ["embedding"], "status": {"value": "loaded"}},
    {
        "id": "idle",
        "capabilities": ["completion"],
        "status": {"value": "unloaded"},
        "aliases": ["sleepy"],
    },
    {"id": "busy", "capabilities": ["completion"], "status": {"value": "loaded"}},
]


def port(server: ScriptedServer) -> int:
    return int(server.base_url.rpartition(":")[2].removesuffix("/v1"))


def test_a_server_is_found_only_while_it_runs() -> None:
    with ScriptedServer(models=MODELS) as server:
        assert engines.local_server("idle", None) is None
        with running.published(ServerSettings().secured(), port(server)):
            for asked, found in (
                (None, "busy"),
                ("Idle", "idle"),
                ("sleepy", "idle"),
                ("idle:latest", "idle"),
            ):
                attached = engines.local_server(asked, None)
                assert attached is not None
                assert (attached.base_url, attached.model, attached.api_key) == (
                    server.base_url,
                    found,
                    None,
                )
            assert engines.local_server("another", None) is None
            by_file = engines.local_server("/models/Idle.gguf", None, lambda: "idle")
            assert by_file is not None
        assert engines.local_server("idle", None) is None
        assert list(running.folder().iterdir()) == []


def test_the_file_of_a_running_server_is_private_and_contains_no_key() -> None:
    secured = ServerSettings(host="0.0.0.0", port=1).secured()
    with running.published(secured, 4711):
        (file,) = running.folder().iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert secured.api_key is not None
        assert secured.api_key not in file.read_text()
        (told,) = running.running_servers()
        assert (told.base_url, told.key) == ("http://127.0.0.1:4711/v1", "kept")
        file.chmod(0o644)  # others could have read it
        assert running.running_servers() == []


def test_the_file_of_a_dead_server_is_removed_even_if_its_pid_was_reused() -> None:
    with running.published(ServerSettings().secured(), 1):
        (file,) = running.folder().iterdir()
        told = json.loads(file.read_text())
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        left = running.folder() / "dead.json"
        left.write_text(json.dumps(told | {"pid": child.pid}))
        left.chmod(0o600)
        later = running.folder() / "later.json"
        later.write_text(json.dumps(told | {"started_s": told["started_s"] - 100}))
        later.chmod(0o600)
        torn = running.folder() / "torn.json"
        torn.write_text('{"pid"')
        torn.chmod(0o600)
        assert [r.pid for r in running.running_servers()] == [os.getpid()]
        assert not left.exists()
        assert not later.exists()


def test_a_local_server_that_does_not_answer_is_skipped() -> None:
    with running.published(ServerSettings().secured(), 9):
        assert engines.local_server(None, None) is None


def test_the_stored_key_is_sent_only_to_our_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    key = stored_or_new_key()
    with ScriptedServer(models=MODELS, api_key=key) as server:
        with pytest.raises(UsageError, match="requires a key"):
            engines.engine_at(server.base_url, "idle", None)
        secured = replace(ServerSettings(host="0.0.0.0").secured(), api_key=key)
        with running.published(secured, port(server)):
            found = engines.local_server("idle", None)
            assert found is not None
            assert found.api_key == key
            assert engines.engine_at(server.base_url, "idle", None).api_key == key
        with pytest.raises(UsageError, match="rejects the key"):
            engines.engine_at(server.base_url, "idle", "wrong")
        monkeypatch.setenv("LOCALLLM_API_KEY", key)
        assert engines.engine_at(server.base_url, "idle", None).api_key == key


def test_a_named_address_is_used_or_causes_an_error_with_the_reason() -> None:
    with ScriptedServer(models=MODELS) as server:
        bare = server.base_url.removesuffix("/v1").removeprefix("http://")
        assert engines.engine_at(bare, None, None).model == "busy"
        with pytest.raises(ModelNotFoundError, match="no model 'gpt'"):
            engines.engine_at(server.base_url, "gpt", None)
    with pytest.raises(ServerUnreachableError, match="no server answers"):
        engines.engine_at(server.base_url, None, None)


def test_a_chat_starts_its_own_engine_for_own_or_for_different_settings(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    models = [{"id": tiny_model.stem, "status": {"value": "loaded"}}]
    with (
        ScriptedServer(models=models) as server,
        running.published(ServerSettings().secured(), port(server)),
    ):
        for wanted, where in (
            (
                engines.EngineRequest(str(tiny_model)),
                server.base_url.removeprefix("http://").removesuffix("/v1"),
            ),
            (engines.EngineRequest(str(tiny_model), own=True), ""),
            (engines.EngineRequest(str(tiny_model), Settings({"context": 512})), ""),
        ):
            with ExitStack() as stack:
                engine = engines.engine_for(stack, wanted, None, at_once=True)
                assert (engine.model, engine.where) == (tiny_model.stem, where)


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="can't be combined"):
        engines.EngineRequest(url="x", own=True)
    with pytest.raises(UsageError, match="already chose how to load"):
        engines.EngineRequest(url="x", settings=Settings({"context": 512}))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no AF_UNIX in Python")
def test_a_chat_finds_and_uses_a_server_on_a_unix_socket(tiny_model: Path, tmp_path: Path) -> None:
    path = Path("/tmp") / f"ll-{os.getpid()}.sock"
    command = [sys.executable, "-m", "localllm"]
    serve = subprocess.Popen(
        [*command, "serve", str(tiny_model), "--only", "--unix", str(path), "--context", "512"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert serve.stderr is not None
        for line in serve.stderr:
            if line.startswith("serving on"):
                break
        attached = engines.local_server(str(tiny_model), None, lambda: tiny_model.stem)
        assert attached is not None
        assert attached.where == str(path.resolve())
        asked = [*command, "chat", "hello", "-m", str(tiny_model), "--max-tokens", "3"]
        done = subprocess.run(
            asked, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
        )
        assert done.returncode == 0, done.stderr
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.communicate(timeout=30)
    assert running.running_servers() == []
    assert list(running.folder().iterdir()) == []
