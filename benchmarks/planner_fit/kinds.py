"""Errors of whole sources that were left out, by kind of device and by kind of model.

A fit uses no row of a source and predicts all of them. Rows that share a source share its machine,
its build and its way of measuring. So these errors are the largest of all ways to leave rows out,
and the closest to those of a new machine or a new report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np

from benchmarks.planner_fit import ranges
from benchmarks.planner_fit.fit import Floats
from benchmarks.planner_fit.rows import RECENT, Row, models_by_id, parameter_count
from localllm.planner import efficiency
from localllm.planner.bytes_per_token import facts

# Parameters that separate the sizes of dense models.
_SMALL, _LARGE = 3e9, 14e9
_DEPTHS = ((2_048, "up to 2k"), (32_768, "2k to 32k"))
# Names of GPUs that share system memory with a CPU, apart from Strix Halo and Apple's.
_INTEGRATED = ("amd-apu", "intel-xe", "qualcomm-adreno")


def source(row: Row) -> str:
    """Return the source of a row, which is left out as a whole."""
    return row.source


def device_kind(row: Row) -> str:
    """Return the kind of device and its engine: "Mac, metal", "NVIDIA card, cuda"."""
    vendor, generation, _ = efficiency.generation(row.device)
    kind = f"{vendor.upper()} card"
    if " + " in row.device:
        kind = "several cards"
    elif vendor == "apple":
        kind = "Mac"
    elif generation == "gb10":
        kind = "DGX Spark"
    elif generation == "strix-halo":
        kind = "Strix Halo"
    elif f"{vendor}-{generation}" in _INTEGRATED:
        kind = "integrated GPU"
    return f"{kind}, {row.engine}"


@cache
def model_kind(model_id: str) -> str:
    """Return the kind of a model: its size if dense, a mixture, latent KV or recurrent layers."""
    model = models_by_id()[model_id]
    known = facts(model)
    if model.experts is not None:
        if known.heads_share_row:
            return "MoE with a latent KV"
        if known.n_recurrent_layers:
            return "MoE with recurrent layers"
        return "MoE"
    if known.n_recurrent_layers:
        return "dense with recurrent layers"
    parameters = parameter_count(model)
    if parameters < _SMALL:
        return "dense, under 3B"
    if parameters < _LARGE:
        return "dense, 3B to 14B"
    return "dense, 14B and more"


def depth_kind(row: Row) -> str:
    """Return the range of the row's mean context, in tokens."""
    for most, name in _DEPTHS:
        if row.depth <= most:
            return name
    return "beyond 32k"


KINDS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("kind of device", device_kind),
    ("kind of model", lambda row: model_kind(row.model)),
    ("context", depth_kind),
)


def report(law: str, data: Sequence[Row], errors: Floats, widths: Mapping[str, float]) -> list[str]:
    """Return Markdown tables of a law's `errors` (predicted ÷ measured − 1) with whole sources left
    out, for recent rows, by kind. `widths` are the widths of ranges by stratum."""
    out = [f"### Whole sources left out, by kind: {law}, recent rows", ""]
    counted = [i for i, row in enumerate(data) if row.era in RECENT and not row.suspect]
    inside = _inside(data, errors, widths)
    for name, kind_of in KINDS:
        out += [
            f"| {name} | rows | sources | median \\|error\\| % | 90th percentile % | bias % | in the 80 % range % |",
            "|---|---|---|---|---|---|---|",
            *_lines(data, errors, inside, counted, kind_of),
            "",
        ]
    return out


def _lines(
    data: Sequence[Row],
    errors: Floats,
    inside: Sequence[bool],
    counted: Sequence[int],
    kind_of: Callable[[Row], str],
) -> Iterator[str]:
    groups: dict[str, list[int]] = defaultdict(list)
    for i in counted:
        groups["**all**"].append(i)
        groups[kind_of(data[i])].append(i)
    for name, members in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        of = errors[members]
        off = np.abs(of) * 100
        held = 100 * np.mean([inside[i] for i in members])
        n_sources = len({data[i].source for i in members})
        yield (
            f"| {name} | {len(members)} | {n_sources} | {np.median(off):.1f} | "
            f"{np.percentile(off, 90):.1f} | {np.median(of) * 100:+.1f} | {held:.0f} |"
        )


def _inside(data: Sequence[Row], errors: Floats, widths: Mapping[str, float]) -> list[bool]:
    """Return whether each row is in the range that its prediction gets without its source."""
    learn = [row for row in data if not row.suspect]
    known = {
        name: ranges.known(row for row in learn if row.source != name)
        for name in {row.source for row in data}
    }
    return [
        ranges.missed(row, float(error), known[row.source]).is_inside(widths)
        for row, error in zip(data, errors, strict=True)
    ]
