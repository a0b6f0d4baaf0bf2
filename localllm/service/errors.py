"""Errors of the service room: a manager that is not there, and one that refused."""

from __future__ import annotations

from localllm.errors import LocalLLMError


class ServiceError(LocalLLMError):
    """The system's service manager can't be asked, or refused what was asked of it."""

    code = "service_manager_failed"
    default_hint = "`localllm serve` runs the same server in this terminal"
