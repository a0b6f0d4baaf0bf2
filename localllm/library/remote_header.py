"""Reads the header of a model file on the hub with range requests, without the weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from localllm.errors import DownloadError
from localllm.library import hub
from localllm_catalog.byte_sources import ByteSource, OpenSource
from localllm_catalog.errors import SourceError

if TYPE_CHECKING:
    import httpx

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


@contextmanager
def opener(*, anonymous: bool = False) -> Iterator[OpenSource]:
    """A function that opens hub addresses.

    It sends the user's token unless `anonymous`, i.e. unless the hub rejected the token.
    """
    patience = hub.Patience.from_environment()
    with hub.new_client(hub.headers(anonymous=anonymous), patience, hub.endpoint()) as client:

        def open_source(url: str) -> ByteSource:
            return HttpSource(client, url)

        yield open_source


class HttpSource(ByteSource):
    """A file on a web server that supports range requests."""

    chunk = 2 << 20

    def __init__(self, client: httpx.Client, url: str) -> None:
        self.name = url
        self.size = 0
        self._client = client
        self._etag = ""
        self._first = self._fetch(0, self.chunk)

    def read(self, offset: int, length: int) -> bytes:
        if offset + length <= len(self._first):
            return self._first[offset : offset + length]
        return self._fetch(offset, length)

    def _fetch(self, offset: int, length: int) -> bytes:
        import httpx

        data = bytearray()
        wanted = {"Range": f"bytes={offset}-{offset + length - 1}"}
        try:
            with self._client.stream("GET", self.name, headers=wanted) as response:
                expected = self._check(response, offset, length)
                for block in response.iter_raw():
                    data += block
                    if len(data) > expected:
                        break
        except DownloadError as error:
            raise SourceError(error.message, error.hint or "") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SourceError(
                f"{self.name} cannot be read: {error}", "check the connection, or use --offline"
            ) from error
        if len(data) != expected:
            raise SourceError(
                f"{self.name} sent {len(data)} bytes instead of the announced {expected}"
            )
        return bytes(data)

    def _check(self, response: httpx.Response, offset: int, length: int) -> int:
        """The number of bytes that a valid response will send. Raises SourceError for any other
        response."""
        if response.is_error:
            host = response.url.host
            failure = hub.status_error(response.status_code, response.headers, host, self.name)
            raise SourceError(failure.message, failure.hint)
        if response.status_code != 206:
            raise SourceError(
                f"{self.name} does not answer range requests (status {response.status_code})",
                "download the file and give its path",
            )
        content_range = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(content_range)
        first = last = total = -1
        if match is not None:
            first, last, total = map(int, match.groups())
        if first != offset or last >= total or last != min(offset + length, total) - 1:
            span_text = f"{length} bytes at {offset}"
            raise SourceError(
                f"{self.name} answered {content_range[:60] or 'no range'} "
                f"when asked for {span_text}"
            )
        etag = response.headers.get("ETag", "")
        if self.size and (total != self.size or (etag and self._etag and etag != self._etag)):
            raise SourceError(f"{self.name} changed during the download of its header", "try again")
        self.size = total
        self._etag = etag
        return last - first + 1
