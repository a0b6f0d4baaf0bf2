"""The first three picks on 14 machines for three workloads, each with its evidence.

`python tests/planner/golden_picks.py` prints them anew, to be reviewed in the diff."""

from __future__ import annotations

from pathlib import Path

from localllm.device.named import resolve
from localllm.planner.recommend import recommend
from localllm.planner.types import Plan, Workload
from localllm_catalog import catalog

FILE = Path(__file__).with_name("golden_picks.txt")
MACHINES = (
    "Jetson Orin Nano 8GB",
    "M2 16GB",
    "RTX 3060 12GB",
    "RTX 4070 Ti SUPER",
    "Radeon RX 7900 XTX",
    "RTX 3090",
    "RTX 4090",
    "RTX 5090",
    "M4 Pro 48GB",
    "H100",
    "DGX Spark",
    "Strix Halo 128GB",
    "M4 Max 128GB",
    "M3 Ultra 512GB",
)
WORKLOADS = {"chat": Workload(), "coding": Workload("coding"), "agents at 32k": Workload("coding", 32768)}
_SHOWN = 3


def line(number: int, plan: Plan) -> str:
    """One pick: files (~ where nobody lists them), memory, speed to two figures, and what its quality rests on."""
    made = "~" if plan.variant.is_estimate else ""
    kv = "" if plan.settings.kv_type == "f16" else f" {plan.settings.kv_type} KV"
    speed = float(f"{plan.decode_tok_s.value:.2g}")
    return (
        f"    {number} {plan.model.id} {made}{plan.variant.quant} {plan.backend}, {plan.memory.total_bytes / 1e9:.1f} GB"
        f"{kv} {plan.fits}, {speed:g} tok/s; {plan.quality:.1f} points: "
        f"{plan.quality_basis if plan.is_rated else 'unrated, ' + plan.quality_basis}"
    )


def table() -> str:
    """Machine by machine, workload by workload."""
    models = catalog.load().models
    lines = []
    for machine in MACHINES:
        device = resolve(machine)
        lines.append(f"{machine} ({device.name}, {device.memory.limit_bytes / 1e9:.1f} GB usable)")
        for what, workload in WORKLOADS.items():
            lines.append(f"  {what}")
            picks = recommend(device, models, workload).plans[:_SHOWN]
            lines += [line(number, plan) for number, plan in enumerate(picks, 1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
    print(table())
