"""Which build of llama.cpp this run uses: told once, at the start, to this process and to every worker it starts."""

from __future__ import annotations

import os
import sys

# Those that choose, show or mend builds and settings must run whatever is chosen.
_NEVER_FAIL = ("setup", "config", "doctor", "device")


def activate(command: str | None) -> None:
    """Put the chosen build first on Python's path. The environment (LOCALLLM_BUILD) goes before config.toml's `build`, that
    before what `setup --use` chose. Raises BuildNotFoundError where one was named that is not there."""
    from localllm import paths

    named = os.environ.get("LOCALLLM_BUILD") or _configured()
    if not named and not paths.builds_dir().is_dir():
        return
    from localllm.errors import LocalLLMError
    from localllm.setup import builds

    try:
        builds.apply(named or builds.chosen(), os.environ, sys.path)
    except LocalLLMError as e:
        if named and command not in _NEVER_FAIL:
            raise
        print(f"note: {e.message}: the build that came with localllm runs", file=sys.stderr)
        builds.apply(builds.OWN, os.environ, sys.path)


def _configured() -> str:
    """config.toml's `build`; "" where it says nothing, or can't be read (whoever needs the rest of it says so)."""
    from localllm.errors import UsageError
    from localllm.settings import config_path, read_config

    if not config_path().is_file():
        return ""
    try:
        return str(read_config().get("build") or "")
    except UsageError:
        return ""
