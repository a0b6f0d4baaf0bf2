"""How what was measured on this machine looks beside what was predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.cli.recommend.page import clip, width, wrapped
from localllm.formatting import gb, rate
from localllm.plain_output import ascii_json

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm_catalog.catalog import Catalog


def check(device: Device, catalog: Catalog, *, as_json: bool) -> list[str]:
    """Predicted beside measured for every run this machine remembers, and what may be wrong where
    reality is slower."""
    from localllm.load import measurements
    from localllm.planner import verify

    records = [r for r in measurements.load() if r.machine == device.name]
    results = []
    for r in records:
        known = measurements.for_planner([r], device.name, catalog.by_id)
        if known:
            others = measurements.for_planner(
                [o for o in records if o != r], device.name, catalog.by_id
            )
            results.append(
                verify.compare(
                    device,
                    known[0],
                    others,
                    memory_bytes=r.memory_bytes,
                    predicted_memory_bytes=r.predicted_memory_bytes,
                )
            )
    if as_json:
        return [ascii_json({"runs": [verify.to_json(x) for x in results]})]
    if not results:
        return [f"nothing has been measured on {device.name} yet: run `localllm bench`"]
    lines = [f"Predicted beside measured on {device.name}", ""]
    name = min(max(len(x.name) for x in results), width() - 51)
    lines.append(f"  {'model':{name}} {'quant':8} {'memory':>17} {'decode tok/s':>21}")
    for x in results:
        memory = "–" if x.memory is None else " / ".join(map(gb, x.memory))
        predicted, measured = x.decode
        speed = f"{rate(predicted)} / {rate(measured)} ({measured / predicted - 1:+.0%})"
        lines.append(f"  {clip(x.name, name):{name}} {clip(x.quant, 8):8} {memory:>17} {speed:>21}")
        for cause in x.causes:
            lines += wrapped(cause, "      ", "      ")
    return lines
