"""Errors of the setup room: a build that can't be made here, one that failed its trial, one that is not there."""

from __future__ import annotations

from localllm.errors import LocalLLMError, NotFoundError


class SetupError(LocalLLMError):
    """A build could not be made, or computes wrongly. Nothing was changed: what ran before still runs."""

    code = "setup_failed"
    exit_code = 6
    default_hint = "what ran before still runs; see the log named above"


class BuildNotFoundError(NotFoundError):
    """No build of that name is installed."""

    code = "build_not_found"
    default_hint = "see `localllm setup --list`"
