"""Models of real size without their weights: do memory and speed match the plan?

python -m benchmarks.real_size NAME… [--folder DIR] [--context 4096] [--decode 32] [--prompt 512]
[--rounds 3]
                               [--threads 0] [--beside 3] [--keep]
python -m benchmarks.real_size --list
python -m benchmarks.real_size --long NAME…     # a long context, streams, a client that goes away:
                                                --long --help

The files have the real shapes and formats, a small model's tokenizer padded to the vocabulary,
random embeddings, outputs and routers, and holes for the rest. They take hundreds of MB of disk,
and are read, repacked and streamed like the real ones, with every token routed to different
experts. Their output makes no sense. Each model runs in a separate process, in our backend's plain
loop, with random tokens. If the plan is "no", the reason is printed and the model is not loaded.

Timings on a shared machine are noisy: the load at start and end is printed too, and decode and
prefill take turns. With --beside N, llama.cpp's own llama-bench runs N times in turn, with one
program in memory at a time. Then the output is our figure ÷ its figure, turn by turn. Its first
token is that of a context of one token. Ours is measured with the smallest context, in a separate
process (clearing the KV of a usual context takes longer than mapping a file).

"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

_PAGE_KB = 1024
_POOL_ROWS = 512
_SMALLEST_CONTEXT = 256
# Tokens of SmolLM2's vocabulary. Higher ids have no text.
_TEXTS = 49_152
_SPREAD = 0.02  # of a random row's elements; norms rescale it


def vocabulary(writer: Any, n_tokens: int) -> None:
    """Write SmolLM2's tokenizer to `writer`, padded to `n_tokens` with tokens that no text
    contains."""
    import gguf

    from benchmarks.models import smollm2

    fields = gguf.GGUFReader(str(smollm2())).fields

    def texts(key: str) -> list[str]:
        field = fields[key]
        return [bytes(field.parts[i]).decode("utf-8") for i in field.data]

    tokens = texts("tokenizer.ggml.tokens")[:n_tokens]
    kinds = [
        int(fields["tokenizer.ggml.token_type"].parts[i][0])
        for i in fields["tokenizer.ggml.token_type"].data
    ]
    unused = n_tokens - len(tokens)
    writer.add_tokenizer_model(texts("tokenizer.ggml.model")[0])
    writer.add_tokenizer_pre(texts("tokenizer.ggml.pre")[0])
    writer.add_token_list([*tokens, *(f"<|unused{i}|>" for i in range(unused))])
    writer.add_token_types([*kinds[:n_tokens], *([int(gguf.TokenType.UNUSED)] * unused)])
    writer.add_token_merges(texts("tokenizer.ggml.merges"))
    for key in ("bos", "eos"):
        getattr(writer, f"add_{key}_token_id")(
            int(fields[f"tokenizer.ggml.{key}_token_id"].parts[-1][0])
        )


def fill(path: Path) -> None:
    """Write random embeddings and routers, and norms and scales of one, to a file of holes. This is
    enough for different tokens to have different results and experts."""
    import numpy as np

    from localllm_catalog import gguf as header_of

    header = header_of.read(path)
    rng = np.random.default_rng(0)
    with path.open("r+b") as f:
        for tensor in header.tensors:
            f.seek(header.data_start + tensor.offset)
            if tensor.name == "token_embd.weight":
                row_bytes, n_rows = tensor.n_bytes // tensor.shape[-1], tensor.shape[-1]
                pool = [_row(tensor.type, row_bytes, rng) for _ in range(_POOL_ROWS)]
                for start in range(0, n_rows, 4096):
                    some = rng.integers(0, _POOL_ROWS, size=min(4096, n_rows - start))
                    f.write(b"".join(pool[i] for i in some))
            elif tensor.name == "output.weight":
                # Zero rows for the tokens without text, so that answers contain only others.
                row_bytes = tensor.n_bytes // tensor.shape[-1]
                f.write(
                    b"".join(
                        _row(tensor.type, row_bytes, rng)
                        for _ in range(min(tensor.shape[-1], _TEXTS))
                    )
                )
            elif "ffn_gate_inp.weight" in tensor.name:
                f.write(rng.standard_normal(tensor.n_bytes // 4).astype(np.float32).tobytes())
            elif len(tensor.shape) == 1 and any(
                word in tensor.name for word in ("norm", "scale", "rope_freqs")
            ):
                f.write(np.ones(tensor.n_bytes // 4, dtype=np.float32).tobytes())


def _row(kind: str, n_bytes: int, rng: Any) -> bytes:
    """Return one row of random values in a ggml format: small finite scales, and random bits
    otherwise."""
    import numpy as np

    # (bytes of a block, offsets of its 16-bit scales)
    blocks = {"Q4_K": (144, (0,)), "Q8_0": (34, (0,)), "Q6_K": (210, (208,)), "Q4_0": (18, (0,))}
    if kind not in blocks:
        return (
            (rng.standard_normal(n_bytes // 4) * _SPREAD).astype(np.float32).tobytes()
            if kind == "F32"
            else bytes(n_bytes)
        )
    size, scales = blocks[kind]
    data = rng.integers(0, 256, size=(n_bytes // size, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(1e-4).tobytes(), dtype=np.uint8)
    for at in scales:
        data[:, at : at + 2] = scale
    if kind == "Q4_K":
        data[:, 2:4] = scale  # the minimum's scale
    return bytes(data.tobytes())


# --- one model, in a process of its own -----------------------------------------------------------


def resident_bytes(kind: str = "VmRSS") -> int:
    """Return the bytes of this process in memory: VmRSS, RssAnon (its own) or RssFile (mapped)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(kind + ":"):
            return int(line.split()[1]) * _PAGE_KB
    return 0


def planned(path: Path, context: int) -> tuple[Any, Any, Any, Any]:
    """Return device, model, plan and known speeds of `path` on this machine, for one request at a
    time, with the measurements of `localllm bench`."""
    from localllm.load.candidates import device_and_overrides
    from localllm.planner.plan import plan_for
    from localllm.planner.types import Workload
    from localllm_catalog import catalog, from_gguf, gguf

    model = from_gguf.model_from_gguf(gguf.read(path))
    device, known = device_and_overrides(None, None, catalog.load())
    workload = Workload(context=context)
    return (
        device,
        model,
        plan_for(
            device,
            model,
            model.variants[0],
            workload,
            overrides=replace(known, slots=4, kv_type="f16"),
        ),
        known.measured,
    )


def run_here(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plan `path`, and if it fits, load and measure it."""
    from localllm.planner import explanations, speed

    device, model, plan, measured = planned(path, options.context)
    found: dict[str, Any] = {
        "file_gb": path.stat().st_size / 1e9,
        "planned_gb": plan.memory.total_bytes / 1e9,
    }
    if plan.fits == "no":
        return {**found, "refused": explanations.does_not_fit_text(plan, device)}
    from localllm.load.options import load_spec
    from localllm_backends.contract import Chunk
    from localllm_backends.llamacpp import backend_type

    backend_type.vocabulary(str(path))  # load the libraries before memory is measured
    before = resident_bytes()
    spec = load_spec(str(path), plan.settings, n_threads=options.threads)
    started = time.perf_counter()
    backend = backend_type.load(replace(spec, n_ctx=_SMALLEST_CONTEXT) if options.first else spec)
    found["load_s"] = time.perf_counter() - started
    sequence = backend.new_sequence()
    backend.step([Chunk(sequence, [0], outputs=1)]).argmax(0)
    backend.drop(sequence)
    found["first_token_s"] = time.perf_counter() - started
    if options.first:
        return found
    found["predicted_load_s"] = plan.load_s.value
    found["places_gb"] = {k: v / 1e9 for k, v in backend.memory().places.items()}
    prefill, decode = _rates(backend, options, model.vocab_size)
    found["resident_gb"] = (resident_bytes() - before) / 1e9
    found["anonymous_gb"], found["mapped_gb"] = (
        resident_bytes(k) / 1e9 for k in ("RssAnon", "RssFile")
    )
    found["planned_over_resident"] = found["planned_gb"] / found["resident_gb"]
    # A plan's figure is for 2,048 tokens, with a larger share of attention.
    prompt = speed.prefill(
        device, model, plan.variant, plan.settings, prompt_tokens=options.prompt, measured=measured
    )
    for name, rates, said in (("prefill", prefill, prompt), ("decode", decode, plan.decode_tok_s)):
        found[f"{name}_tok_s"] = statistics.median(rates)
        found[f"{name}_rounds"] = rates
        found[f"{name}_predicted"] = [said.low, said.value, said.high]
    found["n_ubatch"], found["layout"] = plan.settings.n_batch, plan.settings.placement.layout
    backend.close()
    return found


def _rates(
    backend: Any, options: argparse.Namespace, n_vocab: int
) -> tuple[list[float], list[float]]:
    """Return prefill and decode of every round, in tokens per second, after one round that is not
    counted, as in llama-bench."""
    from localllm_backends.contract import Chunk

    rng = random.Random(1)
    prefill, decode = [], []
    for _ in range(1 + options.rounds):
        sequence = backend.new_sequence()
        prompt = [rng.randrange(n_vocab) for _ in range(options.prompt)]
        started = time.perf_counter()
        for i in range(0, len(prompt), backend.info.n_batch):
            backend.step([Chunk(sequence, prompt[i : i + backend.info.n_batch], outputs=1)]).argmax(
                0
            )
        prefill.append(len(prompt) / (time.perf_counter() - started))
        backend.drop(sequence)
        # Decode from an empty context, as llama-bench does and as the plan's figure is defined. At
        # a depth of 512 tokens on a CPU, attention took a third of a step of Qwen3-30B-A3B.
        sequence = backend.new_sequence()
        started = time.perf_counter()
        for _ in range(options.decode):
            backend.step([Chunk(sequence, [rng.randrange(n_vocab)], outputs=1)]).argmax(0)
        decode.append(options.decode / (time.perf_counter() - started))
        backend.drop(sequence)
    return prefill[1:], decode[1:]


# --- the command ----------------------------------------------------------------------------------


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--folder", type=Path, help="where the files are made (default: a temporary folder)"
    )
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=0, help="0 = as served; 1 where others keep the cores busy"
    )
    parser.add_argument(
        "--beside",
        type=int,
        default=0,
        metavar="N",
        help="N turns of llama-bench, and ours as often",
    )
    parser.add_argument("--keep", action="store_true", help="keep the files")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Write each named file, run it in a separate process, and print planned and measured
    figures."""
    if "--long" in sys.argv:
        from benchmarks import real_size_long

        sys.argv.remove("--long")
        real_size_long.main()
        return
    from models import sparse_gemma4, sparse_gguf

    known = {**sparse_gguf.SHAPES, **sparse_gemma4.SHAPES}
    options = _parser(list(known)).parse_args()
    if options.here is not None:
        print(json.dumps(run_here(options.here, options)))
        return
    if options.list or not options.names:
        print("\n".join(known))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = options.folder if options.keep and options.folder else Path(temporary)
        for name in options.names:
            path = made(name, folder)
            _report(name, path, options)
            if not options.keep:
                path.unlink()


def made(name: str, folder: Path) -> Path:
    """Return the file of that shape in `folder`, after writing it if necessary."""
    from models import sparse_gemma4, sparse_gguf

    known = {**sparse_gguf.SHAPES, **sparse_gemma4.SHAPES}
    if name not in known:
        raise SystemExit(f"no shape {name}: there are {', '.join(known)}")
    path = folder / f"{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fill(sparse_gguf.write(known[name], folder, vocabulary))
    return path


def _report(name: str, path: Path, options: argparse.Namespace) -> None:
    said = [
        f"--{key}={getattr(options, key)}"
        for key in ("context", "prompt", "decode", "rounds", "threads")
    ]
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "benchmarks.real_size", f"--here={path}", *said]
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(max(1, options.beside)):
        found = in_a_process(command, path)
        if isinstance(found, str):
            print(f"\n{name}: failed: {found}")
            return
        if options.beside and "load_s" in found:
            theirs.append(llama_bench(path, options, found))
            first = in_a_process([*command, "--first"], path)
            found["smallest_first_token_s"] = (
                first["first_token_s"] if isinstance(first, dict) else math.nan
            )
        ours.append(found)
    print(
        f"\n{name}: load average {load:.1f} at start, {os.getloadavg()[0]:.1f} at the end, "
        f"{os.cpu_count()} cores"
    )
    for key, value in ours[-1].items():
        print(f"  {key:24} {_shown(value)}", flush=True)
    for key in theirs[-1] if theirs else ():
        pairs = [(mine[key], its[key]) for mine, its in zip(ours, theirs, strict=True)]
        ratio = statistics.median(a / b for a, b in pairs)
        turns = ", ".join(f"{a:.3g}/{b:.3g}" for a, b in pairs)
        print(f"  {key:24} {ratio:.3f} x llama-bench's ({turns})", flush=True)


def in_a_process(command: list[str], path: Path) -> dict[str, Any] | str:
    """Return the result of `run_here` with the file in the page cache, or the last output of a
    process that failed."""
    from localllm.engine.worker.pipe import worker_environment

    cached(path)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=worker_environment()
    )
    if done.returncode:
        return (
            f"({done.returncode}): {(done.stderr.strip().splitlines() or ['without a word'])[-1]}"
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def cached(path: Path) -> None:
    """Read the file once, so that all programs that load it find the same part of it in the page
    cache."""
    with path.open("rb", buffering=0) as f:
        while f.read(16 * 2**20):
            pass


def llama_bench(path: Path, options: argparse.Namespace, ours: dict[str, Any]) -> dict[str, float]:
    """Return the results of llama-bench for `path` with the same prompt, micro-batch, weight layout
    and threads: prefill and decode in tokens per second, and seconds from its start to a first
    token, including loading."""
    from benchmarks.peers_setup import built
    from localllm_backends.llamacpp.threads import processors

    program = built("llama-bench")
    threads = options.threads or processors()
    command = [
        str(program),
        "-m",
        str(path),
        "-t",
        str(threads),
        "-ub",
        str(ours["n_ubatch"]),
        "-o",
        "json",
    ]
    command += ["--repack", "0" if ours["layout"] == "stored" else "1"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}

    def run(*more: object) -> list[dict[str, Any]]:
        whole = [*command, *(str(word) for word in more)]
        done = subprocess.run(whole, capture_output=True, text=True, check=True, env=environment)
        return list(json.loads(done.stdout))

    cached(path)
    started = time.perf_counter()
    run("-p", 0, "-n", 1, "-r", 1, "--no-warmup")
    first = time.perf_counter() - started
    tests = run("-p", options.prompt, "-n", options.decode, "-r", options.rounds)
    rates = {
        "prefill_tok_s" if test["n_prompt"] else "decode_tok_s": statistics.median(
            test["samples_ts"]
        )
        for test in tests
    }
    return {**rates, "smallest_first_token_s": first}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return "[" + ", ".join(f"{x:.3g}" for x in value) + "]"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v:.3f}" for k, v in value.items())
    return str(value)


if __name__ == "__main__":
    main()
