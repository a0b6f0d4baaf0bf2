"""Device: what a machine offers, the readings it is identified from, and its JSON. Every number
carries its basis."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from localllm.device.accelerators import Accelerator as Accelerator
from localllm.errors import LocalLLMError, NotFoundError
from localllm.memory.account import Basis as Basis
from localllm.memory.account import Memory as Memory

DeviceKind = Literal["unified", "discrete", "system"]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and how it is known: `measured` here, `reported` by the system, from a `datasheet`,
    `derived` from other figures, `assumed`, or `given` on the command line.
    `source` names the probe, page or rule.
    `busy`: measured while other programs had much of the processor, so that the machine may give
    more."""

    value: float
    basis: Basis
    source: str = ""
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth telling the user about this machine, with the exact command that fixes it (or
    "")."""

    level: Literal["info", "warning", "error"]
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class MatrixRates:
    """TFLOP/s (two operations per weight and token) at which matrices are multiplied: with a
    prompt's tokens at once, the same where each is sent to experts of its own, and with one
    token's."""

    prompt_tflops: Figure
    experts_tflops: Figure
    token_tflops: Figure


@dataclass(frozen=True, slots=True)
class TypeRates:
    """What a processor makes of matrices of one type of number ("Q4_K"), with the weights as they
    are stored, and as the engine lays them out anew (None: it has no layout for them)."""

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

    `memory` is the pool weights and KV live in;
    `host` the system memory beside a discrete GPU (None where it is the same pool). Bandwidths are
    decimal GB/s, compute dense TFLOP/s by precision;
    `matrix_rates` are what a processor makes of matrices with the installed llama.cpp, as far as
    that was timed (none of a GPU).
    `match` is the devices.toml row, `cpu_vectors` the widest vectors the processor computes with
    ("AVX-512", "" = not known).
    `n_gpus` cards can share a model layer by layer: `memory` is their sum, compute is one card's;
    `cards` is each of several by itself (empty: not known apart), and `number` a card's place among
    the accelerators, by PCI address.
    """

    name: str
    kind: DeviceKind
    accelerator: Accelerator
    family: str
    memory: Memory
    bandwidth_gbps: Figure
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
    cpu_vectors: str = ""
    match: str = ""
    simulated: bool = False
    n_gpus: int = 1
    cards: tuple[Device, ...] = ()
    number: int = 0
    findings: tuple[Finding, ...] = ()
    __hash__ = object.__hash__  # by identity: what is asked of a machine again and again is kept

    @property
    def room_bytes(self) -> int:
        """What a plan may take of `memory`, in bytes: of a card what is free now, as it ends in an
        error or, on Windows, in the slow system-memory fallback; of memory that the system lives in
        too its limit, as others can give way."""
        if self.kind == "discrete":
            return self.memory.loadable_bytes
        return self.memory.limit_bytes

    @property
    def accounts(self) -> list[str]:
        """The account of each place that a plan is held against, a line each: every card, and
        system memory beside them."""
        here = "this GPU" if self.kind == "discrete" else "this machine"
        places = [(card.name, card.memory) for card in self.cards] or [(here, self.memory)]
        if self.kind == "discrete" and self.host is not None:
            places.append(("system memory", self.host))
        if len(places) == 1:
            [(_, memory)] = places
            return [memory.account()]
        return [f"{name}: {memory.account()}" for name, memory in places]


class DeviceUnreadableError(
    LocalLLMError,
    code="device_unreadable",
    default_hint="describe the machine yourself: --device NAME --memory GB --bandwidth GBPS",
):
    """The system did not say what every Device needs: how much memory there is."""


class DeviceNotFoundError(
    NotFoundError,
    code="device_not_found",
    default_hint=(
        "give --memory GB and --bandwidth GBPS to describe a machine that is not in the table"
    ),
):
    """No device of that name in the table. The hint names the nearest ones."""


System = Literal["linux", "macos", "windows"]


@dataclass(frozen=True, slots=True)
class Readings:
    """What one machine said. `files` maps a path to its text, `outputs` a probe or command to what
    it printed.

    Anything that could not be read is simply absent: no reading is ever invented.
    """

    system: System
    architecture: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    def file(self, path: str) -> str:
        """The file's text without surrounding blanks and NULs, "" if it was not there."""
        return self.files.get(path, "").strip("\x00 \t\r\n")

    def output(self, name: str) -> str:
        return self.outputs.get(name, "")

    def matching(self, pattern: str) -> list[str]:
        return sorted(fnmatch.filter(self.files, pattern))


def device_to_json(device: Device) -> dict[str, Any]:
    """The published shape of a Device: bytes as integers, GB/s and TFLOP/s as {value, basis,
    source} or null."""
    matrix_rates = [
        {"type": rates.type, "stored": _rates(rates.stored), "laid_out": _rates(rates.laid_out)}
        for rates in device.matrix_rates
    ]
    figures = {
        "memory": _memory(device.memory),
        "bandwidth_gbps": _figure(device.bandwidth_gbps),
        "host_memory": _memory(device.host),
        "host_bandwidth_gbps": _figure(device.host_bandwidth_gbps),
        "fp16_tflops": _figure(device.fp16_tflops),
        "fp8_tflops": _figure(device.fp8_tflops),
        "fp4_tflops": _figure(device.fp4_tflops),
        "matrix_rates": matrix_rates,
    }
    return {
        "name": device.name,
        "kind": device.kind,
        "accelerator": device.accelerator,
        "family": device.family,
        "simulated": device.simulated,
        **figures,
        "compute_units": device.compute_units or None,
        "compute_capability": device.compute_capability or None,
        "n_gpus": device.n_gpus,
        "os": device.os or None,
        "cpu": device.cpu or None,
        "n_cpu_cores": device.n_cpu_cores or None,
        "cpu_vectors": device.cpu_vectors or None,
        "match": device.match or None,
        "findings": [asdict(finding) for finding in device.findings],
    }


def _memory(memory: Memory | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    return {**asdict(memory), "loadable_bytes": memory.loadable_bytes}


def _rates(rates: MatrixRates | None) -> dict[str, Any] | None:
    if rates is None:
        return None
    return {f.name: _figure(getattr(rates, f.name)) for f in fields(rates)}


def _figure(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {"value": figure.value, "basis": figure.basis, "source": figure.source}
