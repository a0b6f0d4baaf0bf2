"""Name an engine and the release that runs."""

from __future__ import annotations

from localllm.device.library_facts import version_in
from localllm.device.probes import folder_in_environment
from localllm_backends.declaration import Declaration
from localllm_backends.installed_packages import version


def engine_title(engine: Declaration) -> str:
    """Return "llama.cpp (llama-cpp-python 0.3.36)", or "llama.cpp 1.0.0" if another library runs.

    It has no path, because it is also published.
    """
    folder = folder_in_environment(engine.library_variable)
    if folder is not None:
        return f"{engine.label} {version_in(folder) or 'of an unknown version'}"
    installed = version(engine.packages[0]) if engine.packages else None
    if installed is None:
        return engine.label
    return f"{engine.label} ({engine.packages[0]} {installed})"
