"""The errors of the laws for unseen rows, by the way of leaving rows out, as Markdown."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from benchmarks.planner_fit import batched, kinds, ranges
from benchmarks.planner_fit.fit import Design, Floats, family, leave_out
from benchmarks.planner_fit.rows import RECENT, SUSPECTS, TODAY, Row, n_of_unknown_variants
from localllm.planner import efficiency

DEEP = 8192
_FOLDS = 20  # of files, because there are many
SPLITS: tuple[tuple[str, Callable[[Row], object]], ...] = (
    ("file", lambda r: zlib.crc32(repr((r.device, r.engine, r.model, r.quant)).encode()) % _FOLDS),
    ("model", lambda r: r.model),
    ("device", lambda r: r.device),
    ("source", kinds.source),
)
_HEAD = [
    "| left out | predictions | median \\|error\\| % | 90th percentile % | bias % |",
    "|---|---|---|---|---|",
]

INTRODUCTION = """# How well the planner predicts speeds that its fit did not use

Written by `python -m benchmarks.planner_fit --write`. The rows and their sources are in `benchmarks/data/speeds.csv`.

Each **model**, each **device** and each **source** is left out once, and its rows are predicted by a fit to all other rows. The
**files** (model × quant × engine of a device) are divided into twenty parts, and each part is left out once. A source is one
machine, one build and one way of measuring. So a new report can expect the errors by source.

An error is predicted speed ÷ measured speed − 1. Each row is predicted for its own era, which is the age of its engine: 2023, 2024,
2025a, 2025b or 2026. Recent rows are those of 2025b and later. Plans are made for the last era.

- If a file or a model is left out, the fit still has other rows of the same machine, as after one `localllm bench`. If a device
  is left out, the fit has none. Then most of the error is a difference between machines, not between models: nearly all rows of a
  machine miss in the same direction, by a similar share.
- The baseline is t = bytes ÷ (η·bandwidth) + t₀ (prefill: FLOPs ÷ (η·units) + t₀). It has two coefficients per family × engine ×
  dense or MoE. If no such group is left for a row, the baseline does not predict it. So it may have fewer predictions.
- These rows are not used for any fit, the baseline included, and their errors are not counted:
DOUBTS
- In VARIANTS rows the source names an Apple chip that is sold with several GPUs, but not which one. These rows get the geometric
  mean of the core counts that are sold with that bandwidth.
- If the era of a row is before the release of its model, the era of the release is used.
- Two kinds of slowdown are constants: missing kernels (`localllm/planner/kernels.toml`) and older software
  (`benchmarks/planner_fit/ages.py`). They come from published measurements that are not rows of the data. Three of them were made on
  a Strix Halo, the chip with the most rows, but on other machines or with other models. Those for Intel were made on a B580 and a
  B70.
- The standard deviations of the priors were chosen by these errors. So the errors are slightly too small.
- Each 80 % range is wide enough to contain four in five of the left-out rows of its stratum (`benchmarks/planner_fit/ranges.py`).
  "Seen" strata are for machines with rows of their own, and "unseen part" strata for machines with rows of their family only. The
  strata of an engine ("cuda MoE") are for families with few rows, and for families without rows. A row counts in the narrowest
  stratum with at least 15 rows and two sources.
- Less evidence or a deeper context never makes a range narrower. So the range of an unseen part is at least as wide as that of a
  seen part of its family, and the range of a deep context at least as wide as that of a short one. Strata that contradict this order
  share one width.
- A P100 multiplies quantised weights byte by byte. The time for that is a constant from its own rows (`kernels.toml`). So its error
  as a left-out device is too small.
- This project measured the rows of the H200 (llama.cpp of llama-cpp-python 0.3.36, November 2026).
""".replace("DOUBTS", "\n".join(f"  - {doubt.why}." for doubt in SUSPECTS)).replace(
    "VARIANTS", str(n_of_unknown_variants())
)
# The bars: (median, 90th percentile) of |error| in percent, by law and line, left out by device.
BARS = {
    ("decode", ""): (7.5, 21), ("decode", ", recent rows"): (6.5, 18),
    ("decode", f", depth ≥ {DEEP:,}"): (8, 18),
    ("prefill", ", recent rows"): (11, 30), ("batched", ""): (12, 35),
}  # fmt: skip


def line(name: str, errors: Iterable[float]) -> str:
    """Return one row of a report's table: count, median, 90th percentile and bias, in percent."""
    e = np.array(list(errors))
    if not len(e):
        return f"| {name} | 0 | | | |"
    a = np.abs(e) * 100
    return (
        f"| {name} | {len(e)} | {np.median(a):.1f} | {np.percentile(a, 90):.1f} | "
        f"{np.median(e) * 100:+.1f} |"
    )


def _bar(law: str, label: str) -> str:
    """Return the bar of a line, for its name: " (bar 7 / 18)", or ""."""
    found = BARS.get((law, label))
    return f" (bar {found[0]:g} / {found[1]:g})" if found else ""


def report(law: str, data: Sequence[Row]) -> tuple[list[str], dict[str, float]]:
    """Return the errors of every way of leaving out, as Markdown, and the widths of ranges for the
    table."""
    design = Design(law, data)
    counted = np.array([not row.suspect for row in data])
    recent = counted & np.array([row.era in RECENT for row in data])
    deep = counted & np.array([row.depth >= DEEP for row in data])
    today = counted & np.array([row.era == TODAY for row in data])
    out = [f"## {law.capitalize()}", "",
        f"{len(data)} rows, {len({r.device for r in data})} devices, "
           f"{len({r.model for r in data})} models; {len(design.index)} coefficients.", "",
           *_HEAD]  # fmt: skip
    held_back: dict[str, Floats] = {}
    for name, unit in SPLITS:
        errors = leave_out(design, unit)
        held_back[name] = errors
        baseline = baseline_errors(data, unit)
        for label, chosen in (
            ("", counted),
            (", recent rows", recent),
            (", rows of 2026", today),
            (f", depth ≥ {DEEP:,}", deep),
        ):
            bar = _bar(law, label) if name == "device" else ""
            out.append(line(f"**{name}**{label}{bar}", errors[chosen]))
            out.append(line(f"{name}{label}: baseline", (e for i, e in baseline if chosen[i])))
    devices: dict[str, set[str]] = defaultdict(set)
    groups: dict[str, list[float]] = defaultdict(list)
    for row in data:
        devices[family(row.device)].add(row.device)
    for row, error, chosen in zip(data, held_back["device"], recent, strict=True):
        if chosen:
            alone = "" if len(devices[family(row.device)]) > 1 else " (one device)"
            groups[
                f"{family(row.device)}{alone} × {row.engine} × {'MoE' if row.moe else 'dense'}"
            ].append(error)
    out += ["", "### By family and engine, each device left out, recent rows", "", *_HEAD]
    out += [
        line(group, members)
        for group, members in sorted(groups.items(), key=lambda g: (-len(g[1]), g[0]))
    ]
    lines, widths = ranges.report(law, ranges.misses(design))
    by_kind = kinds.report(law, data, held_back["source"], widths)
    stated = ["### Inside the stated 80 % range", "", *lines]
    return [*out, "", *by_kind, *noise(data), *stated], widths


def batched_report(single: Sequence[Row]) -> tuple[list[str], dict[str, float]]:
    """Return the same for several sequences at once, left out by properties that the rows of both
    laws share."""
    widths: dict[str, float] = {}
    inside: list[str] = []
    out = ["## Decode of several sequences at once", ""]
    lines = [*_HEAD]
    for name, unit in SPLITS:
        data, errors = batched.leave_out(single, unit)
        bar = _bar("batched", "") if name == "device" else ""
        lines.append(line(f"**{name}**{bar}", errors))
        baseline = baseline_errors([*single, *data], unit, n_learnt=len(single))
        lines.append(line(f"{name}: baseline", (e for i, e in baseline if i >= len(single))))
        if name == "device":
            sizes = sorted({row.batch for row in data})
            chosen = [
                (n, [e for row, e in zip(data, errors, strict=True) if row.batch == n])
                for n in sizes
            ]
            lines += [line(f"device, {n} sequences", members) for n, members in chosen]
            # One machine of a kind: each is treated as the first measured one of its kind.
            engines = {row.keys[0]: 1 for row in data}
            pairs = zip(data, errors, strict=True)
            missed = [ranges.missed(r, float(e), engines) for r, e in pairs]
            inside, widths = ranges.report("batched", missed)
    out += [
        f"{len(data)} rows of these devices: {', '.join(machines_of(data))}. The baseline reads the "
        "bytes of the whole step.",
        "",
        *lines,
        "",
        *inside,
    ]
    return [*out, ""], widths


def machines_of(data: Sequence[Row]) -> list[str]:
    """Return the sorted names of the devices of `data`."""
    return sorted({row.device for row in data})


def noise(data: Sequence[Row]) -> list[str]:
    """Report how much rows of one file on one part at one depth, length and era differ: the error
    that no law can avoid."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in data:
        if not row.suspect:
            groups[row.device, row.engine, row.model, row.quant, row.parts, row.era].append(row)
    found = [g for g in groups.values() if len(g) > 1]
    apart = [
        abs(math.log(r.seconds / float(np.median([x.seconds for x in g]))))
        for g in found
        for r in g
    ]
    if not apart:
        return []
    return [
        f"Noise: {len(apart)} rows have the same file, part, depth, length and era as another row. "
        "Their difference from the median of their group is "
        f"{100 * float(np.median(apart)):.1f} % (median) and "
        f"{100 * float(np.percentile(apart, 90)):.1f} % (90th percentile). Nearly all rows of a group "
        "are from one source. So the difference between machines is larger.",
        "",
    ]


# --- the baseline ---------------------------------------------------------------------------------


def baseline_errors(
    data: Sequence[Row], unit: Callable[[Row], object], *, n_learnt: int | None = None
) -> list[tuple[int, float]]:
    """Return (row, error) by the simple two-coefficient fit t = bytes/(η·BW) + t0 per family ×
    engine × dense/MoE (prefill: FLOPs and units instead). `n_learnt`: only the first rows, up to
    this number, are used for the fit."""
    members: dict[object, list[int]] = defaultdict(list)
    for i, row in enumerate(data):
        members[unit(row)].append(i)
    found = []
    for held in members.values():
        left_out = set(held)
        groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for i, row in enumerate(data):
            if i not in left_out and not row.suspect and (n_learnt is None or i < n_learnt):
                for key in _baseline_keys(row):
                    groups[key].append(row)
        wanted = {key for i in held for key in _baseline_keys(data[i])}
        fits = {key: _baseline_fit(groups[key]) for key in wanted if len(groups.get(key, ())) >= 3}
        for i in held:
            known = next((k for k in _baseline_keys(data[i]) if k in fits), None)
            if known is not None:
                slope, constant = fits[known]
                found.append((i, data[i].seconds / (slope * _bytes_time(data[i]) + constant) - 1))
    return found


def _baseline_keys(row: Row) -> list[tuple[str, ...]]:
    vendor, gen, tier = efficiency.generation(row.device)
    return [(f"{vendor}-{tier or gen}", row.engine, str(row.moe)), ("*", row.engine, str(row.moe))]


def _bytes_time(row: Row) -> float:
    """Return the seconds that the weights take at the nominal rate: their bytes in decode, their
    arithmetic in prefill."""
    named = {name for name, _ in row.parts[0][1]}
    return row.parts[0][0] + (row.parts[1][0] if "eta" in named else 0.0)


def _baseline_fit(members: Sequence[Row]) -> tuple[float, float]:
    x, y = np.array([_bytes_time(r) for r in members]), np.array([r.seconds for r in members])
    best = (math.inf, 1.0, 0.0)
    for constant in np.linspace(0, min(8e-3, float(np.median(y))), 33):
        slope = float(np.exp(np.median(np.log(y - np.minimum(constant, 0.8 * y)) - np.log(x))))
        score = float(np.mean(np.abs(np.log((slope * x + constant) / y))))
        best = min(best, (score, slope, float(constant)))
    return best[1], best[2]
