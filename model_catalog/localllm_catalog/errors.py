"""The catalog's own errors: it may not import the product's tree, so the composition root maps
these leaves onto it."""

from __future__ import annotations


class CatalogError(Exception):
    """Base of everything the catalog raises on purpose: `message` says what and why, `hint` what to
    do next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadHeaderError(CatalogError):
    """A model file's header is damaged, hostile, or of a format this version does not read."""


class SourceError(CatalogError):
    """A file or URL that should hold a header could not be reached or read (the header itself is
    not at fault)."""


class BadCatalogError(CatalogError):
    """A family TOML (ours or the user's overlay) does not say what a model needs to say."""
