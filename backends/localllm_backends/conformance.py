"""The contract as checks that can be run on a loaded backend anywhere: by our tests, and by a user
on a real device.

Each check raises BrokenRuleError with a sentence. They leave the backend as they found it, so that
one load serves them all. `tests/backends/test_conformance.py` runs them on every memory shape we
can build, and adds what needs a shape of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import (
    Backend,
    BackendFailure,
    CannotRewindError,
    Chunk,
    NoCellsError,
    SampleSpec,
    SeenTokens,
)

# Kernels for different batch shapes round differently; random weights of our tests' size stay well
# inside this share of the largest logit.
LOGIT_NOISE = 2e-2


class BrokenRuleError(BackendFailure):
    """The backend does not do what its contract says."""


class NotHere(Exception):  # noqa: N818 - no error: the check asks for what this memory does not claim to do
    """This check does not apply to the loaded model's memory."""


@dataclass
class Subject:
    """A loaded backend under examination. `noise` is how far logits may differ that should be
    equal, as a share of the largest; `worst` the largest share that was seen."""

    backend: Backend
    noise: float = LOGIT_NOISE
    worst: float = 0.0

    def feed(self, sequence: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens in steps as large as may be; the logits after the last."""
        last: NDArray[np.float32] | None = None
        for i in range(0, len(tokens), self.backend.info.n_batch):
            part = tokens[i : i + self.backend.info.n_batch]
            last = self.backend.step([Chunk(sequence, part, outputs=1)]).logits(0)[-1].copy()
        assert last is not None, "nothing to feed"
        return last

    @contextmanager
    def sequences(self, n: int) -> Iterator[list[int]]:
        """`n` new sequences, which are dropped behind it."""
        made = [self.backend.new_sequence() for _ in range(n)]
        yield made
        for sequence in made:
            self.backend.drop(sequence)

    def same(self, a: NDArray[np.float32], b: NDArray[np.float32], what: str) -> None:
        """`a` and `b` are one another but for rounding; NaN is equal to nothing."""
        share = float(np.abs(a - b).max()) / max(1.0, float(np.abs(a).max()))
        # Written so that NaN fails.
        if not share <= self.noise:
            raise BrokenRuleError(
                f"{what}: logits differ by {share:.3g} of the largest, {self.noise:g} is allowed"
            )
        self.worst = max(self.worst, share)


def line(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 250, n)]


def require(holds: bool, sentence: str) -> None:
    """Raise BrokenRuleError with `sentence` unless it holds."""
    if not holds:
        raise BrokenRuleError(sentence)


@contextmanager
def refused(kind: type[BackendFailure], otherwise: str) -> Iterator[None]:
    """Raise BrokenRuleError with the sentence `otherwise` unless a failure of that kind comes."""
    try:
        yield
    except kind:
        return
    raise BrokenRuleError(otherwise)


def a_step_appends_and_counts(subject: Subject) -> None:
    """A step's tokens are the sequence's, cost as many cells, and give them back."""
    backend = subject.backend
    free = backend.cells_free()
    with subject.sequences(1) as (sequence,):
        subject.feed(sequence, line(40))
        length = backend.length(sequence)
        require(length == 40, f"40 tokens were appended, the sequence holds {length}")
        require(backend.cells_free() == free - 40, "40 tokens did not take 40 cells")
    require(backend.cells_free() == free, "a dropped sequence did not give its cells back")


def logits_are_the_same_however_the_prompt_is_cut(subject: Subject) -> None:
    backend, tokens = subject.backend, line(60)
    with subject.sequences(2) as (whole, pieces):
        expected = subject.feed(whole, tokens)
        for token in tokens[:-1]:
            backend.step([Chunk(pieces, [token], outputs=0)])
        subject.same(
            expected, backend.step([Chunk(pieces, tokens[-1:])]).logits(0)[0], "a prompt in pieces"
        )


def one_step_serves_several_sequences(subject: Subject) -> None:
    a, b = line(20, 1), line(9, 2)
    with subject.sequences(2) as (one, other):
        expected = [subject.feed(one, a), subject.feed(other, b)]
    with subject.sequences(2) as (one, other):
        result = subject.backend.step([Chunk(one, a), Chunk(other, b, outputs=1)])
        for i in range(2):
            subject.same(expected[i], result.logits(i)[0], "two sequences in a step")


def several_outputs_come_in_order_and_argmax_agrees(subject: Subject) -> None:
    """The last n outputs of a chunk are its last n tokens', and argmax is the largest logit's."""
    backend, tokens = subject.backend, line(12)
    with subject.sequences(2) as (sequence, again):
        result = backend.step([Chunk(sequence, tokens, outputs=5)])
        rows = result.logits(0)
        require(rows.shape == (5, backend.info.n_vocab), f"5 outputs came as {rows.shape}")
        require(
            result.argmax(0) == [int(r.argmax()) for r in rows],
            "argmax is not where the largest logit is",
        )
        rows = rows.copy()  # a result is good until the next step
        backend.step([Chunk(again, tokens[:-5], outputs=0)])
        for i, token in enumerate(tokens[-5:]):
            subject.same(rows[i], backend.step([Chunk(again, [token])]).logits(0)[0], f"output {i}")


def what_is_sampled_follows_from_the_logits(subject: Subject) -> None:
    """A sampled token is the one that the spec's definition gives in double precision, or a
    neighbour of it where a share ends that near, or none is named."""
    backend = subject.backend
    if not backend.capabilities.samples:
        raise NotHere("this backend leaves sampling to the engine")
    some = np.arange(0, backend.info.n_vocab, 3)
    seen = SeenTokens(
        some, np.full(len(some), 2, dtype=np.int32), repeat=1.3, presence=0.4, frequency=0.2
    )
    allowed = np.packbits(np.arange(backend.info.n_vocab) % 2 > 0, bitorder="little")
    specs = [
        SampleSpec(0.7, 20, 0.9, 0.0, 0.5),
        SampleSpec(1.0, 40, 0.95, 0.05, 0.1, 0.7),
        SampleSpec(0.9, 30, 1.0, 0.0, 0.6, seen=seen),
        SampleSpec(
            0.0,
            0,
            1.0,
            0.0,
            0.0,
            bias=(some, np.full(len(some), 3.0, dtype=np.float32)),
            allowed=allowed,
        ),
        SampleSpec(1.2, 0, 1.0, 0.0, 0.9),
        SampleSpec(1.0, 0, 1.0, 0.0, 0.01, banned=(0, 7, 30)),
        SampleSpec(
            1.0,
            0,
            1.0,
            0.1,
            0.3,
            reduced=(some, np.full(len(some), -3.0, dtype=np.float32)),
            allowed=allowed,
        ),
    ]
    # Together, and hardly looked at: of few streams a device's whole rows may be as cheap, and are
    # left to the engine. Four at least are such as a device's greatest logits decide.
    named, at_once = 0, min(len(specs), backend.info.n_seq_max)
    for first in range(0, len(specs), at_once):
        group = specs[first : first + at_once]
        with subject.sequences(len(group)) as sequences:
            for sequence in sequences:
                backend.step([Chunk(sequence, line(11), outputs=0)])
            chunks = [
                Chunk(s, [20 + i], sample=group[i], few=True) for i, s in enumerate(sequences)
            ]
            result = backend.step(chunks)
            for i, spec in enumerate(group):
                token, row = result.sampled(i), result.logits(i)[-1].astype(np.float64)
                named += token is not None
                fits = token is None or _may_be(token, row, spec)
                require(fits, f"{token} was sampled for {spec}, not what the logits give")
            plain = backend.step([Chunk(sequence, [30], few=True) for sequence in sequences])
            unasked = [i for i in range(len(group)) if plain.sampled(i) is not None]
            require(not unasked, "what nobody asked to sample was sampled")
    require(named > 0, "of all these tokens none was sampled")


# How far single precision may be from double, in shares of all that is drawn from.
_NEAR = 1e-4


def _may_be(token: int, row: NDArray[np.float64], spec: SampleSpec) -> bool:
    """Is `token` what `spec` asks for, by its definition, wherever within `_NEAR` of where they are
    its limits may lie?"""
    row = row.copy()
    if spec.bias is not None:
        row[spec.bias[0]] += spec.bias[1]
    if spec.seen is not None:
        seen = spec.seen
        values = row[seen.ids]
        values = np.where(values > 0, values / seen.repeat, values * seen.repeat)
        row[seen.ids] = values - seen.presence - seen.counts * seen.frequency
    if spec.reduced is not None:
        row[spec.reduced[0]] += spec.reduced[1]
    if spec.allowed is not None:
        row[np.unpackbits(spec.allowed, bitorder="little")[: len(row)] == 0] = -np.inf
    row[list(spec.banned)] = -np.inf
    if spec.temperature <= 0:
        return bool(row[token] >= row.max() - _NEAR)
    return any(_draws(token, row, spec, by) for by in (0.0, -_NEAR, _NEAR))


def _draws(token: int, row: NDArray[np.float64], spec: SampleSpec, by: float) -> bool:
    ids = np.lexsort((np.arange(len(row)), -row))[: spec.top_k or None]
    share = np.exp(row[ids] - row[ids[0]])
    share /= share.sum()
    if spec.top_p < 1.0:
        ids = ids[: int(np.searchsorted(np.cumsum(share), spec.top_p + by)) + 1]
    ids = ids[share[: len(ids)] >= spec.min_p * (1 + by) * share[0]]
    ids = ids if spec.top_k or spec.top_p < 1.0 else np.sort(ids)
    weights = np.exp((row[ids] - row[ids].max()) / spec.temperature)
    ends = np.cumsum(weights) / weights.sum()
    at = np.flatnonzero(ids == token)
    begins = ends - weights / weights.sum()
    return bool(len(at) and begins[at[0]] - _NEAR <= spec.uniform <= ends[at[0]] + _NEAR)


def no_outputs_means_no_rows(subject: Subject) -> None:
    with subject.sequences(1) as (sequence,):
        result = subject.backend.step([Chunk(sequence, line(5), outputs=0)])
        require(
            result.argmax(0) == [] and len(result.logits(0)) == 0,
            "a chunk without outputs gave some",
        )


def a_fork_at_the_end_continues_independently(subject: Subject) -> None:
    """Two that share a past have futures of their own, and one may go."""
    backend, tokens = subject.backend, line(30)
    source = backend.new_sequence()
    subject.feed(source, tokens)
    free = backend.cells_free()
    other = backend.fork(source, 30)
    taken = free - backend.cells_free()
    require(
        taken == (0 if backend.capabilities.shares_cells else 30),
        f"a fork of 30 tokens took {taken} cells",
    )
    result = backend.step([Chunk(source, [5]), Chunk(other, [7])])
    rows = [result.logits(i)[0].copy() for i in range(2)]
    for tail, row in zip((5, 7), rows, strict=True):
        with subject.sequences(1) as (fresh,):
            subject.same(subject.feed(fresh, [*tokens, tail]), row, "a fork")
    backend.drop(source)
    require(backend.length(other) == 31, "a fork lost tokens with its source")
    subject.feed(other, line(3, 5))
    backend.drop(other)


def rewind_is_what_the_capabilities_say(subject: Subject) -> None:
    """`truncate` works where it is promised, and says so where it is not."""
    backend, tokens = subject.backend, line(24)
    with subject.sequences(1) as (sequence,):
        subject.feed(sequence, tokens)
        if backend.capabilities.rewind == "none":
            with refused(CannotRewindError, "a memory that can't rewind did"):
                backend.truncate(sequence, 20)
            require(backend.length(sequence) == 24, "a refused rewind changed the sequence")
        else:
            stays = 24 - _rewindable(backend, 6)
            backend.truncate(sequence, stays)
            require(backend.length(sequence) == stays, "a rewind left another length")
            other = line(4, 9)
            with subject.sequences(1) as (fresh,):
                expected = subject.feed(fresh, tokens[:stays] + other)
                subject.same(expected, subject.feed(sequence, other), "a rewind")
        backend.truncate(sequence, 0)
        require(backend.length(sequence) == 0, "a sequence that is cut to 0 holds tokens")


def _rewindable(backend: Backend, n_tokens: int) -> int:
    """How many of the last `n_tokens` of a step can be taken back."""
    capabilities = backend.capabilities
    return n_tokens if capabilities.rewind == "any" else min(n_tokens, capabilities.rewind_tokens)


def rejected_draft_tokens_leave_no_trace(subject: Subject) -> None:
    """What was appended and taken back again is as if it had never been."""
    backend = subject.backend
    most = _rewindable(backend, 8)
    if not most:
        raise NotHere("this memory can't take tokens back")
    tokens = line(90)
    with subject.sequences(2) as (sequence, fresh):
        for start in range(0, 90, 10):
            backend.step(
                [
                    Chunk(
                        sequence,
                        [*tokens[start : start + 10], *line(most, start)],
                        outputs=1 + most,
                    )
                ]
            )
            backend.truncate(sequence, start + 10)
        subject.same(
            subject.feed(fresh, [*tokens, 11]), subject.feed(sequence, [11]), "rejected drafts"
        )


def export_and_import_give_the_same_continuation(subject: Subject) -> None:
    backend, tokens = subject.backend, line(50)
    with subject.sequences(2) as (source, copy):
        subject.feed(source, tokens)
        backend.import_range(copy, backend.export_range(source, 0, 50), 0, 50)
        if backend.capabilities.states:
            backend.import_state(copy, backend.export_state(source), 50)
        require(backend.length(copy) == 50, "an import of 50 tokens left another length")
        a = backend.step([Chunk(source, [9])]).logits(0)[0].copy()
        subject.same(a, backend.step([Chunk(copy, [9])]).logits(0)[0], "exported and imported KV")


def segments_can_be_joined_and_clipped(subject: Subject) -> None:
    """A prefix that is kept in pieces can be put together again, in part."""
    backend = subject.backend
    if not backend.capabilities.segments or backend.capabilities.states:
        raise NotHere("this memory can't be cut into segments")
    tokens = line(60)
    with subject.sequences(2) as (source, joined):
        expected = subject.feed(source, tokens)
        blocks = [backend.export_range(source, 0, 25), backend.export_range(source, 25, 60)]
        backend.import_range(joined, blocks[0], 0, 25)
        backend.import_range(joined, blocks[1], 25, 59)
        subject.same(expected, subject.feed(joined, tokens[59:]), "joined segments")


def foreign_bytes_are_refused_and_append_nothing(subject: Subject) -> None:
    """A damaged file of KV is refused, and what it was meant for stays usable."""
    backend = subject.backend
    with subject.sequences(2) as (source, target):
        subject.feed(source, line(20))
        good = backend.export_range(source, 0, 20)
        free = backend.cells_free()
        for bad in (
            b"",
            b"x",
            b"not a block of KV at all, but long enough",
            good[: len(good) // 2],
        ):
            with refused(BackendFailure, f"{len(bad)} foreign bytes were taken for KV"):
                backend.import_range(target, bad, 0, 20)
            unchanged = backend.length(target) == 0 and backend.cells_free() == free
            require(unchanged, "a refused import left something")
        backend.import_range(target, good, 0, 20)


def running_out_of_cells_is_said_and_changes_nothing(subject: Subject) -> None:
    backend = subject.backend
    with subject.sequences(1) as (b,):
        with subject.sequences(1) as (a,):
            subject.feed(a, line(backend.info.n_ctx - 10))
            free = backend.cells_free()
            with refused(NoCellsError, f"{free + 1} tokens were appended to {free} free cells"):
                backend.step([Chunk(b, line(free + 1))])
            require(
                backend.length(b) == 0 and backend.cells_free() == free,
                "a refused step left something",
            )
        subject.feed(b, line(30))


def running_out_of_sequences_is_said(subject: Subject) -> None:
    backend = subject.backend
    with subject.sequences(backend.info.n_seq_max) as held:
        require(len(set(held)) == len(held), "two sequences have one handle")
        with refused(NoCellsError, f"more than {backend.info.n_seq_max} sequences were given out"):
            backend.new_sequence()
        backend.drop(held.pop())
        held.append(backend.new_sequence())


def a_step_that_is_too_large_or_empty_is_refused(subject: Subject) -> None:
    backend = subject.backend
    with subject.sequences(1) as (sequence,):
        for tokens, outputs in ((line(backend.info.n_batch + 1), 0), ([], 1)):
            with refused(BackendFailure, f"a step of {len(tokens)} tokens was taken"):
                backend.step([Chunk(sequence, tokens, outputs=outputs)])
            require(backend.length(sequence) == 0, "a refused step appended tokens")


def text_survives_tokens(subject: Subject) -> None:
    backend = subject.backend
    text = "Grüße, 世界! \n\t{x}"
    tokens = backend.tokenize(text, special=False)
    require(
        backend.detokenize(tokens).strip() == text.strip(),
        "text came back from its tokens as other text",
    )
    pieces = b"".join(backend.token_bytes(t) for t in tokens).decode("utf-8", "replace")
    require(pieces.strip() == text.strip(), "the tokens' bytes are not the text's")
    with refused(BackendFailure, "a token behind the vocabulary has bytes"):
        backend.token_bytes(backend.info.n_vocab)


Check = Callable[[Subject], None]
CHECKS: tuple[Check, ...] = (
    a_step_appends_and_counts,
    logits_are_the_same_however_the_prompt_is_cut,
    one_step_serves_several_sequences,
    several_outputs_come_in_order_and_argmax_agrees,
    what_is_sampled_follows_from_the_logits,
    no_outputs_means_no_rows,
    a_fork_at_the_end_continues_independently,
    rewind_is_what_the_capabilities_say,
    rejected_draft_tokens_leave_no_trace,
    export_and_import_give_the_same_continuation,
    segments_can_be_joined_and_clipped,
    foreign_bytes_are_refused_and_append_nothing,
    running_out_of_cells_is_said_and_changes_nothing,
    running_out_of_sequences_is_said,
    a_step_that_is_too_large_or_empty_is_refused,
    text_survives_tokens,
)
