"""A loopback model hub with the endpoints that huggingface-hub uses, and scheduled faults.

The faults are those that real hubs have.

It supports `GET /api/models/REPO[/revision/REV]`, `HEAD|GET /REPO/resolve/REV/FILE` and byte
ranges. Small files are sent at once. Large ones are redirected to `/cdn/DIGEST?sig=N`, whose
signature can expire.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CONTENT_FAULTS = (
    "truncated", "short length", "429", "500", "503", "wrong range", "range ignored", "corrupt",
    "drip", "hang", "reset",
    "expired", "garbage", "too long", "416", "disk full",
)  # fmt: skip
API_FAULTS = ("429", "500", "reset", "garbage", "hang", "truncated")


_LFS_BYTES = 10_000
_PIECE_BYTES = 16_384


def sha256(content: bytes) -> str:
    """Return the SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


def git_sha1(content: bytes) -> str:
    """Return git's hash of a blob."""
    return hashlib.sha1(
        f"blob {len(content)}\0".encode() + content, usedforsecurity=False
    ).hexdigest()


@dataclass
class Repo:
    """Files of one repository by name. Those of at least 10 kB are stored like LFS files
    (SHA-256)."""

    name: str
    files: dict[str, bytes]

    @property
    def commit(self) -> str:
        """Return a hash that changes with any content."""
        listed = sorted((name, sha256(content)) for name, content in self.files.items())
        return hashlib.sha1(repr(listed).encode(), usedforsecurity=False).hexdigest()

    def digest(self, name: str) -> str:
        """Return the hash under which the file is stored."""
        content = self.files[name]
        return sha256(content) if len(content) >= _LFS_BYTES else git_sha1(content)

    def siblings(self) -> list[dict[str, Any]]:
        """Return the files as the API lists them with blobs=true."""
        rows = []
        for name, content in self.files.items():
            row: dict[str, Any] = {
                "rfilename": name,
                "size": len(content),
                "blobId": git_sha1(content),
            }
            if len(content) >= _LFS_BYTES:
                row["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 135}
            rows.append(row)
        return rows


@dataclass
class Schedule:
    """The requests that fail, and their faults.

    Each entry of `once` affects one request of its kind ("api" or "content"), in order. After
    that `always` applies.
    """

    seed: int = 0
    once: list[tuple[str, str]] = field(default_factory=list)
    always: tuple[str, str] | None = None
    met: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._lock = threading.Lock()

    @classmethod
    def random(cls, seed: int) -> Schedule:
        """Return a schedule with one to six temporary faults, and in one of four also a permanent
        one."""
        rng = random.Random(seed)
        kinds = {"api": API_FAULTS, "content": CONTENT_FAULTS}

        def draw() -> tuple[str, str]:
            kind = rng.choice(("api", "content", "content", "content"))
            return kind, rng.choice(kinds[kind])

        once = [draw() for _ in range(rng.randint(1, 6))]
        return cls(seed, once, draw() if rng.random() < 0.25 else None)

    def next(self, kind: str) -> str:
        """Return the fault of this request, or ""."""
        with self._lock:
            for found in self.once:
                if found[0] == kind:
                    self.once.remove(found)
                    break
            else:
                if self.always is None or self.always[0] != kind:
                    return ""
                found = self.always
            self.met.append(found)
            return found[1]


@dataclass
class Seen:
    """One request as received ("api", "resolve" or "content"), and the number of body bytes
    sent."""

    kind: str
    method: str
    path: str
    range: str
    authorization: str
    user_agent: str
    sent_bytes: int = 0


@dataclass
class Hub:
    """The repositories and the behaviour of the server.

    After `pause_after` bytes of content it stops, sets `paused`, and waits for `resume`. The
    fault "disk full" calls `fill_disk` while content is being sent. `api_location` is the
    address to which the API redirects, with the same path. `scripted` replaces the hub's
    answers; with None the hub answers.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    gated: set[str] = field(default_factory=set)
    api_override: dict[str, Any] = field(default_factory=dict)
    api_location: str = ""
    scripted: Callable[[Seen], tuple[int, bytes, dict[str, str]] | None] | None = None
    retry_after: str = "1"
    pause_after: int = 0
    paused: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)
    fill_disk: Callable[[], None] | None = None
    seen: list[Seen] = field(default_factory=list)
    url: str = ""
    cdn: str = ""
    ending: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, files: dict[str, bytes]) -> Repo:
        """Publish a repository, or a new commit of it."""
        self.repos[name] = Repo(name, dict(files))
        return self.repos[name]

    def contents(self) -> list[Seen]:
        """Return the requests for content, in order."""
        return [s for s in self.seen if s.kind == "content"]

    def wait(self, seconds: float) -> bool:
        """Wait until the hub ends, for at most `seconds`. Return whether it ends."""
        return self.ending.wait(seconds)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    # A client that gives up must not leave a thread running.
    timeout = 20

    def log_message(self, *_args: Any) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        kind = (
            "api"
            if path.startswith("/api/")
            else "content"
            if path.startswith("/cdn/")
            else "resolve"
        )
        seen = Seen(
            kind,
            self.command,
            path,
            self.headers.get("Range", ""),
            self.headers.get("Authorization", ""),
            self.headers.get("User-Agent", ""),
        )
        hub.seen.append(seen)
        try:
            scripted = hub.scripted(seen) if hub.scripted is not None else None
            if scripted is not None:
                status, body, headers = scripted
                self._plain(status, body, headers.pop("Content-Type", "application/json"), headers)
            elif (
                kind == "api" and hub.api_location and self.headers["Host"] not in hub.api_location
            ):
                self._plain(307, b"", headers={"Location": hub.api_location + self.path})
            elif path.startswith("/api/models/"):
                self._listing(hub, path.removeprefix("/api/models/"), seen)
            elif path.startswith("/cdn/"):
                self._cdn(hub, path.removeprefix("/cdn/"), seen)
            elif (match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) is not None:
                self._resolve(hub, match[1], match[2], match[3], seen)
            else:
                self._plain(404, b"no such page")
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    # --- pages ------------------------------------------------------------------------------------

    def _listing(self, hub: Hub, rest: str, seen: Seen) -> None:
        name, _, revision = rest.partition("/revision/")
        repo = hub.repos.get(name)
        fault = hub.schedule.next("api")
        if fault:
            if fault == "truncated":
                self._plain(200, b'{"id": "a/b", "sib', "application/json")
            else:
                self._fail(hub, fault)
            return
        if repo is None:
            self._plain(
                401,
                b"{}",
                "application/json",
                {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Not found"},
            )
            return
        if name in hub.gated and not seen.authorization:
            self._plain(
                403,
                b"{}",
                "application/json",
                {"X-Error-Code": "GatedRepo", "X-Error-Message": "Gated"},
            )
            return
        if revision not in ("", "main", repo.commit):
            self._plain(404, b"{}", "application/json", {"X-Error-Code": "RevisionNotFound"})
            return
        body = {"_id": "1", "id": name, "modelId": name, "sha": repo.commit, "private": False,
            "tags": [],
                "downloads": 0, "likes": 0, "siblings": repo.siblings()}  # fmt: skip
        body.update(hub.api_override)
        self._plain(200, json.dumps(body).encode(), "application/json")

    def _resolve(self, hub: Hub, name: str, revision: str, file: str, seen: Seen) -> None:
        repo = hub.repos.get(name)
        if repo is None or file not in repo.files or revision not in ("main", repo.commit):
            self._plain(404, b"", headers={"X-Error-Code": "EntryNotFound"})
            return
        content, digest = repo.files[file], repo.digest(file)
        about = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if len(digest) == 64:
            about |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            signature = hub.schedule.rng.randrange(10**9)
            self._plain(
                302,
                b"",
                headers={
                    **about,
                    "ETag": '"pointer"',
                    "Location": f"{hub.cdn}/cdn/{digest}?sig={signature}",
                },
            )
            return
        about["ETag"] = f'"{digest}"'
        self._content(hub, content, seen, about)

    def _cdn(self, hub: Hub, digest: str, seen: Seen) -> None:
        assert parse_qs(urlsplit(self.path).query)["sig"]
        content = next(
            (
                r.files[name]
                for r in hub.repos.values()
                for name in r.files
                if r.digest(name) == digest
            ),
            None,
        )
        if content is None:
            self._plain(404, b"")
        else:
            self._content(hub, content, seen, {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"})

    # --- bytes ------------------------------------------------------------------------------------

    def _content(self, hub: Hub, content: bytes, seen: Seen, headers: dict[str, str]) -> None:
        fault = (
            hub.schedule.next("content") if seen.kind == "content" and self.command == "GET" else ""
        )
        if fault in ("429", "500", "503", "expired", "garbage", "416"):
            self._fail(hub, fault)
            return
        start, end = 0, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", seen.range)
        partial = asked is not None and fault != "range ignored"
        if asked is not None and partial:
            start, end = (
                int(asked[1]),
                min(len(content), int(asked[2]) + 1 if asked[2] else len(content)),
            )
            if start >= len(content):
                self._plain(416, b"", headers={"Content-Range": f"bytes */{len(content)}"})
                return
        body = bytearray(content[start:end])
        said_start, length = start, len(body)
        if fault == "wrong range":
            # A wrong range of the file, as a broken cache sends it.
            said_start = hub.schedule.rng.randrange(len(content))
            body = bytearray(content[said_start:] + content)[:length]
            partial = True
        elif fault == "corrupt":
            at = hub.schedule.rng.randrange(len(body))
            for i in range(at, min(len(body), at + 64)):
                body[i] ^= 0x5A
        elif fault == "short length":
            length = hub.schedule.rng.randrange(len(body))
            body = body[:length]
        elif fault == "too long":
            body += b"more than was announced"
            length = len(body)
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header(
                "Content-Range", f"bytes {said_start}-{said_start + length - 1}/{len(content)}"
            )
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = fault in ("truncated", "reset", "hang", "drip", "disk full")
        stop = hub.schedule.rng.randrange(length) if cut else length
        self._send(hub, body[:stop], seen)
        if fault == "reset":
            self._reset()
        elif fault == "disk full" and hub.fill_disk is not None:
            hub.fill_disk()
            self._send(hub, body[stop:], seen)
        elif fault == "hang":
            hub.wait(2)
        elif fault == "drip":
            # One byte at a time, slower than any client should accept.
            for i in range(stop, length):
                if hub.wait(0.02):
                    break
                self._send(hub, body[i : i + 1], seen)

    def _send(self, hub: Hub, body: bytes | bytearray, seen: Seen) -> None:
        for i in range(0, len(body), _PIECE_BYTES):
            piece = body[i : i + _PIECE_BYTES]
            self.wfile.write(piece)
            seen.sent_bytes += len(piece)
            if hub.pause_after and seen.sent_bytes >= hub.pause_after and not hub.resume.is_set():
                hub.paused.set()
                hub.resume.wait(60)

    def _fail(self, hub: Hub, fault: str) -> None:
        if fault == "429":
            self._plain(429, b"slow down", headers={"Retry-After": hub.retry_after})
        elif fault == "500":
            self._plain(500, b"oops")
        elif fault == "503":
            self._plain(503, b"later", headers={"Retry-After": hub.retry_after})
        elif fault == "expired":
            self._plain(
                403,
                b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>",
            )
        elif fault == "garbage":
            self._plain(200, b"<html>Welcome to the hotel's network</html>", "text/html")
        elif fault == "416":
            self._plain(416, b"")
        elif fault == "reset":
            self._reset()
        elif fault == "hang":
            hub.wait(2)

    def _plain(
        self,
        status: int,
        body: bytes,
        kind: str = "text/plain",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Type": kind,
            **(headers or {}),
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(key, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        """Close with a TCP reset instead of an orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)


class _Server(ThreadingHTTPServer):
    # The server waits for its threads, so that no thread outlives its test.
    daemon_threads = False
    hub: Hub

    def shutdown_request(self, request: Any) -> None:
        # The usual orderly shutdown would turn a reset into an end of file.
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free loopback port until the block ends."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub = hub
    hub.url = f"http://127.0.0.1:{server.server_port}"
    # Another host name, like that of a CDN: the token must not be sent there.
    hub.cdn = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    try:
        yield hub
    finally:
        hub.ending.set()
        hub.resume.set()
        server.shutdown()
        thread.join()
        server.server_close()
