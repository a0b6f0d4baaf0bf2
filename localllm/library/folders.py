"""Finds models in a folder: whole GGUFs (splits put together) and MLX folders, by names and sizes, opening no weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm.library import names
from localllm.library.types import LocalModel, Origin

_MAX_FILES = 20_000
_MAX_JSON_BYTES = 32 << 20
# Tokenizers and generators of text; the other folders with safetensors in a hub cache (encoders, diffusion) are not ours.
_TEXT_ARCHITECTURES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def walk(folder: Path, depth: int) -> Iterator[tuple[Path, list[Path]]]:
    """Every folder down to `depth` levels with its files, sorted; links to folders and hidden folders are not followed."""
    budget = _MAX_FILES
    pending = [(folder, 0)]
    while pending and budget > 0:
        current, level = pending.pop()
        files: list[Path] = []
        try:
            with os.scandir(current) as entries:
                for entry in sorted(entries, key=lambda e: e.name):
                    budget -= 1
                    if entry.is_dir(follow_symlinks=False):
                        if level < depth and not entry.name.startswith("."):
                            pending.append((Path(entry.path), level + 1))
                    else:
                        files.append(Path(entry.path))
        except OSError:
            continue
        yield current, files


def ggufs(files: list[Path], origin: Origin, repo: str = "") -> list[LocalModel]:
    """The whole GGUF models among the files of one folder: splits count once, and only when every part is there."""
    weights = {f.name: f for f in files if f.suffix.lower() == ".gguf" and not names.is_projector(f.name)}
    projector = best_projector([f for f in files if f.suffix.lower() == ".gguf" and names.is_projector(f.name)])
    found = []
    for name, file in weights.items():
        split = names.split_of(name)
        parts = [file]
        if split is not None:
            stem, number, count = split
            if number != 1:
                continue
            wanted = [f"{stem}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
            parts = [weights[part] for part in wanted if part in weights]
            if len(parts) != count:
                continue
        size = _total_size(parts)
        if size:
            stem = names.stem_of(name)
            found.append(
                LocalModel(stem, file, "gguf", size, names.quant_of(name), origin, repo, tuple(parts), projector)
            )
    return found


def best_projector(candidates: list[Path]) -> Path | None:
    """The projector to use of several: F16 as published, else the smallest that is whole."""
    whole = [(f, size) for f in candidates if (size := _total_size([f]))]
    ranked = sorted(whole, key=lambda pair: ("f16" not in pair[0].name.lower().replace("bf16", ""), pair[1]))
    return ranked[0][0] if ranked else None


def mlx(folder: Path, files: list[Path], origin: Origin, name: str, repo: str = "") -> LocalModel | None:
    """The MLX (or plain Hugging Face) text model in `folder`, or None: it has a config.json and all its shards."""
    by_name = {f.name: f for f in files}
    shards = [f for f in files if f.suffix == ".safetensors"]
    if "config.json" not in by_name or not shards:
        return None
    config = read_json(by_name["config.json"])
    quantized = config.get("quantization") or config.get("quantization_config")
    architectures = config.get("architectures") or []
    if not quantized and not any(str(a).endswith(_TEXT_ARCHITECTURES) for a in architectures if isinstance(a, str)):
        return None
    index = by_name.get("model.safetensors.index.json")
    if index is not None:
        weight_map = read_json(index).get("weight_map")
        wanted = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not all(isinstance(w, str) and w in by_name for w in wanted):
            return None
    size = _total_size(shards)
    if not size:
        return None
    return LocalModel(name, folder, "mlx", size, _mlx_quant(name, quantized, config), origin, repo, tuple(shards))


def _mlx_quant(name: str, quantized: Any, config: dict[str, Any]) -> str:
    if isinstance(quantized, dict):
        mode, bits = quantized.get("mode"), quantized.get("bits")
        if isinstance(mode, str) and mode not in ("affine", ""):
            return mode
        if isinstance(bits, int):
            return f"{bits}bit"
    kind = config.get("torch_dtype") or config.get("dtype")
    return names.mlx_quant_of(name) or {"bfloat16": "bf16", "float16": "fp16"}.get(str(kind), "")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; {} for anything else."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            return {}
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _total_size(parts: list[Path]) -> int:
    """Bytes of all parts together; 0 if one is missing (a link to nowhere) or empty."""
    total = 0
    for part in parts:
        try:
            size = part.stat().st_size
        except OSError:
            return 0
        if size == 0:
            return 0
        total += size
    return total


def scan(folder: Path, origin: Origin, *, depth: int = 3, repo_of_folder: bool = False) -> list[LocalModel]:
    """All models below `folder`. `repo_of_folder`: its layout is publisher/model/files, as on the hub."""
    found: list[LocalModel] = []
    for current, files in walk(folder, depth):
        repo = ""
        if repo_of_folder:
            parts = current.relative_to(folder).parts
            candidate = "/".join(parts[:2])
            repo = candidate if len(parts) >= 2 and names.safe_repo(candidate) else ""
        found += ggufs(files, origin, repo)
        model = mlx(current, files, origin, current.name, repo)
        if model is not None:
            found.append(model)
    return found
