"""A TCP relay in front of a server: it limits the rate, and cuts, stalls or damages the server's
data."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_PIECE_BYTES = 16 * 1024
# A small window, so that the server can't send much more than this relay has passed on, and little
# of the passed data is lost when the connection is cut. Linux may otherwise buffer 33 MB.
_WINDOW_BYTES = 64 * 1024
# seconds. Waits are collected up to this length, because each takes longer than it should.
_LEAST_WAIT_S = 0.001
# Closing sends a reset at once.
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Relay:
    """A relay that listens on `port`. `rate_bytes_s` is for all connections together (0: no limit).
    `target` is the port of the server. `held` is set while the fault "hold" delays an answer."""

    target: int
    port: int = 0
    rate_bytes_s: float = 0.0
    connections: int = 0
    passed_bytes: int = 0
    _fault: str = ""
    _times: int = 0
    _armed_times: int = 0
    _after_bytes: int = 0
    _left_bytes: int = 0
    _free_s: float = 0.0
    held: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)
    _closed: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def accept(self, listener: socket.socket) -> None:
        """Serve connections until `listener` is closed."""
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=[near], daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.socket() as far:
            # The window is negotiated when the connection is made.
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW_BYTES)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WINDOW_BYTES)
            far.connect(("127.0.0.1", self.target))
            up = threading.Thread(target=self._ask, args=[near, far], daemon=True)
            up.start()
            self._answer(far, near)
            for end in (near, far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            up.join(10)

    def arm(self, fault: str, after_bytes: int, times: int = 99) -> None:
        """From the next request on, after each `after_bytes`, cut or stall the connection, damage a
        byte, or hold the answer until `release`; `times` times. The end of an earlier answer passes
        unchanged."""
        self._fault = fault
        self._armed_times = times
        self._after_bytes = self._left_bytes = after_bytes

    def heal(self) -> None:
        self._times = self._armed_times = 0

    def release(self) -> None:
        self._released.set()

    def _answer(self, far: socket.socket, near: socket.socket) -> None:
        while data := far.recv(_PIECE_BYTES):
            if self._times:
                keep = self._left_bytes
                self._left_bytes -= len(data)
                if self._left_bytes < 0:
                    self._times -= 1
                    self._left_bytes = self._after_bytes
                    if self._fault == "hold":
                        self.held.set()
                        self._released.wait(60)
                    elif self._fault != "damage":
                        near.sendall(data[:keep])
                        if self._fault == "stall":
                            self._closed.wait(60)
                        return
                    else:
                        data = data[:keep] + bytes([data[keep] ^ 1]) + data[keep + 1 :]
            self.passed_bytes += len(data)
            self._wait(len(data))
            near.sendall(data)

    def _wait(self, n_bytes: int) -> None:
        if self.rate_bytes_s:
            self._free_s = max(self._free_s, time.monotonic()) + n_bytes / self.rate_bytes_s
            wait_s = self._free_s - time.monotonic()
            if wait_s > _LEAST_WAIT_S:
                self._closed.wait(wait_s)

    def _ask(self, near: socket.socket, far: socket.socket) -> None:
        """Pass requests on to the server."""
        with suppress(OSError):
            while data := near.recv(_PIECE_BYTES):
                self._times += self._armed_times
                self._armed_times = 0
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._closed.set()


@contextmanager
def relay_to(target: int) -> Iterator[Relay]:
    """Yield a relay to the server on the loopback port `target`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(target, listener.getsockname()[1])
        accepting = threading.Thread(target=relay.accept, args=[listener], daemon=True)
        accepting.start()
        try:
            yield relay
        finally:
            relay.release()
            relay.close()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(10)
