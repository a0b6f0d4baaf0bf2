#!/usr/bin/env python3
"""Start `localllm serve` where llama.cpp's own server tests expect `llama-server`.

The tests are in llama.cpp's tools/server/tests. This program maps the options of llama-server to
those of localllm, and the hub's models to small local ones. Environment variables:

CPP_TESTS_MODELS    folder with main.gguf, bert.gguf, rerank.gguf, and vision/ with a projector
CPP_TESTS_LOCALLLM  the command of localllm
CPP_TESTS_HOME      a folder for homes, one per server
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

# Options of llama-server without a value.
FLAGS = frozenset(
    {
        "--offline", "--cont-batching", "--embedding", "--reranking", "--metrics", "--kv-unified",
        "--swa-full", "--slots", "--no-slots", "--verbose", "--context-shift", "--no-ui",
        "--no-models-autoload", "--jinja", "--no-jinja", "--no-mmproj", "--no-cache-idle-slots",
        "--ui-mcp-proxy", "--backend_sampling",
    }
)  # fmt: skip
# localllm rejects a smaller context.
LEAST_CONTEXT = 256
# Local models by a part of the hub's name. Any other name stands for main.gguf.
MODELS = {
    "bert-bge": "bert.gguf",
    "reranker": "rerank.gguf",
    "gemma3": "vision/vision.gguf",
}


def options(arguments: list[str]) -> dict[str, list[str]]:
    """Return the options by name, each with its values."""
    found: dict[str, list[str]] = {}
    left = list(arguments)
    while left:
        name = left.pop(0)
        values = found.setdefault(name, [])
        if name not in FLAGS:
            values.append(left.pop(0))
    return found


def last(found: dict[str, list[str]], name: str) -> str | None:
    values = found.get(name)
    return values[-1] if values else None


def local_model(found: dict[str, list[str]], home: Path) -> Path | None:
    """Return the local model, under the alias that the test gives it."""
    folder = Path(os.environ["CPP_TESTS_MODELS"])
    wanted = f"{last(found, '--hf-repo') or ''} {last(found, '--hf-file') or ''}".lower()
    if last(found, "--model") is None and not wanted.strip():
        return None
    file = next((name for part, name in MODELS.items() if part in wanted), "main.gguf")
    alias = (last(found, "--alias") or "main").split(",")[0]
    model = home / "served" / f"{alias}.gguf"
    model.parent.mkdir()
    model.symlink_to(folder / file)
    if "/" in file:
        for projector in (folder / file).parent.glob("mmproj*.gguf"):
            (model.parent / projector.name).symlink_to(projector)
    return model


def command(found: dict[str, list[str]], model: Path | None) -> list[str]:
    """Return the command of localllm for these options."""
    made = [os.environ["CPP_TESTS_LOCALLLM"], "serve"]
    if model is not None:
        made += [model.stem, "--only"]
    host = last(found, "--host") or "127.0.0.1"
    if host == "127.0.0.1,::1":
        host = "localhost"
    made += ["--host", host, "--port", last(found, "--port") or "8080", "--offline", "--alias", "*"]
    context = last(found, "--ctx-size")
    if context is not None:
        # llama-server divides its context among the slots, localllm does not.
        slots = 1 if "--kv-unified" in found else int(last(found, "--parallel") or 1)
        made += ["--context", str(max(int(context) // slots, LEAST_CONTEXT))]
    for theirs, ours in (
        ("--parallel", "--parallel"),
        ("--api-key", "--api-key"),
        ("--model-draft", "--draft"),
    ):
        value = last(found, theirs)
        if value is not None:
            made += [ours, value]
    for adapter in found.get("--lora", []):
        made += ["--lora", adapter]
    if last(found, "--cors-origins") is None and "--api-key" in found:
        made += ["--allow-origin", "*"]  # llama-server's default
    return made


def config(found: dict[str, list[str]], model: Path | None) -> str:
    """Return a config.toml for options that are settings or request defaults here."""
    lines: list[str] = []
    idle_s = last(found, "--sleep-idle-seconds")
    if idle_s is not None:
        lines.append(f"idle_unload_min = {float(idle_s) / 60}")
    sampled = {"--seed": "seed", "--temp": "temperature"}
    values = {ours: last(found, theirs) for theirs, ours in sampled.items()}
    if model is not None:
        lines += [f'[models."{model.stem}"]', f'model = "{model}"']
        lines += [f"{name} = {value}" for name, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace this process with localllm."""
    found = options(sys.argv[1:])
    home = Path(tempfile.mkdtemp(dir=os.environ["CPP_TESTS_HOME"]))
    model = local_model(found, home)
    made = command(found, model)
    (home / "config").mkdir()
    (home / "config" / "config.toml").write_text(config(found, model), encoding="utf-8")
    os.environ |= {
        "HOME": str(home),
        "LOCALLLM_CONFIG_DIR": str(home / "config"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "data"),
    }
    os.execv(made[0], made)


if __name__ == "__main__":
    main()
