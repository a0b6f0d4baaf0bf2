"""A loopback server that answers as GitHub does for llama.cpp's releases.

It has the API of releases and of a folder's contents, redirects of downloads, byte ranges, and
transfers that are cut.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VERSION = "v1.0.0"
TAG = "b12110"


@dataclass
class Releases:
    """The files of release b12110, to which v1.0.0 points, and the headers of its source.

    - `cuts`: after how many bytes each of the next transfers of an archive ends.
    - `stated`: digests that differ from the content, by file name.
    - `seen`: the paths that were requested, with the requested range.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    stated: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def api(self) -> str:
        return f"{self.url}/repos/ggml-org/llama.cpp"

    def answer(self, path: str) -> Any:
        """The API's JSON for a path, or None if there is no such page."""
        match path:
            case "/releases/latest" | "/releases/tags/v1.0.0":
                return self._release(VERSION, {"nightly-tag.txt": f"{TAG}\n".encode()})
            case "/releases/tags/b12110":
                return self._release(TAG, self.files)
        if path.startswith("/contents/"):
            folder = path.removeprefix("/contents/")
            return [
                {
                    "name": name.rpartition("/")[2],
                    "sha": _git_sha1(content),
                    "size": len(content),
                    "download_url": f"{self.url}/raw/{name}",
                }
                for name, content in self.headers.items()
                if name.rpartition("/")[0] == folder
            ]
        return None

    def _release(self, tag: str, files: dict[str, bytes]) -> dict[str, Any]:
        rows = []
        for name, content in files.items():
            digest = hashlib.sha256(content).hexdigest()
            row = {
                "name": name,
                "size": len(content),
                "digest": f"sha256:{self.stated.get(name, digest)}",
                "browser_download_url": f"{self.url}/download/{tag}/{name}",
            }
            rows.append(row)
        return {"tag_name": tag, "prerelease": tag == TAG, "assets": rows}


def _git_sha1(content: bytes) -> str:
    blob = f"blob {len(content)}\0".encode() + content
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest()


class _Server(ThreadingHTTPServer):
    releases: Releases


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        releases = self.server.releases
        path, _, _ = self.path.partition("?")
        releases.seen.append(f"{path} {self.headers.get('Range', '')}".strip())
        if path.startswith("/repos/ggml-org/llama.cpp"):
            answer = releases.answer(path.removeprefix("/repos/ggml-org/llama.cpp"))
            status = 404 if answer is None else 200
            self._send(status, json.dumps(answer).encode())
        elif path.endswith("/nightly-tag.txt"):
            self._send(200, f"{TAG}\n".encode())
        elif path.startswith("/download/"):
            name = path.rpartition("/")[2]
            self._send(302, b"", {"Location": f"{releases.url}/storage/{name}?signature=1"})
        elif path.startswith("/storage/"):
            self._content(releases.files[path.removeprefix("/storage/")])
        elif path.startswith("/raw/"):
            self._send(200, releases.headers[path.removeprefix("/raw/")])
        else:
            self._send(404, b"")

    def _content(self, content: bytes) -> None:
        cuts = self.server.releases.cuts
        start = 0
        wanted = self.headers.get("Range", "")
        if wanted:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        body = content[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(body)))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Connection", "close")
        self.end_headers()
        if cuts:
            body = body[: cuts.pop(0)]
        self.wfile.write(body)
        self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True


@contextmanager
def running(releases: Releases) -> Iterator[Releases]:
    """Serve the releases on loopback until the block ends."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.releases = releases
    releases.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield releases
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
