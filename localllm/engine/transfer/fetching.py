"""One transfer on the asking server: a thread receives and checks blocks, the engine imports them.

While streams decode here on the processor, the thread rests after each piece, because it takes
processor time from them. The thread holds at most a few blocks that the engine has not taken, so a transfer takes no more
memory than these, however long the prompt is. If the connection breaks, the transfer resumes once at
the first block that is missing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from localllm.engine.cache.identity import KvIdentity
from localllm.engine.cache.kv_file import KvEntry
from localllm.engine.tokens import Tokens
from localllm.engine.transfer import frames, wire
from localllm.engine.transfer.errors import TransferError
from localllm.engine.transfer.peer import KvAnswer, KvPeer

_MAX_WAITING = 6
# While streams decode, the thread rests this many times as long as a piece took, at most `_REST_S`.
_RESTS = 3.0
_REST_S = 0.02
# bytes that a block or a state may have, in addition to twice its share of the context's memory.
_SPARE_BYTES = 2**20
_SPARE_STATE_BYTES = 2**28
# bytes. The limit for a token if the context's memory grows with use.
_MAX_TOKEN_BYTES = 2**19


class FetchedBlock(NamedTuple):
    """Checked KV of the tokens [start, stop), or the `state` after them."""

    start: int
    stop: int
    data: memoryview
    state: bool


@dataclass(frozen=True, slots=True, eq=False)
class WantedKv:
    """The KV of `prompt` from token `start` up to the last token but one.

    `adapters`: those that compute it, as (hash of the contents, scale).
    """

    prompt: Tokens
    start: int
    salt: str
    adapters: Sequence[tuple[str, float]] = ()

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) - 1 - self.start


@dataclass(eq=False)
class KvFetch:
    """The transfer of the KV that is `wanted` from `peer`. `identity` names it.

    `copies`: the prompt is the beginning that other prompts share, and the server is expected to
    have it. `single_block`: the model's KV comes in one block. `lacks_state`: a state is to come
    after the last block.
    `token_bytes`: the memory of a token in the context (0: unknown). `wake` is set when there is
    something to `take`. `yields` may be set at any time: the thread then leaves most of the
    processor to streams.
    """

    peer: KvPeer
    identity: KvIdentity
    wanted: WantedKv
    token_bytes: float
    wake: threading.Event
    single_block: bool = False
    lacks_state: bool = False
    copies: bool = False
    yields: bool = False
    clock: Callable[[], float] = time.monotonic
    cached_on_peer: int = 0
    received_bytes: int = 0
    received: int = field(init=False)
    error: TransferError | None = None
    _blocks: deque[FetchedBlock] = field(default_factory=deque)
    _space: threading.Condition = field(default_factory=threading.Condition)
    _is_closed: bool = False
    _closed: threading.Event = field(default_factory=threading.Event)
    _answer: KvAnswer | None = None

    def __post_init__(self) -> None:
        self.received = self.wanted.start
        self.stop = len(self.wanted.prompt) - 1
        self.began_s = self.last_progress_s = self.clock()
        self._all_received = False

    def begin(self) -> None:
        threading.Thread(target=self._run, name="kv-fetch", daemon=True).start()

    def pause(self, seconds: float) -> None:
        """Wait, unless the transfer is closed."""
        self._closed.wait(seconds)

    # --- the engine's thread ----------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if a block can be taken."""
        return bool(self._blocks)

    @property
    def done(self) -> bool:
        """True if no further block comes, and all blocks were taken."""
        return not self._blocks and (self._all_received or self.error is not None)

    @property
    def complete(self) -> bool:
        """True if every block was received."""
        return self._all_received

    def take(self) -> FetchedBlock:
        """Remove the next block. It must be `ready`."""
        with self._space:
            block = self._blocks.popleft()
            self.last_progress_s = self.clock()
            self._space.notify()
        return block

    def close(self) -> None:
        """Stop the transfer, if it still runs. The other server stops computing."""
        with self._space:
            self._is_closed = True
            self._closed.set()
            self._blocks.clear()
            self._space.notify()
            answer = self._answer
        if answer is not None and not self._all_received:
            answer.hang_up()

    # --- the receiving thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            try:
                self._receive()
            except TransferError as e:
                if e.reason != "cut" or self._is_closed or self._all_received:
                    raise
                self._receive()
        except TransferError as e:
            # After the last block, the connection is of no further use.
            if not self._all_received:
                self.error = e
        except MemoryError:
            self.error = TransferError("there is no memory for its blocks", reason="no_cells")
        self.wake.set()

    def _receive(self) -> None:
        reader = wire.FrameReader(self._max_block_bytes())
        wanted = self.wanted
        body = {
            "identity": self.identity.to_json(),
            "tokens": wanted.prompt.tolist(),
            "start": self.received,
            "salt": wanted.salt,
            "adapters": [{"digest": digest, "scale": scale} for digest, scale in wanted.adapters],
        }
        with self.peer.open_response(body) as answer:
            with self._space:
                self._answer = answer
            began_s = time.thread_time()
            for piece in answer.pieces:
                for frame in reader.feed(piece):
                    self._handle(frame)
                if self._is_closed:
                    return
                if self.yields:
                    # Waiting for the link takes no processor time.
                    self.pause(min(_RESTS * (time.thread_time() - began_s), _REST_S))
                began_s = time.thread_time()
        if not self._all_received:
            raise TransferError("it broke off its answer", reason="cut")

    def _max_block_bytes(self) -> int:
        n_tokens = wire.BLOCK_TOKENS
        spare_bytes = _SPARE_BYTES
        if self.single_block or self.lacks_state:
            n_tokens = len(self.wanted.prompt)
            spare_bytes = _SPARE_STATE_BYTES
        token_bytes = 2 * self.token_bytes or _MAX_TOKEN_BYTES
        return int(token_bytes * n_tokens) + 4 * len(self.wanted.prompt) + spare_bytes

    def _handle(self, frame: wire.Frame) -> None:
        if frame.kind in (frames.BLOCK, frames.STATE):
            self._add(frame)
        elif frame.kind == frames.HEAD:
            cached = frame.words().get("cached")
            if isinstance(cached, int):
                self.cached_on_peer = cached
        elif frame.kind == frames.DONE:
            if self.received < self.stop or self.lacks_state:
                raise TransferError("it sent fewer blocks than the prompt has", reason="damaged")
            self._all_received = True
            self.wake.set()
        elif frame.kind == frames.FAIL:
            raise TransferError(str(frame.words().get("message", ""))[:300], reason="refused")

    def _add(self, frame: wire.Frame) -> None:
        """Check a block, and keep it for the engine."""
        state = frame.kind == frames.STATE
        start = self.received
        stop = self.stop
        if not self.single_block and not state:
            stop = min(start + wire.BLOCK_TOKENS, stop)
        entry = KvEntry(self.identity.name, self.wanted.prompt[:stop], 0 if state else start, state)
        data = None
        if state == (self.received >= self.stop) and (self.lacks_state or not state):
            data = entry.checked_data(frame.body)
        if data is None:
            raise TransferError(
                "a block is damaged, or another one than was asked for", reason="damaged"
            )
        with self._space:
            while len(self._blocks) >= _MAX_WAITING and not self._is_closed:
                self._space.wait()
            if self._is_closed:
                return
            self._blocks.append(FetchedBlock(entry.start, stop, data, state))
        self.received = stop
        if state:
            self.lacks_state = False
        self.received_bytes += len(frame.body)
        self.last_progress_s = self.clock()
        self.wake.set()
