"""Decides where a prompt is read: here, or on another server that sends its KV.

Before a prompt is read, two times are compared. The time here is its uncached tokens times the
learnt cost of a token. The time there is the learnt cost of a transfer: queue, computing and link.
If one of them is unknown, the transfer is tried. While streams decode here, the time here counts
twice, because they lose as much time as the prompt takes.

A transfer is given up as soon as a block is late: if it comes later than expected by the time that
computing the block here takes. The prompt is then read here from the first missing block on.

A pool of servers reads a system prompt once. Before such a shared beginning is read, the servers
of the pool that were given it are asked in turn. The first of them that has not read it reads it,
so that the others can copy it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from localllm.engine import EngineSettings
from localllm.engine.adapters import set_name
from localllm.engine.cache.identity import KvIdentity, identity_of
from localllm.engine.cache.kv_file import ReadAhead
from localllm.engine.step_costs import PrefillCost
from localllm.engine.transfer.errors import REASONS, TransferError
from localllm.engine.transfer.fetching import FetchedBlock, KvFetch, WantedKv
from localllm.engine.transfer.peer import KvPeer
from localllm_backends.contract import Backend, BackendFailure, NoCellsError

# tokens. The other server sends the blocks of one step together. So the next block may take as long
# as the part of the prompt that a step reads.
_PART_TOKENS = 256
# tokens. A shorter rest of a prompt is always computed here.
_MIN_TOKENS = _PART_TOKENS
# The cost of reading a prompt here while streams decode.
_WITH_STREAMS = 2.0
# tokens. A shorter beginning is not copied, unless the whole prompt is read there.
_MIN_SHARED_TOKENS = 1024
# A copy is waited for this many times as long as reading the beginning here takes: the other server
# may have to read it first, and others wait for it too.
_COPY_PATIENCE = 2.0
# seconds. The expected time of a block before anything is measured.
_UNKNOWN_S = 2.0


def _no_fallbacks() -> dict[str, int]:
    return dict.fromkeys(REASONS, 0)


@dataclass
class Conductor:
    """The servers that this engine may ask for KV, and the counters of its transfers.

    `peers` read prompts for this engine, and shared beginnings are copied from `pool`.
    `speed`: the cost of reading prompts here. `always_from`: prompts with at least this many
    uncached tokens are always read there (0: the costs decide). `patience_s`: a block is never late
    before this long after its time. `wake` is set when a block arrives.
    """

    backend: Backend
    identity: KvIdentity
    peers: Sequence[KvPeer]
    speed: PrefillCost
    wake: threading.Event
    always_from: int = 0
    patience_s: float = 0.25
    pool: Sequence[KvPeer] = ()
    clock: Callable[[], float] = time.monotonic
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    saved_s: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=_no_fallbacks)

    def __post_init__(self) -> None:
        memory = self.backend.memory()
        cells_bytes = memory.kv_bytes + memory.recurrent_bytes
        self._token_bytes = cells_bytes / max(self.backend.info.n_ctx, 1)
        for peer in (*self.peers, *self.pool):
            peer.token_bytes = self._token_bytes
            peer.patience_s = self.patience_s
            peer.start()

    def begin(self, wanted: WantedKv, *, is_decoding: bool) -> KvFetch | None:
        """Begin to fetch the KV that is `wanted`; None if the prompt is to be read here."""
        n_tokens = wanted.n_tokens
        if not self.peers or n_tokens < _MIN_TOKENS or not self._can_follow(wanted):
            return None
        weight = _WITH_STREAMS if is_decoding else 1.0
        usable = [peer for peer in self.peers if peer.accepts(len(wanted.prompt))]
        peer = self._best(usable, n_tokens, weight)
        if peer is None:
            return None
        return self._start_fetch(peer, replace(wanted, salt=hashed_salt(wanted.salt)))

    def copy(self, wanted: WantedKv, names: Sequence[str]) -> KvFetch | None:
        """Begin to copy the KV that is `wanted`, of a shared beginning and one more token. The first
        server among `names` is asked that can be asked now. Returns None if no server can be asked,
        or if computing is faster than the link.

        The servers of a pool have the same keys, so the salt means the same to them.
        """
        n_tokens = wanted.n_tokens
        if n_tokens < _MIN_SHARED_TOKENS or not self._can_follow(wanted):
            return None
        by_name = {peer.name: peer for peer in self.pool if peer.accepts(len(wanted.prompt))}
        for name in names:
            if name in by_name and not self._link_is_slower(by_name[name], n_tokens):
                return self._start_fetch(by_name[name], wanted, copies=True)
        return None

    def _link_is_slower(self, peer: KvPeer, n_tokens: int) -> bool:
        """True if the KV of `n_tokens` takes longer over the link than computing it here."""
        here_s = self.speed.seconds(n_tokens)
        if not peer.link_bytes_s or not here_s:
            return False
        return n_tokens * self._token_bytes / peer.link_bytes_s > here_s

    def _can_follow(self, wanted: WantedKv) -> bool:
        """True if KV of another server may follow the first tokens of the prompt.

        A model whose states are separate, or that is exported only as a whole, can't continue after
        tokens from another source. The other server does not have the pixels of images, whose
        tokens are negative.
        """
        capabilities = self.backend.capabilities
        in_pieces = capabilities.segments and not capabilities.states
        return (in_pieces or not wanted.start) and int(np.min(wanted.prompt)) >= 0

    def _start_fetch(self, peer: KvPeer, wanted: WantedKv, *, copies: bool = False) -> KvFetch:
        capabilities = self.backend.capabilities
        fetch = KvFetch(
            peer,
            self.identity.with_adapters(set_name(wanted.adapters)),
            wanted,
            self._token_bytes,
            self.wake,
            single_block=not capabilities.segments,
            lacks_state=capabilities.states,
            copies=copies,
            clock=self.clock,
        )
        fetch.begin()
        return fetch

    def _best(self, usable: Sequence[KvPeer], n_tokens: int, weight: float) -> KvPeer | None:
        """The one of the `usable` servers that is expected to deliver the KV of `n_tokens` first, if
        computing them here takes longer."""
        if not usable:
            return None
        best = min(usable, key=lambda peer: peer.cost.seconds(n_tokens))
        here_s = weight * self.speed.seconds(n_tokens)
        always = 0 < self.always_from <= n_tokens
        if always or not here_s or best.cost.seconds(n_tokens) < here_s:
            return best
        return None

    def late(self, fetch: KvFetch) -> bool:
        """True if the next block should have arrived."""
        if fetch.copies:
            rest_s = self.speed.seconds(fetch.stop - fetch.received)
            expected_s = _UNKNOWN_S + _COPY_PATIENCE * rest_s
            return self.clock() - fetch.last_progress_s > expected_s + self.patience_s
        n_tokens = _PART_TOKENS
        if fetch.single_block:
            n_tokens = fetch.stop
        expected_s = fetch.peer.cost.seconds(n_tokens) or _UNKNOWN_S
        late_s = max(self.speed.seconds(n_tokens), self.patience_s)
        return self.clock() - fetch.last_progress_s > expected_s + late_s

    def place(self, sequence: int, block: FetchedBlock) -> TransferError | None:
        """Import a block into `sequence`. Returns the reason if that fails; the sequence then holds
        its earlier tokens, or none if the model can't continue after them."""
        try:
            if block.state:
                self.backend.import_state(sequence, block.data, block.stop)
            else:
                self.backend.import_range(sequence, block.data, block.start, block.stop)
        except NoCellsError:
            return TransferError("the context has no room for its blocks", reason="no_cells")
        except BackendFailure as e:
            return TransferError(str(e), reason="unreadable")
        if not block.state:
            self.fetched_tokens += block.stop - block.start
            self.fetched_bytes += len(block.data)
        return None

    def learn_from(self, fetch: KvFetch, error: TransferError | None) -> None:
        """Learn from a transfer that ended, with `error` if the rest is to be computed here."""
        fetch.close()
        took_s = fetch.last_progress_s - fetch.began_s
        n_tokens = fetch.received - fetch.wanted.start
        if error is None:
            fetch.peer.record_success()
            fetch.peer.cost.learn(n_tokens, max(took_s, 1e-6))
        else:
            self.fallbacks[error.reason] += 1
            if error.reason != "no_cells":
                fetch.peer.record_failure(error)
        here_s = self.speed.seconds(n_tokens)
        if here_s:
            self.saved_s += max(0.0, here_s - (self.clock() - fetch.began_s))

    def snapshot(self) -> dict[str, int | float]:
        """The counters, if there are servers to ask."""
        if not self.peers and not self.pool:
            return {}
        return {
            "kv_fetched_tokens": self.fetched_tokens,
            "kv_fetched_bytes": self.fetched_bytes,
            "kv_saved_s": self.saved_s,
            **{f"kv_fallbacks_{reason}": n for reason, n in self.fallbacks.items()},
        }

    def close(self) -> None:
        for peer in (*self.peers, *self.pool):
            peer.close()


def hashed_salt(salt: str) -> str:
    """A salt that keeps users apart on another server, which need not know them."""
    if not salt:
        return ""
    return hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()


def conductor_of(
    backend: Backend, settings: EngineSettings, reads: ReadAhead, speed: PrefillCost
) -> Conductor:
    """The conductor for the servers of `settings`. The links to them are measured at once. `reads`
    wakes the engine."""
    identity = identity_of(backend)

    def peers(urls: Sequence[str]) -> list[KvPeer]:
        key = settings.prefill_key
        return [
            KvPeer(url, key, settings.model_name, identity.to_json(), settings.say) for url in urls
        ]

    return Conductor(
        backend,
        identity,
        peers(settings.prefill_from),
        speed,
        reads.wake,
        settings.prefill_from_tokens,
        settings.prefill_patience_s,
        peers(settings.kv_from),
    )
