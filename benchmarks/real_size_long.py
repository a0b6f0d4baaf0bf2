"""A model of real size with a long context, several streams, a cancelled request, and no requests.

python -m benchmarks.real_size --long NAME… [--folder DIR] [--tokens 16384] [--block 256] [--only
kv,streams,sampling,served]
                                    [--keep]

The files are those of `benchmarks.real_size`: real shapes and formats, no weights. Reading 16,384
tokens of a 30B model takes hours on two cores. Instead, one `block` is computed and imported
repeatedly at later positions. Exports, imports and decode steps have the real sizes, but their
contents make no sense.

kv        seconds and GB/s of exporting and importing all of it, compared with the predicted seconds
          of prefill; decode after it
streams   tokens per second of four sequences in one step, compared with one and with the prediction
sampling  milliseconds of our sampler for the resulting rows, compared with a step
served    through `localllm serve`: the first token after a cancel, compared with an idle server,
          and memory before and after the model was unloaded for lack of requests and loaded again

"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from benchmarks.models import serve_command
from benchmarks.processes import Server
from localllm.bench.scenarios import user
from localllm.bench.stream import free_port

_PARTS = ("kv", "streams", "sampling", "served")
# After our header: llama.cpp's mark, the sequence, streams, cells. Then position, sequences and
# sequence of each cell.
_STATE, _CELLS, _CELL = 16, 32, struct.Struct("<iIi")
_STEPS = 12
_STREAMS = 4
_IDLE_MIN = 0.05


def moved(block: bytes, by: int) -> bytes:
    """Return an exported block with its tokens moved by `by` positions, in its header and in its
    table of positions."""
    magic, first, last, rest = struct.unpack_from("<4sIII", block)
    changed = bytearray(block)
    struct.pack_into("<4sIII", changed, 0, magic, first + by, last + by, rest)
    _, sequence, streams, cells = struct.unpack_from("<4I", block, _STATE)
    if (streams, cells) != (1, last - first):
        raise SystemExit("a state of llama.cpp's is not laid out as was thought")
    for i in range(cells):
        at = _CELLS + _CELL.size * i
        if _CELL.unpack_from(block, at) != (first + i, 1, sequence):
            raise SystemExit("the table of positions is not where it was thought to be")
        _CELL.pack_into(changed, at, first + i + by, 1, sequence)
    return bytes(changed)


def in_engine(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements at the backend, in this process."""
    from benchmarks.real_size import planned
    from localllm.load.options import load_spec
    from localllm_backends.llamacpp import backend_type

    parts = options.only.split(",")
    device, model, plan, measured = planned(path, options.tokens + 1024 if "kv" in parts else 4096)
    if plan.fits == "no":
        return {"refused": f"{plan.memory.total_bytes / 1e9:.1f} GB are needed"}
    backend = backend_type.load(load_spec(str(path), plan.settings, n_threads=0))
    run = _Run(backend, options, model.vocab_size)
    said = functools.partial(_said, device, model, plan, measured)
    found: dict[str, Any] = {"layout": plan.settings.placement.layout}
    if "sampling" in parts:
        found |= run.sampling()
    if "streams" in parts:
        found |= run.streams() | {
            "four_streams_predicted": said(
                "decode", _STREAMS, depth=options.block, n_sequences=_STREAMS
            )
        }
    if "kv" in parts and not backend.capabilities.states:
        cold_s = options.tokens / said("prefill", prompt_tokens=options.tokens)[1]
        found |= run.kv(cold_s) | {"deep_decode_predicted": said("decode", depth=options.tokens)}
    backend.close()
    return found


def _said(
    device: Any, model: Any, plan: Any, measured: Any, what: str, times: int = 1, **more: int
) -> list[float]:
    """Return the lowest, likeliest and highest predicted tokens per second, for `times` streams."""
    from localllm.planner import speed

    said = getattr(speed, what)(
        device, model, plan.variant, plan.settings, measured=measured, **more
    )
    return [times * rate for rate in (said.low, said.value, said.high)]


class _Run:
    """A loaded model that runs step by step with random tokens."""

    def __init__(self, backend: Any, options: argparse.Namespace, n_vocab: int) -> None:
        self._backend, self._tokens, self._block = backend, options.tokens, options.block
        self._rng, self._n_vocab = random.Random(1), n_vocab

    def sampling(self) -> dict[str, Any]:
        """Measure our sampler on a row of this vocabulary, in milliseconds."""
        sequence = self._backend.new_sequence()
        row = self._step({sequence: self._block}).logits(0)[-1].copy()
        found = {
            "vocabulary": len(row),
            "step_ms": 1000 / self._steps_s([sequence]),
            **_sampled(row),
        }
        self._backend.drop(sequence)
        return found

    def streams(self) -> dict[str, Any]:
        """Measure tokens per second of one sequence and of four together, each after one block."""
        sequences = [self._backend.new_sequence() for _ in range(_STREAMS)]
        for sequence in sequences:
            self._step({sequence: self._block}).argmax(0)
        one, four = self._steps_s(sequences[:1]), _STREAMS * self._steps_s(sequences)
        for sequence in sequences:
            self._backend.drop(sequence)
        return {"one_stream_tok_s": one, "four_streams_tok_s": four}

    def kv(self, cold_s: float) -> dict[str, Any]:
        """Export and import all of the context's KV. `cold_s`: the predicted time to compute it."""
        line = self._backend.new_sequence()
        self._step({line: self._block}).argmax(0)
        block = self._backend.export_range(line, 0, self._block)
        starts = range(0, self._tokens, self._block)
        for start in starts[1:]:
            self._backend.import_range(line, moved(block, start), start, start + self._block)
        began = time.perf_counter()
        blobs = [self._backend.export_range(line, start, start + self._block) for start in starts]
        exported_s = time.perf_counter() - began
        self._backend.drop(line)
        again, began = self._backend.new_sequence(), time.perf_counter()
        for start, blob in zip(starts, blobs, strict=True):
            self._backend.import_range(again, blob, start, start + self._block)
        imported_s = time.perf_counter() - began
        gb = sum(map(len, blobs)) / 1e9
        return {
            "kv_tokens": self._tokens, "kv_gb": gb, "export_s": exported_s, "import_s": imported_s,
            "export_gb_s": gb / exported_s, "import_gb_s": gb / imported_s,
            "import_over_predicted_cold": imported_s / cold_s,
            "deep_decode_tok_s": self._steps_s([again]),
        }  # fmt: skip

    def _step(self, wanted: dict[int, int]) -> Any:
        from localllm_backends.contract import Chunk

        chunks = [
            Chunk(s, [self._rng.randrange(self._n_vocab) for _ in range(n)], outputs=1)
            for s, n in wanted.items()
        ]
        return self._backend.step(chunks)

    def _steps_s(self, sequences: Sequence[int]) -> float:
        """Return steps per second with one token of each sequence."""
        taken = []
        for _ in range(_STEPS):
            began = time.perf_counter()
            done = self._step(dict.fromkeys(sequences, 1))
            for i in range(len(sequences)):
                done.argmax(i)
            taken.append(time.perf_counter() - began)
        return 1 / statistics.median(taken)


def _sampled(row: Any) -> dict[str, Any]:
    from localllm.engine.messages import Sampling
    from localllm.engine.sampling.sampler import Sampler

    found: dict[str, Any] = {}
    kinds = {
        "defaults": Sampling(),
        "nothing_else": Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        "top_p": Sampling(temperature=1.0, top_k=0, top_p=0.95, min_p=0.0),
    }
    for name, sampling in kinds.items():
        sampler, taken = Sampler(sampling), []
        for _ in range(20):
            fresh = row.copy()
            began = time.perf_counter()
            sampler.choose(fresh, [])
            taken.append(time.perf_counter() - began)
        found[f"sample_{name}_ms"] = 1000 * statistics.median(taken)
    return found


def served(path: Path) -> dict[str, Any]:
    """Return the measurements with a server."""
    with tempfile.TemporaryDirectory() as cache:
        port = free_port()
        command = serve_command(path, port, "--host", "127.0.0.1", "--context", "4096", "--quiet")
        environment = {"LOCALLLM_CACHE_DIR": cache, "LOCALLLM_IDLE_UNLOAD_MIN": str(_IDLE_MIN)}
        server = Server("ours", command, port, "", environment, Path(cache) / "log")
        found: dict[str, Any] = {"served_ready_s": server.start()}
        try:
            ask = server.target.chat
            ask(user("Hi there"), 2)
            found["idle_ttft_s"] = ask(user("Hi a"), 2).ttft_s
            ask(user("Tell me a long story"), 400, stop_after=5)
            found["after_cancel_ttft_s"] = ask(user("Hi b"), 2).ttft_s
            found["loaded_gb"] = server.rss_bytes() / 1e9
            deadline = time.monotonic() + 60 * _IDLE_MIN + 30
            while server.rss_bytes() > 1e9 and time.monotonic() < deadline:
                time.sleep(0.25)  # wait for an event that only the system's memory figures show
            found["unloaded_gb"] = server.rss_bytes() / 1e9
            found["loaded_again_ttft_s"] = ask(user("Hi c"), 2).ttft_s
        finally:
            server.stop()
    return found


def main() -> None:
    """Write each named file, measure, print."""
    from benchmarks.real_size import fill, vocabulary
    from localllm.engine.worker.pipe import worker_environment
    from models import sparse_gemma4, sparse_gguf

    known = {**sparse_gguf.SHAPES, **sparse_gemma4.SHAPES}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--only", default=",".join(_PARTS))
    parser.add_argument("--keep", action="store_true", help="keep the files")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        print(json.dumps(in_engine(options.here, options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = options.folder if options.keep and options.folder else Path(temporary)
        for name in options.names:
            path = folder / f"{name}.gguf"
            if not path.exists():
                fill(sparse_gguf.write(known[name], folder, vocabulary))
            said = [
                f"--tokens={options.tokens}",
                f"--block={options.block}",
                f"--only={options.only}",
            ]
            command = [sys.executable, "-m", "benchmarks.real_size_long", f"--here={path}", *said]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=worker_environment()
            )
            last = (done.stdout.strip().splitlines() or ["{}"])[-1]
            found = (
                json.loads(last) if done.returncode == 0 else {"failed": done.stderr.strip()[-500:]}
            )
            if "served" in options.only and "refused" not in found:
                found |= served(path)
            print(f"\n{name}: load average {os.getloadavg()[0]:.1f}")
            for key, value in found.items():
                print(
                    f"  {key:28} {value if not isinstance(value, float) else f'{value:.4g}'}",
                    flush=True,
                )
            if not options.keep:
                path.unlink()


if __name__ == "__main__":
    main()
