"""Which repository and file names may become a path: overlays and hubs are untrusted."""

from __future__ import annotations

import re

from localllm_catalog.errors import BadCatalogError

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}|pypi:[a-z0-9][a-z0-9.-]{0,63}", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9_][\w .+=()-]{0,199}", re.ASCII)


def check_repo(repo: str) -> str:
    """`repo` if it is "org/name" or "pypi:package"; BadCatalogError for anything a path could hide in."""
    if _REPO.fullmatch(repo) is None or ".." in repo:
        raise BadCatalogError(f"{repo[:80]!r} is not a repository name", 'repositories look like "org/name"')
    return repo


def check_file(name: str) -> str:
    """`name` if it is a plain relative path inside a repository; BadCatalogError for .., roots, drives and the like."""
    parts = name.split("/")
    if len(parts) > 4 or not all(_PART.fullmatch(part) and ".." not in part for part in parts):
        raise BadCatalogError(f"{name[:80]!r} is not a file name of a repository", "names are relative, without ..")
    return name
