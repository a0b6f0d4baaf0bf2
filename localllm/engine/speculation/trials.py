"""When a drafter that computes may draft: its acceptance rate, and the time that it gained and lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.engine.speculation.controller import FAST_DECAY, PRIOR_WEIGHT, SLOW_DECAY
from localllm.engine.step_costs import DecayedRatio


class Acceptance:
    """Acceptance rate of a drafter in one request (a draft model's tokens), with the
    engine-wide rate as prior.

    `average` is the share of right guesses among those observed. Older guesses have less weight.
    """

    def __init__(self, shared: Acceptance | None = None, prior: float = 0.6) -> None:
        self._shared = shared
        self._prior = prior
        self.average = DecayedRatio(SLOW_DECAY if shared is None else FAST_DECAY)

    def observe(self, accepted: int, drafted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were right.

        Tokens after the first wrong one are not counted.
        """
        for hit in [True] * accepted + [False] * (accepted < drafted):
            self.average.add(hit)
        if self._shared is not None:
            self._shared.observe(accepted, drafted)

    @property
    def rate(self) -> float:
        """Probability that the next drafted token is accepted."""
        return self.average.rate(
            self._shared.rate if self._shared is not None else self._prior, PRIOR_WEIGHT
        )

    def survival(self, length: int) -> list[float]:
        """P(the first k are all accepted) = a^k for k = 1 … length.

        Their sum is (1 − a^(g+1))/(1 − a) − 1.
        """
        rate = self.rate
        return [rate**k for k in range(1, length + 1)]


# The time that a drafter may lose in this engine, in decode steps without drafts: so many steps, and
# this share of all further steps. 250 tokens of streams that begin together then keep 0.99 of their
# speed if every draft is wrong.
_CREDIT_STEPS = 1.25
_CREDIT_PER_STEP = 0.002
# Most steps that a trial is charged for, and how many times its estimate the next one is expected
# to take. A longer one was probably slowed by other programs.
_MAX_TAKEN_STEPS = 8.0
_MAX_OVERRUN_FACTOR = 8.0
# A drafter that was right before is charged for at most so many steps more than estimated. Otherwise one
# slow step would end its drafts for thousands of steps.
_MAX_EXTRA_STEPS = 1.0
# Whether drafts could pay is asked again after so many steps.
_CAN_PAY_AGAIN = 24
# Before a trial can be paid for, its price is computed again after so many steps at most.
_MAX_WAIT_STEPS = 64
# Gains of a drafter allow longer drafts, up to this many steps.
_MAX_BALANCE_STEPS = 16.0
# Tokens of a trial draft, which measures the acceptance rate. It has a second token only if that
# leaves half of the balance, unless one was right before: after a wrong first token, the second was
# verified in vain.
_TRIAL_TOKENS = 2
_MAX_FAILURES = 9
# Drafters follow the model for so many steps before a trial, since they need a past to guess from. If
# a trial is further away, they rest.
_STEPS_OF_PAST = 32
# If a drafter was right before, its long past is worth following for so many steps.
_FAR_IF_TRUSTED = 256


@dataclass
class Pause:
    """The pause after a draft. Each draft in a row without an accepted token doubles it."""

    failures: int = 0

    def after(self, accepted: int) -> int:
        """Return the tokens (or steps) to wait after a draft of which `accepted` tokens were right."""
        self.failures = 0 if accepted else min(self.failures + 1, _MAX_FAILURES)
        return 1 << self.failures


@dataclass
class DrafterAccount:
    """The gains and losses of one drafter in one engine. All streams share them, because a draft for
    one of them lengthens the steps of all.

    `balance_steps`: decode steps without drafts that it may lose now.
    `trusted`: False until a token is accepted. Before that, all drafts are trials.
    `wait_steps`: steps until a trial may be made.
    `can_pay`: False if drafts would not pay even if they were always right.
    `price_steps`: decode steps that the next trial is expected to take.
    `overrun_factor`: how many times as long as estimated the last trial took.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    balance_steps: float = _CREDIT_STEPS
    trusted: bool = False
    pause: Pause = field(default_factory=Pause)
    wait_steps: int = 0
    can_pay: bool = True
    price_steps: float = 0.0
    overrun_factor: float = 1.0

    def __post_init__(self) -> None:
        # Decode steps that the last step with drafts lost, by the clock and by its estimate, and those
        # that its drafts cost by the estimate (0: it had no drafts, or they are charged).
        self._taken_steps = self._estimated_steps = self._cost_steps = 0.0

    @property
    def rests(self) -> bool:
        """True if the drafter is expected to stay unused for some time."""
        unpaid_wait_steps = (self.price_steps - self.balance_steps) / _CREDIT_PER_STEP
        far_steps = _STEPS_OF_PAST
        if self.trusted:
            far_steps = _FAR_IF_TRUSTED
        return not self.can_pay or max(self.wait_steps, unpaid_wait_steps) > far_steps

    def settle(self, n_steps: int, gained_steps: float, lost_steps: float) -> None:
        """Record `n_steps` steps: the decode steps that drafts saved in them, and those that drafts
        took.
        """
        self.wait_steps = max(self.wait_steps - n_steps, 0)
        max_balance_steps = max(_CREDIT_STEPS, self.price_steps)
        if self.balance_steps < max_balance_steps:
            self.balance_steps = min(
                self.balance_steps + n_steps * _CREDIT_PER_STEP, max_balance_steps
            )
        if gained_steps and not self.trusted:
            # The first success is no loss, so drafts that are long enough to pay can follow.
            self.trusted = True
            lost_steps = 0.0
        if lost_steps:
            self._estimated_steps = lost_steps - gained_steps
            self._cost_steps = lost_steps
        self.balance_steps = min(self.balance_steps + gained_steps - lost_steps, _MAX_BALANCE_STEPS)

    def measure(self, lost_steps: float, *, drafted: bool) -> None:
        """Record the decode steps that a step lost, which had drafts or followed one with drafts.

        A draft after a pause also reads tokens, and the step after it was not started early. No
        estimate knows these costs, so such a draft is charged for what it took.
        """
        if drafted:
            self._taken_steps = lost_steps
        elif self._cost_steps:
            extra_steps = max(
                min(self._taken_steps + lost_steps, _MAX_TAKEN_STEPS) - self._estimated_steps, 0.0
            )
            if self.trusted:
                extra_steps = min(extra_steps, _MAX_EXTRA_STEPS)
            self.overrun_factor = min(1.0 + extra_steps / self._cost_steps, _MAX_OVERRUN_FACTOR)
            self.balance_steps -= extra_steps
            self.price_steps = self._cost_steps + extra_steps
        # If two steps in a row have drafts, the time of the first one is not known.
        self._cost_steps = 0.0

    def learn(self, accepted: int) -> None:
        """Record a draft of which `accepted` tokens were right."""
        pause = self.pause.after(accepted)
        if not accepted:
            self.wait_steps = pause

    def trial_length(
        self, max_tokens: int, lost_steps: Callable[[int], float], *, can_pay: bool
    ) -> int:
        """The tokens of a trial now; 0: no trial. `lost_steps(n)`: decode steps that n wrong tokens take.

        A trial that costs more than the balance waits until the balance pays for it. Drafts that
        would not pay even if they were always right (not `can_pay`) need no trial.
        """
        rested = self.rests
        self.can_pay = can_pay
        if not can_pay:
            self.wait_steps = _CAN_PAY_AGAIN
            return 0
        if not max_tokens:
            return 0
        self.price_steps = lost_steps(1) * self.overrun_factor
        if self.price_steps > self.balance_steps:
            missing_steps = (self.price_steps - self.balance_steps) / _CREDIT_PER_STEP
            self.wait_steps = min(math.ceil(missing_steps), _MAX_WAIT_STEPS)
            return 0
        if rested:
            self.wait_steps = _STEPS_OF_PAST
            return 0
        for length in range(min(max_tokens, _TRIAL_TOKENS), 1, -1):
            reserve_factor = 1 if self.trusted else length
            if reserve_factor * lost_steps(length) * self.overrun_factor <= self.balance_steps:
                return length
        return 1


# A drafter that did not pay in earlier answers is tried in a new one only after this many tokens,
# because a short answer can't pay for a trial.
PATIENCE_TOKENS = 24


@dataclass
class BackOff:
    """The acceptance of one drafter in one request, and when a trial may be made for it: after
    `retry_at` generated tokens.
    """

    account: DrafterAccount
    retry_at: int = 0
    pause: Pause = field(default_factory=Pause)

    def __post_init__(self) -> None:
        self.acceptance = Acceptance(self.account.acceptance)

    def learn(self, accepted: int, drafted: int, n_generated: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were right."""
        self.acceptance.observe(accepted, drafted)
        self.account.learn(accepted)
        self.retry_at = n_generated + self.pause.after(accepted)
