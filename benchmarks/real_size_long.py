"""What a model of true size does with a long context, several streams, a client that goes away, and nobody asking.

python -m benchmarks.real_size_long NAME… [--folder DIR] [--tokens 16384] [--block 256] [--only kv,streams,sampling,served]
                                    [--keep]

The files are those of `benchmarks.real_size`: true shapes and formats, no weights. Reading 16,384 tokens of a model of 30B
takes hours on two cores, so a `block` is computed and taken in again and again under later positions: what is exported,
imported and decoded behind is as large as the real thing, and says as little as everything else here.

kv        seconds and GB/s of exporting and importing all of it, beside the predicted seconds of reading it; decode behind it
streams   tokens a second of four sequences in one step, beside one's and what was predicted
sampling  milliseconds of our sampler at the rows that come out, beside a step's
served    through `localllm serve`: the first token after a cancel beside an idle server's, and memory before and after the
          model was unloaded because nobody asked, and loaded again
"""

from __future__ import annotations

import argparse
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
from localllm.bench.stream import free_port
from localllm.bench.texts import user

_PARTS = ("kv", "streams", "sampling", "served")
_STEPS = 12
_STREAMS = 4
_IDLE_MIN = 0.05


def moved(block: bytes, by: int) -> bytes:
    """An exported block as if its tokens stood `by` places later: its header says so, and the table of positions in it."""
    magic, first, last, rest = struct.unpack_from("<4sIII", block)
    n = last - first
    table = struct.pack("<iIi", first, 0, first + 1)  # a cell: its position, and no other sequences
    at = block.index(table, 16)
    changed = bytearray(block)
    struct.pack_into("<4sIII", changed, 0, magic, first + by, last + by, rest)
    for i in range(n):
        position, others = struct.unpack_from("<iI", block, at + 8 * i)
        if (position, others) != (first + i, 0):
            raise SystemExit("the table of positions is not where it was thought to be")
        struct.pack_into("<i", changed, at + 8 * i, position + by)
    return bytes(changed)


def in_engine(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What is measured at the backend, in this process."""
    from dataclasses import replace

    from benchmarks.real_size import planned
    from localllm.cli.launch import load_spec
    from localllm.planner import speed
    from localllm_backends.contract import Chunk
    from localllm_backends.llamacpp import backend_type

    parts = options.only.split(",")
    device, model, plan, _ = planned(path, options.tokens + 1024 if "kv" in parts else 4096)
    if plan.fits == "no":
        return {"refused": f"{plan.memory.total_bytes / 1e9:.1f} GB are needed"}
    settings = replace(plan.settings, slots=_STREAMS)
    backend = backend_type.load(load_spec(str(path), settings, n_threads=0))
    rng, found = random.Random(1), dict[str, Any]()

    def prompt(n: int) -> list[int]:
        return [rng.randrange(model.vocab_size) for _ in range(n)]

    def decoded(sequences: Sequence[int]) -> float:
        """Steps a second."""
        taken = []
        for _ in range(_STEPS):
            began = time.perf_counter()
            done = backend.step([Chunk(s, prompt(1), outputs=1) for s in sequences])
            for i in range(len(sequences)):
                done.argmax(i)
            taken.append(time.perf_counter() - began)
        return 1 / statistics.median(taken)

    first = backend.new_sequence()
    result = backend.step([Chunk(first, prompt(options.block), outputs=1)])
    row = result.logits(0).copy()
    found["layout"] = settings.placement.layout
    if "sampling" in parts:
        found |= _sampled(row, decoded([first]))
        backend.truncate(first, options.block) if backend.can_rewind(first, options.block) else None
    if "streams" in parts:
        alone = decoded([first])
        others = [backend.new_sequence() for _ in range(_STREAMS - 1)]
        for sequence in others:
            backend.step([Chunk(sequence, prompt(options.block), outputs=1)]).argmax(0)
        four = _STREAMS * decoded([first, *others])
        said = speed.decode(device, model, plan.variant, settings, depth=options.block, n_sequences=_STREAMS)
        found["four_streams_tok_s"], found["one_stream_tok_s"] = four, alone
        found["four_streams_predicted"] = [_STREAMS * x for x in (said.low, said.value, said.high)]
        for sequence in others:
            backend.drop(sequence)
    if "kv" in parts and not backend.capabilities.states:
        line = backend.new_sequence()
        backend.step([Chunk(line, prompt(options.block), outputs=1)]).argmax(0)
        block = backend.export_range(line, 0, options.block)
        for start in range(options.block, options.tokens, options.block):
            backend.import_range(line, moved(block, start), start, start + options.block)
        began = time.perf_counter()
        blobs = [backend.export_range(line, at, at + options.block) for at in range(0, options.tokens, options.block)]
        exported_s = time.perf_counter() - began
        again, began = backend.new_sequence(), time.perf_counter()
        backend.drop(line)
        for i, blob in enumerate(blobs):
            backend.import_range(again, blob, i * options.block, (i + 1) * options.block)
        imported_s = time.perf_counter() - began
        gb = sum(len(blob) for blob in blobs) / 1e9
        cold = speed.prefill(device, model, plan.variant, settings, prompt_tokens=options.tokens)
        found |= {
            "kv_tokens": options.tokens, "kv_gb": gb, "export_s": exported_s, "import_s": imported_s,
            "import_gb_s": gb / imported_s, "import_over_predicted_cold": imported_s * cold.value / options.tokens,
        }  # fmt: skip
        said = speed.decode(device, model, plan.variant, settings, depth=options.tokens)
        found["deep_decode_tok_s"], found["deep_decode_predicted"] = decoded([again]), [said.low, said.value, said.high]
    backend.close()
    return found


def _sampled(row: Any, steps_s: float) -> dict[str, Any]:
    from localllm.engine.messages import Sampling
    from localllm.engine.sampling import Sampler

    found: dict[str, Any] = {"vocabulary": len(row), "step_ms": 1000 / steps_s}
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
    """What is measured through a server on the file."""
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
                time.sleep(0.25)  # for an event that only the system's count of its memory tells
            found["unloaded_gb"] = server.rss_bytes() / 1e9
            found["loaded_again_ttft_s"] = ask(user("Hi c"), 2).ttft_s
        finally:
            server.stop()
    return found


def main() -> None:
    """Make each named file, measure, print."""
    from benchmarks.real_size import fill, vocabulary
    from localllm.engine.process_engine import worker_environment
    from models import sparse_gemma4, sparse_gguf

    known = {**sparse_gguf.SHAPES, **sparse_gemma4.SHAPES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
            said = [f"--tokens={options.tokens}", f"--block={options.block}", f"--only={options.only}"]
            command = [sys.executable, "-m", "benchmarks.real_size_long", f"--here={path}", *said]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=worker_environment())
            last = (done.stdout.strip().splitlines() or ["{}"])[-1]
            found = json.loads(last) if done.returncode == 0 else {"failed": done.stderr.strip()[-500:]}
            if "served" in options.only and "refused" not in found:
                found |= served(path)
            print(f"\n{name}: load average {os.getloadavg()[0]:.1f}")
            for key, value in found.items():
                print(f"  {key:28} {value if not isinstance(value, float) else f'{value:.4g}'}", flush=True)
            if not options.keep:
                path.unlink()


if __name__ == "__main__":
    main()
