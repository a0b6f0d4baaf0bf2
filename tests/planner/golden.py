"""The machines, models and cells of the golden table. `python tests/planner/golden.py` prints a new
table, to be reviewed in the diff."""

from __future__ import annotations

from pathlib import Path

from localllm.device.name_lookup import resolve
from localllm.planner.plan import plan_for
from localllm.planner.starting_settings import Overrides
from localllm.planner.types import Plan, Workload
from localllm_catalog import catalog

FILE = Path(__file__).with_name("golden_verdicts.txt")
MACHINES = (
    "Jetson Orin Nano 8GB",
    "RTX 3060 12GB",
    "M2 16GB",
    "RTX 4090",
    "RTX 5090",
    "M4 Pro 48GB",
    "H100",
    "DGX Spark",
    "Strix Halo 128GB",
    "M4 Max 128GB",
    "M5 Max 128GB",
    "M3 Ultra 512GB",
)
MODELS = (
    "smollm2-135m-instruct",
    "llama-3.2-3b-instruct",
    "qwen3-4b-instruct-2507",
    "gemma-3-4b-it",
    "llama-3.1-8b-instruct",
    "qwen3-8b",
    "qwen3.5-9b",
    "phi-4",
    "gpt-oss-20b",
    "mistral-small-3.2-24b",
    "gemma-3-27b-it",
    "qwen3.8-27b",
    "qwen3-30b-a3b",
    "glm-4.7-flash",
    "qwen3-32b",
    "llama-3.3-70b-instruct",
    "qwen3-next-80b-a3b-instruct",
    "gpt-oss-120b",
    "glm-4.5-air",
    "qwen3-235b-a22b-instruct-2507",
)


CATALOG = catalog.load()


def plan(machine: str, model_id: str, workload: Workload | None = None, **fixed: str) -> Plan:
    """Return the plan of the model's usual GGUF: Q4_K_M, or MXFP4 if it was released so."""
    model = CATALOG.by_id[model_id]
    wanted = ("Q4_K_M", "MXFP4")
    variant = next(v for q in wanted for v in model.variants if v.quant == q and v.format == "gguf")
    overrides = Overrides(kv_type=fixed.get("kv_type", ""))
    return plan_for(resolve(machine), model, variant, workload or Workload(), overrides=overrides)


def cell(found: Plan) -> str:
    """Return yes, tight, split or no, and the decode speed: fast (≥ 20 tok/s), ok (≥ 5) or slow."""
    if found.fits == "no":
        return "no"
    speed = found.decode_tok_s.value
    return f"{found.fits} {'fast' if speed >= 20 else 'ok' if speed >= 5 else 'slow'}"


def table() -> str:
    """Return the whole table: a row per model, a column per machine."""
    width = max(len(m) for m in MODELS)
    lines = ["chat at each purpose's default context, Q4_K_M (MXFP4 for gpt-oss); columns:"]
    lines += [f"  {i}: {machine}" for i, machine in enumerate(MACHINES, 1)]
    lines.append(" " * width + "".join(f" {i:>10}" for i in range(1, len(MACHINES) + 1)))
    for model in MODELS:
        cells = (f" {cell(plan(machine, model)):>10}" for machine in MACHINES)
        lines.append(f"{model:<{width}}" + "".join(cells).rstrip())
    return "\n".join(line.rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
    print(table())
