"""A reference prefix cache that only counts tokens, with the real one's budgets and pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.bench.token_counts import common_prefix_length

# Before the last two turns of a prompt, and at the end of its answer.
_NEWEST_STATES = 3


@dataclass(eq=False)
class _Piece:
    """The tokens of `line` from `start` on. A piece for a state stands for the state after `line`,
    which takes the space of `state_tokens`."""

    line: tuple[int, ...]
    start: int
    state_tokens: int = 0
    used: int = 0
    in_memory: bool = True
    on_disk: bool = True

    @property
    def tokens(self) -> int:
        """Return the number of tokens whose space it takes."""
        return self.state_tokens or len(self.line) - self.start


class ReferenceCache:
    """The best reuse of a cache with `memory_bytes` and `disk_bytes` that keeps the most recently
    used tokens.

    A sequence is cut into pieces of `piece_tokens` after its cached prefix. The last piece is
    shorter. A piece is kept completely or not at all, costs its bytes once for all sequences that
    contain it, and is as recent as the latest of them. Memory keeps the most recent of the pieces
    used since the start, the disk the most recent of all. Of two pieces of one sequence, the
    earlier one is kept. A piece that is in neither is lost.

    With `whole`, a sequence is stored as snapshots of everything up to a point. Each is as large as
    the whole prefix, and longer ones have priority. With `state_tokens`, a sequence can be
    continued only after a stored state, which costs as much as that number of tokens. The newest
    states of a used sequence are kept.
    """

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
        """Return the tokens in memory, on disk, or both."""
        return sum(p.tokens for p in self._pieces)

    def reuse(self, prompt: Sequence[int]) -> int:
        """Return how many leading tokens of `prompt` need no prefill. The last one always does,
        because its logits are needed. The reused part becomes the most recent and is in memory."""
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
        """Store `line`, the prompt and answer of a finished request, with states at its
        `points`."""
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
        """Return the stored states of prefixes of `line`, the shortest first."""
        found = [p for p in self._pieces if p.state_tokens and line[: len(p.line)] == p.line]
        return sorted(found, key=lambda p: len(p.line))

    def restart(self, clean: bool) -> None:
        """Drop everything that is only in memory. After a kill, also drop the pieces of the last
        sequence, which may not be written yet."""
        lost = [] if clean else self._newest
        self._pieces = [p for p in self._pieces if p.on_disk and p not in lost]
        for piece in self._pieces:
            piece.in_memory = False

    def _path(self, line: tuple[int, ...]) -> tuple[list[_Piece], int]:
        """Return the pieces of the prefix of `line` in order, and the length of their common
        part."""
        path: list[_Piece] = []
        covered = 0
        while (piece := self._going_on(line, covered)) is not None:
            path.append(piece)
            covered = common_prefix_length(line, piece.line)
        return path, covered

    def _going_on(self, line: tuple[int, ...], covered: int) -> _Piece | None:
        """Return a piece that contains token `covered` of `line`."""
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
    """Return the first pieces that fit together."""
    held, total = set(), 0
    for piece in pieces:
        total += piece.tokens
        if total > most_tokens:
            break
        held.add(piece)
    return held
