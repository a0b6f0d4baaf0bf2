"""Device: what a machine offers. Every number carries its basis; nothing is guessed silently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.device.accelerators import Accelerator as Accelerator

Basis = Literal["measured", "reported", "datasheet", "derived", "assumed", "given"]
DeviceKind = Literal["unified", "discrete", "system"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and how it is known: `measured` here, `reported` by the system, from a `datasheet`, `derived` from
    other figures, `assumed`, or `given` on the command line. `source` names the probe, page or rule."""

    value: float
    basis: Basis
    source: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth telling the user about this machine, with the exact command that fixes it (or "")."""

    level: Literal["info", "warning", "error"]
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the pool the accelerator computes from.

    total: installed. limit: the most a model may ever use (hard). available: what can be used now (soft, <= limit).
    """

    total_bytes: int
    limit_bytes: int
    available_bytes: int
    basis: Basis
    source: str = ""


@dataclass(frozen=True, slots=True)
class MatrixRates:
    """TFLOP/s (two operations per weight and token) at which matrices are multiplied: with a prompt's tokens at once, the same
    where each is sent to experts of its own, and with one token's."""

    prompt_tflops: Figure
    experts_tflops: Figure
    token_tflops: Figure


@dataclass(frozen=True, slots=True)
class TypeRates:
    """What a processor makes of matrices of one type of number ("Q4_K"), with the weights as they are stored, and as the engine
    lays them out anew (None: it has no layout for them)."""

    type: str
    stored: MatrixRates
    laid_out: MatrixRates | None = None

    @property
    def usual(self) -> MatrixRates:
        """As the engine would have it: laid out anew where it can."""
        return self.laid_out or self.stored


@dataclass(frozen=True, slots=True)
class Device:
    """One machine as a place to run one model.

    `memory` is the pool weights and KV live in; `host` the system memory beside a discrete GPU (None where it is the
    same pool). Bandwidths are decimal GB/s, compute dense TFLOP/s by precision; `matrix_rates` are what a processor
    makes of matrices with the installed llama.cpp, as far as that was timed (none of a GPU). `match` is the devices.toml row.
    `n_gpus` cards share the model layer by layer: `memory` is their sum, compute is one card's, and `cards_bytes` what each
    of them may hold (empty: the same).
    """

    name: str
    kind: DeviceKind
    accelerator: Accelerator
    family: str
    memory: Memory
    bandwidth_gbps: Figure | None
    host: Memory | None = None
    host_bandwidth_gbps: Figure | None = None
    fp16_tflops: Figure | None = None
    fp8_tflops: Figure | None = None
    fp4_tflops: Figure | None = None
    matrix_rates: tuple[TypeRates, ...] = ()
    compute_units: int = 0
    compute_capability: str = ""
    os: str = ""
    cpu: str = ""
    n_cpu_cores: int = 0
    match: str = ""
    simulated: bool = False
    n_gpus: int = 1
    cards_bytes: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()
