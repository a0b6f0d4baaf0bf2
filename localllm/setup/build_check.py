"""Test whether a build is fit to run.

Its devices are listed and ten tokens are computed in child processes. The tokens are compared with
the CPU's.

A token may differ if two tokens were almost equally good on the CPU. So for each step, the test
measures how far the logit of the CPU's token is below the build's highest one. A build may refuse
to load, crash, hang or compute wrong results. Each failure is reported in one sentence.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm import __version__
from localllm.device import ggml
from localllm.device.backend_view import query_build
from localllm.device.probes import programs
from localllm.device.probes.programs import ProgramAnswers
from localllm.device.types import Device

# Builds run model files of this kind, regardless of the backend.
ENGINE = "gguf"
# Rounding moves a logit by up to 0.6 between kernels on one CPU (SmolLM2). A device that computes
# wrong results is off by ten.
_TIE_LOGITS = 1.0
# The first start on a GPU may compile its shaders. That takes minutes on slow drivers.
_TIMEOUT_S = 600.0
# Limit for all checks together on an emulated device.
_CHECKS_TIMEOUT_S = 3600.0
Show = Callable[[str], None]


def _show_nothing(_text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """The result of a trial.

    - `failure`: one sentence, or "" if the build passed.
    - `devices`: the build's devices, as text.
    - `summary`: a description of the result.
    """

    failure: str = ""
    devices: tuple[str, ...] = ()
    summary: str = ""


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """The answer of the installed build on the CPU. Other builds are compared with its tokens."""

    model: Path
    tokens: tuple[int, ...]
    text: str
    speed: str = ""


def reference(
    model: Path, environment: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S
) -> ReferenceAnswer | str:
    """Compute ten tokens on the CPU. Returns one sentence if that fails."""
    arguments = [ENGINE, "greedy", str(model), json.dumps({"layers": 0})]
    replies = run(arguments, environment, timeout_s=timeout_s)
    if replies.failure:
        return f"the CPU reference failed: {replies.failure}"
    answer = replies.answers[-1]
    return ReferenceAnswer(model, tuple(answer["tokens"]), str(answer["text"]), speed(answer))


def measured_turn_s(model: Path, environment: Mapping[str, str]) -> float | None:
    """Measure a short turn with the build in `environment`, with all layers on the device.

    Returns the seconds, or None if the turn fails.
    """
    answer = run([ENGINE, "turn", str(model), json.dumps({"layers": -1})], environment)
    if answer.failure:
        return None
    return float(answer.answers[-1]["turn_s"])


def judge(backend: str, expected: ReferenceAnswer, environment: Mapping[str, str]) -> TrialVerdict:
    """Test the build in `environment`.

    `backend` must be among its devices and must do the computation.
    """
    build = query_build(environment)
    if build.failure:
        return TrialVerdict(f"it does not start: {build.failure}")
    devices = tuple(
        f"{device.name}: {device.description}, {device.memory_total_bytes / 1e9:.1f} GB"
        for device in build.devices
    )
    if backend == "cpu":
        return check_tokens(expected, environment, 0, devices)
    if backend not in build.accelerators:
        devices_text = ", ".join(devices) or "nothing"
        return TrialVerdict(f"it sees no {backend} device (it sees {devices_text})", devices)
    return check_tokens(expected, environment, -1, devices)


def check_tokens(
    expected: ReferenceAnswer,
    environment: Mapping[str, str],
    layers: int,
    devices: tuple[str, ...] = (),
    *,
    timeout_s: float = _TIMEOUT_S,
) -> TrialVerdict:
    """Test whether the build in `environment` computes the expected tokens.

    `layers` is the number of layers on its device: -1 for all, 0 for the CPU. The CPU computes the
    layers and experts that are on no device.
    """
    order = json.dumps({"layers": layers, "follow": list(expected.tokens)})
    arguments = [ENGINE, "greedy", str(expected.model), order]
    answer = run(arguments, environment, timeout_s=timeout_s)
    if answer.failure:
        return TrialVerdict(f"the test run failed: {answer.failure}", devices)
    return compare(expected, answer.answers[-1], devices)


def compare(
    expected: ReferenceAnswer, answer: Mapping[str, Any], devices: tuple[str, ...] = ()
) -> TrialVerdict:
    """Compare an answer of the trial program with the reference, allowing near ties."""
    gaps = [float(gap) for gap in answer["gaps"]]
    max_gap = max(gaps, default=math.inf)
    if any(math.isnan(gap) for gap in gaps):
        max_gap = math.inf
    if len(gaps) != len(expected.tokens) or max_gap > _TIE_LOGITS:
        difference = f"{answer['text']!r} instead of {expected.text!r}"
        text = f"its tokens differ from the CPU's: {difference}"
        return TrialVerdict(f"{text} (off by {max_gap:.3g} in logits)", devices)
    n_same = sum(gap == 0 for gap in gaps)
    message = f"{n_same} of {len(gaps)} tokens as on the CPU, {speed(answer)}"
    return TrialVerdict("", devices, message)


def speed(answer: Mapping[str, Any]) -> str:
    """Return the speed of an answer of the trial program, as text."""
    if answer.get("decode_s"):
        return f"{1 / answer['decode_s']:.3g} tok/s"
    return "generated a token"


def conformance(
    model: Path, backend: str, environment: Mapping[str, str], show: Show = _show_nothing
) -> tuple[list[dict[str, Any]], str]:
    """Run the contract's checks on `model`.

    Returns the results of the completed checks, and one sentence if the process failed. `show`
    gets the name of each check when it begins.
    """
    layers = 0 if backend == "cpu" else -1
    arguments = [ENGINE, "conformance", str(model), json.dumps({"layers": layers})]
    replies = run(arguments, environment, timeout_s=_CHECKS_TIMEOUT_S, show=show)
    answers = replies.answers
    failure = replies.failure
    completed = [answer for answer in answers if "outcome" in answer]
    if failure and answers and "outcome" not in answers[-1]:
        failure = f"during the check that {answers[-1]['check']}: {failure}"
    return completed, failure


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    timeout_s: float = _TIMEOUT_S,
    show: Show = _show_nothing,
) -> ProgramAnswers:
    """Run the trial program and return its answers. `show` gets the name of each check when it
    begins."""

    def show_check(answer: dict[str, Any]) -> None:
        if "outcome" not in answer and "check" in answer:
            show(f"checking that {answer['check']} …")

    # If other programs are running, threads that spin while they wait for each other are very slow
    # (engine/worker/supervisor.py).
    full_environment = {"GOMP_SPINCOUNT": "1000", **environment}
    return programs.ask(
        "self_test",
        *arguments,
        environment=full_environment,
        timeout_s=timeout_s,
        on_answer=show_check,
    )


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Results of testing a build on the real device, for a text file that users can send.

    The file contains no paths, model names or environment.

    - `backend`: the accelerator under test, or "cpu" if the build has no accelerator.
    - `checks`: results of the trial program.
    - `failures`: sentences, empty if all checks passed.
    """

    device: Device
    build: ggml.GgmlBuild
    backend: str
    verdict: TrialVerdict
    checks: tuple[dict[str, Any], ...]
    failures: tuple[str, ...]


def examine(
    device: Device,
    build: ggml.GgmlBuild,
    model: Path,
    environment: Mapping[str, str],
    show: Show = _show_nothing,
) -> SelfTest:
    """Run all tests on the build in `environment`: ten tokens, then the contract's checks.

    Never raises: a crash or hang becomes one of its failures. `show` gets the name of each check
    when it begins.
    """
    if build.failure:
        verdict = TrialVerdict(f"it does not start: {build.failure}")
        return SelfTest(device, build, "", verdict, (), (verdict.failure,))
    backend = ggml.driving_accelerator(device, build)
    if backend == "cpu" and build.accelerators:
        # The probes do not know this device (a software renderer). The build runs on it, so it is
        # tested.
        backend = build.accelerators[0]
    expected = reference(model, environment)
    if isinstance(expected, str):
        verdict = TrialVerdict(expected)
    else:
        verdict = judge(backend, expected, environment)
    checks, process_failure = conformance(model, backend, environment, show)
    failures = [verdict.failure]
    for check in checks:
        if check["outcome"] == "failed":
            failures.append(f"{check['check']}: {check['said']}")
    failures.append(process_failure)
    if device.accelerator != "cpu" and backend == "cpu":
        reason = "the installed llama.cpp is a CPU build"
        failures.append(f"{device.name} was not used: {reason}")
    return SelfTest(device, build, backend, verdict, tuple(checks), tuple(filter(None, failures)))


def report(test: SelfTest) -> list[str]:
    """Return the lines of the self-test's text file."""
    result = "passed"
    if test.failures:
        result = f"{len(test.failures)} failure(s)"
    lines = [
        f"localllm {__version__} self-test, {datetime.date.today().isoformat()}",
        f"result: {result}",
        "",
        *_machine_lines(test.device),
        *_build_lines(test),
        "",
        f"ten tokens   {test.verdict.summary or 'FAILED'}",
    ]
    for check in test.checks:
        line = f"{check['outcome']:<12} {check['check']}"
        line += f" ({check['seconds']:.1f} s, noise {check['noise']:.2g})"
        if check["said"]:
            line += f": {check['said']}"
        lines.append(line)
    if test.failures:
        lines += ["", "failures"]
        lines += [f"  {without_folders(failure)}" for failure in test.failures]
    return lines


def _machine_lines(device: Device) -> list[str]:
    memory = device.memory
    bandwidth = device.bandwidth_gbps
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    usable = f"{memory.limit_bytes / 1e9:.1f} GB usable of {memory.total_bytes / 1e9:.1f}"
    return [
        f"machine      {device.name}, {device.accelerator} {device.compute_capability}".rstrip(),
        f"system       {system}, Python {platform.python_version()}",
        f"memory       {usable}",
        f"bandwidth    {bandwidth.value:g} GB/s ({bandwidth.basis})",
    ]


def _build_lines(test: SelfTest) -> Iterator[str]:
    build = test.build
    yield f"llama.cpp    {build.title}, tested on: {test.backend or 'nothing'}"
    for device in build.devices:
        yield _device_line(device)
    for name, features in build.features.items():
        features_text = " ".join(f"{key}={value}" for key, value in features.items())
        yield f"compiled     {name}: {features_text}"
    for finding in ggml.differences(test.device, build):
        yield f"difference   {without_folders(finding.message)}"


def _device_line(device: ggml.GgmlDevice) -> str:
    memory = f"{device.memory_free_bytes} of {device.memory_total_bytes} B free"
    if device.largest_buffer_bytes is not None:
        memory += f", one buffer up to {device.largest_buffer_bytes} B"
    name = f"{device.name} ({device.backend}, {device.type})"
    capabilities = ", ".join((*device.details, *device.capabilities))
    return f"device       {name}: {device.description}, {memory}; {capabilities}"


def without_folders(text: str) -> str:
    """Remove folder names of this disk, which are private."""
    return re.sub(r"(?<![\w.])/(?:[^\s/:']+/)+", "", text)
