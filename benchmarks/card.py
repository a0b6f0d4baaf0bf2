"""A real card: the product on it, stage by stage, compared with llama-server of the same release.

    python -m benchmarks card [STAGE[=SECONDS] …] [--model FILE|SHAPE] [--json FILE]
                              [--llama-server PROGRAM] [--rounds 1] [--scenarios eight,burst,…]

newcomer   the first commands after an installation: device, doctor, recommend, setup --dry-run
sizes      plan, load and run the model, with predicted and measured figures
serving    over HTTP, compared with llama-server if it is available
restart    the first token of a known conversation after the server was restarted
doctor     localllm doctor --accelerator
tests      the tests of backends and exactness on this card

Without a STAGE all of them run. Each stage is a separate process. After its seconds it is ended
with all its children, and the figures until then count. Every figure is one line of JSON, and a
table at the end lists them all. SHAPE is a name of `real_size --list`: a file of the real shape
with random weights, written to the cache. Drafts are off, because random text repeats itself.

"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.models import smollm2
from benchmarks.peers_setup import Wanted, gguf
from benchmarks.processes import ProcessScenarios, empty_home, put_through, running
from localllm.bench import against
from localllm.bench.against import ScenarioResult

ROOT = Path(__file__).parent.parent
_SERVING = "single,eight,burst,stall,warm,known"
_NEWCOMER = ("--version", "device", "doctor", "recommend", "setup --dry-run")
# The streams that the servers are started with: as many as "burst" needs.
_STREAMS = 32
_TESTS = (
    "tests/backends", "tests/engine/test_kv_types.py", "tests/engine/test_exactness.py",
    "tests/setup/test_self_test.py",
)  # fmt: skip

Figure = dict[str, Any]


def newcomer(_: argparse.Namespace) -> Iterator[Figure]:
    """Yield the seconds and the exit code of each command."""
    for words in _NEWCOMER:
        begun = time.perf_counter()
        done = _ours(*words.split())
        yield _figure(f"localllm {words}", time.perf_counter() - begun, "s", exit=done.returncode)


def sizes(options: argparse.Namespace) -> Iterator[Figure]:
    """Yield the figures of `real_size` for the model, from a separate process."""
    from benchmarks.real_size import in_a_process

    path = _model(options.model)
    command = [sys.executable, "-m", "benchmarks.real_size", f"--here={path}"]
    found = in_a_process(
        [*command, "--context=4096", f"--prompt={options.prompt}", "--decode=64"], path
    )
    if isinstance(found, str):
        yield {"what": path.stem, "failed": found}
        return
    for key in ("planned_gb", "load_s", "first_token_s", "prefill_tok_s", "decode_tok_s"):
        name, _, unit = key.rpartition("_") if not key.endswith("tok_s") else key.partition("_")
        predicted = found.get(f"{name}_predicted") or found.get(f"predicted_{key}")
        if key in found:
            yield _figure(f"{path.stem}: {name}", found[key], unit, predicted=predicted)
    if "refused" in found:
        yield {"what": path.stem, "failed": found["refused"]}


def serving(options: argparse.Namespace) -> Iterator[Figure]:
    """Run the scenarios on our server and on llama-server in turn."""
    yield from _scenarios(options, options.scenarios)


def restart(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure the reuse after a restart, and the time until a server is ready."""
    yield from _scenarios(options, "fresh,restart")


def doctor(_: argparse.Namespace) -> Iterator[Figure]:
    """Yield each check with its noise and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.txt"
        done = _ours("doctor", "--accelerator", "--report", str(report))
        said = report.read_text() if report.exists() else done.stdout + done.stderr
    failures = said.partition("\nfailures\n")[2].strip().splitlines()
    yield _figure("doctor --accelerator: failures", len(failures), "", exit=done.returncode)
    yield from ({"what": line.strip(), "failed": "a check"} for line in failures)
    for line in said.splitlines():
        if ", noise " in line:
            check, _, noise = line.partition(" (")[0], "", line.partition(", noise ")[2]
            yield _figure(" ".join(check.split()), float(noise.partition(")")[0]), "noise")


def tests(_: argparse.Namespace) -> Iterator[Figure]:
    """Yield the number of tests that passed, and the names of those that failed."""
    there = [path for path in _TESTS if (ROOT / path).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *there]
    done = subprocess.run(
        [*command, "-m", "not long and not mlx", "--tb=no"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            yield {"what": line.partition(" ")[2].partition(" - ")[0], "failed": "a test"}
    last = next((s for s in reversed(done.stdout.splitlines()) if " in " in s), "nothing ran")
    counts = {
        word: n for n, word in zip(last.split(), last.replace(",", "").split()[1:], strict=False)
    }
    yield _figure("tests passed", int(counts.get("passed", 0)), "", exit=done.returncode, said=last)


# Stages in their order, each with its limit in seconds. Together they take at most 15 minutes, and
# 5 on a card of 24 GB or more.
STAGES: dict[str, tuple[float, Callable[[argparse.Namespace], Iterator[Figure]]]] = {
    "newcomer": (60, newcomer),
    "sizes": (90, sizes),
    "serving": (240, serving),
    "restart": (90, restart),
    "doctor": (120, doctor),
    "tests": (300, tests),
}


def _figure(what: str, value: float, unit: str, **more: Any) -> Figure:
    rounded = round(value, 4) if math.isfinite(value) else None
    return {"what": what, "value": rounded, "unit": unit, **more}


def _ours(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localllm", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def _model(name: str) -> Path:
    """Return the file of that name, or a file of that shape."""
    if not name:
        return smollm2()
    if name.endswith(".gguf"):
        return Path(name)
    from benchmarks.real_size import made
    from localllm import paths

    return made(name, paths.cache_dir() / "card")


def _scenarios(options: argparse.Namespace, names: str) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as logs:
        without = ["llama-cpp-python", "ollama"]
        if options.llama_server is None and not options.build:
            without.append("llama-server")
        wanted = Wanted(
            _model(options.model), options.llama_server, Path(logs), without,
            streams=_STREAMS, options=("--draft", "off"),
        )  # fmt: skip
        with running(gguf(wanted).servers) as servers:
            for server in servers:
                yield _figure("start → ready", server.ready_s, "s", who=server.name)
            # One by one, so that figures already printed remain if the stage is ended.
            for name in against.parse_scenarios(names, ProcessScenarios.means):
                yield from _told(put_through(servers, [name], options.rounds))


def _told(found: ScenarioResult) -> Iterator[Figure]:
    for measured in found.tables:
        for who in measured.values:
            yield _figure(measured.title, measured.median(who), measured.unit, who=who)
    yield from ({"what": fault, "failed": "a scenario"} for fault in found.faults)


# --- the stages as processes ----------------------------------------------------------------------


def run_stage(name: str, limit_s: float, arguments: list[str]) -> Iterator[Figure]:
    """Yield the figures of a stage as they arrive, and end it with all its children after
    `limit_s`."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.card", "--here", name, *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    late, said = threading.Event(), list[str]()
    errors = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    errors.start()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        for line in process.stdout:
            yield {"stage": name, **json.loads(line)}
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            end()
            process.wait()
    errors.join(1.0)
    if late.is_set():
        yield {"stage": name, "what": "the stage", "failed": f"was ended after {limit_s:g} s"}
    elif process.returncode:
        last = said[-1].strip() if said else "without a word"
        yield {"stage": name, "what": "the stage", "failed": last}
    yield {"stage": name, **_figure("the stage took", time.perf_counter() - begun, "s")}


def table(figures: list[Figure]) -> list[str]:
    """Return all figures in columns, with the servers of one measurement on one line."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for figure in figures:
        row = rows.setdefault((figure["stage"], figure["what"], figure.get("unit", "")), [])
        row.append(_cell(figure))
    return [
        f"{stage:9} {what[:64]:64} {unit:6} {'   '.join(values)}"
        for (stage, what, unit), values in rows.items()
    ]


def _cell(figure: Figure) -> str:
    value = figure.get("value")
    said = figure.get("failed") or ("-" if value is None else f"{value:.4g}")
    if "who" in figure:
        return f"{figure['who']} {said}"
    predicted = figure.get("predicted")
    return said if predicted is None else f"{said} (predicted {predicted})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE[=SECONDS]")
    parser.add_argument("--model", default="", help="a .gguf, or a shape (default: the starter)")
    parser.add_argument("--llama-server", type=Path, default=None)
    parser.add_argument("--build", action="store_true", help="build llama-server (minutes, once)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scenarios", default=_SERVING)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens that sizes reads at once")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    parser.add_argument("--here", choices=STAGES, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Run the stages, print each figure as it arrives, and print the table at the end."""
    options = _parser().parse_args()
    if options.here:
        with empty_home():
            for figure in STAGES[options.here][1](options):
                print(json.dumps(figure), flush=True)
        return
    stages = [stage.partition("=") for stage in options.stages or STAGES]
    unknown = [name for name, _, _ in stages if name not in STAGES]
    if unknown:
        raise SystemExit(f"no stage {', '.join(unknown)}: there are {', '.join(STAGES)}")
    passed = [word for word in sys.argv[1:] if word not in options.stages]
    figures: list[Figure] = []
    for name, _, seconds in stages:
        for figure in run_stage(name, float(seconds or STAGES[name][0]), passed):
            figures.append(figure)
            print(json.dumps(figure), flush=True)
    print("\n" + "\n".join(table(figures)))
    if options.json is not None:
        options.json.write_text("\n".join(map(json.dumps, figures)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
