"""The self-test that anybody can run and send: a build examined on the real device, written as one text file.

It holds what somebody needs who has not got that device: the machine, the build, ten tokens beside the processor's, and the
contract's checks one by one. Nothing of the user is in it: no paths, no names of models of theirs, no environment.
"""

from __future__ import annotations

import datetime
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm import __version__
from localllm.device import ggml
from localllm.device.types import Device
from localllm.setup import trial


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What was found. `layers` is what was asked for: the model on the device, or "cpu" where the build has none. Each of
    `checks` is an answer of the trial program; `failures` are sentences, none where all is well."""

    device: Device
    build: ggml.GgmlBuild
    backend: str
    verdict: trial.TrialVerdict
    checks: tuple[dict[str, Any], ...]
    failures: tuple[str, ...]


def examine(device: Device, build: ggml.GgmlBuild, model: Path, environment: dict[str, str]) -> SelfTest:
    """Run everything on the build that `environment` runs: ten tokens, then the contract's checks. Never raises: what
    crashes or hangs is a failure in it."""
    if build.failure:
        verdict = trial.TrialVerdict(f"it does not start: {build.failure}")
        return SelfTest(device, build, "", verdict, (), (verdict.failure,))
    driver = ggml.driven_by(device, build)
    if driver == "cpu" and build.accelerators:
        # A device that the probes do not know (a software renderer): it is what runs, so it is what is tested.
        driver = build.accelerators[0]
    expected = trial.reference(model, environment)
    verdict = trial.TrialVerdict(expected) if isinstance(expected, str) else trial.judge(driver, expected, environment)
    checks, broken = trial.conformance(model, driver, environment)
    failures = [verdict.failure] if verdict.failure else []
    failures += [f"{check['check']}: {check['said']}" for check in checks if check["outcome"] == "failed"]
    failures += [broken] if broken else []
    if device.accelerator not in ("cpu", driver) and driver == "cpu":
        failures.append(f"{device.name} was not used: the installed llama.cpp is a build for the processor")
    return SelfTest(device, build, driver, verdict, tuple(checks), tuple(failures))


def report(test: SelfTest) -> list[str]:
    device, build = test.device, test.build
    bandwidth = (
        f"{device.bandwidth_gbps.value:g} GB/s ({device.bandwidth_gbps.basis})" if device.bandwidth_gbps else "unknown"
    )
    lines = [
        f"localllm {__version__} self-test, {datetime.date.today().isoformat()}",
        f"result: {'passed' if not test.failures else f'{len(test.failures)} failure(s)'}",
        "",
        f"machine      {device.name}, {device.accelerator} {device.compute_capability}".rstrip(),
        f"system       {platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        f"memory       {device.memory.limit_bytes / 1e9:.1f} GB usable of {device.memory.total_bytes / 1e9:.1f}",
        f"bandwidth    {bandwidth}",
        f"llama.cpp    llama-cpp-python {build.version or 'unknown'}, tested on: {test.backend or 'nothing'}",
    ]
    for seen in build.devices:
        told = ", ".join((*seen.details, *seen.capabilities))
        most = f", one buffer up to {seen.largest_buffer_bytes} B" if seen.largest_buffer_bytes is not None else ""
        lines.append(
            f"device       {seen.name} ({seen.backend}, {seen.type}): {seen.description}, "
            f"{seen.memory_free_bytes} of {seen.memory_total_bytes} B free{most}; {told}"
        )
    for name, features in build.features.items():
        lines.append(f"compiled     {name}: {' '.join(f'{k}={v}' for k, v in features.items())}")
    lines += [f"difference   {_plain(f.message)}" for f in ggml.differences(device, build)]
    lines += ["", f"ten tokens   {test.verdict.said or 'FAILED'}"]
    for check in test.checks:
        said = f": {check['said']}" if check["said"] else ""
        lines.append(
            f"{check['outcome']:<12} {check['check']} ({check['seconds']:.1f} s, noise {check['noise']:.2g}){said}"
        )
    if test.failures:
        lines += ["", "failures", *(f"  {_plain(failure)}" for failure in test.failures)]
    return lines


def _plain(text: str) -> str:
    """Without the folders of this disk, which are nobody's business."""
    return re.sub(r"(?<![\w.])/(?:[^\s/:']+/)+", "", text)
