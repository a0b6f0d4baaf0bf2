"""The first pick on 42 machines for four purposes, each reviewed: `golden_picks.txt`.

`python tests/planner/golden_picks.py` rewrites the file. A changed pick loses its reason and must
be reviewed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localllm.device.name_lookup import resolve
from localllm.planner.recommend import recommend
from localllm.planner.types import Plan, Workload
from localllm_catalog import catalog

FILE = Path(__file__).with_name("golden_picks.txt")
MACHINES = (
    "Core i7-13700K 32GB",
    "N100 16GB",
    "Snapdragon X Elite 32GB",
    "EPYC 7702 256GB",
    "EPYC 9654 768GB",
    "Jetson Orin Nano 8GB",
    "M1 8GB",
    "M2 16GB",
    "M4 16GB",
    "M3 Pro 36GB",
    "M4 Pro 48GB",
    "M2 Ultra 192GB",
    "M4 Max 128GB",
    "M5 Max 128GB",
    "M3 Ultra 512GB",
    "GTX 1650",
    "GTX 1080 Ti",
    "Tesla P40",
    "RTX 3060 12GB",
    "RTX 4050 Laptop + 16GB RAM",
    "RTX 4060",
    "RTX 3080",
    "RTX 5060 Ti 16GB",
    "RTX 4070 Ti SUPER",
    "RTX 3090",
    "2x RTX 3090",
    "RTX 4090",
    "RTX 5090",
    "RTX 5090 + RTX 3090",
    "A100 80GB",
    "RTX PRO 6000",
    "H100",
    "Radeon 780M 32GB",
    "Ryzen AI 9 HX 370 64GB",
    "RX 580",
    "RX 6800 XT",
    "Radeon RX 7900 XTX",
    "Radeon RX 9070 XT",
    "Arc B580",
    "Arc Pro B60",
    "Strix Halo 128GB",
    "DGX Spark",
)
WORKLOADS = {
    "chat": Workload(),
    "coding": Workload("coding"),
    "autocomplete": Workload("autocomplete"),
    "long documents": Workload("long"),
}
NOT_JUDGED = "not judged yet"
NOTHING = "nothing"


def picked(plans: Sequence[Plan]) -> str:
    """Return model, files (with ~ if they are not published) and engine of the first plan."""
    if not plans:
        return NOTHING
    plan = plans[0]
    made = "~" if plan.variant.is_estimate else ""
    kv = "" if plan.settings.kv_type == "f16" else f" {plan.settings.kv_type} KV"
    return (
        f"{plan.model.id} {made}{plan.variant.quant} "
        f"{plan.backend}{kv}{'' if plan.fits == 'yes' else f' {plan.fits}'}"
    )


def judged() -> dict[tuple[str, str], tuple[str, str]]:
    """Return (pick, reason) by machine and purpose from the file."""
    found = {}
    machine = ""
    for line in FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else ():
        if line and not line.startswith((" ", "#")):
            machine = line
        elif ":" in line and machine:
            purpose, _, rest = line.strip().partition(": ")
            pick, _, reason = rest.partition(" | ")
            found[machine, purpose] = pick, reason
    return found


def table() -> str:
    """Return all picks by machine and purpose, with the reasons of unchanged picks."""
    models = catalog.load().models
    known = judged()
    lines = [
        "# The first pick, and why whoever knows machine and models would make it too. What moves "
        "is judged again."
    ]
    for machine in MACHINES:
        device = resolve(machine)
        lines += ["", machine]
        for purpose, workload in WORKLOADS.items():
            pick = picked(recommend(device, models, workload).plans)
            was, reason = known.get((machine, purpose), ("", ""))
            lines.append(f"  {purpose}: {pick} | {reason if was == pick else NOT_JUDGED}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    written = table()
    FILE.write_text(written, encoding="utf-8")
    print(written)
