"""Published speeds as rows of the planner's laws: seconds per token = Σ parts × Π coefficient ^
exponent."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.planner_fit import ages
from localllm.device import parts_table
from localllm.planner import decode_cost, efficiency, kernels, prefill_cost
from localllm.planner.bytes_per_token import facts, streamed
from localllm_catalog import catalog, shapes
from localllm_catalog.layers.full import Full
from localllm_catalog.types import Layer, Model, Variant

DATA = Path(__file__).parent.parent / "data" / "speeds.csv"
# The eras of an engine, by its build or date. A prediction is for the last one.
ERAS = ("2023", "2024", "2025a", "2025b", "2026")
TODAY = ERAS[-1]
RECENT = ERAS[-2:]
_MAMBA2 = ("nemotron", "granite")

Powers = decode_cost.Powers


@dataclass(frozen=True)
class Row:
    """One measurement in the terms of a law: `seconds` of a step of `batch` sequences, or of one
    prompt token.

    `token_s`: the time of one token's arithmetic at the machine's nominal rate.
    `further_sequences`: the addition by sequences after the first, in the terms of their law.
    """

    device: str
    engine: str
    model: str
    quant: str
    moe: bool
    depth: int
    seconds: float
    keys: tuple[str, ...]
    parts: tuple[tuple[float, Powers], ...]
    source: str = ""
    era: str = TODAY
    batch: int = 1
    token_s: float = 0.0
    n_layers: int = 0
    further: tuple[tuple[float, Powers], ...] = ()

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Return the keys of machine and model. For an older engine, also those of its age and of
        its kernels for this generation of chips."""
        if self.era == TODAY:
            return self.keys
        vendor, generation, tier = efficiency.generation(self.device)
        kind = f"{vendor}-{tier or generation}"
        return (*self.keys, f"era:{self.engine}.{self.era}", f"era:{kind}.{self.engine}.{self.era}")

    @property
    def suspect(self) -> bool:
        """Return True for rows that differ from their description. Fits do not use them, and scores
        do not count them."""
        return any(
            self.device in doubt.devices
            and doubt.source in self.source
            and (
                not doubt.prefill_engine
                or (self.is_prefill and self.engine == doubt.prefill_engine)
            )
            and doubt.quant in ("", self.quant)
            and doubt.model in ("", self.model)
            for doubt in SUSPECTS
        )

    @property
    def is_prefill(self) -> bool:
        """Return True for a row of prefill, False for one of decode."""
        return any(name == "matmul" for name, _ in self.parts[0][1])


@dataclass(frozen=True)
class Doubt:
    """Rows that differ from their description, with their source and the reason. `prefill_engine`:
    only prompts of that engine."""

    devices: tuple[str, ...]
    source: str
    why: str
    prefill_engine: str = ""
    quant: str = ""
    model: str = ""


SUSPECTS = (
    Doubt(
        ("Apple M2 Ultra",), "crypdick",
        "Two mixtures on an M2 Ultra at 50,000 tokens. They read memory at a third of the rate of the machine's other source. No "
        "other source has such a slow Metal at that depth",
    ),
    Doubt(
        ("Apple M2 Max", "Apple M5"), "mac-llm-bench",
        "Two machines of mac-llm-bench. The M2 Max is 25 to 35 % slower than in llama.cpp's scoreboard of the chip. The GGUF rows of "
        "the M5 were dropped when the data was collected, because they have half the speed of other sources. In its remaining rows, "
        "two models with the same shapes and format have 20.3 and 58.8 tok/s",
    ),
    Doubt(
        ("AMD Ryzen AI Max+ 395 (Strix Halo, Radeon 8060S)",),
        "strix-halo-testing/tree/main/llm-bench",
        "Prompts under ROCm in lhl's raw runs of 2025 on Strix Halo. They ran without hipBLASLt, and rocBLAS had no kernels for the "
        "chip then (5.1 of 59 TFLOP/s in the author's test, 36.9 with hipBLASLt). The author's table of the same models with "
        "hipBLASLt is in the data instead: its prompts are 3.2 to 5.1 times as fast. Decode is the same in both, so it counts",
        "rocm",
    ),
    Doubt(
        ("AMD Ryzen AI Max+ 395 (Strix Halo, Radeon 8060S)",),
        "strix-halo-testing/tree/main/llm-bench",
        "Prompts of a 70B under Vulkan in the same raw runs (July 2025): 26 tok/s, and 34 to 37 for shorter prompts. Another machine "
        "with the same chip, driver and format and a build of three weeks later has 72.8 tok/s, and 79.1 with the other driver "
        "(kyuz0/amd-strix-halo-toolboxes, 3 August 2025)",
        "vulkan", "Q4_K_M", "llama-3.3-70b-instruct",
    ),
    Doubt(
        ("AMD Ryzen AI Max+ 395 (Strix Halo, Radeon 8060S)",),
        "llama.cpp/discussions/10879",
        "The prompt of a 7B under Vulkan on Strix Halo in llama.cpp's scoreboard (1,289 tok/s without flash attention). It ran on "
        "AMD's own driver, which AMD gave up in September 2025. With builds of 2026 this driver reads the file at 325 to 350 tok/s. "
        "Another owner of the chip measured 1,306 to 1,325 with this driver from August to October 2025, and 869 to 1,006 with "
        "Mesa's driver. The figures with Mesa's driver are in the data (kyuz0/amd-strix-halo-toolboxes)",
        "vulkan", "Q4_0", "llama-2-7b",
    ),
    Doubt(
        ("Apple M2 Pro",), "Rapid-MLX",
        "Prompts of Qwen3.6-27B in 2 bits on an M2 Pro. They would need a third more arithmetic per second than the chip's GPU has. "
        "They are 3.5 times as fast as 4 bits in the same table",
        "mlx", "2bit",
    ),
    *(
        Doubt(
            ("Apple M2 Ultra",), "AtomGradient",
            f"Prompts of Qwen3.5-4B in {quant} on an M2 Ultra. The machine was not idle: in the source's raw file the repetitions "
            "differ by 1 to 9 % (decode by 19 to 36 %), and those of all other files by 0.0 to 0.3 %",
            "metal", quant, "qwen3.5-4b",
        )
        for quant in ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
    ),
    Doubt(
        ("NVIDIA GeForce RTX 3090",), "club-3090/blob/master/BENCHMARKS.md",
        "The prompt of Gemma 4 12B on an RTX 3090, a round 1,000 tok/s. Another machine of the same project reads a 27B at 993",
        "cuda", "Q8_0", "gemma-4-12b-it",
    ),
    Doubt(
        ("NVIDIA Jetson AGX Orin 64GB",), "thehighnotes",
        "One prompt on a Jetson AGX Orin. Its source does not state the length",
        "cuda",
    ),
)  # fmt: skip


def _dense(
    name: str, layers: int, hidden: int, ff: int, heads: int, kv_heads: int, vocab: int
) -> Model:
    """A plain GQA model that is often measured but is not in the catalog."""
    dim = hidden // heads if name != "mistral-nemo-12b" else 128
    layer = Layer(Full(n_kv_heads=kv_heads, head_dim_k=dim, head_dim_v=dim))
    return Model(
        id=name, name=name, family=name, params_total=0, params_active=0, layers=(layer,) * layers,
        hidden_size=hidden,
        intermediate_size=ff, n_heads=heads, head_dim=dim, vocab_size=vocab, native_context=4096,
        architecture="dense",
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


def variant_of(model: Model, quant: str, file_bytes: str, *, mlx: bool) -> Variant | None:
    """Return the file that a row was measured with, with the stated size if there is one."""
    if file_bytes:
        size = int(file_bytes)
    elif mlx:
        size = shapes.estimate_mlx_bytes(model, quant)
    else:
        known = [v.file_bytes for v in model.variants if v.quant == quant and v.format == "gguf"]
        if not known and quant == "MXFP4":
            return None
        size = known[0] if known else shapes.estimate_gguf_bytes(model, quant)
    return Variant("mlx" if mlx else "gguf", quant, "", (), size)


def _batch(record: dict[str, str]) -> int:
    return int(float(record["batch"] or 1))


@cache
def _bins(device: str, bandwidth_gbps: float) -> tuple[int, ...]:
    """Return the numbers of units with which an Apple chip of this bandwidth is sold."""
    chip = device.removeprefix("Apple ")
    sold = (
        row for row in parts_table.rows() if row.name == chip or row.name.startswith(f"{chip} (")
    )
    return tuple(
        row.compute_units
        for row in sold
        if row.bandwidth_gbps == bandwidth_gbps and row.compute_units
    )


def _units(record: dict[str, str]) -> float:
    """Return the stated compute units. If the source names only the chip, return the mean of the
    variants with that bandwidth, which differs from each by at most 15 % (0 if no units are
    known)."""
    stated = float(record["units"] or 0)
    bins = _bins(record["device"], float(record["bandwidth_gbps"])) if not stated else ()
    return stated or (math.prod(bins) ** (1 / len(bins)) if bins else 0.0)


def n_of_unknown_variants() -> int:
    """Return the number of rows whose source names an Apple chip that is sold with several GPUs,
    but not which one."""
    with DATA.open(newline="") as f:
        return sum(
            not record["units"]
            and len(_bins(record["device"], float(record["bandwidth_gbps"]))) > 1
            for record in csv.DictReader(f)
        )


def _flops_s(record: dict[str, str]) -> float:
    return (
        efficiency.part_tflops(record["device"], _units(record), engine=record["engine"])[0] * 1e12
    )


@cache
def models_by_id() -> dict[str, Model]:
    """Return the catalog's models, and models that are often measured but not in the catalog."""
    return {m.id: m for m in catalog.load().models} | EXTRA


def parameter_count(model: Model) -> int:
    """Return the parameters that one token is multiplied with."""
    size = shapes.estimate_gguf_bytes(model, "Q8_0")
    return _active(model, Variant("gguf", "Q8_0", "", (), size))


def _active(model: Model, variant: Variant) -> int:
    parts = streamed(model, variant)
    return parts.dense_params + parts.routed_params


def _era(record: dict[str, str], model: Model) -> str:
    """Return the era of the engine: the recorded one, but not before the model's release."""
    date = re.match(r"(\d{4})(?:-(\d\d))?", model.release_date)
    if date is None:
        return record["era"]
    year, month = date[1], int(date[2] or 1)
    born = {"2025": "2025a" if month < 7 else "2025b"}.get(year, year)
    return max(record["era"], min(born, TODAY))


def _row(
    record: dict[str, str], model: Model, variant: Variant, parts: Sequence[decode_cost.CostTerm]
) -> Row:
    hardware = _hardware(record)
    return Row(
        record["device"], record["engine"], model.id, variant.quant, bool(model.experts),
        _mean_depth(record), _batch(record) / float(record["tok_s"]),
        hardware.keys_for(variant),
        _plain(parts), record["source"], _era(record, model), _batch(record),
        2 * _active(model, variant) / _flops_s(record), len(model.layers),
        _plain(decode_cost.further_parts(model, variant, hardware, _batch(record))),
    )  # fmt: skip


def _plain(parts: Iterable[decode_cost.CostTerm]) -> tuple[tuple[float, Powers], ...]:
    return tuple((part.value, part.powers) for part in parts)


def _hardware(record: dict[str, str]) -> decode_cost.Hardware:
    name, units = record["device"], _units(record)
    return decode_cost.Hardware(
        efficiency.hardware_keys(name, record["engine"]), float(record["bandwidth_gbps"]),
        _flops_s(record) / 1e12,
        power_share=efficiency.share(efficiency.part(name), units),
        clock_ghz=efficiency.clock_ghz(name),
        plain_tflops=efficiency.part_tflops(name, units)[0],
        lane_tflops=efficiency.lane_tflops(name, units) if record["engine"] == "cuda" else 0.0,
    )  # fmt: skip


def _age(record: dict[str, str], model: Model, variant: Variant) -> ages.Age:
    quant = efficiency.quant_class(variant)
    keys = efficiency.hardware_keys(record["device"], record["engine"])
    attention = (layer.mixer for layer in model.layers if layer.mixer.attends)
    kv_heads = next((mixer.head_counts[-1] for mixer in attention), model.n_heads)
    return ages.Age(
        keys, quant, model.experts is not None, model.n_heads / kv_heads, _era(record, model),
        int(record["build"] or 0),
        facts(model).n_recurrent_layers > 0 and model.family in _MAMBA2,
    )  # fmt: skip


def _decode_parts(
    record: dict[str, str], model: Model, variant: Variant
) -> Sequence[decode_cost.CostTerm]:
    generated = re.match(r"tg(\d+)", record["test"])
    depth = float(record["depth"] or 0) + (int(generated.group(1)) / 2 if generated else 0)
    hardware = _hardware(record)
    parts = decode_cost.decode_parts(
        model,
        variant,
        hardware,
        depth=int(depth),
        kv_type=record["kv"] or "f16",
        n_sequences=_batch(record),
    )
    return tuple(
        ages.decode(
            _age(record, model, variant),
            parts,
            _active(model, variant),
            hardware.plain_tflops * 1e12,
        ).values()
    )


def _prompt(record: dict[str, str]) -> tuple[int, int]:
    """Return the tokens of a prompt, and the tokens before it."""
    length = re.match(r"pp(\d+)", record["test"])
    tokens = int(length.group(1)) if length else 2048
    depth = int(float(record["depth"] or 0))
    # a whole prompt of that length; for llama-bench it is a chunk after the depth
    if record["test"] == "prefill" and depth:
        return depth, 0
    return tokens, depth


def _mean_depth(record: dict[str, str]) -> int:
    """Return the context of a row in tokens, as the planner's ranges count it: the middle of a
    prompt."""
    if _is_decode(record):
        return int(float(record["depth"] or 0))
    tokens, depth = _prompt(record)
    return depth + tokens // 2


def _is_decode(record: dict[str, str]) -> bool:
    return record["test"].startswith("tg") or record["test"] == "decode"


def _prefill_parts(
    record: dict[str, str], model: Model, variant: Variant
) -> Sequence[decode_cost.CostTerm]:
    tokens, depth = _prompt(record)
    batch = 2048 if variant.format == "mlx" else int(record["ubatch"] or 512)
    age, hardware, unfused = _age(record, model, variant), _hardware(record), record["flash"] == "0"
    age = replace(age, expert_tokens=prefill_cost.expert_tokens(model, min(tokens, batch)))
    parts = prefill_cost.prefill_parts(
        model, variant, hardware, prompt_tokens=tokens, depth=depth, n_batch=batch,
        masked=kernels.ALL_MASKED if unfused else ages.masked(age, batch),
    )  # fmt: skip
    if unfused:
        context = prefill_cost.mean_context(tokens, depth, min(tokens, batch))
        moved = ages.scores_bytes(model, context) / (hardware.bandwidth_gbps * 1e9)
        parts["activations"] = parts["activations"]._replace(
            value=parts["activations"].value + moved
        )
    return tuple(ages.prefill(age, parts).values())


def rows(law: str, *, batched: bool = False) -> list[Row]:
    """Return every single-sequence row of `law` ("decode" or "prefill") whose model is known.
    `batched`: return those of several sequences instead, with seconds per step (only
    llama-batched-bench's, because others include the time of the prompts)."""
    models = models_by_id()
    found = []
    with DATA.open(newline="") as f:
        for record in csv.DictReader(f):
            if (_batch(record) > 1) != batched or _is_decode(record) != (law == "decode"):
                continue
            if batched and not record["test"].startswith("tg"):
                continue
            model, mlx = models[record["model"]], record["engine"] == "mlx"
            variant = variant_of(model, record["quant"], record["file_bytes"], mlx=mlx)
            if variant is None:
                continue
            found.append(
                _row(
                    record,
                    model,
                    variant,
                    (_decode_parts if law == "decode" else _prefill_parts)(record, model, variant),
                )
            )
    return found
