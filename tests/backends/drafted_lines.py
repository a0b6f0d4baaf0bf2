"""Random histories of sequences with a drafter: after any history, the drafter proposes the same
tokens as if it had read the sequence at once."""

from __future__ import annotations

import random
from collections.abc import Callable

from localllm_backends.contract import Backend, Chunk

MOST = 4


def words(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(n)]


class Lines:
    """Sequences of a backend, and the tokens that each of them should hold."""

    def __init__(self, backend: Backend, rng: random.Random) -> None:
        self.backend, self.rng = backend, rng
        self.held: dict[int, list[int]] = {}
        self.unseen: dict[int, tuple[int, ...]] = {}

    def open(self) -> None:
        sequence = self.backend.new_sequence()
        self.held[sequence], self.unseen[sequence] = [], ()
        self.step([sequence])

    def step(self, sequences: list[int]) -> None:
        chunks = [
            Chunk(s, words(self.rng, self.rng.choice([1, 1, 2, 5, 37])), 0) for s in sequences
        ]
        self.backend.step(chunks)
        for chunk in chunks:
            self.held[chunk.sequence] += chunk.tokens

    def verify(self) -> None:
        """Draft, verify and keep some of the draft tokens."""
        newest = {s: self.rng.randrange(3, 500) for s in self.held}
        drafts = dict(
            zip(newest, self.backend.draft([(s, t, MOST) for s, t in newest.items()]), strict=True)
        )
        self.backend.step([Chunk(s, [t, *drafts[s]], 1) for s, t in newest.items()])
        for s, t in newest.items():
            self.held[s] += [t, *drafts[s][: self.rng.randint(0, len(drafts[s]))]]
            self.backend.truncate(s, len(self.held[s]))

    def fork(self) -> None:
        if len(self.held) < 4:
            source = self.rng.choice(list(self.held))
            copy = self.backend.fork(source, len(self.held[source]))
            self.held[copy], self.unseen[copy] = list(self.held[source]), self.unseen[source]

    def cut(self) -> None:
        """Truncate a sequence before the drafter's read position. The drafter then loses the hidden
        row before the cut."""
        sequence = self.rng.choice(list(self.held))
        if len(self.held[sequence]) < 2:
            return
        at = self.rng.randint(1, len(self.held[sequence]) - 1)
        if not self.backend.can_rewind(sequence, at):
            return
        self.backend.draft([(sequence, 3, 1)])
        self.backend.truncate(sequence, at)
        self.held[sequence] = self.held[sequence][:at]
        self.unseen[sequence] = (*(p for p in self.unseen[sequence] if p < at), at)

    def travel(self) -> None:
        """Export a sequence as two blocks (if its memory can be split) and import them as another
        sequence."""
        if len(self.held) >= 4:
            return
        source = self.rng.choice(list(self.held))
        line, copy = self.held[source], self.backend.new_sequence()
        half = len(line) // 2 if self.backend.capabilities.segments else 0
        for start, stop in ((0, half), (half, len(line))):
            if start < stop:
                self.backend.import_range(
                    copy, self.backend.export_range(source, start, stop), start, stop
                )
        self.held[copy], self.unseen[copy] = list(line), (*self.unseen[source], len(line))

    def drop(self) -> None:
        if len(self.held) > 1:
            sequence = self.rng.choice(list(self.held))
            self.backend.drop(sequence)
            del self.held[sequence]


def agrees(guessed: list[int], expected: list[int]) -> bool:
    """Return whether the drafts agree. A drafter may stop early where it is unsure."""
    return guessed == expected[: len(guessed)]


def resting_heads_guess_from_the_newest_tokens(
    backend: Backend, rng: random.Random, draft: Callable[..., list[int]]
) -> None:
    """Heads that rested while the model read 200 tokens guess from the 100 after them. `draft(line,
    most, begin=n)` drafts from scratch without the first n tokens. A fork, a copy and a truncated
    sequence still draft."""

    def guess(sequence: int, line: list[int], begin: int = 0) -> bool:
        newest = rng.randrange(3, 250)
        (guessed,) = backend.draft([(sequence, newest, MOST)])
        # Compare only the first guess. Some later guesses are near ties, which prefill in parts
        # decides differently on some processors.
        return agrees(guessed[:1], draft([*line, newest], MOST, begin=begin))

    def read(line: list[int], *, resting: bool) -> int:
        sequence = backend.new_sequence()
        for begin, end in ((0, 40), (40, 128), (128, 199), (199, 200), (200, 299), (299, 300)):
            backend.rest_heads(resting and 40 <= begin < 200)
            backend.step([Chunk(sequence, line[begin:end], 0)])
        return sequence

    line = [rng.randrange(3, 250) for _ in range(300)]
    sequence = read(line, resting=True)
    fork = backend.fork(sequence, len(line))
    right = [guess(sequence, line, 200), guess(fork, line, 200)]
    backend.drop(fork)
    backend.rest_heads(True)
    copy = backend.new_sequence()
    backend.import_range(copy, backend.export_range(sequence, 0, 300), 0, 300)
    assert backend.draft([(copy, 9, MOST)])
    for at in (299, 200, 100):
        if backend.can_rewind(sequence, at):
            backend.truncate(sequence, at)
            backend.draft([(sequence, 9, MOST)])
            assert backend.length(sequence) == at
    for left in (sequence, copy):
        backend.drop(left)
    backend.rest_heads(False)
    right.append(guess(read(line, resting=False), line))
    assert right == [True] * 3


def guesses_are_those_from_scratch(
    backend: Backend,
    rng: random.Random,
    draft: Callable[[list[int], int, tuple[int, ...]], list[int]],
) -> None:
    """Run two random histories. `draft(line, most, unseen)` drafts from scratch; the rows before
    the positions `unseen` are unknown."""
    right = asked = lengths = 0
    for _ in range(2):
        lines = Lines(backend, rng)
        lines.open()
        for _ in range(14):
            able = [lines.verify, lines.verify, lines.fork, lines.cut, lines.travel, lines.drop]
            rng.choice([*able, lambda lines=lines: lines.step(list(lines.held))])()  # type: ignore[misc]
            sequence, line = rng.choice(list(lines.held.items()))
            newest = rng.randrange(3, 500)
            (guessed,) = backend.draft([(sequence, newest, MOST)])
            right += agrees(guessed, draft([*line, newest], MOST, lines.unseen[sequence]))
            lengths += len(guessed)
            asked += 1
            assert backend.length(sequence) == len(line)
        for sequence in lines.held:
            backend.drop(sequence)
    assert right >= asked - 2, "near-ties"
    assert lengths > asked
