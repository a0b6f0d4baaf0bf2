"""A Device as plain data for --json: numbers with units in their names, each with its basis and source."""

from __future__ import annotations

from typing import Any

from localllm.device.types import Device, Figure, MatrixRates, Memory


def device_to_json(device: Device) -> dict[str, Any]:
    """The published shape of a Device: bytes as integers, GB/s and TFLOP/s as {value, basis, source} or null."""
    return {
        "name": device.name,
        "kind": device.kind,
        "accelerator": device.accelerator,
        "family": device.family,
        "simulated": device.simulated,
        "memory": _memory(device.memory),
        "bandwidth_gbps": _figure(device.bandwidth_gbps),
        "host_memory": _memory(device.host),
        "host_bandwidth_gbps": _figure(device.host_bandwidth_gbps),
        "fp16_tflops": _figure(device.fp16_tflops),
        "fp8_tflops": _figure(device.fp8_tflops),
        "fp4_tflops": _figure(device.fp4_tflops),
        "matrix_rates": [
            {"type": rates.type, "stored": _rates(rates.stored), "laid_out": _rates(rates.laid_out)}
            for rates in device.matrix_rates
        ],
        "compute_units": device.compute_units or None,
        "compute_capability": device.compute_capability or None,
        "n_gpus": device.n_gpus,
        "os": device.os or None,
        "cpu": device.cpu or None,
        "n_cpu_cores": device.n_cpu_cores or None,
        "match": device.match or None,
        "findings": [{"level": f.level, "message": f.message, "fix": f.fix} for f in device.findings],
    }


def _memory(memory: Memory | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    return {
        "total_bytes": memory.total_bytes,
        "limit_bytes": memory.limit_bytes,
        "available_bytes": memory.available_bytes,
        "basis": memory.basis,
        "source": memory.source,
    }


def _rates(rates: MatrixRates | None) -> dict[str, Any] | None:
    if rates is None:
        return None
    return {
        "prompt_tflops": _figure(rates.prompt_tflops),
        "experts_tflops": _figure(rates.experts_tflops),
        "token_tflops": _figure(rates.token_tflops),
    }


def _figure(figure: Figure | None) -> dict[str, Any] | None:
    return None if figure is None else {"value": figure.value, "basis": figure.basis, "source": figure.source}
