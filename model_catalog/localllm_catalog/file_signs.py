"""Say what a file is that was expected to be a model, by its first bytes."""

from __future__ import annotations

from localllm_catalog.errors import PartialFileError


def other_kind(start: bytes, expected: str, hint: str) -> PartialFileError:
    """Return an error that describes a file which is not of the `expected` format ("GGUF"). The
    `hint` is for a file of an unknown kind."""
    download_hint = "download the file again"
    if start.startswith(b"version "):
        hint = f"run `git lfs pull` there, or {download_hint}"
        return PartialFileError("this is a Git LFS pointer, not the file itself", hint)
    if start.lstrip()[:1] == b"<":
        return PartialFileError(f"this is a web page, not a {expected} file", download_hint)
    if not any(start):
        message = f"this file contains only zero bytes, so it is not a {expected} file"
        return PartialFileError(message, download_hint)
    return PartialFileError(f"this is not a {expected} file", hint)
