"""Errors of KV transfers. They reach no client: the prompt is read here instead."""

from __future__ import annotations

from localllm.errors import LocalLLMError

# Why a transfer ended early: no connection; the connection broke; a block came too late; the server
# refused the request; a block was damaged; the context has no room; the engine can't read the block.
REASONS = ("unreachable", "cut", "late", "refused", "damaged", "no_cells", "unreadable")


class TransferError(LocalLLMError, code="kv_transfer_failed", http_status=502, exit_code=6):
    """A transfer of KV ended early. `reason` is one of `REASONS`."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "cut",
        hint: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, param=param)
        self.reason = reason


class BadFrameError(TransferError, code="bad_kv_frame"):
    """The other server sent data that is not a KV transfer, or a frame over its limit."""

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, reason="damaged", hint=hint, param=param)
