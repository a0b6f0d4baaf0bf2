"""Fits localllm/planner/efficiency.toml to published speeds, and reports how well it predicts rows it has not seen.

    python -m benchmarks.planner_fit            report (four ways of holding rows back)
    python -m benchmarks.planner_fit --write    report, then write localllm/planner/efficiency.toml from all rows and
                                                the report to benchmarks/planner_fit.md

OPENBLAS_NUM_THREADS=1 makes it several times faster: its matrices are small.

Data: benchmarks/data/speeds.csv (llama-bench and mlx-lm results with their sources, trust "good"). The laws are those
of localllm/planner/laws.py; every coefficient is exp(base + Σ effects of its keys), fitted by ridge-regularised
Gauss-Newton on ln(seconds per token) with Huber weights, so that a key with few rows stays near its parent. A part's
own effects have Student-t priors: where three or more of a kind are known, one far from its kin does not
drag them along.
"""

from __future__ import annotations

import csv
import math
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localllm.planner import efficiency, families, laws
from localllm.planner.facts import facts
from localllm.planner.streams import streamed
from localllm_catalog import catalog, shapes
from localllm_catalog.types import Layer, Model, Variant

DATA = Path(__file__).parent / "data" / "speeds.csv"
REPORT = Path(__file__).with_suffix(".md")
SHORT, DEEP = 2048, 8192


def _dense(name: str, layers: int, hidden: int, ff: int, heads: int, kv_heads: int, vocab: int) -> Model:
    """A plain GQA model that is measured often and not in the catalog."""
    dim = hidden // heads if name != "mistral-nemo-12b" else 128
    layer = Layer("full", n_kv_heads=kv_heads, head_dim_k=dim, head_dim_v=dim)
    return Model(
        id=name, name=name, family=name, params_total=0, params_active=0, layers=(layer,) * layers, hidden_size=hidden,
        intermediate_size=ff, n_heads=heads, head_dim=dim, vocab_size=vocab, native_context=4096, architecture="dense",
    )  # fmt: skip


EXTRA = {
    m.id: m
    for m in (
        _dense("llama-2-7b", 32, 4096, 11008, 32, 32, 32000),
        _dense("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 32000),
        _dense("mistral-7b", 32, 4096, 14336, 32, 8, 32768),
        _dense("mistral-nemo-12b", 40, 5120, 14336, 32, 8, 131072),
    )
}


@dataclass(frozen=True)
class Row:
    """One measurement in the terms of a law: seconds per token = Σ parts × Π coefficient ^ exponent."""

    device: str
    engine: str
    model: str
    quant: str
    moe: bool
    depth: int
    seconds: float
    keys: tuple[str, ...]
    parts: tuple[tuple[float, tuple[tuple[str, int], ...]], ...]
    source: str = ""


def _variant(model: Model, quant: str, file_bytes: str, *, mlx: bool) -> Variant | None:
    if file_bytes:
        size = int(file_bytes)
    elif mlx:
        size = shapes.estimate_mlx_bytes(model, quant.replace("-g32", "-g32"))
    else:
        known = [v.file_bytes for v in model.variants if v.quant == quant and v.format == "gguf"]
        if not known and quant == "MXFP4":
            return None
        size = known[0] if known else shapes.estimate_gguf_bytes(model, quant)
    return Variant("mlx" if mlx else "gguf", quant, "", (), size)


def _decode_row(
    record: dict[str, str], model: Model, variant: Variant, keys: tuple[str, ...], hw: Sequence[str]
) -> Row:
    generated = re.match(r"tg(\d+)", record["test"])
    depth = float(record["depth"] or 0) + (int(generated.group(1)) / 2 if generated else 0)
    parts = streamed(model, variant)
    known = facts(model)
    layers, experts, recurrent = known.n_layers, known.n_expert_layers, known.n_recurrent_layers
    bandwidth = float(record["bandwidth_gbps"]) * 1e9
    moe = (("moe", 1),) if model.experts else ()
    kv = "kv_mla" if any(layer.kind == "mla" for layer in model.layers) else "kv"
    core = (("graph", 1), *moe)
    return Row(
        record["device"], hw[0], model.id, variant.quant, bool(model.experts), int(float(record["depth"] or 0)),
        1 / float(record["tok_s"]), keys,
        (
            (parts.dense_bytes / bandwidth, (("eta", -1), ("quant", 1), *core)),
            (parts.routed_bytes / bandwidth, (("eta", -1), ("quant", 1), ("routed", 1), *core)),
            (float(layers), (("layer_s", 1), *core)),
            (float(experts), (("expert_layer_s", 1), *core)),
            (float(recurrent), (("recurrent_layer_s", 1), *core)),
            (shapes.kv_bytes(model, int(depth)) / bandwidth, ((kv, -1),)),
        ),
        record["source"],
    )  # fmt: skip


def _prefill_row(
    record: dict[str, str], model: Model, variant: Variant, keys: tuple[str, ...], hw: Sequence[str]
) -> Row:
    length = re.match(r"pp(\d+)", record["test"])
    tokens = int(length.group(1)) if length else 2048
    depth = int(float(record["depth"] or 0))
    tflops, _ = families.part_tflops(record["device"], int(float(record["units"] or 0)))
    batch = max(1, min(tokens, 2048 if variant.format == "mlx" else int(record["ubatch"] or 512)))
    parts = streamed(model, variant)
    known = facts(model)
    layers, experts, recurrent = known.n_layers, known.n_expert_layers, known.n_recurrent_layers
    moe = (("moe", 1),) if model.experts else ()
    weights = max(1, parts.dense_params + parts.routed_params - model.vocab_size * model.hidden_size)
    attention = sum(laws.attention_flops(layer, model.n_heads, depth + tokens / 2) for layer in model.layers)
    bandwidth = float(record["bandwidth_gbps"]) * 1e9
    return Row(
        record["device"], hw[0], model.id, variant.quant, bool(model.experts), depth, 1 / float(record["tok_s"]), keys,
        (
            (2 * weights / (tflops * 1e12), (("matmul", -1), ("quant", 1), ("graph", 1), *moe)),
            (attention / (tflops * 1e12), (("attention", -1),)),
            (parts.step_bytes(model, batch) / bandwidth / batch, (("eta", -1),)),
            (layers / batch, (("layer_s", 1),)),
            (experts / batch, (("expert_layer_s", 1),)),
            (recurrent / batch, (("recurrent_layer_s", 1),)),
        ),
        record["source"],
    )  # fmt: skip


def rows(law: str) -> list[Row]:
    """Every single-sequence row of `law` ("decode" or "prefill") the catalog knows the model of."""
    models = {m.id: m for m in catalog.load().models} | EXTRA
    found = []
    with DATA.open(newline="") as f:
        for record in csv.DictReader(f):
            decoding = record["test"].startswith("tg") or record["test"] == "decode"
            if float(record["batch"] or 1) != 1 or decoding != (law == "decode"):
                continue
            model, mlx = models[record["model"]], record["engine"] == "mlx"
            variant = _variant(model, record["quant"], record["file_bytes"], mlx=mlx)
            if variant is None:
                continue
            hw = families.hardware_keys(record["device"], record["engine"])
            vendor = families.generation(record["device"])[0]
            keys = (*hw, *laws.format_keys(model, variant.quant, engine=hw[0], vendor=vendor, mlx=mlx))
            make = _decode_row if law == "decode" else _prefill_row
            found.append(make(record, model, variant, keys, hw))
    return found


# --- the fit --------------------------------------------------------------------------------------------------------

BASE = {
    "decode": {
        "eta": 0.8, "layer_s": 4e-5, "expert_layer_s": 3e-5, "recurrent_layer_s": 2e-5, "routed": 1.2, "kv": 0.5,
        "kv_mla": 0.2, "quant": 1.0, "graph": 1.0, "moe": 1.0,
    },
    "prefill": {
        "matmul": 0.55, "attention": 0.25, "eta": 0.6, "layer_s": 4e-5, "expert_layer_s": 1e-4,
        "recurrent_layer_s": 5e-5, "quant": 1.0, "graph": 1.0, "moe": 1.5,
    },
}  # fmt: skip
# Prior standard deviations of effects, in ln, by level of key: (engine, generation, tier, part).
_HARDWARE_SD = {
    "decode": {
        "eta": (0.20, 0.16, 0.13, 0.13), "layer_s": (0.78, 0.52, 0.39, 0.39), "expert_layer_s": (0.65, 0.39, 0.39, 0.39),
        "recurrent_layer_s": (0.65, 0.39, 0.26, 0.26), "routed": (0.20, 0.20, 0.00, 0.13), "kv": (0.39, 0.39, 0.26, 0.26),
        "kv_mla": (0.52, 0.39, 0.00, 0.26), "moe": (0.10, 0.10, 0.07, 0.10),
    },
    "prefill": {
        "matmul": (0.60, 0.45, 0.15, 0.18), "attention": (0.75, 0.60, 0.15, 0.30), "eta": (0.45, 0.30, 0.00, 0.15),
        "layer_s": (0.90, 0.60, 0.30, 0.30), "expert_layer_s": (0.90, 0.60, 0.30, 0.30), "recurrent_layer_s": (0.75, 0.45, 0.00, 0.30),
        "moe": (0.60, 0.45, 0.15, 0.22),
    },
}  # fmt: skip
# Noise of one row, in ln: runs of the same part and file in different hands differ by about this much.
SIGMA = {"decode": 0.10, "prefill": 0.15}
_BASE_SD = {"moe": 0.4, "quant": 0.001, "graph": 0.001, "routed": 0.3}
# Degrees of freedom of the Student-t prior on a part's own effects; None = normal. By holding whole devices back, normal
# against Student-t: decode 13.6 -> 12.8 % (depth >= 8k: 17.0 -> 15.1 %), prefill 27.6 -> 28.9 %, so prefill keeps normal.
PART_FREEDOM: dict[str, float | None] = {"decode": 1.0, "prefill": None}
# A model's own graph (its norms, gates and small kernels), across machines: narrow, so the physics stays in charge.
MODEL_SD = (0.03, 0.02)
_WIDE_FORMATS = ("bf16", "iq", "f16")


def prior_sd(law: str, key: str, name: str) -> float:
    """How far `key` may move coefficient `name`, as a standard deviation in ln; 0 = not at all."""
    kind, _, rest = key.partition(":")
    if kind == "quant":
        if name != "quant":
            return 0.0
        wide = rest.split(".")[0] in _WIDE_FORMATS
        return (0.08, 0.06, 0.06, 0.15)[rest.count(".")] * (3 if wide else 1) * (1.5 if law == "prefill" else 1)
    if kind == "arch":
        return (0.08 if "." not in rest else 0.06) * (2 if law == "prefill" else 1) if name == "graph" else 0.0
    if kind.startswith("model"):
        return MODEL_SD[1 if "@" in kind else 0] if law == "decode" and name == "graph" else 0.0
    sds = _HARDWARE_SD[law].get(name)
    if sds is None:
        return 0.0
    if kind == "part":
        return sds[3]
    head = key.split(".")[0]
    if "-" not in head:
        return sds[0]
    return sds[2] if head in ("apple-base", "apple-pro", "apple-max", "apple-ultra") else sds[1]


class Fit:
    """Coefficients of one law: natural logs of the base and of every (key, coefficient) effect."""

    def __init__(self, law: str, data: Sequence[Row], iterations: int = 25) -> None:
        self.law = law
        sigma = SIGMA[law]
        names = list(BASE[law])
        self.index: dict[tuple[str, str], int] = {("", name): i for i, name in enumerate(names)}
        for row in data:
            used = {name for value, powers in row.parts if value for name, _ in powers}
            for key in row.keys:
                for name in used:
                    if prior_sd(law, key, name) > 0:
                        self.index.setdefault((key, name), len(self.index))
        self.theta = np.zeros(len(self.index))
        for name, value in BASE[law].items():
            self.theta[self.index["", name]] = math.log(value)
        start = self.theta.copy()
        sd = [_BASE_SD.get(n, 1.0) if not k else prior_sd(law, k, n) for k, n in self.index]
        normal = 1 / np.array(sd) ** 2
        penalty, freedom = normal, PART_FREEDOM[law]
        # Which machine of a kind is the odd one takes three to tell; below that it may speak for its kind.
        kin: dict[str, set[str]] = defaultdict(set)
        for row in data:
            kin[family(row.device)].add(row.device)
        alike = {key for r in data if len(kin[family(r.device)]) >= 3 for key in r.keys if key.startswith("part:")}
        own = np.array([key in alike for key, _ in self.index])
        target = np.array([math.log(row.seconds) for row in data])
        # Rows of one series (the same file at several depths) are not independent.
        series = Counter((r.device, r.engine, r.model, r.quant) for r in data)
        weight = np.array([series[r.device, r.engine, r.model, r.quant] ** -0.4 for r in data])
        for _ in range(iterations):
            if freedom is not None:  # the normal prior that touches the Student-t's at the present effects
                scaled = (self.theta - start) ** 2 * normal
                penalty = np.where(own, normal * (freedom + 1) / (freedom + scaled), normal)
            jacobian, residual = np.zeros((len(data), len(self.index))), np.zeros(len(data))
            for i, row in enumerate(data):
                seconds, gradient = self._evaluate(row)
                residual[i] = target[i] - math.log(seconds)
                for j, value in gradient.items():
                    jacobian[i, j] = value
            w = weight / np.maximum(1.0, np.abs(residual) / (1.2 * sigma)) / sigma**2
            hessian = jacobian.T @ (jacobian * w[:, None]) + np.diag(penalty)
            step = np.linalg.solve(hessian, jacobian.T @ (w * residual) - penalty * (self.theta - start))
            largest = float(np.max(np.abs(step)))
            self.theta += step * min(1.0, 1.0 / largest)
            if largest < 2e-3:
                break

    def _places(self, keys: Iterable[str], name: str) -> list[int]:
        return [j for key in ("", *keys) if (j := self.index.get((key, name))) is not None]

    def _evaluate(self, row: Row) -> tuple[float, dict[int, float]]:
        places: dict[str, list[int]] = {}
        logs: dict[str, float] = {}
        for name in BASE[self.law]:
            places[name] = self._places(row.keys, name)
            logs[name] = float(sum(self.theta[j] for j in places[name]))
        values = []
        for value, powers in row.parts:
            exponent = sum(power * logs[name] for name, power in powers)
            names = [name for name, _ in powers]
            if "eta" in names and "quant" in names:  # the cap of laws.decode_terms
                exponent += max(0.0, (logs["eta"] - logs["quant"]) - math.log(0.98))
            if "routed" in names:
                exponent += max(0.0, -logs["routed"])
            values.append(value * math.exp(exponent))
        total = sum(values)
        gradient: dict[int, float] = defaultdict(float)
        for value, (_, powers) in zip(values, row.parts, strict=True):
            for name, power in powers:
                for j in places[name]:
                    gradient[j] += power * value / total
        return total, gradient

    def error(self, row: Row) -> float:
        """Predicted ÷ measured speed − 1."""
        return row.seconds / self._evaluate(row)[0] - 1


# Prefill of 2025 builds on gfx1151, before its matrix kernels: 3-10 times slower than 2026's on the same machine. They
# are still predicted and counted in every report, but nobody who installs today meets them, so no fit learns them.
_SUPERSEDED = ("strix-halo-testing", "llm-tracker.info")


def superseded(law: str, row: Row) -> bool:
    """True for rows that today's engines have left behind."""
    return law == "prefill" and any(name in row.source for name in _SUPERSEDED)


# --- holding rows back ----------------------------------------------------------------------------------------------

Split = Callable[[list[Row], int], tuple[list[Row], list[Row]]]


def by_file(data: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Every device's files (model × quant × engine) dealt to two halves: all depths of a file stay together."""
    return _deal(data, seed, lambda r: (r.model, r.quant, r.engine))


def by_model(data: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Every device's models dealt to two halves."""
    return _deal(data, seed, lambda r: (r.model,))


def _deal(data: list[Row], seed: int, unit: Callable[[Row], tuple[str, ...]]) -> tuple[list[Row], list[Row]]:
    rng = random.Random(seed)
    units: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for row in data:
        units[row.device].add(unit(row))
    first, offset = set(), 0
    for device in sorted(units):
        order = sorted(units[device])
        rng.shuffle(order)
        first |= {(device, u) for i, u in enumerate(order) if (i + offset) % 2 == 0}
        offset += len(order)
    return [r for r in data if (r.device, unit(r)) in first], [r for r in data if (r.device, unit(r)) not in first]


def by_device(data: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Whole devices held back: what a machine nobody has measured would see."""
    devices = sorted({r.device for r in data})
    random.Random(seed).shuffle(devices)
    first = set(devices[: len(devices) // 2])
    return [r for r in data if r.device in first], [r for r in data if r.device not in first]


def by_device_in_family(data: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Whole devices held back, each family's devices dealt to both halves: an unmeasured machine of a known kind."""
    rng = random.Random(seed)
    devices: dict[str, set[str]] = defaultdict(set)
    for row in data:
        devices[family(row.device)].add(row.device)
    first, offset = set(), 0
    for name in sorted(devices):
        order = sorted(devices[name])
        rng.shuffle(order)
        first |= {device for i, device in enumerate(order) if (i + offset) % 2 == 0}
        offset += len(order)
    return [r for r in data if r.device in first], [r for r in data if r.device not in first]


def family(device: str) -> str:
    """Vendor and Apple tier, or vendor and generation."""
    vendor, gen, tier = families.generation(device)
    return f"{vendor} {tier or gen}"


def cross_errors(law: str, data: list[Row], split: Split, seeds: int = 3) -> list[tuple[Row, float]]:
    """(row, error) of every row predicted from the other half, both ways round."""
    found = []
    for seed in range(seeds):
        one, two = split(data, seed)
        for train, test in ((one, two), (two, one)):
            fit = Fit(law, [r for r in train if not superseded(law, r)], iterations=15)
            found += [(row, fit.error(row)) for row in test]
    return found


def plain_errors(data: list[Row], split: Split, seeds: int = 3) -> list[tuple[Row, float]]:
    """The plain two-parameter fit t = bytes/(η·BW) + t0 per family × engine × dense/MoE, as a yardstick."""
    found = []
    for seed in range(seeds):
        one, two = split(data, seed)
        for train, test in ((one, two), (two, one)):
            groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
            for row in train:
                for key in _plain_keys(row):
                    groups[key].append(row)
            fits = {key: _plain_fit(members) for key, members in groups.items() if len(members) >= 3}
            for row in test:
                found_key = next((k for k in _plain_keys(row) if k in fits), None)
                if found_key is not None:
                    slope, constant = fits[found_key]
                    found.append((row, row.seconds / (slope * _bytes_time(row) + constant) - 1))
    return found


def _plain_keys(row: Row) -> list[tuple[str, ...]]:
    vendor, gen, tier = families.generation(row.device)
    family = f"{vendor}-{tier or gen}"
    return [(family, row.engine, str(row.moe)), ("*", row.engine, str(row.moe))]


def _bytes_time(row: Row) -> float:
    return row.parts[0][0] + row.parts[1][0]


def _plain_fit(members: list[Row]) -> tuple[float, float]:
    x, y = np.array([_bytes_time(r) for r in members]), np.array([r.seconds for r in members])
    best = (math.inf, 1.0, 0.0)
    for constant in np.linspace(0, 8e-3, 33):
        slope = float(np.exp(np.median(np.log(y - np.minimum(constant, 0.8 * y)) - np.log(x))))
        score = float(np.mean(np.abs(np.log((slope * x + constant) / y))))
        best = min(best, (score, slope, float(constant)))
    return best[1], best[2]


# --- report and write -----------------------------------------------------------------------------------------------


# "By device" is the hard reading of the bar: nothing of the machine has been seen.
SPLITS: tuple[tuple[str, str, Split], ...] = (
    ("file", "part", by_file),
    ("model", "family", by_model),
    ("device, within families", "", by_device_in_family),
    ("device", "engine", by_device),
)
# Rows their compiler keeps but leaves out of statistics: 25-35 % below llama.cpp's scoreboard for the same chip. They are
# fitted and counted here like any other; one line of the report says what the score is without them.
_SUSPECT = ("Apple M2 Max", "mac-llm-bench")


def line(name: str, errors: Iterable[float]) -> str:
    """One row of a report's table: count, median, 90th percentile and bias, in percent."""
    e = np.array(list(errors))
    if not len(e):
        return f"| {name} | 0 | | | |"
    a = np.abs(e) * 100
    return f"| {name} | {len(e)} | {np.median(a):.1f} | {np.percentile(a, 90):.1f} | {np.median(e) * 100:+.1f} |"


def report(law: str, data: list[Row]) -> tuple[list[str], dict[str, float]]:
    """The errors of every way of holding back, as Markdown; and the spreads for the table."""
    out = [f"## {law.capitalize()}", "", f"{len(data)} rows, {len({r.device for r in data})} devices, "
           f"{len({r.model for r in data})} models. Rows are counted once for each of three random halvings.", ""]  # fmt: skip
    head = [
        "| held back by | predictions | median \\|error\\| % | 90th percentile % | bias % |",
        "|---|---|---|---|---|",
    ]
    devices: dict[str, set[str]] = defaultdict(set)
    for row in data:
        devices[family(row.device)].add(row.device)
    out += head
    spread, kept = {}, {}
    for name, level, split in SPLITS:
        errors = kept[name] = cross_errors(law, data, split)
        short = [(r, e) for r, e in errors if r.depth < SHORT]
        out.append(line(f"**{name}**: short context", (e for _, e in short)))
        out.append(line(f"{name}: depth ≥ 8k", (e for r, e in errors if r.depth >= DEEP)))
        if name.startswith("device"):
            several = [(r, e) for r, e in short if len(devices[family(r.device)]) > 1]
            out.append(line(f"{name}: short, families of two or more devices", (e for _, e in several)))
        if law == "decode":
            clean = (e for r, e in short if not (r.device == _SUSPECT[0] and _SUSPECT[1] in r.source))
            out.append(line(f"{name}: short, without the suspect M2 Max", clean))
            plain = [e for r, e in plain_errors(data, split) if r.depth < SHORT]
            out.append(line(f"{name}: short, plain two-parameter fit", plain))
        else:
            today = (e for r, e in short if not superseded(law, r))
            out.append(line(f"{name}: short, without superseded 2025 builds of Strix Halo", today))
        if level:
            spread[level] = round(float(np.percentile(np.abs(np.log1p([e for _, e in errors])), 80)) / 1.28, 3)
    for name in ("file", "device"):
        groups: dict[str, list[float]] = defaultdict(list)
        for r, e in kept[name]:
            if r.depth < SHORT:
                few = "" if len(devices[family(r.device)]) > 1 else " (one device)"
                groups[f"{family(r.device)}{few} × {r.engine} × {'MoE' if r.moe else 'dense'}"].append(e)
        out += ["", f"### By family and engine, held back by {name}, short context", "", *head]
        out += [line(group, members) for group, members in sorted(groups.items(), key=lambda g: (-len(g[1]), g[0]))]
    spread["none"] = 0.45
    return [*out, ""], spread


def to_toml(laws: dict[str, tuple[Fit, list[Row], dict[str, float]]]) -> str:
    """efficiency.toml: bases, effects above half a percent, row counts, spreads."""
    out = [
        "# How close each kind of machine comes to its limits: written by benchmarks/planner_fit.py, do not edit by hand.",
        "# Natural logarithms: coefficient = exp(base + sum of the effects of every key that applies). [*.cpu] is set in",
        "# benchmarks/planner_fit.py from measurements on x86 cores. Sources of every row: benchmarks/data/speeds.csv.",
        "",
        "[meta]",
        'source = "published llama-bench and mlx-lm results, benchmarks/data/speeds.csv"',
    ]
    for law, (fit, data, spread) in laws.items():
        out += ["", f"[{law}.base]"]
        out += [f"{name} = {fit.theta[fit.index['', name]]:.4f}" for name in BASE[law]]
        out += ["", f"[{law}.spread]"] + [f"{name} = {value}" for name, value in spread.items()]
        effects: dict[str, dict[str, float]] = defaultdict(dict)
        for (key, name), j in fit.index.items():
            if key and abs(fit.theta[j]) >= 0.005:
                effects[key][name] = fit.theta[j]
        effects["cpu"] = {name: math.log(value) - fit.theta[fit.index["", name]] for name, value in CPU[law].items()}
        out += ["", f"[{law}.effects]"]
        for key in sorted(effects):
            body = ", ".join(f"{n} = {v:.3f}" for n, v in sorted(effects[key].items()))
            out.append(f'"{key}" = {{ {body} }}')
        counts = Counter(key for row in data for key in row.keys if not key.startswith(("quant:", "arch:", "model")))
        out += ["", f"[{law}.rows]"] + [f'"{key}" = {n}' for key, n in sorted(counts.items())]
    return "\n".join(out) + "\n"


# CPU: no published row is in the data. These are what llama.cpp 0.3.36 does on two Zen 5 cores (34 GB/s measured):
# SmolLM2-135M Q4_1 6.8 ms and Gemma-3-270M Q4_K_M 11.5 ms a token solve to 25 GB/s and 99 µs a layer; 128-token prompts
# at 320 and 746 tok/s are 34-75 GFLOP/s a core. The machine's own figures replace them after one `localllm bench`.
CPU = {
    "decode": {
        "eta": 0.75, "layer_s": 95e-6, "expert_layer_s": 60e-6, "recurrent_layer_s": 60e-6, "routed": 1.2, "kv": 0.5,
        "kv_mla": 0.2, "moe": 1.0,
    },
    "prefill": {
        "matmul": 0.9, "attention": 0.4, "eta": 0.75, "layer_s": 95e-6, "expert_layer_s": 95e-6,
        "recurrent_layer_s": 95e-6, "moe": 1.5,
    },
}  # fmt: skip


INTRODUCTION = """# How well the planner predicts speeds it has not seen

Written by `python -m benchmarks.planner_fit --write`; rows and sources: `benchmarks/data/speeds.csv`. Half of the rows
are fitted, the other half predicted, and the reverse. Errors are predicted ÷ measured − 1. "Short" is less than 2,048
tokens of context. Bars: decode median 8, 90th percentile 22; at depth 8k and more median 12; prefill median 18.

- Held back by **file** (model × quant × engine of a device) or by **model**, the machine has been seen with something
  else, as after one `localllm bench`. Held back by **device**, it has not.
- What is left by device is between machines, not between models: on most machines nearly all rows miss in the same
  direction by a similar share. Why is not known from the data; known differences that no datasheet tells are builds
  (the llama.cpp scoreboard of discussion 4167 is mostly of November 2023) and one set of M2 Max rows, 25-35 % below
  that scoreboard, scored with and without below. Both are fitted.
- By device the plain fit answers only where it has a group to answer from, so it counts fewer predictions.
- The Student-t prior of a part's own effects was chosen among a dozen variants (prior widths, weights per device) by
  holding back whole devices of these same rows, so the device figures are slightly optimistic.
"""


def main() -> None:
    """Report, and with --write replace the table."""
    laws, text = {}, [INTRODUCTION]
    for law in ("decode", "prefill"):
        data = rows(law)
        lines, spread = report(law, data)
        fit = Fit(law, [r for r in data if not superseded(law, r)])
        text += lines
        print("\n".join(lines))
        laws[law] = (fit, data, spread)
    if "--write" in sys.argv:
        efficiency.FILE.write_text(to_toml(laws), encoding="utf-8")
        REPORT.write_text("\n".join(text), encoding="utf-8")
        print(f"wrote {efficiency.FILE.name} and {REPORT.name}")


if __name__ == "__main__":
    main()
