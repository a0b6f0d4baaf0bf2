"""Device, the readings it is identified from, and its JSON. Every number carries its basis."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

from localllm.device.accelerators import Accelerator as Accelerator
from localllm.errors import LocalLLMError, NotFoundError
from localllm.memory.account import Basis as Basis
from localllm.memory.account import Memory as Memory

DeviceKind = Literal["unified", "discrete", "system"]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its basis.

    - `basis`: `measured` here, `reported` by the system, from a `datasheet`, `derived` from other
      figures, `assumed`, or `given` on the command line.
    - `source`: the probe, page or rule.
    - `busy`: measured while other programs used much of the processor. The machine may give more.
    """

    value: float
    basis: Basis
    source: str = ""
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about this machine that the user should know.

    `fix` is the exact command that fixes it, or "".
    """

    level: Literal["info", "warning", "error"]
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class MatrixRates:
    """Rates of matrix products in TFLOP/s (two operations per weight and token).

    - `prompt_tflops`: many tokens of a prompt at once.
    - `experts_tflops`: the same, with each token sent to experts of its own.
    - `token_tflops`: one token.
    """

    prompt_tflops: Figure
    experts_tflops: Figure
    token_tflops: Figure


class TypeRates(NamedTuple):
    """A processor's rates for matrices of one number type ("Q4_K").

    `stored` uses the weights as stored. `laid_out` uses the layout into which the engine repacks
    them, or is None if it has no such layout.
    """

    type: str
    stored: MatrixRates
    laid_out: MatrixRates | None = None

    @property
    def usual(self) -> MatrixRates:
        """The rates that the engine reaches: repacked if possible."""
        return self.laid_out or self.stored


@dataclass(frozen=True, slots=True)
class Device:
    """One machine on which one model can run.

    - `memory`: the memory that holds weights and KV.
    - `host`: system memory next to a discrete GPU (None if both are the same memory).
    - `bandwidth_gbps`, `host_bandwidth_gbps`: decimal GB/s.
    - `fp16_tflops`, `fp8_tflops`, `fp4_tflops`: dense TFLOP/s.
    - `matrix_rates`: measured rates of the processor's matrix products with the installed
      llama.cpp. Empty for GPUs and for types not measured.
    - `match`: name of the devices.toml row.
    - `cpu_vectors`: widest vectors of the processor ("AVX-512", "" = unknown).
    - `n_gpus`: cards that can share a model layer by layer. `memory` is their sum, compute is one
      card's.
    - `cards`: each of several cards by itself (empty if they are not known separately).
    - `number`: a card's index among the accelerators, by PCI address.
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
    __hash__ = object.__hash__  # Hashed by identity, because results for a machine are cached.

    @property
    def usable_bytes(self) -> int:
        """Bytes of `memory` that a plan may take.

        On a card, these are the bytes free now. If a plan took more, it would fail or, on Windows,
        fall back to slow system memory. In memory shared with the system it is the limit, because
        other programs can give memory back.
        """
        if self.kind == "discrete":
            return self.memory.loadable_bytes
        return self.memory.limit_bytes

    @property
    def accounts(self) -> list[str]:
        """Memory account of each pool that a plan uses, one line each.

        The pools are every card, and the system memory in addition to the cards.
        """
        name_here = "this GPU" if self.kind == "discrete" else "this machine"
        pools = [(card.name, card.memory) for card in self.cards] or [(name_here, self.memory)]
        if self.kind == "discrete" and self.host is not None:
            pools.append(("system memory", self.host))
        if len(pools) == 1:
            [(_, memory)] = pools
            return [memory.account()]
        return [f"{name}: {memory.account()}" for name, memory in pools]


class DeviceUnreadableError(
    LocalLLMError,
    code="device_unreadable",
    default_hint="describe the machine yourself: --device NAME --memory GB --bandwidth GBPS",
):
    """The system did not report how much memory it has, which every Device needs."""


class DeviceNotFoundError(
    NotFoundError,
    code="device_not_found",
    default_hint=(
        "give --memory GB and --bandwidth GBPS to describe a machine that is not in the table"
    ),
):
    """No device in the table has this name. The hint lists the nearest names."""


System = Literal["linux", "macos", "windows"]


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings of one machine.

    `files` maps a path to its text. `outputs` maps a probe or command to its output. Data that
    could not be read is absent: readings are never invented.
    """

    system: System
    architecture: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    def file(self, path: str) -> str:
        """Return the file's text without surrounding blanks and NULs, or "" if it was not read."""
        return self.files.get(path, "").strip("\x00 \t\r\n")

    def output(self, name: str) -> str:
        return self.outputs.get(name, "")

    def matching(self, pattern: str) -> list[str]:
        return sorted(fnmatch.filter(self.files, pattern))


def device_to_json(device: Device) -> dict[str, Any]:
    """Return the published JSON form of a Device.

    Bytes are integers. GB/s and TFLOP/s are {value, basis, source} or null.
    """
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
    return {
        rate_field.name: _figure(getattr(rates, rate_field.name)) for rate_field in fields(rates)
    }


def _figure(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {"value": figure.value, "basis": figure.basis, "source": figure.source}


class Price(NamedTuple):
    """A price in US dollars before tax.

    - `machine`: a name in devices.toml. `memory_gb`: the size that has this price (GiB as sold).
    - `of`: what it buys: a computer's name, or "card" for a card without a computer.
    - `date`: "2026-06", or the year of a launch price.
    - `source`: the page that states it.
    """

    machine: str
    memory_gb: float
    usd: int
    of: str
    date: str
    source: str

    @property
    def is_of_card(self) -> bool:
        return self.of == "card"
