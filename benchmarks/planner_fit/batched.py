"""Decoding for several sequences at once: what each of them costs beside the one sweep over the
weights they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.planner_fit.fit import Design, Fit, Floats, seconds
from benchmarks.planner_fit.rows import Row, rows


def extended(single: Sequence[Row]) -> Design:
    """The design of the decode law over `single` and, after them, the rows of several sequences."""
    return Design("decode", [*single, *rows("decode", batched=True)])


def law_of(design: Design, decode: Fit) -> Design:
    """The rows of several sequences as a law of their own: what the decode law says of the step is
    taken as given, and each further sequence costs its arithmetic and a little time per layer."""
    members = [i for i, row in enumerate(design.data) if row.batch > 1]
    step, _ = seconds(design.part(np.array(members)), decode.theta)
    return Design(
        "batched", [_row(design.data[i], float(s)) for i, s in zip(members, step, strict=True)]
    )


def _row(row: Row, step_s: float) -> Row:
    return replace(row, parts=((step_s, ()), *row.further))


def leave_out(single: Sequence[Row], unit: Callable[[Row], object]) -> tuple[Sequence[Row], Floats]:
    """Every row of several sequences, and its error by fits of both laws that saw no row of its
    `unit`."""
    design = extended(single)
    learn = [i for i, row in enumerate(design.data) if row.batch == 1 and not row.suspect]
    whole = Fit(design, learn)
    many = law_of(design, whole).data
    held_back: dict[object, list[int]] = defaultdict(list)
    for i, row in enumerate(many):
        held_back[unit(row)].append(i)
    errors = np.zeros(len(many))
    for held, members in held_back.items():
        rest = [i for i in learn if unit(design.data[i]) != held]
        own = law_of(design, Fit(design, rest, near=whole.theta, passes=8))
        others = [i for i in range(len(many)) if i not in set(members)]
        errors[members] = Fit(own, others).errors(members)
    return many, errors
