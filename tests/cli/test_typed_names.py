"""A typed name means the same model on the command line, in every dialect, and in a chat."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm import paths
from localllm.cli.chat import engines
from localllm.cli.serve import running
from localllm.cli.serve.model_router import router_of
from localllm.cli.serve.presets import load_presets
from localllm.cli.serve.served_models import ServedModels
from localllm.errors import ModelNotFoundError
from localllm.library import app_folders, store
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.proxy.upstreams import Upstream, Upstreams
from localllm.settings import Settings
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

PRESETS = """
[models.coder]
model = "alpha-Q4_0"
aliases = ["fast", "claude-*"]

[models.beta-Q8_0]
aliases = ["second"]
"""
QWEN = "Qwen3-8B-Q4_K_M"
ADDRESS = f"https://huggingface.co/unsloth/Qwen3-8B-GGUF/blob/main/{QWEN}.gguf"

# A typed name, and the id of the model that it means everywhere.
NAMES = {
    # a full name, in any case, of a model or its file
    "beta-Q8_0": "beta-Q8_0",
    "BETA-q8_0": "beta-Q8_0",
    "beta-Q8_0.gguf": "beta-Q8_0",
    "beta-Q8_0:latest": "beta-Q8_0",
    "beta-Q8_0:Q8_0": "beta-Q8_0",
    # a part of the name
    "beta": "beta-Q8_0",
    "beta:latest": "beta-Q8_0",
    "Beta:q8_0": "beta-Q8_0",
    # a preset and aliases
    "coder": "coder",
    "Coder:latest": "coder",
    "fast": "coder",
    "second": "beta-Q8_0",
    # a repository
    "unsloth/Qwen3-8B-GGUF": QWEN,
    "unsloth/qwen3-8b-gguf:q4_k_m": QWEN,
    "hf.co/unsloth/Qwen3-8B-GGUF:latest": QWEN,
    ADDRESS: QWEN,
    # the catalog
    "qwen3-8b": QWEN,
    "qwen3-8b:Q4_K_M": QWEN,
    "qwen3-8b:latest": QWEN,
    "qwen3:8b": QWEN,
    "Qwen/Qwen3-8B": QWEN,
    # Ollama's store, with one file under two names
    "tiny": "tiny:1b",
    "tiny:latest": "tiny:1b",
    "tiny:1b": "tiny:1b",
    # the starter
    "starter": "smollm2-135m-instruct",
    "smollm2-135m": "smollm2-135m-instruct",
    "smollm2-135m-instruct:latest": "smollm2-135m-instruct",
}
UNKNOWN = ("gamma", "beta:Q4_0", "beta-Q4_0", "bartowski/Qwen3-8B-GGUF", "qwen3-8b:Q8_0", "tiny:7b")


@pytest.fixture
def disk(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, str]:
    """Install models in an adopted folder, the hub's cache and Ollama's store.

    Returns the id of each file.
    """
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    adopted = tmp_path / "library"
    adopted.mkdir()
    for name in ("alpha-Q4_0", "beta-Q8_0"):
        shutil.copy(tiny_model, adopted / f"{name}.gguf")
    store.adopt(adopted)
    cached(tiny_model, "unsloth/Qwen3-8B-GGUF", f"{QWEN}.gguf")
    for tag in ("1b", "latest"):
        in_ollama(tmp_path / "ollama", tiny_model, tag)
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    (paths.config_dir() / "config.toml").write_text(PRESETS)
    return {real(model.path): model.name for model in reversed(store.scan())}


def cached(model: Path, repo: str, file: str) -> None:
    folder = app_folders.hub_cache() / ("models--" + repo.replace("/", "--"))
    pointer = folder / "snapshots" / ("b" * 40) / file
    pointer.parent.mkdir(parents=True)
    shutil.copy(model, pointer)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("b" * 40)


def in_ollama(models: Path, model: Path, tag: str) -> None:
    def blob(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (models / "blobs").mkdir(parents=True, exist_ok=True)
        (models / "blobs" / f"sha256-{digest}").write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    facts = json.dumps({"model_format": "gguf", "model_family": "llama"}).encode()
    manifest = {
        "schemaVersion": 2,
        "config": blob(facts, "application/vnd.docker.container.image.v1+json"),
        "layers": [blob(model.read_bytes(), "application/vnd.ollama.image.model")],
    }
    file = models / "manifests" / "registry.ollama.ai" / "library" / "tiny" / tag
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(manifest))


def real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def on_the_command_line(typed: str, disk: dict[Path, str]) -> str:
    """Return the preset, or the id of the file, that `localllm serve` and `localllm chat`
    select."""
    served = ServedModels(Settings({"context": 512}), load_presets())
    [load], [preset] = served.load_plans([typed])
    return preset.name if preset is not None else disk[real(load.local.path)]


def in_a_request(http: httpx.Client, path: str, body: dict[str, Any], typed: str) -> str:
    reply = http.post(path, json={**body, "model": typed})
    assert reply.status_code == 200, (typed, reply.text)
    return str(reply.json()["model"])


def in_a_chat(typed: str) -> str:
    """Return the model name in the chat's requests to the server on this machine."""
    with ExitStack() as stack:
        engine = engines.engine_for(stack, engines.EngineRequest(typed), None, at_once=True)
        assert isinstance(engine, engines.ServerEngine), typed
        return engine.model


def test_a_name_means_the_same_model_in_every_place(disk: dict[Path, str]) -> None:
    router = router_of(["alpha-Q4_0"], (), Settings({"context": 512, "only": False}))
    openai = {"prompt": "a", "max_tokens": 1}
    ollama = {"prompt": "a", "stream": False, "options": {"num_predict": 1}}
    anthropic = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with (
        running_server(router) as server,
        httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http,
        running.published(ServerSettings().secured(), int(server.url.rpartition(":")[2])),
    ):
        for typed, model in NAMES.items():
            found = {
                "command line": on_the_command_line(typed, disk),
                "OpenAI": in_a_request(http, "/v1/completions", openai, typed),
                "Anthropic": in_a_request(http, "/v1/messages", anthropic, typed),
                "Ollama": in_a_request(http, "/api/generate", ollama, typed),
                "chat": in_a_request(http, "/v1/completions", openai, in_a_chat(typed)),
            }
            assert found == dict.fromkeys(found, model), typed
        for typed in UNKNOWN:
            with pytest.raises(ModelNotFoundError):
                on_the_command_line(typed, disk)
            with pytest.raises(ModelNotFoundError):
                engines.engine_at(server.url, typed, None)
            for path, body in (("/v1/completions", openai), ("/api/generate", ollama)):
                assert http.post(path, json={**body, "model": typed}).status_code == 404, typed


def test_an_alias_with_wildcards_applies_only_to_requests(disk: dict[Path, str]) -> None:
    router = router_of(["alpha-Q4_0"], (), Settings({"context": 512, "only": False}))
    assert router.resolve("claude-opus-4").name == "coder"
    with pytest.raises(ModelNotFoundError):
        on_the_command_line("claude-opus-4", disk)


def test_a_local_name_wins_over_an_upstreams_and_a_partial_local_name_does_not() -> None:
    lab = Upstream("lab", "http://127.0.0.1:9/v1", models={"tiny": "tiny", "big:latest": "big"})
    here = ServedModel("Tiny", ScriptedEngine(), aliases=("b*",))
    router = ModelRouter([here], upstreams=Upstreams([lab]))
    assert router.remote_model_named("tiny") is None
    assert router.remote_model_named("tiny:latest") is None
    for typed in ("big", "BIG:latest"):
        remote = router.remote_model_named(typed)
        assert remote is not None
        assert remote.upstream_name == "big"
