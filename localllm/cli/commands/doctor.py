"""`localllm doctor`: check the machine and installation, and print the command that fixes each
problem."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm import __version__, paths
from localllm.cli.commands.shared import Json, installed_names, print_json
from localllm.errors import UsageError
from localllm.plain_output import print_lines

if TYPE_CHECKING:
    from localllm.device.health import HealthCheck


def doctor(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            autocompletion=installed_names,
            help="Check this model's file and what its quant loses, instead of the machine.",
        ),
    ] = "",
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
            help="Write the probes' readings (or --accelerator's report) to a file for an issue.",
        ),
    ] = None,
    kv: Annotated[
        str,
        typer.Option(
            "--kv",
            metavar="MODEL",
            help="Measure how much precision MODEL loses with quantised KV (a minute).",
        ),
    ] = "",
) -> None:
    """Check this machine and this installation, without changing them.

    It decodes a few tokens on each backend, and lists the checks that were not possible.
    --accelerator tests the device with the starter model: ten tokens compared with the CPU's, and
    all rules for engines. It writes a text file that you can attach to an issue. --kv compares a
    model's logits with quantised KV and with f16, and stores the result for the planner. --report
    alone writes the probes' readings of this machine, without serial numbers. With a MODEL, it
    compares the file with the most exact file of that model on this disk: `localllm quality` in
    short.
    """
    from localllm.cli import doctor_checks

    if model:
        _check_model(model, as_json=as_json, has_more_options=any((accelerator, kv, file)))
        return
    if accelerator and as_json:
        raise UsageError(
            "the report of --accelerator is a text file", hint="omit --json", param="--json"
        )
    if accelerator:
        doctor_checks.examine(file or Path("localllm-self-test.txt"))
        return
    if kv:
        doctor_checks.measure_kv(kv)

    from localllm.device.detect import from_readings
    from localllm.device.probes.systems import read
    from localllm.device.recording import recording_text
    from localllm.device.types import device_to_json

    readings = read()
    machine = from_readings(readings)
    checks = doctor_checks.all_checks(machine)
    columns = _NO_LIMIT_COLUMNS
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
    body = {"device": device_to_json(machine), "checks": [asdict(check) for check in checks]}
    if as_json:
        print_json(body)
    else:
        print_lines(lines(checks, columns))
    if file is not None:
        program = f"localllm {__version__} doctor --report"
        paths.write_text(file, recording_text(readings, machine.name, program, lines(checks)))
        print(f"wrote {file}: attach it to an issue", file=sys.stderr)


def _check_model(ref: str, *, as_json: bool, has_more_options: bool) -> None:
    """Print the checks of one model. Exits with code 4 if it has a fault.

    Raises UsageError if there are options that concern the machine.
    """
    if has_more_options:
        raise UsageError(
            "with a MODEL, doctor checks only that model",
            hint="omit --accelerator, --kv and --report, or the MODEL",
        )
    from localllm.cli.doctor_model import model_checks
    from localllm.errors import ModelFileError
    from localllm.library.resolve import resolve

    checks = model_checks(resolve(ref))
    columns = _NO_LIMIT_COLUMNS
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
    if as_json:
        print_json({"checks": [asdict(check) for check in checks]})
    else:
        print_lines(lines(checks, columns))
    if any(check.status == "error" for check in checks):
        raise typer.Exit(ModelFileError.exit_code)


# If fewer columns than this remain next to the names of the checks, messages go on the next line.
_MIN_MESSAGE_COLUMNS = 40
_NO_LIMIT_COLUMNS = 10_000


def lines(checks: list[HealthCheck], columns: int = _NO_LIMIT_COLUMNS) -> list[str]:
    """Format the checks with at most `columns` per line, each fix below its check, and the totals.

    Checks that were not possible are counted separately.
    """
    width = max(len(check.name) for check in checks)
    margin_width = 11 + 2 + width + 2
    is_narrow = columns - margin_width < _MIN_MESSAGE_COLUMNS
    margin = " " * margin_width
    if is_narrow:
        margin = "  "
    text_lines = []
    for check in checks:
        head = f"{check.status.upper():<11}  {check.name:<{width}}  "
        if is_narrow:
            text_lines.append(head.rstrip())
            head = margin
        text_lines += _wrapped(check.message, columns, head, margin)
        if check.fix:
            text_lines += _wrapped(f"fix: {check.fix}", columns, margin, margin)
    return [*text_lines, "", *_wrapped(_counts(checks), columns, "", "")]


def _counts(checks: list[HealthCheck]) -> str:
    n_by_status = Counter(check.status for check in checks)
    text = (
        f"{n_by_status['error']} error(s), {n_by_status['warning']} warning(s), "
        f"{n_by_status['ok']} check(s) passed"
    )
    if n_by_status["not checked"]:
        text += f", {n_by_status['not checked']} not checked"
    return text


def _wrapped(text: str, columns: int, first: str, further: str) -> list[str]:
    return textwrap.wrap(text, columns, initial_indent=first, subsequent_indent=further)
