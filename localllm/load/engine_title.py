"""Name an engine and the release that runs."""

from __future__ import annotations

import os
from pathlib import Path

from localllm.device.library_facts import version_in
from localllm_backends.declaration import Declaration
from localllm_backends.installed_packages import version


def engine_title(engine: Declaration) -> str:
    """Return "llama.cpp (llama-cpp-python 0.3.36)", or "llama.cpp 1.0.0" if another library runs.

    It has no path, because it is also published.
    """
    folder = os.environ.get(engine.library_variable) if engine.library_variable else None
    if folder:
        return f"{engine.label} {version_in(Path(folder).expanduser()) or 'of an unknown version'}"
    installed = version(engine.packages[0]) if engine.packages else None
    if installed is None:
        return engine.label
    return f"{engine.label} ({engine.packages[0]} {installed})"
