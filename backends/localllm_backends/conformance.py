"""The backend contract as checks that run on any loaded backend.

Our tests run them, and users can run them on a real device. Each check raises BrokenRuleError with
a sentence. `Subject.examine` restores the backend after each check, so one load is enough for all.
`tests/backends/test_conformance.py` runs them on every memory shape that we can build, and adds
checks for single shapes.

Kernels for different batch shapes round differently, on some cards far more than on others. The
first check (`rounding_is_far_below_what_a_token_changes`) measures that rounding between two ways
to compute the same result. Other checks report a difference only if it is well above the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise

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

# Allowed difference on any device, as a share of the largest logit. Random weights of our tests'
# size stay well below it, and so does SmolLM2 on processors (0.012).
LOGIT_NOISE = 2e-2
# On an H200, SmolLM2 differed by 0.035 for a split prompt, and by 0.065 in a later check.
_OUTSIDE_NOISE = 3.0
# Each next word depends on the one or two words before it, so a row or a position that is off by
# one shows. Neighbouring rows of SmolLM2 differ by 0.46 to 1.5; a token at a neighbouring position
# differs by 0.2 to 0.7.
_TEXT = (
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March, "
    "April, May, June, July, August, September, October, November, December. A, B, C, D, E, F, "
    "G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z. One, two, three, four, five, "
    "six, seven, eight, nine, ten. "
)


class BrokenRuleError(BackendFailure):
    """The backend violates its contract."""


class NotApplicable(Exception):  # noqa: N818 - no error: the memory has no such ability
    """This check does not apply to the loaded model's memory."""


def difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the largest difference of two logit arrays, as a share of the largest logit in `a`.

    NaN if either contains NaN.
    """
    return float(np.abs(a - b).max()) / max(1.0, float(np.abs(a).max()))


@dataclass
class Subject:
    """A loaded backend under test.

    `noise`: allowed difference of logits that should be equal, as a share of the largest logit.
    `worst`: largest share seen. `sequences`: sequences that a check has created.
    """

    backend: Backend
    noise: float = LOGIT_NOISE
    worst: float = 0.0
    sequences: list[int] = field(default_factory=list)

    def examine(self, check: Check) -> None:
        """Run a check. Its sequences are dropped, even if it raises."""
        self.worst = 0.0
        try:
            check(self)
        finally:
            while self.sequences:
                self.backend.drop(self.sequences.pop())

    def text_tokens(self, n: int, start: int = 0) -> list[int]:
        """Return `n` tokens of a fixed text, starting with token number `start`."""
        text = self.backend.tokenize(_TEXT, special=False)
        return list(islice(cycle(text), start, start + n))

    def feed(self, sequence: int, tokens: Sequence[int], outputs: int = 1) -> NDArray[np.float32]:
        """Append tokens in the largest possible steps; return the last `outputs` rows of the last
        step."""
        size = self.backend.info.n_batch
        for start in range(0, len(tokens), size):
            chunk = Chunk(sequence, tokens[start : start + size], outputs)
            result = self.backend.step([chunk])
        return result.logits(0).copy()

    def new(self) -> int:
        """Create a sequence."""
        self.sequences.append(self.backend.new_sequence())
        return self.sequences[-1]

    def drop(self, sequence: int) -> None:
        """Drop a sequence before the check ends."""
        self.sequences.remove(sequence)
        self.backend.drop(sequence)

    def fresh(self, tokens: Sequence[int], outputs: int = 1) -> NDArray[np.float32]:
        """Return `feed` of a new sequence, which is dropped afterwards."""
        sequence = self.new()
        rows = self.feed(sequence, tokens, outputs)
        self.drop(sequence)
        return rows

    def same(self, a: NDArray[np.float32], b: NDArray[np.float32], subject: str) -> None:
        """Require that `a` and `b` are equal except for rounding. NaN equals no value."""
        share = difference(a, b)
        # Written so that NaN fails.
        require(
            share <= self.noise,
            f"{subject}: logits differ by {share:.3g} of the largest logit; "
            f"{self.noise:.3g} is allowed",
        )
        self.worst = max(self.worst, share)


Check = Callable[[Subject], None]


def require(holds: bool, sentence: str) -> None:
    """Raise BrokenRuleError with `sentence` unless `holds`."""
    if not holds:
        raise BrokenRuleError(sentence)


@contextmanager
def refused(kind: type[BackendFailure], otherwise: str) -> Iterator[None]:
    """Raise BrokenRuleError with `otherwise` unless the block raises `kind`."""
    try:
        yield
    except kind:
        return
    raise BrokenRuleError(otherwise)


def rounding_is_far_below_what_a_token_changes(subject: Subject) -> None:
    """Measure rounding: the same tokens at once, split in two ways, and twice in one step.

    Later checks treat a difference of more than `_OUTSIDE_NOISE` times this rounding as a fault.
    That limit must be small compared with the change that one more token makes.
    """
    backend = subject.backend
    last = 8
    tokens = subject.text_tokens(backend.info.n_batch)
    half = tokens[: len(tokens) // 2]
    at_once = subject.fresh(tokens, last)
    at_half = subject.fresh(half)
    first_sequence = subject.new()
    second_sequence = subject.new()
    by_rounding: list[float] = []
    for size in (1, 5):
        backend.truncate(first_sequence, 0)
        subject.feed(first_sequence, tokens[:-last])
        at = 0
        for start in range(len(tokens) - last, len(tokens), size):
            for row in subject.feed(first_sequence, tokens[start : start + size], size):
                by_rounding.append(difference(at_once[at], row))
                at += 1
    backend.truncate(first_sequence, 0)
    twice = backend.step([Chunk(first_sequence, half), Chunk(second_sequence, half)])
    by_rounding.append(difference(at_half, twice.logits(0)))
    by_rounding.append(difference(at_half, twice.logits(1)))
    subject.worst = float(np.max(by_rounding))
    by_tokens = [difference(a, b) for a, b in pairwise(at_once)]
    changed = float(np.median(by_tokens))
    # Written so that NaN and empty results fail.
    require(
        _OUTSIDE_NOISE * subject.worst < changed / 2,
        f"the same tokens computed in other ways differ by {subject.worst:.3g} of the largest "
        f"logit, and one more token changes it only by {changed:.3g}",
    )
    subject.noise = max(subject.noise, _OUTSIDE_NOISE * subject.worst)


def a_step_appends_and_counts(subject: Subject) -> None:
    """A step appends its tokens and takes as many cells, which `drop` frees again."""
    backend = subject.backend
    free = backend.cells_free()
    sequence = subject.new()
    subject.feed(sequence, subject.text_tokens(35))
    without = backend.step([Chunk(sequence, subject.text_tokens(5), outputs=0)])
    require(not without.argmax(0), "a step without outputs returned outputs")
    require(not len(without.logits(0)), "a step without outputs returned outputs")
    require(backend.length(sequence) == 40, "not all of 40 tokens were appended")
    require(backend.cells_free() == free - 40, "40 tokens did not take 40 cells")
    subject.drop(sequence)
    require(backend.cells_free() == free, "a dropped sequence did not free its cells")


def one_step_serves_several_sequences_and_outputs(subject: Subject) -> None:
    """The last n outputs of a chunk belong to its last n tokens, as if each sequence were stepped
    alone.

    argmax is the index of the largest logit.
    """
    backend = subject.backend
    first = subject.text_tokens(12)
    second = subject.text_tokens(9, 30)
    third = subject.text_tokens(5, 20)
    expected = [subject.fresh(first[:n]) for n in range(8, 13)]
    expected.append(subject.fresh(second))
    chunks = [
        Chunk(subject.new(), first, 5),
        Chunk(subject.new(), second, 1),
        Chunk(subject.new(), third, 0),
    ]
    result = backend.step(chunks)
    rows = np.concatenate([result.logits(i) for i in range(3)])
    require(len(rows) == 6, f"6 outputs were requested, {len(rows)} were returned")
    for i, row in enumerate(rows):
        subject.same(expected[i][0], row, f"output {i} of a step of three sequences")
    best = [*result.argmax(0), *result.argmax(1), *result.argmax(2)]
    require(
        best == [int(row.argmax()) for row in rows],
        "argmax differs from the largest logit",
    )


def _sample_specs(n_vocab: int) -> list[SampleSpec]:
    """Return specs in which each field matters."""
    some = np.arange(0, n_vocab, 3)
    twice = np.full(len(some), 2, dtype=np.int32)
    seen = SeenTokens(some, twice, repeat=1.3, presence=0.4, frequency=0.2)
    raised = (some, np.full(len(some), 3.0, dtype=np.float32))
    lowered = (some, np.full(len(some), -3.0, dtype=np.float32))
    odd = np.packbits(np.arange(n_vocab) % 2 > 0, bitorder="little")
    by_top_k = [
        SampleSpec(0.7, 20, 0.9, 0.0, 0.5),
        SampleSpec(1.0, 40, 0.95, 0.05, 0.1, 0.7),
        SampleSpec(0.9, 30, 1.0, 0.0, 0.6, seen=seen),
    ]
    best = SampleSpec(0.0, 0, 1.0, 0.0, 0.0, bias=raised, allowed=odd)
    among_all = [
        SampleSpec(1.2, 0, 1.0, 0.0, 0.9),
        SampleSpec(1.0, 0, 1.0, 0.0, 0.01, banned=(0, 7, 30)),
        SampleSpec(1.0, 0, 1.0, 0.1, 0.3, dry_bias=lowered, allowed=odd),
    ]
    return [*by_top_k, best, *among_all]


def what_is_sampled_follows_from_the_logits(subject: Subject) -> None:
    """A sampled token is the one that the spec defines in double precision.

    It may be the neighbouring token if a cumulative probability ends that close, and the backend
    may leave it open.
    """
    backend = subject.backend
    if not backend.capabilities.samples:
        raise NotApplicable("this backend does not sample; the engine does")
    specs = _sample_specs(backend.info.n_vocab)
    # All specs in one step, with `top_k_suffices`. For few streams a device may find it as cheap to
    # return full rows, which leaves sampling to the engine. From four streams on, the device's
    # top-k logits are used.
    named = 0
    at_once = min(len(specs), backend.info.n_seq_max)
    for first in range(0, len(specs), at_once):
        group = specs[first : first + at_once]
        sequences = [subject.new() for _ in group]
        for sequence in sequences:
            backend.step([Chunk(sequence, subject.text_tokens(11), outputs=0)])
        chunks = []
        for i, (sequence, spec) in enumerate(zip(sequences, group, strict=True)):
            chunks.append(Chunk(sequence, [20 + i], sample=spec, top_k_suffices=True))
        result = backend.step(chunks)
        for i, spec in enumerate(group):
            token = result.sampled(i)
            row = result.logits(i)[-1].astype(np.float64)
            named += token is not None
            fits = token is None or may_be_sampled(token, row, spec)
            require(fits, f"{token} was sampled for {spec}, but the logits give another token")
        unsampled = backend.step(
            [Chunk(sequence, [30], top_k_suffices=True) for sequence in sequences]
        )
        for i, sequence in enumerate(sequences):
            require(unsampled.sampled(i) is None, "a chunk without a sample spec got a token")
            subject.drop(sequence)
    require(named > 0, "no token was sampled for any chunk")


# Allowed difference of single from double precision, as a share of the probability mass.
_TOLERANCE = 1e-4


def may_be_sampled(
    token: int, row: NDArray[np.float64], spec: SampleSpec, tolerance: float = _TOLERANCE
) -> bool:
    """Return whether `token` is the one that `spec` defines.

    The spec's limits may be off by `tolerance`, a share of the probability mass.
    """
    row = row.copy()
    if spec.bias is not None:
        row[spec.bias[0]] += spec.bias[1]
    if spec.seen is not None:
        seen = spec.seen
        values = row[seen.ids]
        values = np.where(values > 0, values / seen.repeat, values * seen.repeat)
        row[seen.ids] = values - seen.presence - seen.counts * seen.frequency
    if spec.dry_bias is not None:
        row[spec.dry_bias[0]] += spec.dry_bias[1]
    if spec.allowed is not None:
        bits = np.unpackbits(spec.allowed, bitorder="little")
        row[bits[: len(row)] == 0] = -np.inf
    row[list(spec.banned)] = -np.inf
    if spec.temperature <= 0:
        return bool(row[token] >= row.max() - _TOLERANCE)
    return any(_draws(token, row, spec, by, tolerance) for by in (0.0, -tolerance, tolerance))


def _draws(
    token: int, row: NDArray[np.float64], spec: SampleSpec, shift: float, tolerance: float
) -> bool:
    """Return whether `spec`, with its limits moved by `shift`, draws `token` within `tolerance`."""
    ranked = np.lexsort((np.arange(len(row)), -row))
    ids = ranked[: spec.top_k or None]
    share = np.exp(row[ids] - row[ids[0]])
    share /= share.sum()
    if spec.top_p < 1.0:
        last = int(np.searchsorted(np.cumsum(share), spec.top_p + shift))
        ids = ids[: last + 1]
    min_share = spec.min_p * (1 + shift) * share[0]
    ids = ids[share[: len(ids)] >= min_share]
    if not spec.top_k and spec.top_p >= 1.0:
        ids = np.sort(ids)
    places = np.flatnonzero(ids == token)
    if not len(places):
        return False
    at = places[0]
    weights = np.exp((row[ids] - row[ids].max()) / spec.temperature)
    weights /= weights.sum()
    end = np.cumsum(weights)[at]
    begin = end - weights[at]
    return bool(begin - tolerance <= spec.uniform <= end + tolerance)


def a_fork_at_the_end_continues_independently(subject: Subject) -> None:
    """Two sequences with a common prefix continue independently, and one of them may be dropped."""
    backend = subject.backend
    tokens = subject.text_tokens(30)
    source = subject.new()
    subject.feed(source, tokens)
    free = backend.cells_free()
    other = backend.fork(source, 30)
    subject.sequences.append(other)
    n_cells = free - backend.cells_free()
    expected = 0 if backend.capabilities.shares_cells else 30
    require(n_cells == expected, f"a fork of 30 tokens took {n_cells} cells")
    result = backend.step([Chunk(source, [5]), Chunk(other, [7])])
    after_5 = result.logits(0)[0].copy()
    after_7 = result.logits(1)[0].copy()
    subject.same(subject.fresh([*tokens, 5]), after_5, "a fork")
    subject.same(subject.fresh([*tokens, 7]), after_7, "a fork")
    subject.drop(source)
    require(backend.length(other) == 31, "a fork lost tokens with its source")
    subject.feed(other, subject.text_tokens(3, 5))


def truncated_tokens_leave_no_trace(subject: Subject) -> None:
    """`truncate` works as far as promised, and rejected tokens leave no trace.

    A memory that can't rewind raises CannotRewindError.
    """
    backend = subject.backend
    tokens = subject.text_tokens(90)
    sequence = subject.new()
    capabilities = backend.capabilities
    n_rejected = 8
    if capabilities.rewind != "any":
        n_rejected = min(8, capabilities.rewind_tokens)
    for start in range(0, 90, 10):
        accepted = tokens[start : start + 10]
        rejected = subject.text_tokens(n_rejected, start + 40)
        backend.step([Chunk(sequence, [*accepted, *rejected], outputs=1 + n_rejected)])
        backend.truncate(sequence, start + 10)
        require(backend.length(sequence) == start + 10, "truncate left a wrong length")
    expected = subject.fresh([*tokens, 11])
    subject.same(expected, subject.feed(sequence, [11]), "rejected drafts")
    if capabilities.rewind == "none":
        with refused(CannotRewindError, "truncate worked on a memory that can't rewind"):
            backend.truncate(sequence, 80)
        require(backend.length(sequence) == 91, "a rejected truncate changed the sequence")
    backend.truncate(sequence, 0)
    require(backend.length(sequence) == 0, "a sequence truncated to 0 still holds tokens")


def exported_kv_gives_the_same_continuation(subject: Subject) -> None:
    """Exported KV can be imported in full, and in pieces if the backend supports segments."""
    backend = subject.backend
    tokens = subject.text_tokens(60)
    source = subject.new()
    capabilities = backend.capabilities
    expected = subject.feed(source, tokens)
    edges = (0, 25, 60) if capabilities.segments else (0, 60)
    pieces = [(a, b, backend.export_range(source, a, b)) for a, b in pairwise(edges)]
    copy = subject.new()
    for start, stop, data in pieces:
        backend.import_range(copy, data, start, stop)
    if capabilities.states:
        backend.import_state(copy, backend.export_state(source), 60)
    require(backend.length(copy) == 60, "the sequence does not have 60 tokens after their import")
    after_source = backend.step([Chunk(source, [9])]).logits(0)[0].copy()
    after_copy = backend.step([Chunk(copy, [9])]).logits(0)[0]
    subject.same(after_source, after_copy, "exported and imported KV")
    if capabilities.segments and not capabilities.states:
        backend.truncate(copy, 0)
        for start, stop, data in pieces:
            backend.import_range(copy, data, start, min(stop, 59))
        subject.same(expected, subject.feed(copy, tokens[59:]), "joined segments")


def foreign_bytes_are_refused_and_append_nothing(subject: Subject) -> None:
    """Damaged KV data is rejected, and the target sequence stays usable."""
    backend = subject.backend
    source = subject.new()
    target = subject.new()
    subject.feed(source, subject.text_tokens(20))
    full = backend.export_range(source, 0, 20)
    free = backend.cells_free()
    for data in (b"", b"x", b"not a block of KV at all, but long enough", full[: len(full) // 2]):
        with refused(BackendFailure, f"{len(data)} bytes of other data were accepted as KV"):
            backend.import_range(target, data, 0, 20)
        require(backend.length(target) == 0, "a rejected import left tokens")
        require(backend.cells_free() == free, "a rejected import left cells in use")
    backend.import_range(target, full, 0, 20)


def running_out_of_cells_is_reported_and_changes_nothing(subject: Subject) -> None:
    backend = subject.backend
    a = subject.new()
    b = subject.new()
    subject.feed(a, subject.text_tokens(backend.info.n_ctx - 10))
    free = backend.cells_free()
    with refused(NoCellsError, f"{free + 1} tokens were appended to {free} free cells"):
        backend.step([Chunk(b, subject.text_tokens(free + 1))])
    require(backend.length(b) == 0, "a rejected step left tokens")
    require(backend.cells_free() == free, "a rejected step left cells in use")
    subject.drop(a)
    subject.feed(b, subject.text_tokens(30))


def running_out_of_sequences_is_reported(subject: Subject) -> None:
    max_sequences = subject.backend.info.n_seq_max
    sequences = [subject.new() for _ in range(max_sequences)]
    require(len(set(sequences)) == max_sequences, "two sequences have the same id")
    with refused(NoCellsError, f"more than {max_sequences} sequences were created"):
        subject.new()
    subject.drop(sequences[0])
    subject.new()


def a_step_that_is_too_large_or_empty_is_refused(subject: Subject) -> None:
    backend = subject.backend
    sequence = subject.new()
    for tokens, outputs in ((subject.text_tokens(backend.info.n_batch + 1), 0), ([], 1)):
        with refused(BackendFailure, f"a step of {len(tokens)} tokens was accepted"):
            backend.step([Chunk(sequence, tokens, outputs=outputs)])
        require(backend.length(sequence) == 0, "a rejected step appended tokens")


def text_survives_tokens(subject: Subject) -> None:
    backend = subject.backend
    text = "Grüße, 世界! \n\t{x}"
    tokens = backend.tokenize(text, special=False)
    whole = backend.detokenize(tokens)
    require(whole.strip() == text.strip(), "detokenizing the tokens of a text gave another text")
    pieces = b"".join(backend.token_bytes(t) for t in tokens).decode("utf-8", "replace")
    require(pieces.strip() == text.strip(), "the bytes of the tokens are not the bytes of the text")
    with refused(BackendFailure, "a token outside the vocabulary has bytes"):
        backend.token_bytes(backend.info.n_vocab)


CHECKS: tuple[Check, ...] = (
    rounding_is_far_below_what_a_token_changes,
    a_step_appends_and_counts,
    one_step_serves_several_sequences_and_outputs,
    what_is_sampled_follows_from_the_logits,
    a_fork_at_the_end_continues_independently,
    truncated_tokens_leave_no_trace,
    exported_kv_gives_the_same_continuation,
    foreign_bytes_are_refused_and_append_nothing,
    running_out_of_cells_is_reported_and_changes_nothing,
    running_out_of_sequences_is_reported,
    a_step_that_is_too_large_or_empty_is_refused,
    text_survives_tokens,
)
