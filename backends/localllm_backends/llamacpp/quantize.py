"""Write a quant of a GGUF file with llama.cpp's own quantiser."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, QuantizeOrder
from localllm_backends.llamacpp.imatrix import ImportanceMatrix, read_imatrix
from localllm_backends.llamacpp.native import log, start_native
from localllm_backends.llamacpp.threads import usable_cores

# llama.cpp reads and writes this many bytes of a tensor at once. With its default of 8 GiB, a
# tensor, its F32 form and the result are in memory as a whole.
_SLAB_BYTES = 64 << 20
_MIB = 2**20
_PLANNED_SIZE = re.compile(r"quant size\s*=\s*([0-9.]+) MiB")
# Sizes in the log have two decimals.
_ROUNDING_BYTES = 0.005 * _MIB
_FTYPES = "LLAMA_FTYPE_"
# No quantiser exists for these numbers of file types.
_NOT_MADE = ("GUESSED", "NVFP4")


def file_types(llama: Any) -> dict[str, int]:
    """Return the quants that llama.cpp writes, with their numbers."""
    found = {}
    for name, number in llama.constants(_FTYPES).items():
        quant = name.removeprefix("MOSTLY_").removeprefix("ALL_")
        if quant not in _NOT_MADE:
            found[quant] = number
    return found


def quantize(order: QuantizeOrder, on_planned: Callable[[int], None]) -> None:
    """Write the quant of `order`. `on_planned` is called with the size of the result in bytes.

    Raises LoadError with llama.cpp's reason.
    """
    llama = start_native()
    missing = llama.missing("quantising")
    if missing:
        raise LoadError(f"this llama.cpp can't quantise: {missing}", "localllm setup")
    params = llama.llama_model_quantize_default_params()
    llama.set_fields(
        params,
        ftype=_file_type(llama, order.quant),
        nthread=order.n_threads or usable_cores(),
        # The caller decides whether a source is exact enough.
        allow_requantize=True,
        max_buf_size=_SLAB_BYTES,
    )
    facts: dict[str, str | int] = dict(order.facts)
    keep_alive: list[Any] = []
    if order.imatrix:
        missing = llama.missing("importance")
        if missing:
            raise LoadError(
                f"this llama.cpp can't use importance matrices: {missing}", "localllm setup"
            )
        matrix = read_imatrix(Path(order.imatrix))
        params.imatrix = _imatrix_entries(llama, matrix, keep_alive)
        facts |= _imatrix_facts(Path(order.imatrix), matrix)
    params.kv_overrides = _overrides(llama, facts, keep_alive)
    on_planned(_planned_bytes(llama, order, params))
    _run(llama, order.source, order.target, params)


def _file_type(llama: Any, quant: str) -> int:
    known = file_types(llama)
    name = quant.upper()
    if name not in known:
        raise LoadError(
            f"llama.cpp writes no quant {quant[:40]!r}", f"it writes {', '.join(sorted(known))}"
        )
    return known[name]


def _run(llama: Any, source: str, target: str, params: Any) -> None:
    log.mark()
    code = llama.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(params)
    )
    if code:
        reason = log.reason().removeprefix("failed to quantize: ")
        raise LoadError(
            f"llama.cpp can't quantise {Path(source).name!r}: {reason}", _quantize_hint(reason)
        )


def _quantize_hint(reason: str) -> str:
    if "imatrix" in reason or "importance matrix" in reason:
        return (
            "give the importance matrix of this very model with --imatrix, or choose a larger quant"
        )
    return ""


def _planned_bytes(llama: Any, order: QuantizeOrder, params: Any) -> int:
    """Return the size of the result's tensors by llama.cpp's own plan; 0 if it makes no plan."""
    if not llama.has_field("llama_model_quantize_params", "dry_run"):
        return 0
    params.dry_run = True
    _run(llama, order.source, order.target, params)
    params.dry_run = False
    for _, line in reversed(log.lines):
        match = _PLANNED_SIZE.search(line)
        if match:
            return round(float(match[1]) * _MIB + _ROUNDING_BYTES)
    return 0


# --- the parameters' lists ------------------------------------------------------------------------


def _imatrix_entries(llama: Any, matrix: ImportanceMatrix, keep_alive: list[Any]) -> Any:
    """Return llama_model_imatrix_data with an empty entry at the end. `keep_alive` keeps the data
    alive."""
    entry = llama.llama_model_imatrix_data
    entries = (entry * (len(matrix.values) + 1))()
    for place, (name, values) in zip(entries, matrix.values.items(), strict=False):
        place.name = os.fsencode(name)
        place.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        place.size = len(values)
    keep_alive += [matrix, entries]
    return entries


def _imatrix_facts(path: Path, matrix: ImportanceMatrix) -> dict[str, str | int]:
    """Return the keys that llama-quantize writes for an importance matrix."""
    facts: dict[str, str | int] = {
        "quantize.imatrix.file": path.name,
        "quantize.imatrix.entries_count": len(matrix.values),
    }
    if matrix.dataset:
        facts["quantize.imatrix.dataset"] = matrix.dataset
    if matrix.n_chunks:
        facts["quantize.imatrix.chunks_count"] = matrix.n_chunks
    return facts


def _overrides(llama: Any, facts: Mapping[str, str | int], keep_alive: list[Any]) -> Any:
    """Return llama_model_kv_override that add `facts` to the result's keys, with an empty entry at
    the end."""
    override = llama.llama_model_kv_override
    entries = (override * (len(facts) + 1))()
    for place, (key, value) in zip(entries, facts.items(), strict=False):
        place.key = key.encode()
        if isinstance(value, int):
            place.tag = llama.LLAMA_KV_OVERRIDE_TYPE_INT
            place.val_i64 = value
        else:
            place.tag = llama.LLAMA_KV_OVERRIDE_TYPE_STR
            place.val_str = _cut(value, override.val_str.size - 1)
    keep_alive.append(entries)
    return entries


def _cut(text: str, max_bytes: int) -> bytes:
    """Return the UTF-8 of `text`, cut between two characters."""
    return text.encode()[:max_bytes].decode("utf-8", "ignore").encode()
