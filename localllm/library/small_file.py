"""Reads a small file of others, given by its path or its address."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from localllm import foreign_json, paths
from localllm.addresses import is_loopback
from localllm.errors import DownloadError, UsageError
from localllm.library import hub

_MAX_BYTES = foreign_json.MAX_BYTES


def read(place: str) -> bytes:
    """Return the contents of the file at `place`.

    Raises UsageError for an address that is not encrypted or a file that can't be read, and
    DownloadError if the address does not answer with a file of at most `foreign_json.MAX_BYTES`.
    """
    scheme = urlsplit(place).scheme
    if scheme in ("http", "https"):
        return _fetched(place)
    try:
        return paths.file_bytes(Path(place).expanduser(), _MAX_BYTES)
    except (OSError, ValueError) as e:
        raise UsageError(
            f"{place} can't be read: {e}", hint="give the path or the https:// address of a file"
        ) from e


def _fetched(address: str) -> bytes:
    import httpx

    host = urlsplit(address).hostname or ""
    if not address.startswith("https:") and not is_loopback(host):
        raise UsageError(
            f"{address} is not encrypted, so its contents could be changed on the way",
            hint="give an https:// address",
        )
    try:
        # The hub's token is for the hub alone.
        with (
            hub.new_client({}, hub.Patience.from_environment(), address) as client,
            client.stream("GET", address) as response,
        ):
            if response.is_error:
                raise hub.status_error(response.status_code, response.headers, host, "this file")
            return foreign_json.read(response.iter_raw())
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise DownloadError(
            f"{address} can't be read: {e}", hint="check the address and the connection"
        ) from e
    except foreign_json.MalformedError as e:
        raise DownloadError(f"{address} can't be used: {e.message}") from e
