"""The catalog's own errors. The catalog must not import the product's error tree, so the
composition root maps these classes to it."""

from __future__ import annotations


class CatalogError(Exception):
    """Base of all errors that the catalog raises on purpose. `message` states the problem and its
    cause, `hint` the next step."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadHeaderError(CatalogError):
    """A model file's header is damaged, malicious, or of a format that this version does not read."""


class PartialFileError(BadHeaderError):
    """The file is no GGUF file, or it ends before its last tensor, like a download that was cut."""


class SourceError(CatalogError):
    """A file or URL of a header could not be reached or read. The header itself may be valid."""


class BadCatalogError(CatalogError):
    """A family TOML (ours or the user's) lacks a required fact of a model or has an invalid one."""
