"""Ask llama.cpp itself how much memory a model needs: it plans every buffer (`no_alloc`) and
allocates none.

This works on a header-only (sparse) GGUF, in milliseconds for ordinary models and up to a second
for hybrids. llama.cpp reports the sizes only in its log, whose text is not an API, and it aborts
the process on impossible settings. Therefore `plan` runs in a child process by default, and every
figure that it does not find is None rather than 0.

    python -P tests/support/plan_probe.py FILE '{"n_ctx": 8192}'      (prints the answers as JSON)
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, LoadSpec, Placement

_MIB = 2**20
_KV = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers")
_STATE = re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB")
_COMPUTE = re.compile(r"compute buffer size = +([\d.]+) MiB")
_OUTPUT = re.compile(r"output buffer size = +([\d.]+) MiB")


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """A context like our backend's: unified KV, trimmed sliding windows. 0 outputs means one per
    sequence. `n_gpu_layers` are planned on the accelerators of the installed build. The default is
    none, because figures of a CPU are the same everywhere."""

    n_ctx: int = 4096
    n_seq_max: int = 1
    n_ubatch: int = 512
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    n_outputs: int = 0
    n_rewind: int = 0
    flash_attention: bool = True
    n_gpu_layers: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """Bytes that llama.cpp would allocate (its log's MiB have two decimals); `kv_cells` are (cells,
    layers) per cache."""

    weights_bytes: int
    kv_bytes: int
    kv_cells: tuple[tuple[int, int], ...]
    recurrent_bytes: int
    compute_bytes: int | None
    output_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """The sum of all figures that were found."""
        return (
            self.weights_bytes
            + self.kv_bytes
            + self.recurrent_bytes
            + (self.compute_bytes or 0)
            + (self.output_bytes or 0)
        )


def parse(lines: Iterable[str], weights_bytes: int) -> Planned:
    """Return the figures in llama.cpp's log lines of one context."""
    kv, cells, state = 0, [], 0
    compute: int | None = None
    output: int | None = None
    for text in lines:
        if match := _KV.search(text):
            kv += round(float(match.group(1)) * _MIB)
            cells.append((int(match.group(2)), int(match.group(3))))
        elif match := _STATE.search(text):
            state += round(float(match.group(1)) * _MIB)
        elif match := _COMPUTE.search(text):
            compute = (compute or 0) + round(float(match.group(1)) * _MIB)
        elif match := _OUTPUT.search(text):
            output = (output or 0) + round(float(match.group(1)) * _MIB)
    return Planned(weights_bytes, kv, tuple(cells), state, compute, output)


def plan(
    path: str | Path, settings: Sequence[ProbeSettings], *, timeout_s: float = 120.0
) -> list[Planned]:
    """Return the memory that `path` needs with each of `settings`, planned in a child process.

    Raises LoadError if llama.cpp refuses the file or the settings, with the end of its output.
    """
    command = [sys.executable, "-P", __file__, str(path), json.dumps([asdict(s) for s in settings])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise LoadError(
            f"llama.cpp did not finish planning {Path(path).name} in {timeout_s:.0f} s"
        ) from e
    if done.returncode != 0:
        said = [text for text in done.stderr.splitlines() if text.strip()]
        raise LoadError(
            f"llama.cpp can't plan {Path(path).name}: "
            f"{said[-1] if said else f'exit {done.returncode}'}"
        )
    answers = json.loads(done.stdout)
    return [Planned(**{**a, "kv_cells": tuple((c, n) for c, n in a["kv_cells"])}) for a in answers]


def plan_here(path: str | Path, settings: Sequence[ProbeSettings]) -> list[Planned]:
    """Run `plan` in this process: faster, but it ends the process if llama.cpp aborts."""
    from localllm_backends.llamacpp.native import log, start_native

    llama = start_native()
    # Planning a deep model with a quantised cache logs over 4,000 debug lines before the lines with
    # the sizes are read.
    log.lines = deque(maxlen=200_000)
    models: dict[int, Any] = {}
    try:
        for layers in {s.n_gpu_layers for s in settings}:
            models[layers] = _model(llama, path, layers)
        weights = {layers: int(llama.llama_model_size(model)) for layers, model in models.items()}
        return [
            _context(llama, models[s.n_gpu_layers], s, weights[s.n_gpu_layers]) for s in settings
        ]
    finally:
        for model in models.values():
            llama.llama_model_free(model)


def _model(llama: Any, path: str | Path, n_gpu_layers: int) -> Any:
    from localllm_backends.llamacpp.context import model_params
    from localllm_backends.llamacpp.native import log

    params = model_params(llama, LoadSpec(str(path), placement=Placement(gpu_layers=n_gpu_layers)))
    params.no_alloc = True
    params.load_mode = 0  # no mmap: a sparse file has no data to map
    log.mark()
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise LoadError(log.reason())
    return model


def _context(llama: Any, model: Any, s: ProbeSettings, weights: int) -> Planned:
    from localllm_backends.llamacpp.native import ggml_type, log

    params = llama.llama_context_default_params()
    params.n_ctx = s.n_ctx
    params.n_batch = params.n_ubatch = s.n_ubatch
    params.n_seq_max = s.n_seq_max
    params.n_outputs_max = max(s.n_outputs, s.n_seq_max * (1 + s.n_rewind))
    params.n_rs_seq = s.n_rewind
    params.flash_attn_type = 1 if s.flash_attention else 0
    params.type_k, params.type_v = ggml_type(s.kv_type_k), ggml_type(s.kv_type_v)
    params.kv_unified = True
    params.swa_full = False
    params.op_offload = s.n_gpu_layers != 0
    log.mark()
    context = llama.llama_init_from_model(model, params)
    said = [text for _, text in log.lines]
    if not context:
        raise LoadError(log.reason("llama.cpp refused the context"))
    llama.llama_free(context)
    return parse(said, weights)


def _main(arguments: Sequence[str]) -> int:
    path, body = arguments
    asked = json.loads(body)
    try:
        answers = plan_here(
            path, [ProbeSettings(**s) for s in (asked if isinstance(asked, list) else [asked])]
        )
    except LoadError as e:
        print(e, file=sys.stderr)
        return 1
    print(json.dumps([asdict(a) for a in answers]))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
