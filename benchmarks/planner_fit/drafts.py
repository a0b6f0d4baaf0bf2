"""The fourth law: what one drafted token adds to a step, from published speeds with and without a
model's own draft heads.

Each row of data/drafts.csv has both speeds of one machine and file, and the number of tokens that were
drafted. The measured plain speed is taken as given, so its own error does not count. The tokens of a step
follow from the acceptance rates that the planner assumes for the kind of text.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.planner_fit.fit import Design, Floats, family, leave_out
from benchmarks.planner_fit.rows import Row, models_by_id, variant_of
from localllm.device.name_lookup import resolve
from localllm.device.types import Device
from localllm.planner import decode_cost, draft_cost, drafting, speed
from localllm_catalog.types import Model, Variant

DATA = Path(__file__).parent.parent / "data" / "drafts.csv"
LAW = "drafted"
# Tokens that a step drafts if the source does not state it.
_USUAL_LENGTH = 2
_ACCEPTANCE = dict(zip(("prose", "mixed", "code"), drafting.HEADS_ACCEPTANCE, strict=True))


@dataclass(frozen=True)
class Drafted:
    """One row of the data: where it ran, what it drafted, and both speeds in tokens/s."""

    device: Device
    model: Model
    variant: Variant
    engine: str
    length: int
    content: str
    plain_tok_s: float
    tok_s: float
    source: str

    @property
    def tokens(self) -> float:
        """Return the tokens per step at the acceptance rate of the text."""
        rate = _ACCEPTANCE[self.content]
        return float((1 - rate ** (self.length + 1)) / (1 - rate))

    @property
    def gain(self) -> float:
        """Return the drafted speed ÷ the plain speed."""
        return self.tok_s / self.plain_tok_s


@cache
def drafted() -> list[Drafted]:
    """Return the published rows."""
    with DATA.open(newline="") as f:
        return [_read(record) for record in csv.DictReader(f)]


def _read(record: dict[str, str]) -> Drafted:
    model = models_by_id()[record["model"]]
    variant = variant_of(model, record["quant"], record["file_bytes"], mlx=False)
    assert variant is not None
    device = replace(resolve(record["machine"]), accelerator=record["engine"])
    return Drafted(
        device, model, variant, record["engine"], int(record["draft_n"] or _USUAL_LENGTH),
        record["content"], float(record["base_tok_s"]), float(record["tok_s"]), record["source"],
    )  # fmt: skip


def rows() -> list[Row]:
    """Return the rows of dense models in the terms of the law: seconds of a step that drafts. (In
    mixtures, each drafted token reads further experts: `drafting.verify_ratios`.)"""
    return [_row(one) for one in drafted() if one.model.experts is None]


def _row(one: Drafted) -> Row:
    hardware = decode_cost.hardware_of(one.device, "llamacpp")
    guesses = one.length * draft_cost.guess_share(one.model, one.variant)
    parts = draft_cost.draft_parts(one.model, one.variant, hardware)
    terms = [((1 + guesses) / one.plain_tok_s, ())]
    terms += [(one.length * part.value, part.powers) for part in parts.values()]
    return Row(
        one.device.name, one.engine, one.model.id, one.variant.quant, False, 0,
        one.tokens / one.tok_s, hardware.keys, tuple(terms), one.source,
    )  # fmt: skip


def report(design: Design) -> list[str]:
    """Return the errors of the drafted speed, as Markdown."""
    runs = [one for one in drafted() if one.model.experts is None]
    by_source = leave_out(design, lambda row: row.source)
    by_device = leave_out(design, lambda row: row.device)
    mixtures = [one for one in drafted() if one.model.experts is not None]
    mixed = [i for i, one in enumerate(runs) if one.content == "mixed"]
    absolute = _with_the_plain_speed(runs, by_source)
    out = [
        "## Speeds with a model's own draft heads",
        "",
        f"{len(runs)} rows of dense models, {len({one.source for one in runs})} sources, "
        f"{len({one.device.name for one in runs})} devices (`benchmarks/data/drafts.csv`); "
        f"{len(design.index)} coefficients. An error is that of the gain: drafted speed ÷ plain speed. "
        "The plain speed is the measured one, unless the row names the predicted one. The number of "
        "drafted tokens is that of the source. The acceptance rates are those that the planner assumes "
        "for code, prose and a mix of both. Mixtures of experts have a constant instead of "
        "coefficients. So no fit predicts them, only the planner. Most rows are of one model "
        "(Qwen3.8-27B), measured with one program.",
        "",
        "| left out | predictions | median \\|error\\| % | 90th percentile % | bias % |",
        "|---|---|---|---|---|",
        _line("**source** (bar 10 / 30, bias 5)", by_source),
        _line("**source**, each source's median", _medians(runs, by_source)),
        _line("**source**, a mix of code and prose", by_source[mixed]),
        _line("**source**, with the predicted plain speed", absolute),
        _line("**device**", by_device),
        _line("mixtures, by the planner", np.array([_planned(one) for one in mixtures])),
        "",
        "| family, each source left out | rows | sources | median \\|error\\| % | 90th percentile % | bias % |",
        "|---|---|---|---|---|---|",
    ]
    groups = _grouped(runs, lambda one: f"{family(one.device.name)}, {one.engine}")
    for name, members in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        n_sources = len({runs[i].source for i in members})
        cells = _line(name, by_source[members]).split("|")
        cells.insert(3, f" {n_sources} ")
        out.append("|".join(cells))
    return [*out, ""]


def _line(name: str, errors: Floats) -> str:
    off = np.abs(errors) * 100
    return (
        f"| {name} | {len(errors)} | {np.median(off):.1f} | {np.percentile(off, 90):.1f} | "
        f"{np.median(errors) * 100:+.1f} |"
    )


def _grouped(runs: Sequence[Drafted], name_of: Callable[[Drafted], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(runs):
        groups[name_of(one)].append(i)
    return groups


def _medians(runs: Sequence[Drafted], errors: Floats) -> Floats:
    groups = _grouped(runs, lambda one: one.source)
    return np.array([np.median(errors[members]) for members in groups.values()])


def _with_the_plain_speed(runs: Iterable[Drafted], errors: Floats) -> Floats:
    """Return the errors of the drafted speed if the plain speed is predicted too (by a fit to these
    and other rows)."""
    found = []
    for one, error in zip(runs, errors, strict=True):
        plain = speed.decode(one.device, one.model, one.variant, depth=300).value
        found.append((1 + error) * plain / one.plain_tok_s - 1)
    return np.array(found)


def _planned(one: Drafted) -> float:
    """Return the error of the planner's prediction of a mixture's gain."""
    (ratio,) = drafting.verify_ratios(one.device, one.model, one.variant, (one.length + 1,))
    hardware = decode_cost.hardware_of(one.device, "llamacpp")
    host_s = draft_cost.draft_seconds(one.model, one.variant, hardware)["guess"]
    guess = draft_cost.guess_share(one.model, one.variant) + host_s * one.plain_tok_s
    gain = drafting.speculation_gain(_ACCEPTANCE[one.content], one.length, guess, ratio)
    return gain / one.gain - 1
