"""Fetches one file into a resumable partial file, and accepts it only with the published hash.

huggingface-hub 2.x writes to a separate file per process, removes it on failure, and checks only
the length (file_download.py, _download_to_tmp_and_move). An interrupted download of 40 GB starts
again at zero, and a flipped bit passes. So localllm fetches the bytes itself: into
`<hash>.incomplete` next to the blob, as huggingface-hub before 2 did, continued with Range.
"""

from __future__ import annotations

import errno
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from localllm.errors import DownloadError
from localllm.library.hub import LATER_HINT, HubUnreachableError, Patience, RepoFile, status_error
from localllm.library.store import new_digest

if TYPE_CHECKING:
    import httpx

_BLOCK_BYTES = 1 << 20
# A try that brought fewer bytes counts as a failure. Otherwise a server that resets at once would
# be retried forever.
_MIN_GAIN_BYTES = 16 << 10
# Wrong content is fetched again once, or twice if bytes of an earlier run may be the cause.
_MAX_RESTARTS = 1
# Bytes per request. The hub's delivery network refuses requests above 50 GB (huggingface-hub's
# MAX_HTTP_DOWNLOAD_SIZE).
MAX_SPAN_BYTES = 16 << 30
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")

DownloadState = Literal[
    "listing", "checking", "downloading", "waiting", "verifying", "done", "quantising"
]
# States in which bytes arrive at a speed.
MOVING: tuple[DownloadState, ...] = ("downloading", "quantising")
OnBytes = Callable[[int, DownloadState], None]


class Fetch:
    """The download of one file from `url` to `partial`, checked against `file`'s size and hash.

    `on_bytes(have, state)` receives the number of bytes present. The state is "checking" (reading a
    partial back), "downloading" or "waiting".
    """

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        file: RepoFile,
        partial: Path,
        patience: Patience,
        on_bytes: OnBytes,
        *,
        span_bytes: int = MAX_SPAN_BYTES,
    ) -> None:
        self._client = client
        self._url = url
        self._file = file
        self._partial = partial
        self._patience = patience
        self._on_bytes = on_bytes
        self._span_bytes = span_bytes
        self._have = 0
        self._digest = new_digest(file.digest, file.size_bytes)

    def run(self) -> None:
        """Download until the partial has its full length and the published hash.

        Raises DownloadError. The partial is then kept for the next run, unless its bytes were
        wrong.
        """
        import httpx

        self._take_up()
        failures = 0
        restarts = 0
        if self._have:
            restarts = -1
        while True:
            before = self._have
            try:
                while self._have < self._file.size_bytes:
                    self._stream()
                if self._digest.hexdigest() == self._file.digest:
                    return
                restarts += 1
                self._restart()
                if restarts > _MAX_RESTARTS:
                    raise self._changed()
                failures += 1
                continue
            except (
                httpx.TransportError,
                httpx.DecodingError,
                httpx.TooManyRedirects,
                httpx.InvalidURL,
                HubUnreachableError,
            ) as e:
                failure = e
            if self._have - before >= _MIN_GAIN_BYTES:
                failures = 1
            else:
                failures += 1
            self._wait_or_give_up(failure, failures)

    def _changed(self) -> DownloadError:
        return DownloadError(
            f"{self._file.name} was downloaded again, but its content still differs from the "
            "published hash",
            hint="a proxy or mirror may be changing it; try another network, or unset HF_ENDPOINT",
        )

    def _wait_or_give_up(self, failure: Exception, failures: int) -> None:
        retry_after_s = getattr(failure, "retry_after_s", None)
        if retry_after_s is not None and retry_after_s > self._patience.max_retry_after_s:
            raise DownloadError(
                f"{self._file.name}: the hub requests a wait of {retry_after_s:.0f} s",
                hint=f"{LATER_HINT}; HF_TOKEN raises the limit",
            ) from failure
        if failures >= self._patience.failures:
            at = f"{self._have:,} of {self._file.size_bytes:,} bytes"
            raise DownloadError(
                f"{self._file.name} stopped at {at}: {_reason(failure)}", hint=LATER_HINT
            ) from failure
        self._on_bytes(self._have, "waiting")
        self._patience.sleep(self._patience.wait_s(failures, retry_after_s))

    # --- the partial ------------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Continue an earlier run's partial: hash its bytes."""
        try:
            if not self._partial.is_file():
                return
            if self._partial.stat().st_size > self._file.size_bytes:
                self._restart()
                return
            with self._partial.open("rb") as f:
                while True:
                    block = f.read(_BLOCK_BYTES)
                    if not block:
                        break
                    self._digest.update(block)
                    self._have += len(block)
                    self._on_bytes(self._have, "checking")
        except OSError as e:
            raise disk_error(e, self._partial) from e

    def _restart(self) -> None:
        self._partial.unlink(missing_ok=True)
        self._digest = new_digest(self._file.digest, self._file.size_bytes)
        self._have = 0

    # --- one try ----------------------------------------------------------------------------------

    def _stream(self) -> None:
        end = min(self._file.size_bytes, self._have + self._span_bytes)
        wanted = {}
        if end < self._file.size_bytes:
            wanted = {"Range": f"bytes={self._have}-{end - 1}"}
        elif self._have:
            wanted = {"Range": f"bytes={self._have}-"}
        with self._client.stream("GET", self._url, headers=wanted) as response:
            self._check(response)
            try:
                with self._partial.open("ab") as out:
                    self._receive(response, out)
            except OSError as e:
                raise disk_error(e, self._partial) from e
        if self._have < end:
            raise HubUnreachableError("the connection ended early")

    def _receive(self, response: httpx.Response, out: BinaryIO) -> None:
        began = time.monotonic()
        had_bytes = self._have
        for block in response.iter_raw():
            if self._have + len(block) > self._file.size_bytes:
                raise HubUnreachableError("the server sent more than it announced")
            out.write(block)
            out.flush()  # `on_bytes` may read the file
            self._digest.update(block)
            self._have += len(block)
            self._on_bytes(self._have, "downloading")
            elapsed = time.monotonic() - began
            if elapsed > self._patience.slow_window_s:
                if self._have - had_bytes < self._patience.least_bytes_s * elapsed:
                    rate = (self._have - had_bytes) / elapsed
                    raise HubUnreachableError(
                        f"the connection transferred only {rate:.0f} bytes per second"
                    )
                began = time.monotonic()
                had_bytes = self._have

    def _check(self, response: httpx.Response) -> None:
        """Accept a response that continues our bytes.

        If the server sends the whole file instead of the rest, the partial is emptied first.
        """
        status = response.status_code
        if status not in (200, 206):
            self._refuse(response)
        if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
            raise HubUnreachableError(
                "the server sent it compressed, although it was requested uncompressed"
            )
        if status == 206:
            match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
            total = str(self._file.size_bytes)
            if match is None or int(match[1]) != self._have or match[3] not in (total, "*"):
                content_range = response.headers.get("Content-Range", "nothing")[:60]
                raise HubUnreachableError(
                    f"the server sent another range than requested ({content_range})"
                )
            return
        length = response.headers.get("Content-Length")
        if length is not None and length != str(self._file.size_bytes):
            raise HubUnreachableError(
                f"the server sent {length} bytes, but the hub announced {self._file.size_bytes}"
            )
        if self._have:
            self._restart()

    def _refuse(self, response: httpx.Response) -> None:
        status = response.status_code
        host = response.url.host
        if status == 416:
            self._restart()
            raise HubUnreachableError("the server lacks the rest of the file")
        failure = status_error(status, response.headers, str(host), self._file.name)
        if response.history and not isinstance(failure, HubUnreachableError):
            # The redirect's target is a signed address that expires. The next try gets a fresh one
            # from the hub.
            failure = HubUnreachableError(f"{host} no longer provides the file ({status})")
        elif status == 401 and self._client.headers.pop("authorization", None) is not None:
            # A hub that answers 401 does not know the token (any more). A public file is available
            # without.
            failure = HubUnreachableError(
                f"{host} rejects the token (HF_TOKEN, or the stored login)"
            )
        raise failure


def _reason(error: Exception) -> str:
    if isinstance(error, HubUnreachableError):
        return error.message
    lines = str(error).splitlines()
    if lines and lines[0]:
        return lines[0][:200]
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).lower()


def disk_error(error: OSError, path: Path) -> DownloadError:
    """The DownloadError for a disk that is full or can't be written at `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"the disk of {path.parent} is full",
            hint="free disk space (`localllm models prune`), then run the same command again: "
            "it continues where it stopped",
        )
    return DownloadError(
        f"{path.parent} can't be written: {error.strerror or error}", hint="check its permissions"
    )


# --- how a download is doing: bytes, speed over the last seconds, time left -----------------------

_WINDOW_S = 10.0
_SAMPLE_S = 0.1
# A time left is given after bytes were measured for so long.
_MIN_S = 2.0


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """The state of a download at one moment.

    `done_bytes` includes bytes that were present before. `speed_bytes_s` counts only transferred
    bytes. `eta_s` is None until a speed is known. `digest` is the published hash of the current
    file.
    """

    state: DownloadState
    file: str
    done_bytes: int
    total_bytes: int
    speed_bytes_s: float = 0.0
    eta_s: float | None = None
    digest: str = ""


class DownloadMeter:
    """Turns byte counts into DownloadProgress, with the speed over the last ten seconds."""

    def __init__(
        self,
        total_bytes: int,
        on_progress: Callable[[DownloadProgress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._on_progress = on_progress
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def report(self, state: DownloadState, file: str, have_bytes: int, digest: str = "") -> None:
        """Report progress: `have_bytes` of the current file, in addition to all finished files."""
        done = self.done_bytes + have_bytes
        now = self._clock()
        if state not in MOVING:
            self._samples.clear()
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, done))
        while len(self._samples) > 1 and now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        elapsed = now - then
        # A restart (wrong content) reduces the count. No speed is shown rather than a negative one.
        speed = 0.0
        eta = None
        if elapsed > 0 and done > before:
            speed = (done - before) / elapsed
        # The first blocks arrive slowly: a time from them alone is hours for a small file.
        if speed and elapsed >= _MIN_S:
            eta = (self.total_bytes - done) / speed
        self._on_progress(DownloadProgress(state, file, done, self.total_bytes, speed, eta, digest))

    def finished(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes
