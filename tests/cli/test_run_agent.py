"""`localllm run` starts an agent with temporary settings for its process only."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.commands.run import sandboxed
from localllm.cli.editors.recipes import RECIPES, ClientTarget
from localllm.cli.main import run as localllm
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

TARGET = ClientTarget("http://127.0.0.1:11535", "tiny", 4096)
STARTED = [
    name for name, recipe in RECIPES.items() if recipe(TARGET, Path("/home")).run is not None
]
# The test's agent: it prints its arguments and variables, and exits with 7.
TELLS = """#!{python}
import json, os, sys
places = [value for value in [*sys.argv, *os.environ.values()] if "localllm-run-" in value]
files = [os.path.join(p, name) for p in places if os.path.isdir(p) for name in os.listdir(p)] + places
found = {{f: open(f).read() for f in files if os.path.isfile(f)}}
told = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "files": found, "cwd": os.getcwd()}}
json.dump(told, open({out!r}, "w"))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"tiny": ScriptedEngine()}) as running:
        yield running


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder, a home folder, and a folder of programs that is the only one in PATH."""
    for name in ("project", "home", "bin"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def install(place: Path, name: str, text: str | None = None) -> None:
    program = place / "bin" / name
    told = TELLS.format(python=sys.executable, out=str(place / "told.json"))
    program.write_text(told if text is None else text)
    program.chmod(0o755)


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        localllm(["run", *arguments])
    return int(left.value.code or 0)


def told(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "told.json").read_text())
    return found


@pytest.mark.parametrize("agent", STARTED)
def test_an_agent_gets_the_server_and_model_in_temporary_settings(
    agent: str, server: Running, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = RECIPES[agent](TARGET, Path("/home")).run
    assert recipe is not None
    install(place, recipe.command[0])
    assert ran(agent, "--url", server.url, "--", "--do", "it") == 7
    given = told(place)
    assert given["arguments"][-2:] == ["--do", "it"]
    assert given["cwd"] == str(place / "project")
    new = {k: v for k, v in given["environment"].items() if os.environ.get(k) != v}
    everything = " ".join([*given["arguments"], *new.values(), *given["files"].values()])
    assert server.url in everything
    assert "tiny" in everything
    said = capfd.readouterr().err
    assert all(name in said for name in new)
    # The agent's own configuration is unchanged, and the temporary folder is gone.
    assert list((place / "home").iterdir()) == []
    assert [p.name for p in place.iterdir() if p.name.startswith("localllm-run-")] == []
    for file in given["files"]:
        assert file in said
        assert not Path(file).exists()


def test_variables_that_would_override_the_settings_are_not_passed_to_an_agent(
    server: Running, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")
    monkeypatch.setenv("EDITOR", "vi")
    install(place, "claude")
    assert ran("claude", "--url", server.url) == 7
    given = told(place)["environment"]
    assert "ANTHROPIC_API_KEY" not in given
    assert (given["EDITOR"], given["ANTHROPIC_MODEL"]) == ("vi", "tiny")
    assert os.environ["ANTHROPIC_API_KEY"] == "the user's own"


def test_an_agent_is_refused_if_the_server_lacks_the_named_model(
    server: Running, place: Path
) -> None:
    install(place, "goose")
    assert ran("goose", "-m", "tiny", "--url", server.url) == 7
    assert ran("goose", "-m", "nosuch", "--url", server.url) == 3


def test_an_unknown_agent_is_answered_with_the_known_ones(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ran("foo") == 3
    error = capfd.readouterr().err
    known = error.partition("known: ")[2].splitlines()[0]
    assert known.split(", ") == STARTED
    assert "roo" not in error.partition("hint")[2]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nosuch",), 3, "known: codex"),
        (("qwen3-8b",), 3, "`localllm chat qwen3-8b` chats with a model"),
        (("llama3",), 3, "`localllm chat llama3` chats with a model"),
        (("cladue",), 3, "did you mean claude?"),
        (("open-code",), 3, "did you mean opencode?"),
        (("zed",), 2, "localllm connect zed"),
        (("codex",), 3, "codex is not installed here"),
    ],
)
def test_an_agent_that_cannot_start_is_an_error_before_a_model_is_loaded(
    arguments: tuple[str, ...], code: int, said: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ran(*arguments) == code
    assert said in capfd.readouterr().err


def test_without_a_server_a_model_is_loaded_for_the_agent_and_unloaded_after_it(
    tiny_model: Path, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asks = """#!{python}
import json, os, sys, urllib.request
url = os.environ["OPENAI_HOST"] + "/v1/chat/completions"
body = {{"model": os.environ["GOOSE_MODEL"], "messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 2}}
key = os.environ["OPENAI_API_KEY"]
headers = {{"content-type": "application/json", "authorization": "Bearer " + key}}
asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
print(url, json.load(urllib.request.urlopen(asked))["usage"]["completion_tokens"])
"""
    install(place, "goose", asks.format(python=sys.executable))
    assert ran("goose", "-m", str(tiny_model)) == 0
    url, tokens = capfd.readouterr().out.split()
    assert int(tokens) <= 2
    port = url.split(":")[2].partition("/")[0]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(port)), timeout=2)


def test_a_sandboxed_agent_may_write_only_in_its_folder(
    server: Running, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(place, "goose")
    assert ran("goose", "--url", server.url, "--sandbox") == 2
    assert "install bubblewrap" in capfd.readouterr().err
    (place / "home" / ".ssh").mkdir()
    install(
        place,
        "bwrap",
        f'#!/bin/sh\nfor w in "$@"; do echo "$w" >> {place}/bwrap.txt; done\nexec '
        f"{place}/bin/goose\n",
    )
    assert ran("goose", "--url", server.url, "--sandbox") == 7
    words = (place / "bwrap.txt").read_text().split()
    writable = [words[i + 1] for i, word in enumerate(words) if word == "--bind"]
    assert writable[0] == str(place / "project")
    assert Path(writable[1]).name.startswith("localllm-run-")
    assert len(writable) == 2
    hidden = [words[i + 1] for i, word in enumerate(words) if word == "--tmpfs"]
    assert str(place / "home" / ".ssh") in hidden
    assert told(place)["environment"]["HOME"] == writable[1]
    assert "writes only in" in capfd.readouterr().err
    monkeypatch.chdir(place / "home")
    assert ran("goose", "--url", server.url, "--sandbox") == 2


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bubblewrap_prevents_writes_outside_the_allowed_folders(tmp_path: Path) -> None:
    folder, home, outside = (tmp_path / name for name in ("project", "home", "outside"))
    for made in (folder, home, outside):
        made.mkdir()
    script = f"touch {folder}/a {home}/b; touch {outside}/c"
    done = subprocess.run(sandboxed(["/bin/sh", "-c", script], folder, home), check=False)
    assert done.returncode != 0
    assert [p.name for p in (*folder.iterdir(), *home.iterdir(), *outside.iterdir())] == ["a", "b"]
