"""Errors of servers that requests are handed on to."""

from __future__ import annotations

from localllm.errors import LocalLLMError


class UpstreamError(LocalLLMError):
    """Another server, which a request was handed on to, can't be reached or broke off."""

    code = "upstream_failed"
    http_status = 502
    exit_code = 6
    default_hint = "see whether that server runs; GET /v1/models says which model is where"
