"""What drafts cost besides their rows, and how much they may lengthen a step.

They cost the host's time to choose them, and the early start of the next step without drafts.
"""

from __future__ import annotations

import math

from localllm.engine.step_costs import SINGLE_STEP_S

# Choosing drafts takes about _HOST_S for each stream (measured: 0.1 ms for four), which is long for a
# tiny model. It may take a share of the time, up to so many decode steps at once, and the time that
# drafts saved. If it was not limited, it took 1.2 of 7.8 ms of a step of four streams.
_HOST_S = 20e-6
_HOST_SHARE = 0.002
_MAX_HOST_STEPS = 0.5
# Weight of a new measurement of the time to start early steps again.
_RESTART_RATE = 0.2

# Limits of a step with drafts, in decode steps without drafts. A single stream may take a long step
# that emits 60 tokens, if that is faster overall. If other streams share the step, it may take this
# many steps of one stream, or _MAX_STEPS_TOGETHER steps of all streams, whichever is longer.
# Readers prefer an even flow of words.
_MAX_STEPS_SHARED = 2.5
_MAX_STEPS_TOGETHER = 1.5
# When a request ends, its client often sends the next one within milliseconds (agents do). That
# request would wait for an entire long step. So a stream that is alone again gets longer steps
# only gradually: the limit grows by this factor per step.
_ALONE_AGAIN = 1.5
# No step with drafts takes longer than SINGLE_STEP_S or this many decode steps, whichever is longer. A
# cancel and a new request wait for the end of the step, and the reader gets no text meanwhile. Example:
# 64 rows of an 8B model on a processor, at 0.2 s for the first row and 0.06 s for each other row, took
# 4 s. If every row costs 0.15 to 0.6 steps, drafts within 8 steps copy text 3 to 5 % slower than drafts
# of 64 rows.
_MAX_STEPS_SLOW = 8.0


class HostTime:
    """The seconds that choosing drafts may take on the host now."""

    def __init__(self) -> None:
        self._left_s = 0.0

    def allows(self, streams: int, step_s: float) -> bool:
        """Return whether drafts may be chosen for a step that takes `step_s` without them. If so, the
        time for it is spent."""
        self._left_s = min(self._left_s + _HOST_SHARE * step_s, _MAX_HOST_STEPS * step_s)
        if self._left_s < 0.0:
            return False
        self._left_s -= _HOST_S * streams
        return True

    def gain(self, seconds: float) -> None:
        """Add the time that drafts saved."""
        self._left_s += max(seconds, 0.0)


class EarlyStart:
    """The time that drafts add to the first step without drafts after them.

    A backend that starts steps early can't do so for drafts, so that step takes longer. The
    difference is learnt from two steps without drafts in a row.
    """

    def __init__(self) -> None:
        self.after_drafts = False
        self._lost_s = 0.0
        # Sequences and seconds of the last step, if it was the first one after drafts.
        self._first: tuple[int, float] | None = None

    @property
    def cost_s(self) -> float:
        """Seconds that drafts in the next step would add to a later one."""
        return 0.0 if self.after_drafts else max(self._lost_s, 0.0)

    def observe(self, sequences: int, seconds: float, *, drafted: bool) -> float:
        """Record a step. Return how long it would have taken with its early start."""
        first = self._first
        self._first = None
        usual_s = seconds
        if self.after_drafts and not drafted:
            self._first = sequences, seconds
            usual_s = max(seconds - self._lost_s, seconds / 2)
        elif not drafted and first is not None and first[0] == sequences:
            longer_s = min(max(first[1] - seconds, -seconds), seconds)
            self._lost_s += _RESTART_RATE * (longer_s - self._lost_s)
        self.after_drafts = drafted
        return usual_s


class StepLimit:
    """How long a step with drafts may take, in decode steps without drafts."""

    def __init__(self) -> None:
        # The limit is this many times that of a shared step.
        self._factor = math.inf

    def update(self, *, shared: bool) -> None:
        """Set the low limit for a step that is `shared`, and raise it gradually otherwise."""
        if shared:
            self._factor = 1.0
        else:
            self._factor *= _ALONE_AGAIN

    def allowed(self, plain_s: float, single_s: float) -> float:
        """The limit if a decode step without drafts takes `plain_s` seconds, and `single_s` seconds
        for one stream alone."""
        steps = self._factor * max(_MAX_STEPS_TOGETHER, _MAX_STEPS_SHARED * single_s / plain_s)
        return min(steps, max(SINGLE_STEP_S / plain_s, _MAX_STEPS_SLOW))
