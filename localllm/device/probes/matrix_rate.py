"""Time the matrix kernels of the installed llama.cpp on the CPU, in a child process.

See llamacpp/matrix_rate.py in localllm_backends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from localllm.device.measurement_store import FigureFile, Measurement, ProcessorTimes
from localllm.device.probes import programs
from localllm.device.types import Figure, MatrixRates, TypeRates

# Types of most published files, so that rates are known before a model is chosen. Q4_K is first,
# because the rates of other types are expressed as shares of it.
TYPES = (
    "Q4_K",
    "Q6_K",
    "Q8_0",
    "MXFP4",
    "Q4_0",
    "Q4_1",
    "Q5_K",
    "Q3_K",
    "Q2_K",
    "IQ4_XS",
    "F16",
    "BF16",
)
# TFLOP/s by machine, build, type, layout and kind of product: see measurement_store.py.
_FIGURES = FigureFile("matrix_rate.json", sane=(1e-4, 1000.0))
_PRODUCTS = ("prompt_flops_s", "experts_flops_s", "token_flops_s")
_LAYOUTS = ("stored", "laid_out")


# Keys are type, layout ("stored", and "laid_out" if there is one) and kind of product.
Measurements = Mapping[tuple[str, str, str], Measurement]


def measure(types: Sequence[str]) -> Measurements | None:
    """Measure the build that a worker would run, in about half a second a type.

    Returns None if it does not answer. Plans then assume a rate.
    """
    times_before = ProcessorTimes.now()
    reply = programs.ask("llamacpp.matrix_rate", *types)
    try:
        answer = {} if reply.failure else reply.answers[-1]
        threads = int(answer["threads"])
        cpu_s = float(answer["cpu_s"])
        flops_s = {key: float(rate) for key, rate in _flat_rates(answer["rates"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    others_share = times_before.others_share(ProcessorTimes.now(child_s=cpu_s))
    date = time.strftime("%Y-%m-%d")
    source = f"the installed llama.cpp's product of {{}} matrices, {threads} thread(s)"
    return {
        key: Measurement(round(rate / 1e12, 4), source.format(key[0]), date, others_share)
        for key, rate in flops_s.items()
    }


def due(folder: Path, machine: str, types: Sequence[str]) -> list[str]:
    """Return the `types` that need a measurement on `machine` (with its build).

    They were not measured yet, or only while it was busy.
    """
    return [
        name for name in types if _FIGURES.due(folder, _key(machine, name, "stored", _PRODUCTS[0]))
    ]


def keep(folder: Path, machine: str, measurements: Measurements) -> None:
    _FIGURES.keep_all(folder, {_key(machine, *key): rate for key, rate in measurements.items()})


def _flat_rates(rates: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Yield each rate that the program printed, with its type, layout and kind."""
    for name, layouts in rates.items():
        for layout, kind in product(layouts, _PRODUCTS):
            yield (name, layout, kind), layouts[layout][kind]


def reliable(folder: Path, machine: str) -> tuple[TypeRates, ...]:
    """Return the rates cached for `machine` (with its build) that need no other measurement."""
    figures = _FIGURES.reliable_of(folder, f"{machine} | ")
    type_rates: list[TypeRates] = []
    for name in dict.fromkeys(key.split()[0] for key in figures):
        stored, laid_out = (_rates(figures, name, layout) for layout in _LAYOUTS)
        if stored is not None:
            type_rates.append(TypeRates(name, stored, laid_out))
    return tuple(type_rates)


def _rates(figures: Mapping[str, Figure], name: str, layout: str) -> MatrixRates | None:
    prompt, experts, token = (figures.get(f"{name} {layout} {kind}") for kind in _PRODUCTS)
    if prompt is None or experts is None or token is None:
        return None
    return MatrixRates(prompt, experts, token)


def _key(machine: str, name: str, layout: str, kind: str) -> str:
    return f"{machine} | {name} {layout} {kind}"
