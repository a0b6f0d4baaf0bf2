"""Drafts of single streams: what a drafter proposes, and how much time drafts have saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from localllm.engine.speculation.controller import DraftCandidate, recent_gain
from localllm.engine.speculation.ngram import PromptLookup
from localllm.engine.speculation.trials import BackOff
from localllm.engine.step_costs import DecayedRatio

# Readers notice a long step as a pause. So a lookup draft may lengthen a step only if the drafts of
# this stream have saved enough time: the stream must stay faster by this factor even if only very
# likely tokens (_LIKELY) of the draft are accepted. Otherwise the step may take at most
# MAX_STEPS_UNPAID decode steps without drafts.
#
# With a limit less than two (1.75), copies were not detected if the second row was expensive and
# further rows cheap. On one of ten random machines they ran at under half their best speed.
#
# The rule does not apply to text that a grammar forces, which is not a guess, or to drafters that
# compute, which back off by themselves.
#
# The factor is 1.2 because very likely tokens are sometimes wrong. In 250 simulated streams of
# random text, half of it predictable, every stream kept a gain of 9 %. With 1.15, one of 30 did
# not.
PAID_GAIN = 1.2
_LIKELY = 0.9
MAX_STEPS_UNPAID = 2.0
# A copy is detected only if a long step accepts many tokens. So once in this many steps, a lookup
# draft may lengthen a step before earlier drafts have saved the time. Readers do not notice one
# long step in this many, which is above the 95th percentile of the gaps. Such a trial step may take
# at most _MAX_STEPS_TRIED decode steps without drafts.
_TRIED_EVERY = 24
_MAX_STEPS_TRIED = 8.0
# Such trials cost a stream at most this many decode steps without drafts, plus 1.5 % of its time.
_MAX_STEPS_LOST = 6.0
MIN_GAIN = 0.985


def _gain_overall() -> DecayedRatio:
    return DecayedRatio(1.0)


@dataclass
class DraftState:
    """Draft state of one decoding request: its lookup, the back-off of every drafter, and recent
    gains.

        `n_tokens`: tokens of the request that its lookup has read.
        `n_steps`: its decode steps that count in the gains.
        `drafter`: the last drafter used.
        `stopped_at`: the length at which that drafter stopped early, unsure of the next token
            (-1: it did not).
        `since_long_step`: steps since the last one longer than `MAX_STEPS_UNPAID`.
    """

    lookup: PromptLookup
    back_offs: dict[str, BackOff]
    n_tokens: int
    n_steps: int
    drafter: str = ""
    stopped_at: int = -1
    recent: DecayedRatio = field(default_factory=recent_gain)
    overall: DecayedRatio = field(default_factory=_gain_overall)
    since_long_step: int = _TRIED_EVERY

    def read(self, tokens: Sequence[int], n_steps: int) -> None:
        """Read the `tokens` and steps of the request since the last proposal."""
        self.lookup.advance(tokens[self.n_tokens :])
        self.n_tokens = len(tokens)
        self.read_steps(n_steps)

    def read_steps(self, n_steps: int) -> None:
        """Record steps without drafts up to the request's step `n_steps`."""
        new = n_steps - self.n_steps
        if new > 0:
            self.n_steps = n_steps
            self.recent.add_ones(new)
            self.overall.add_ones(new)
            self.since_long_step += new

    def learn(self, tokens: int, steps: float) -> None:
        """Record a step that emitted `tokens` and took as long as `steps` decode steps without
        drafts.
        """
        self.n_steps += 1
        self.recent.add(tokens, steps)
        self.overall.add(tokens, steps)
        if steps > MAX_STEPS_UNPAID:
            self.since_long_step = 0
        else:
            self.since_long_step += 1

    def allowed_steps(self, tokens: int) -> float:
        """The most decode steps without drafts that the next step may take if it emits `tokens`.

        `tokens` are those that it emits very likely. Within this time the stream stays faster by
        `PAID_GAIN`, either recently or overall.
        """
        return max(gain.total_for(PAID_GAIN, tokens) for gain in (self.recent, self.overall))

    def trial_steps(self) -> float:
        """The most decode steps without drafts that a step with a trial draft may take.

        It is 0 until _TRIED_EVERY steps after the last long step. It is limited by the time that
        this stream may lose.
        """
        if self.since_long_step < _TRIED_EVERY:
            return 0.0
        return min(_MAX_STEPS_TRIED, _MAX_STEPS_LOST + self.overall.total_for(MIN_GAIN, 1))


class DraftCounts:
    """Counts of drafted and accepted tokens by drafter, and the time that drafts took and saved."""

    def __init__(self, names: Sequence[str]) -> None:
        self._drafted = dict.fromkeys(names, 0)
        self._accepted = dict.fromkeys(names, 0)
        self._seconds = self._undrafted_s = 0.0

    def add(self, name: str, drafted: int, accepted: int) -> None:
        """Record a draft by the drafter `name`."""
        self._drafted[name] += drafted
        self._accepted[name] += accepted

    def add_time(self, seconds: float, undrafted_s: float) -> None:
        """Record a step whose tokens would have taken `undrafted_s` without drafts."""
        self._seconds += seconds
        self._undrafted_s += undrafted_s

    def values(self) -> dict[str, float]:
        """The counts as plain values.

        `speculation_gain`: measured speed relative to no drafting; 1.0 before the first draft.
        """
        gain = 1.0
        if self._seconds:
            gain = self._undrafted_s / self._seconds
        accepted = {f"accepted_{name}_tokens": n for name, n in self._accepted.items()}
        drafted = {f"drafted_{name}_tokens": n for name, n in self._drafted.items()}
        return {
            "drafted_tokens": sum(self._drafted.values()),
            "accepted_draft_tokens": sum(self._accepted.values()),
            **accepted,
            **drafted,
            "speculation_gain": gain,
        }


@dataclass(frozen=True, slots=True)
class StreamDraft:
    """A draft of one stream. `computed`: the tokens that the drafter computed for it."""

    drafted: int
    accepted: int
    computed: int


@dataclass(frozen=True)
class Proposal(DraftCandidate):
    """A draft that one drafter could make for one job.

    `trial`: tokens to draft in order to learn, although the draft does not promise to pay.
    """

    drafter: str = ""
    tokens: Sequence[int] = ()
    trial: int = 0

    def likely(self, length: int) -> int:
        """Tokens that a step emits very likely if it drafts `length` tokens."""
        return 1 + sum(chance >= _LIKELY for chance in self.survival[:length])
