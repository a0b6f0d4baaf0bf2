"""Fit localllm/planner/efficiency.json to published speeds, and report its errors for unseen rows.

    python -m benchmarks.planner_fit            report (files, models and devices left out one at a
                                                time)
    python -m benchmarks.planner_fit --write    report, then write localllm/planner/efficiency.json
                                                from all rows and
                                                the report to benchmarks/planner_fit.md

OPENBLAS_NUM_THREADS=1 makes it several times faster, because its matrices are small.

"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.planner_fit import batched, drafts
from benchmarks.planner_fit.fit import BASE, Design, Fit
from benchmarks.planner_fit.report import INTRODUCTION, batched_report, report
from benchmarks.planner_fit.rows import Row, rows
from localllm.planner import efficiency

REPORT = Path(__file__).parent.with_suffix(".md")
# The head of the table that --write writes.
ABOUT = [
    "How close each kind of machine comes to its limits: written by benchmarks/planner_fit, do not "
    "edit by hand.",
    "Natural logarithms: coefficient = exp(base + sum of the effects of every key that applies). "
    "The effects of cpu are set in benchmarks/planner_fit from measurements on x86 cores.",
    "Sources of every row: benchmarks/data/speeds.csv and drafts.csv.",
]
# CPU: the data has no published row. These figures are from llama.cpp 0.3.36 on two Zen 5 cores (34
# GB/s measured): SmolLM2-135M Q4_1 at 6.8 ms and Gemma-3-270M Q4_K_M at 11.5 ms per token give 25
# GB/s and 99 µs per layer; 128-token prompts at 320 and 746 tok/s give 34-75 GFLOP/s per core. The
# machine's own figures replace them after one `localllm bench`.
CPU = {
    "decode": {
        "eta": 0.75, "layer_s": 95e-6, "expert_layer_s": 60e-6, "recurrent_layer_s": 60e-6,
        "routed": 1.2, "kv": 0.5,
        "kv_mla": 0.17, "state": 0.5, "moe": 1.0, "size": 1.0,
    },
    "prefill": {
        "matmul": 1.1, "attention": 0.4, "eta": 0.75, "layer_s": 95e-6, "expert_layer_s": 95e-6,
        "recurrent_layer_s": 95e-6, "scan": 0.2, "moe": 1.5, "clock": math.e,
    },
}  # fmt: skip


def tables(
    fitted: Mapping[str, tuple[Fit, Sequence[Row], Mapping[str, float]]],
) -> dict[str, object]:
    """Return efficiency.json: bases, effects above half a percent, row counts, widths of ranges.
    Effects of past eras are not included."""
    found: dict[str, object] = {"about": ABOUT}
    for law, (fit, data, widths) in fitted.items():
        index = fit.design.index
        base = {name: float(fit.theta[index["", name]]) for name in BASE[law]}
        effects: dict[str, dict[str, float]] = defaultdict(dict)
        for (key, name), j in sorted(index.items()):
            if key and not key.startswith("era:") and abs(fit.theta[j]) >= 0.005:
                effects[key][name] = round(float(fit.theta[j]), 3)
        effects["cpu"] = {
            name: round(math.log(value) - base[name], 3)
            for name, value in sorted(CPU.get(law, {}).items())
        }
        learnt = [row for row in data if not row.suspect]
        counts = Counter(key for row in learnt for key in row.keys if not key.startswith("quant:"))
        found[law] = {
            "base": {name: round(value, 4) for name, value in base.items()},
            "width": {name: value for name, value in widths.items() if value},
            "effects": {key: effects[key] for key in sorted(effects) if effects[key]},
            "rows": dict(sorted(counts.items())),
        }
    return found


def main() -> None:
    """Report, and with --write replace the table."""
    fitted: dict[str, tuple[Fit, Sequence[Row], Mapping[str, float]]] = {}
    text = [INTRODUCTION]
    for law in ("decode", "prefill"):
        data = rows(law)
        lines, widths = report(law, data)
        print("\n".join(lines))
        text += lines
        learnt = [i for i, row in enumerate(data) if not row.suspect]
        fitted[law] = (Fit(Design(law, data), learnt), data, widths)
    single = rows("decode")
    lines, widths = batched_report(single)
    print("\n".join(lines))
    text += lines
    both = batched.extended(single)
    one = Fit(both, [i for i, row in enumerate(both.data) if row.batch == 1 and not row.suspect])
    many = batched.law_of(both, one)
    fitted["batched"] = (Fit(many), many.data, widths)
    drafted = Design(drafts.LAW, drafts.rows())
    fitted[drafts.LAW] = (Fit(drafted), drafted.data, {})
    lines = drafts.report(drafted)
    print("\n".join(lines))
    text += lines
    if "--write" in sys.argv:
        efficiency.FILE.write_text(json.dumps(tables(fitted), indent=1) + "\n", encoding="utf-8")
        REPORT.write_text("\n".join(text), encoding="utf-8")
        print(f"wrote {efficiency.FILE.name} and {REPORT.name}")


if __name__ == "__main__":
    main()
