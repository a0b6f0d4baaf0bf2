"""Reads byte ranges of a model file, from a path or over HTTP: all the I/O the header reader does."""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from localllm_catalog.errors import SourceError

MAX_REDIRECTS = 5
TIMEOUT_S = 30.0
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


class ByteSource(ABC):
    """Something with a name, a size in bytes, and ranges that can be read."""

    name: str
    size: int
    chunk: int

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; SourceError if they cannot be had."""


class FileSource(ByteSource):
    """A local file, opened for each range (headers take a handful of them)."""

    chunk = 1 << 20

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        try:
            if not path.is_file():
                raise SourceError(f"{path} is not a file", "give the path of a .gguf file")
            self.size = path.stat().st_size
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error

    def read(self, offset: int, length: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                data = file.read(length)
        except OSError as error:
            raise SourceError(f"{self.name} cannot be read: {error.strerror}") from error
        if len(data) != length:
            raise SourceError(f"{self.name} became shorter while it was read")
        return data


class HttpSource(ByteSource):
    """A file on a web server that answers range requests. `transferred` counts the body bytes fetched.

    `headers` (an Authorization for a gated repo) go to the first host only, never along a redirect to another.
    """

    chunk = 2 << 20

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise SourceError(f"{url} is not an http or https URL")
        self.name = url
        self._headers = dict(headers or {})
        self._opener = urllib.request.build_opener(_CappedRedirects())
        self._etag = ""
        self.transferred = 0
        self.size = 0
        self._first = self._fetch(0, self.chunk)

    def read(self, offset: int, length: int) -> bytes:
        if offset + length <= len(self._first):
            return self._first[offset : offset + length]
        return self._fetch(offset, length)

    def _fetch(self, offset: int, length: int) -> bytes:
        request = urllib.request.Request(self.name, headers={"User-Agent": "localllm", "Accept-Encoding": "identity"})
        # "unredirected" headers stay with this host: urllib would carry the others, token included, anywhere.
        for key, value in self._headers.items():
            request.add_unredirected_header(key, value)
        request.add_header("Range", f"bytes={offset}-{offset + length - 1}")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                expected = self._check(response, offset, length)
                data: bytes = response.read(expected + 1)
        except urllib.error.HTTPError as error:
            error.close()
            raise SourceError(f"{self.name} answered {error.code} {error.reason}", _http_hint(error.code)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SourceError(
                f"{self.name} cannot be read: {error}", "check the connection, or use --offline"
            ) from error
        self.transferred += len(data)
        if len(data) != expected:
            raise SourceError(f"{self.name} sent {len(data)} bytes where {expected} were announced")
        return data

    def _check(self, response: http.client.HTTPResponse, offset: int, length: int) -> int:
        if response.status != 206:
            raise SourceError(
                f"{self.name} does not answer range requests (status {response.status})",
                "download the file and give its path",
            )
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None:
            raise SourceError(f"{self.name} answered a range request without a usable Content-Range")
        first, last, total = (int(part) for part in match.groups())
        if first != offset or last >= total or last != min(offset + length, total) - 1:
            raise SourceError(
                f"{self.name} answered bytes {first}-{last} of {total} when asked for {length} at {offset}"
            )
        etag = response.headers.get("ETag", "")
        if self.size and (total != self.size or (etag and self._etag and etag != self._etag)):
            raise SourceError(f"{self.name} changed while it was read", "try again")
        self.size, self._etag = total, etag
        return last - first + 1


class _CappedRedirects(urllib.request.HTTPRedirectHandler):
    max_redirections = MAX_REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        """Follows to http(s) only, and never from https back to http."""
        scheme = urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (req.type == "https" and scheme == "http"):
            raise urllib.error.HTTPError(newurl, code, f"redirect from {req.type} to {scheme} refused", headers, fp)
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if following is not None and (following.type, following.host) == (req.type, req.host):
            for key, value in req.unredirected_hdrs.items():
                following.add_unredirected_header(key, value)
        return following


def _http_hint(code: int) -> str:
    if code in (401, 403):
        return "the repository may be gated: accept its licence on the hub and set HF_TOKEN"
    if code == 404:
        return "check the repository and file name"
    return "try again later" if code == 429 or code >= 500 else ""


def open_source(source: str | os.PathLike[str], headers: Mapping[str, str] | None = None) -> ByteSource:
    """A Source for a path or an http(s) URL. Raises SourceError if it is not there."""
    text = os.fspath(source)
    if text.startswith(("http://", "https://")):
        return HttpSource(text, headers)
    return FileSource(Path(text))
