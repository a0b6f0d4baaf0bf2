"""Pulling over the server's API, with a hub, HTTP and the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from library.hub import Hub, sha256
from library.test_pull import REPO, files
from localllm.cli.serve.installed_models import LibraryStore
from localllm.library import store
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine


@pytest.fixture
def http():
    with (
        running_server({"tiny": ScriptedEngine()}, store=LibraryStore()) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as client,
    ):
        yield client


def test_a_model_is_pulled_and_deleted_over_http(hub: Hub, cache: Path, http: httpx.Client) -> None:
    content = hub.add(REPO, files("Q4_K_M")).files["Tiny-1B-Q4_K_M.gguf"]
    lines = [
        json.loads(line)
        for line in http.post("/api/pull", json={"model": f"{REPO}:Q4_K_M"}).text.splitlines()
    ]
    assert lines[0] == {"status": "pulling manifest"}
    assert lines[-1] == {"status": "success"}
    assert {line["digest"] for line in lines if "digest" in line} == {f"sha256:{sha256(content)}"}
    (local,) = [m for m in store.scan() if m.origin == "hf-cache"]
    assert local.path.read_bytes() == content
    assert (
        http.request("DELETE", "/api/delete", json={"model": f"{REPO}:Q4_K_M"}).status_code == 200
    )
    assert not [m for m in store.scan() if m.origin == "hf-cache"]
    assert (
        http.request("DELETE", "/api/delete", json={"model": f"{REPO}:Q4_K_M"}).status_code == 404
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_token_path_that_is_no_file_is_an_error_that_names_it(
    hub: Hub, http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A token path that is not a file causes an error that names it.

    Opening a pipe would wait for its writer.
    """
    token = tmp_path / "token"
    if kind == "folder":
        token.mkdir()
    else:
        os.mkfifo(token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(token))
    hub.add(REPO, files("Q4_K_M"))
    reply = http.post("/api/pull", json={"model": f"{REPO}:Q4_K_M", "stream": False})
    assert reply.status_code == 400, reply.text
    assert str(token) in reply.json()["error"]
    assert hub.seen == []


def test_a_path_is_refused_by_pull_and_delete(hub: Hub, http: httpx.Client, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF")
    for ref in (
        str(file),
        "../mine.gguf",
        "~/mine.gguf",
        "file:///etc/passwd",
        "https://evil.example/a/b",
    ):
        for reply in (
            http.post("/api/pull", json={"model": ref, "stream": False}),
            http.request("DELETE", "/api/delete", json={"model": ref}),
        ):
            assert reply.status_code == 400, ref
            assert "error" in reply.json()
    assert file.exists()


def test_the_starter_model_is_not_deleted_over_http(
    hub: Hub, http: httpx.Client, smollm2: Path
) -> None:
    reply = http.request("DELETE", "/api/delete", json={"model": "smollm2-135m"})
    assert reply.status_code == 400
    assert "is the starter model" in reply.json()["error"]
    assert smollm2.exists()


def test_an_unknown_model_is_an_error_that_names_it(hub: Hub, http: httpx.Client) -> None:
    whole = http.post("/api/pull", json={"model": "nobody/nothing", "stream": False})
    assert whole.status_code in (404, 502)
    assert "nobody/nothing" in whole.json()["error"]
    streamed = http.post("/api/pull", json={"model": "nobody/nothing"})
    assert json.loads(streamed.text.splitlines()[-1]) == whole.json()
