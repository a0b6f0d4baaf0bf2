"""The server that is asked for KV: exports the blocks of a prompt as soon as they are computed.

A request with `sends_from` reads its prompt except the last token, and generates no answer. Between
two steps, its next blocks are exported. It exports only as many as its reader has room for
(`credits`), so a slow link takes no memory. It ends when all its blocks are exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from localllm.engine.adapters import named_adapters, set_name
from localllm.engine.cache.identity import identity_of
from localllm.engine.cache.kv_file import KvEntry
from localllm.engine.cache.tree import as_tokens
from localllm.engine.messages import Failure
from localllm.engine.request import RunningRequest
from localllm.engine.request_table import RequestTable
from localllm.engine.tokens import Tokens
from localllm.engine.transfer.frames import DONE, HEAD, json_frame
from localllm.engine.transfer.wire import BLOCK_TOKENS, CREDITS, block_frame
from localllm_backends.contract import Backend, BackendFailure

# Takes the frames of a request in order. Each frame is in pieces.
Outlet = Callable[[str, Iterable[bytes]], object]


def no_outlet(request_id: str, frame: Iterable[bytes]) -> None:
    """Drop the frame, because the engine's owner has no reader."""
    del request_id, frame


@dataclass
class KvSender:
    """Exports the blocks of running requests to `outlet`."""

    backend: Backend
    jobs: RequestTable
    outlet: Outlet = no_outlet
    sent_tokens: int = 0
    sent_bytes: int = 0
    _credits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._identity = identity_of(self.backend)

    def more(self, request_id: str) -> None:
        """The reader of this request has room for one more block."""
        if request_id in self._credits:
            self._credits[request_id] += 1

    def send(self) -> None:
        """Export the next blocks of all requests whose readers have room for them."""
        for job in [j for j in self.jobs.running.values() if j.sends and j.running]:
            try:
                self._send(job)
            except BackendFailure as e:
                self.jobs.fail(job, Failure(job.id, "backend_error", str(e)))
        self._credits = {key: n for key, n in self._credits.items() if self.jobs.find(key)}

    def _send(self, job: RunningRequest) -> None:
        if job.id not in self._credits:
            self._credits[job.id] = CREDITS
            self.outlet(job.id, [json_frame(HEAD, {"cached": job.cached})])
        whole = not self.backend.capabilities.segments
        while self._credits[job.id]:
            stop = job.sent_to + BLOCK_TOKENS
            if whole or stop > job.sends_to:
                stop = job.sends_to
            if job.n_kv < stop or stop <= job.sent_to:
                break
            assert job.sequence is not None
            start = 0 if whole else job.sent_to
            data = self.backend.export_range(job.sequence, start, stop)
            self._emit(job, KvEntry(self._name(job), _named(job, stop), start), data)
            job.sent_to = stop
        if job.sent_to == job.sends_to and self._credits[job.id]:
            self._end(job)

    def _end(self, job: RunningRequest) -> None:
        """Send the state, if the model needs one, and end the request."""
        assert job.sequence is not None
        if self.backend.capabilities.states:
            data = self.backend.export_state(job.sequence)
            tokens = _named(job, job.sends_to)
            self._emit(job, KvEntry(self._name(job), tokens, 0, state=True), data)
        self.outlet(job.id, [json_frame(DONE, {})])
        self.jobs.finish(job, "length")

    def _name(self, job: RunningRequest) -> str:
        adapters = named_adapters(self.backend.info, job.adapters)
        return self._identity.with_adapters(set_name(adapters)).name

    def _emit(self, job: RunningRequest, entry: KvEntry, data: bytes) -> None:
        self._credits[job.id] -= 1
        self.outlet(job.id, block_frame(entry, data))
        self.sent_bytes += len(data)
        if not entry.state:
            self.sent_tokens += len(entry.tokens) - entry.start

    def snapshot(self) -> dict[str, int]:
        return {"kv_sent_tokens": self.sent_tokens, "kv_sent_bytes": self.sent_bytes}


def _named(job: RunningRequest, stop: int) -> Tokens:
    """The tokens that name a block. They have no salt, because the other server has other salts."""
    return as_tokens(job.tokens[:stop])
