"""Decode of several sequences at once: the cost of each sequence in addition to the one read of the
weights that they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.planner_fit.fit import Design, Fit, Floats, seconds
from benchmarks.planner_fit.rows import Row, rows


def extended(single: Sequence[Row]) -> Design:
    """Return the design of the decode law with `single` and then the rows of several sequences."""
    return Design("decode", [*single, *rows("decode", batched=True)])


def law_of(design: Design, decode: Fit) -> Design:
    """Return the rows of several sequences as a separate law. The step's cost comes from the decode
    law, and each further sequence adds its arithmetic and a little time per layer."""
    members = [i for i, row in enumerate(design.data) if row.batch > 1]
    step, _ = seconds(design.part(np.array(members)), decode.theta)
    return Design(
        "batched", [_row(design.data[i], float(s)) for i, s in zip(members, step, strict=True)]
    )


def _row(row: Row, step_s: float) -> Row:
    return replace(row, parts=((step_s, ()), *row.further))


def leave_out(single: Sequence[Row], unit: Callable[[Row], object]) -> tuple[Sequence[Row], Floats]:
    """Return every row of several sequences, with its error by fits of both laws that saw no row of
    its `unit`."""
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
