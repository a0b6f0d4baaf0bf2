"""A prefix cache that only counts: what perfect knowledge of every line reuses within the same
bytes and pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.bench.token_counts import common

# Before the last two turns of a prompt, and at the end of its answer.
_NEWEST_STATES = 3


@dataclass(eq=False)
class _Piece:
    """Tokens `start` to the end of `line`, which holds everything up to there; or the state behind
    it, which takes the room of `state_tokens`."""

    line: tuple[int, ...]
    start: int
    state_tokens: int = 0
    used: int = 0
    in_memory: bool = True
    on_disk: bool = True

    @property
    def tokens(self) -> int:
        """How many it takes the room of."""
        return self.state_tokens or len(self.line) - self.start


class ReferenceCache:
    """What a cache of `memory_bytes` and `disk_bytes` can hold at best, if it keeps what was used
    last.

    A line is cut into pieces of `piece_tokens` from where it leaves what is held; the last one is
    shorter. A piece is held whole or not at all, costs its bytes once however many lines go through
    it, and is as recent as the latest of them. Memory holds the most recent pieces of those used
    since the start, the disk the most recent of all; of two pieces of one line the earlier one
    stays. What neither holds is forgotten.

    With `whole` a line is held as snapshots of everything up to a point, each as large as all of
    it, the longer before the shorter. With `state_tokens` a line can be taken up only behind a
    state that is held, which costs as much as so many tokens. Of a line that is used the newest
    states are."""

    def __init__(
        self,
        memory_bytes: int,
        disk_bytes: int,
        bytes_per_token: int,
        piece_tokens: int = 512,
        state_tokens: int = 0,
        *,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        self._state_tokens = state_tokens
        self._memory_tokens = memory_bytes // bytes_per_token
        self._disk_tokens = disk_bytes // bytes_per_token
        self._piece_tokens = piece_tokens
        self._pieces: list[_Piece] = []
        self._newest: list[_Piece] = []
        self._uses = 0

    @property
    def held_tokens(self) -> int:
        """Tokens in memory, on disk, or both."""
        return sum(p.tokens for p in self._pieces)

    def reuse(self, prompt: Sequence[int]) -> int:
        """How many leading tokens of `prompt` need not be computed: never the last one, whose
        logits are needed. What is used of it is then the most recent, and in memory."""
        if self._whole:
            path = self._states(tuple(prompt[:-1]))[-1:]
            self._use(path)
            return len(path[0].line) if path else 0
        path, covered = self._path(tuple(prompt[:-1]))
        if self._state_tokens:
            states = self._states(tuple(prompt[:covered]))
            covered = len(states[-1].line) if states else 0
            path = [p for p in path if p.start < covered] + states[-1:]
        self._use(path)
        return covered

    def finished(self, line: Sequence[int], points: Sequence[int] = ()) -> None:
        """A request ended and left `line` (its prompt and answer) behind; behind `points` of it
        states were taken."""
        whole = tuple(line)
        if self._whole:
            held = {len(p.line) for p in self._states(whole)}
            self._newest = [_Piece(whole[:p], p, p) for p in points if p not in held]
            self._pieces += self._newest
            self._use(self._states(whole)[-_NEWEST_STATES:])
            return
        path, covered = self._path(whole)
        starts = range(covered, len(whole), self._piece_tokens)
        self._newest = [_Piece(whole[: start + self._piece_tokens], start) for start in starts]
        held = {len(p.line) for p in self._states(whole)}
        if self._state_tokens:
            self._newest += [
                _Piece(whole[:p], p, self._state_tokens) for p in points if p not in held
            ]
        self._pieces += self._newest
        self._use(
            path
            + [p for p in self._newest if not p.state_tokens]
            + self._states(whole)[-_NEWEST_STATES:]
        )

    def _states(self, line: tuple[int, ...]) -> list[_Piece]:
        """The states that are held of beginnings of `line`, the shortest first."""
        found = [p for p in self._pieces if p.state_tokens and line[: len(p.line)] == p.line]
        return sorted(found, key=lambda p: len(p.line))

    def restart(self, clean: bool) -> None:
        """What only memory held is gone; after a kill also what the last line brought, which may
        not be written yet."""
        lost = [] if clean else self._newest
        self._pieces = [p for p in self._pieces if p.on_disk and p not in lost]
        for piece in self._pieces:
            piece.in_memory = False

    def _path(self, line: tuple[int, ...]) -> tuple[list[_Piece], int]:
        """The pieces that hold the beginning of `line`, in order, and how much of it they hold
        together."""
        path: list[_Piece] = []
        covered = 0
        while (piece := self._going_on(line, covered)) is not None:
            path.append(piece)
            covered = common(line, piece.line)
        return path, covered

    def _going_on(self, line: tuple[int, ...], covered: int) -> _Piece | None:
        """A piece that holds token `covered` of `line`."""
        wanted = line[: covered + 1]
        if len(wanted) == covered:
            return None
        held = (p for p in self._pieces if not p.state_tokens)
        return next(
            (p for p in held if p.start <= covered and p.line[: covered + 1] == wanted), None
        )

    def _use(self, path: list[_Piece]) -> None:
        self._uses += 1
        for piece in path:
            piece.used, piece.in_memory = self._uses, True
        latest = sorted(self._pieces, key=lambda p: (-p.used, -p.start if self._whole else p.start))
        memory = _first([p for p in latest if p.in_memory], self._memory_tokens)
        disk = _first(latest, self._disk_tokens)
        for piece in latest:
            piece.in_memory, piece.on_disk = piece in memory, piece in disk
        self._pieces = [p for p in latest if p.in_memory or p.on_disk]


def _first(pieces: list[_Piece], most_tokens: int) -> set[_Piece]:
    """The pieces at the beginning of `pieces` that fit together."""
    held, total = set(), 0
    for piece in pieces:
        total += piece.tokens
        if total > most_tokens:
            break
        held.add(piece)
    return held
