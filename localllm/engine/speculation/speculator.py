"""Fills in drafts before a step if they pay, and learns from their results after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from localllm.engine.contention import CpuContention
from localllm.engine.request import RunningRequest
from localllm.engine.speculation import Drafter, longest_draft, registered
from localllm.engine.speculation.controller import (
    CostProbe,
    DraftCandidate,
    HitRates,
    all_gain,
    choose_lengths,
    rows_of,
)
from localllm.engine.speculation.ngram import PromptLookup, RecentOutputs
from localllm.engine.speculation.step_limits import EarlyStart, HostTime, StepLimit
from localllm.engine.speculation.stream_drafts import (
    MAX_STEPS_UNPAID,
    MIN_GAIN,
    PAID_GAIN,
    DraftCounts,
    DraftState,
    Proposal,
    StreamDraft,
)
from localllm.engine.speculation.trials import PATIENCE_TOKENS, BackOff, DrafterAccount
from localllm.engine.step_costs import PrefillCost, StepCost
from localllm_backends.contract import Backend, BackendFailure

# Acceptance rate of text that a grammar forces: the model nearly always follows it token by token.
_FORCED_RATE = 0.95
_MAX_MODEL_TOKENS = 16
# Drafters that compute cost a stream at most this many decode steps without drafts, plus 1.5 % of
# its time. Over the first 24 tokens that is 1.15 times the time without drafts, and over
# 200 tokens a speed of 0.97.
_MAX_STEPS_TRIAL = 3.0
# Steps with drafts do not measure the cost of a step without drafts. So one step in this many has no
# drafts.
_PLAIN_EVERY = 64
# Draft lengths that are compared with the time that a step may take.
_ROWS_IN_TIME = (2, 4, 8, 16, 32)
# Acceptance rate of a drafter that is always right. It is below 1, so that `choose_lengths` gives
# all streams equally long drafts.
_NEARLY_RIGHT = 0.999
# Guesses needed to judge a drafter.
_MIN_SEEN = 4
# Salts whose recent answers are kept.
_MAX_RECENT_SALTS = 64


@dataclass
class Speculator:
    """Drafts for every decoding request of one engine.

    It uses lookups, which cost no computation, and every registered drafter that can be made for
    the engine (`Drafter.for_engine`). `cost` and `reading` hold the cost of steps, measured while
    there are no requests.
    """

    backend: Backend
    draft_backend: Backend | None
    mode: str
    clock: Callable[[], float]
    others: CpuContention
    reading: PrefillCost = field(default_factory=PrefillCost)
    cost: StepCost = field(default_factory=StepCost)

    def __post_init__(self) -> None:
        self._states: dict[str, DraftState] = {}
        self._rates = HitRates()
        kinds = registered()
        parts = (self.backend, self.draft_backend, self.mode, self.clock)
        made_drafters = [kind.for_engine(*parts) for kind in kinds]
        self.drafters: dict[str, Drafter] = {
            drafter.name: drafter for drafter in made_drafters if drafter is not None
        }
        self.accounts = {name: DrafterAccount() for name in self.drafters}
        # Steps that the drafters are not charged for yet. The drafts of the last one by drafter.
        self._unsettled = 0
        self._last_drafts: dict[str, list[StreamDraft]] = {}
        # One per salt. Otherwise the speed of an answer would reveal the text of other users.
        self._recent = lru_cache(_MAX_RECENT_SALTS)(lambda salt: RecentOutputs())
        names = ["ngram", "grammar", *[kind.name for kind in kinds], *self.drafters]
        self._counts = DraftCounts(names)
        self._since_plain = 0
        self._host_time = HostTime()
        self._early_start = EarlyStart()
        # The next step: its decoding requests, and whether it also reads a prompt.
        self._streams = 1
        self._prefills = False
        self._padded = self.backend.capabilities.pads_drafts
        self._step_limit = StepLimit()
        # Seconds that drafters computed for the next step.
        self._drafting_s = 0.0
        self._probe = CostProbe(self.backend, self.cost, self.others, self.clock, self.reading)
        # The longest draft that can be rewound.
        self._max_draft_tokens = longest_draft(self.backend)
        self.off_because = "this model's memory can't remove rejected draft tokens"
        if self._max_draft_tokens:
            self.off_because = ""
        if self.mode == "off":
            self.off_because = "switched off"

    # --- before a step ----------------------------------------------------------------------------

    def propose(
        self, running: Sequence[RunningRequest], *, hurry: bool = False, shared: bool = False
    ) -> None:
        """Fill in `draft` of every decoding job if drafting pays now.

        `hurry`: the step is between two slices of another request's prompt, so no draft may
        lengthen it. `shared`: requests that are not in the step wait for it.
        """
        if self.off_because:
            return
        if self._last_drafts:
            self._settle()
        self._unsettled += 1
        decoding = [j for j in running if not j.prefilling and j.compilation is None]
        for job in decoding:
            job.draft = []
            job.draft_from = None
        self._step_limit.update(shared=hurry or shared or len(running) > 1)
        if not hurry and decoding and self.cost.known:
            self._choose(decoding, prefills=len(running) > len(decoding))

    def _choose(self, decoding: Sequence[RunningRequest], *, prefills: bool) -> None:
        """Draft for these requests if it pays and the host has time for it."""
        self._streams = len(decoding)
        self._prefills = prefills
        if self._since_plain >= _PLAIN_EVERY:
            self._since_plain = 0
            return
        if not self._host_time.allows(self._streams, self.cost.seconds(self._streams)):
            return
        self._settle()
        rows = self._free_rows(decoding, prefills=prefills)
        if rows < 1:
            return
        proposals = [self._proposal(job, rows) for job in decoding]
        self._fill_in(decoding, proposals, self._lengths(decoding, proposals))

    def _free_rows(self, decoding: Sequence[RunningRequest], *, prefills: bool) -> int:
        """The most draft tokens of the next step: those that there is room for, and time."""
        # Drafts never take cells that are certain to be needed.
        info = self.backend.info
        rows = min(info.n_batch, info.n_outputs) - prefills
        rows = min(rows, self.backend.cells_free() - info.n_batch * prefills) - len(decoding)
        rows = min(rows, self._max_draft_tokens)
        limit_s = self._max_steps * self.cost.seconds(self._streams)
        for n in _ROWS_IN_TIME:
            if n < rows and self.cost.seconds(self._streams + n) > limit_s:
                return n
        return rows

    @property
    def _max_steps(self) -> float:
        """The most decode steps without drafts that the next step may take."""
        return self._step_limit.allowed(self.cost.seconds(self._streams), self.cost.seconds(1))

    def _settle(self) -> None:
        """Charge the drafters for the steps since the last proposals, of which only the first had
        drafts.
        """
        for name, account in self.accounts.items():
            last_drafts = self._last_drafts.get(name, [])
            gained_steps = lost_steps = 0.0
            if last_drafts:
                streams = max(self._streams, len(last_drafts))
                gained_steps = sum(draft.accepted for draft in last_drafts) / streams
                lengths = [draft.drafted for draft in last_drafts]
                lengths += [0] * (streams - len(last_drafts))
                lost_steps = self._lost_steps(name, lengths, max(d.computed for d in last_drafts))
            account.settle(self._unsettled, gained_steps, lost_steps)
            self.drafters[name].rest(account.rests)
        self._unsettled = 0
        self._last_drafts = {}
        self._drafting_s = 0.0

    def _lost_steps(self, name: str, lengths: Sequence[int], computed: int) -> float:
        """Decode steps without drafts that wrong drafts of these lengths take. The drafter computes
        `computed` tokens in lockstep.
        """
        drafting_s = self.drafters[name].drafting_s(computed) + self._early_start.cost_s
        rows = rows_of(lengths, padded=self._padded)
        return (self.cost.seconds(rows) + drafting_s) / self.cost.seconds(len(lengths)) - 1.0

    def _fill_in(
        self,
        decoding: Sequence[RunningRequest],
        proposals: Sequence[Proposal],
        lengths: Sequence[int],
    ) -> None:
        """Give every job a draft of its length, from its lookup or from the drafter, which
        computes it now.
        """
        for job, proposal, length in zip(decoding, proposals, lengths, strict=True):
            if proposal.drafter not in self.drafters and length:
                job.draft = list(proposal.tokens[:length])
                job.draft_from = None
                self._states[job.id].drafter = proposal.drafter
        for name, drafter in self.drafters.items():
            chosen = zip(decoding, proposals, lengths, strict=True)
            self._run_drafter(
                name, drafter, [(j, n or p.trial) for j, p, n in chosen if p.drafter == name]
            )

    def _lengths(
        self, decoding: Sequence[RunningRequest], proposals: Sequence[Proposal]
    ) -> list[int]:
        """Choose how many tokens of each proposal to draft."""
        max_steps = self._max_steps
        for name in {p.drafter for p in proposals if p.drafter in self.drafters and p.survival}:
            max_steps = min(max_steps, 1.0 + self.accounts[name].balance_steps)
        paying_lengths = self._worthwhile(proposals, max_steps)
        lookups = [
            (job, p, n)
            for job, p, n in zip(decoding, proposals, paying_lengths, strict=True)
            if p.drafter == "ngram" and n
        ]
        if not lookups:
            return paying_lengths
        states = [self._states[job.id] for job, _, _ in lookups]
        likely = [p.likely(n) for _, p, n in lookups]
        allowed_steps = min(state.allowed_steps(n) for state, n in zip(states, likely, strict=True))
        allowed_steps = max(allowed_steps, MAX_STEPS_UNPAID)
        trial_steps = min(max_steps, *[state.trial_steps() for state in states])
        if trial_steps > allowed_steps:
            lengths = self._worthwhile(proposals, trial_steps)
            if all_gain(proposals, lengths, self.cost.seconds, PAID_GAIN, padded=self._padded):
                return lengths
        return self._worthwhile(proposals, min(max_steps, allowed_steps))

    def _worthwhile(self, candidates: Sequence[DraftCandidate], max_steps: float) -> list[int]:
        """The draft lengths that pay in a step of these candidates."""
        seconds = self.cost.seconds
        return choose_lengths(
            candidates, seconds, max_steps, self._early_start.cost_s, padded=self._padded
        )

    def _run_drafter(
        self, name: str, drafter: Drafter, wanted: list[tuple[RunningRequest, int]]
    ) -> None:
        if not any(n for _, n in wanted):
            return
        jobs = {job.id: (job, length) for job, length in wanted}
        began_s = self.clock()
        drafts = drafter.draft(wanted)
        self._drafting_s += self.clock() - began_s
        for key, (tokens, dists) in drafts.items():
            job, length = jobs[key]
            state = self._states[key]
            job.draft = tokens
            job.draft_from = dists
            if job.sampler.constraint is not None:
                job.draft = tokens[: job.sampler.constraint.acceptable(tokens)]
            state.drafter = name
            ends = bool(job.draft) and job.draft[-1] in self.backend.info.eog_tokens
            if drafter.stops_when_unsure and len(job.draft) < length and not ends:
                state.stopped_at = len(job.draft)

    def _proposal(self, job: RunningRequest, max_tokens: int) -> Proposal:
        state = self._state(job)
        max_tokens = min(
            max_tokens,
            job.max_tokens - job.n_generated - 1,
            self.backend.info.n_ctx - len(job.tokens) - 1,
        )
        if not job.drafts or max_tokens < 1:
            return Proposal(())
        state.read(job.tokens, job.decode_steps)
        tokens, match = state.lookup.propose(max_tokens)
        constraint = job.sampler.constraint
        if constraint is not None and tokens:
            tokens = tokens[: constraint.acceptable(tokens)]
        forced = []
        if constraint is not None and len(tokens) < 2:
            forced = constraint.forced_tokens()[:max_tokens]
        if forced:
            survival = [_FORCED_RATE ** (k + 1) for k in range(len(forced))]
            best = Proposal(survival, drafter="grammar", tokens=forced)
        else:
            survival = state.lookup.rates.survival(match, len(tokens))
            best = Proposal(survival, drafter="ngram", tokens=tokens)
        if self.mode != "ngram" and job.request.draft != "ngram":
            for name, drafter in self.drafters.items():
                best = self._better_proposal(
                    job, state.back_offs[name], best, max_tokens, name, drafter
                )
        return best

    def _better_proposal(
        self,
        job: RunningRequest,
        back_off: BackOff,
        best: Proposal,
        max_tokens: int,
        name: str,
        drafter: Drafter,
    ) -> Proposal:
        """Return this drafter's proposal if it promises more than `best` for this job alone, else
        `best`.
        """
        proposal, n_paying = self._drafter_proposal(job, back_off, max_tokens, name, drafter)
        if not (n_paying or proposal.trial):
            return best
        (n_best,) = choose_lengths([best], self.cost.seconds)
        # A trial promises no gain, so it replaces `best` only if `best` has no gain either.
        if proposal.trial:
            better = not n_best
        else:
            better = proposal.speed(n_paying, self.cost.seconds) > best.speed(
                n_best, self.cost.seconds
            )
        if not better or not drafter.ready(job):
            return best
        if proposal.trial:
            # One stream at a time, and then a step without a trial, which shows what this one took.
            back_off.account.wait_steps = 2
        return proposal

    def _drafter_proposal(
        self, job: RunningRequest, back_off: BackOff, max_tokens: int, name: str, drafter: Drafter
    ) -> tuple[Proposal, int]:
        """This drafter's proposal, and the tokens of it that pay for this job alone."""
        account = back_off.account
        # The time of a trial is not known in a step that also reads a prompt.
        waits = account.wait_steps > 0 or self._prefills
        may_try = not waits and job.n_generated >= back_off.retry_at
        # On average 1 / (1 - rate) tokens are right, if a draft is long enough.
        may_pay = account.trusted and self._steps(name, 1) * (1.0 - back_off.acceptance.rate) < 1.0
        if not drafter.token_s or not (may_try or may_pay):
            return Proposal(()), 0
        max_tokens = min(max_tokens, drafter.longest, _MAX_MODEL_TOKENS)
        # The longest draft that can be rejected entirely while the stream keeps its minimum speed.
        steps = _MAX_STEPS_TRIAL + self._states[job.id].overall.total_for(MIN_GAIN, 1)
        length = next((n for n in range(max_tokens, 0, -1) if self._steps(name, n) <= steps), 0)
        survival = back_off.acceptance.survival(length)
        proposal = Proposal(survival, drafter.token_s, drafter.at_once, name)
        n_paying = 0
        if may_pay:
            (n_paying,) = choose_lengths([proposal], self.cost.seconds, 1.0 + account.balance_steps)
        if not n_paying and may_try:
            trial = self._trial_length(name, account, length)
            proposal = Proposal((), drafter.token_s, drafter.at_once, name, trial=trial)
        return proposal, n_paying

    def _trial_length(self, name: str, account: DrafterAccount, max_tokens: int) -> int:
        """The tokens of a trial draft now (0: no trial)."""
        drafter = self.drafters[name]
        survival = [_NEARLY_RIGHT ** (k + 1) for k in range(max_tokens)]
        right = DraftCandidate(survival, drafter.token_s, drafter.at_once)
        lengths = self._worthwhile([right] * self._streams, self._max_steps)

        def lost_steps(n: int) -> float:
            return self._lost_steps(name, [n] + [0] * (self._streams - 1), n)

        return account.trial_length(max_tokens, lost_steps, can_pay=any(lengths))

    def _state(self, job: RunningRequest) -> DraftState:
        state = self._states.get(job.id)
        if state is None:
            lookup = PromptLookup(
                job.tokens,
                HitRates(self._rates),
                self._recent(job.request.generation.salt),
                job.predicted,
            )
            back_offs = {
                name: BackOff(account, PATIENCE_TOKENS * self._is_unprofitable(name))
                for name, account in self.accounts.items()
            }
            state = DraftState(lookup, back_offs, len(job.tokens), job.decode_steps)
            self._states[job.id] = state
        return state

    def _is_unprofitable(self, name: str) -> bool:
        """Return whether this drafter did not pay in earlier answers.

        If so, a new request does not try it at once, because a short answer can't pay for a trial.
        """
        drafter = self.drafters[name]
        shared = self.accounts[name].acceptance
        candidate = DraftCandidate(
            shared.survival(_MAX_MODEL_TOKENS), drafter.token_s, drafter.at_once
        )
        return shared.average.total >= _MIN_SEEN and not any(
            choose_lengths([candidate], self.cost.seconds)
        )

    # --- after a step -----------------------------------------------------------------------------

    def emitted(self, job: RunningRequest, drafted: int, accepted: int) -> None:
        """Record that `job` got tokens from a step that verified `drafted` tokens and accepted
        `accepted`.
        """
        state = self._states.get(job.id)
        # Steps without drafts are the usual ones. They are read with the next proposal.
        if state is None or (not drafted and state.stopped_at < 0):
            return
        # A token that the heads were unsure of counts as wrong: they computed it in vain.
        unsure = state.stopped_at == drafted
        state.stopped_at = -1
        state.read_steps(job.decode_steps - 1)
        # Tokens that a constraint added after them are not a gain of the draft.
        state.learn(accepted + 1, self._steps(state.drafter, drafted, unsure))
        self._counts.add(state.drafter, drafted, accepted)
        if state.drafter in state.back_offs:
            draft = StreamDraft(drafted, accepted, drafted + unsure)
            self._last_drafts.setdefault(state.drafter, []).append(draft)
            state.back_offs[state.drafter].learn(accepted, drafted + unsure, job.n_generated)

    def _steps(self, drafter: str, drafted: int, unsure: bool = False) -> float:
        """The length of a step with such a draft, in decode steps without drafts, for a stream
        alone.

        `unsure`: the drafter computed one token more.
        """
        drafter_used = self.drafters.get(drafter)
        drafting_s = 0.0
        if drafter_used is not None:
            drafting_s = drafter_used.drafting_s(drafted + unsure)
        return (self.cost.seconds(1 + drafted) + drafting_s) / self.cost.seconds(1)

    def observe(self, lengths: Sequence[int], *, tokens: int, seconds: float) -> None:
        """Record a step without prefill that verified drafts of these lengths (one for each
        sequence) and emitted `tokens`.
        """
        sequences = len(lengths)
        rows = rows_of(lengths, padded=self._padded)
        drafted = rows > sequences
        counts = drafted or self._early_start.after_drafts
        usual_s = self._early_start.observe(sequences, seconds, drafted=drafted)
        if drafted:
            self.cost.observe(rows, seconds, sequences)
            self._since_plain += 1
        else:
            self.cost.observe(rows, usual_s)
            self._since_plain = 0
        if counts:
            step_s = self.cost.seconds(sequences)
            undrafted_s = step_s * tokens / sequences
            self._counts.add_time(seconds, undrafted_s)
            self._host_time.gain(undrafted_s - seconds)
            # A draft that took far longer than its step is not all in `seconds`.
            seconds = max(seconds, self.cost.seconds(rows) + self._drafting_s)
            for name, account in self.accounts.items():
                account.measure((seconds - undrafted_s) / step_s, drafted=drafted)
                self.drafters[name].rest(account.rests)

    def forget(self, job: RunningRequest) -> None:
        if self._states.pop(job.id, None) is not None:
            self._recent(job.request.generation.salt).add(job.tokens[job.n_prompt :])
        for drafter in self.drafters.values():
            drafter.forget(job)

    # --- between requests -------------------------------------------------------------------------

    def tick(self, *, busy: bool, idle_s: float = 0.0) -> bool:
        """Do one piece of a drafter's housekeeping, or one measurement while the engine is idle.

        The engine has been idle for `idle_s` seconds. Returns True if there is more to do.
        """
        more = sum(drafter.tick(busy=busy) for drafter in self.drafters.values()) > 0
        return more or (not busy and self._measure(idle_s))

    def _measure(self, idle_s: float) -> bool:
        if self.off_because and not self.backend.capabilities.slow_first_steps:
            return False
        more = self._probe.tick(idle_s)
        if self._probe.failed:
            self.off_because = self._probe.failed
        elif self.cost.known and not more:
            for name, drafter in self.drafters.items():
                try:
                    if not drafter.token_s:
                        drafter.probe()
                except BackendFailure as e:
                    self.off_because = f"a trial draft ({name}) failed: {e}"
        return more

    def close(self) -> None:
        for drafter in self.drafters.values():
            drafter.close()

    def snapshot(self) -> dict[str, float | int | str]:
        """Counters and the cost of verification, as plain values."""
        plain = self.cost.seconds(1)
        return {
            "speculation": self.off_because or "on",
            **self._counts.values(),
            "verify_8_cost": self.cost.seconds(8) / plain,
            "verify_16_cost": self.cost.seconds(16) / plain,
        }
