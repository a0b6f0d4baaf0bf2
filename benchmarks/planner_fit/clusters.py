"""The accuracy of `recommend --link` for published speeds of several machines.

Usage: python -m benchmarks.planner_fit.clusters. Rows and sources are in data/clusters.csv. Rows
split by layers are assumed to have llama.cpp's placement, by each machine's memory. Rows that also
state the speed of one machine alone with the same file were used for `cluster.RPC_S`. The others
were not.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner_fit.rows import variant_of
from localllm.cli.recommend.cluster import machines
from localllm.planner import cluster
from localllm.planner.types import Range, RunSettings
from localllm_catalog import catalog
from localllm_catalog.types import Model

DATA = Path(__file__).parents[1] / "data" / "clusters.csv"
_ROOM_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Compared:
    """A published row and its prediction in tokens/s. `seen`: it was used for RPC's cost. `today`:
    it was measured with an engine of 2026, which is predicted. `shared`: every machine had a share
    of each layer."""

    what: str
    n_machines: int
    decoding: bool
    measured: float
    predicted: Range
    seen: bool
    today: bool
    shared: bool = False

    @property
    def error(self) -> float:
        """Return the relative error: 0.1 is a prediction that is ten percent too fast."""
        return self.predicted.value / self.measured - 1


def compared() -> list[Compared]:
    """Return every row of the data with its prediction."""
    models = {m.id: m for m in catalog.load().models}
    with DATA.open(newline="", encoding="utf-8") as f:
        return [_compare(record, models) for record in csv.DictReader(f)]


def _compare(record: dict[str, str], models: dict[str, Model]) -> Compared:
    model, shared = models[record["model"]], record["split"] == "shared"
    variant = variant_of(model, record["quant"], record["file_bytes"], mlx=shared)
    if variant is None:
        raise ValueError(f"{record['model']} {record['quant']}: its size is not known")
    boxes, depth, test = machines(record["devices"]), int(record["depth"]), record["test"]
    found = re.fullmatch(r"(tg|pp)(\d+)", test)
    if found is None:
        raise ValueError(f"{test}: not a test")
    decoding, n_tokens = found[1] == "tg", int(found[2])
    settings = RunSettings(n_ctx=depth + _ROOM_TOKENS, n_batch=int(record["ubatch"]))
    total = sum(b.memory.limit_bytes for b in boxes)
    layers = [round(len(model.layers) * b.memory.limit_bytes / total) for b in boxes]
    layers[-1] = len(model.layers) - sum(layers[:-1])
    shares = [
        cluster.Share(b, n, 0, b.memory.limit_bytes) for b, n in zip(boxes, layers, strict=True)
    ]
    link = cluster.LINKS.get(record["link"], cluster.LINKS["10gbe"])
    if shared:
        said = cluster.tensor_parallel_decode(
            model, variant, settings, boxes, link, depth=depth + n_tokens // 2
        )
    elif decoding:
        said = cluster.decode_over(
            model, variant, settings, shares, link, depth=depth + n_tokens // 2
        )
    else:
        said = cluster.prefill_over(
            model, variant, settings, shares, link, prompt_tokens=n_tokens, depth=depth
        )
    return Compared(
        f"{record['devices']:33} {record['model'][:22]:22} {record['quant']:9} {test:7} @{depth:<6}", len(boxes),
        decoding, float(record["tok_s"]), said, bool(record["alone_tok_s"]),
        record["build"] >= "2025-11", shared,
    )  # fmt: skip


def main() -> None:
    """Print every row, and the median of the errors by group."""
    rows = compared()
    for row in rows:
        p = row.predicted
        print(
            f"{row.what} {row.measured:7.1f} tok/s, predicted {p.value:6.1f} "
            f"({p.low:.1f}-{p.high:.1f}) {row.error:+.0%}"
        )
    groups: Sequence[tuple[str, Callable[[Compared], bool]]] = (
        ("decode, two machines", lambda r: r.decoding and r.n_machines == 2 and not r.shared),
        (
            "decode, two machines, never seen",
            lambda r: r.decoding and r.n_machines == 2 and not (r.seen or r.shared),
        ),
        ("decode, two machines, every layer shared (MLX)", lambda r: r.shared),
        (
            "decode, three and four machines (engines of August 2025)",
            lambda r: r.decoding and r.n_machines > 2,
        ),
        ("prompts, two machines", lambda r: not r.decoding),
        ("all of two machines", lambda r: r.n_machines == 2),
        (
            "all of two machines, engines of November 2025 or newer",
            lambda r: r.n_machines == 2 and r.today,
        ),
    )
    for name, belongs in groups:
        mine = [r for r in rows if belongs(r)]
        within = sum(r.predicted.low <= r.measured <= r.predicted.high for r in mine)
        median = statistics.median(abs(r.error) for r in mine)
        bias = statistics.median(r.error for r in mine)
        print(
            f"{name}: median |error| {median:.0%}, bias {bias:+.0%}, {within} of {len(mine)} "
            "within the range"
        )


if __name__ == "__main__":
    main()
