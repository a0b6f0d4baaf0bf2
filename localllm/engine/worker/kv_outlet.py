"""Writes KV for other servers to the worker's pipe, in a thread of its own.

A block has megabytes. It is written in small pieces, so that the events of other requests are not
delayed. The events of a request that sends KV pass through the same thread, so they keep their order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable

from localllm.engine.messages import Event, Failure, Finish, event_text
from localllm.engine.worker.child_pipe import ChildPipe

_PIECE_BYTES = 2**18


class KvOutlet:
    """Sends frames and events of the requests in `ids` to `pipe`."""

    def __init__(self, pipe: ChildPipe) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[tuple[str, Iterable[bytes]] | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.ids: set[str] = set()

    def frame(self, request_id: str, frame: Iterable[bytes]) -> None:
        """Send a frame of KV. Its pieces are made in the outlet's thread."""
        self._put((request_id, frame))

    def send_kv_events(self, events: list[Event]) -> list[Event]:
        """Send the events of requests that send KV, and return the others."""
        if not self.ids:
            return events
        others = []
        for event in events:
            if event.id not in self.ids:
                others.append(event)
                continue
            self._put(f'{{"ev":[{event_text(event)}]}}\n')
            if isinstance(event, Finish | Failure):
                self.ids.discard(event.id)
        return others

    def _put(self, item: tuple[str, Iterable[bytes]] | str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="kv-outlet", daemon=True)
            self._thread.start()
        self._queue.put(item)

    def _write_all(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, str):
                self._pipe.send_line(item)
                continue
            request_id, frame = item
            for part in frame:
                for at in range(0, len(part), _PIECE_BYTES):
                    self._pipe.send_raw({"kv": request_id}, part[at : at + _PIECE_BYTES])
            self._pipe.send({"kv": request_id})
