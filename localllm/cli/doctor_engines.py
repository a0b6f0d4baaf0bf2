"""`localllm doctor --accelerator` for engines other than llama.cpp, such as MLX on a Mac.

The checks run on the smallest model of that engine on this disk, in child processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

from localllm.library import store
from localllm.library.catalog import load_catalog, open_model
from localllm.library.types import LocalModel
from localllm.load import kv_evidence
from localllm.planner import kv_sizes
from localllm.planner.types import RunSettings
from localllm.setup import build_check
from localllm.setup.build_check import Show
from localllm_backends import registry
from localllm_backends.declaration import Declaration

# Limit for all checks together, on a slow device.
_PATIENCE_S = 1800.0
# Buffers grow in blocks, so short prompts take more than planned.
_MOST_OVER_PLAN = 1.6
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineTest:
    """The lines of a report about one engine, and a sentence for each failure.

    The lines contain no paths and no names of models.
    """

    lines: tuple[str, ...]
    failures: tuple[str, ...] = ()


def examine_others(show: Show) -> list[EngineTest]:
    """Examine each installed engine other than llama.cpp. `show` gets the name of each check when
    it begins."""
    tests = []
    for backend in registry.declarations():
        modules = [package.replace("-", "_") for package in backend.packages]
        installed = all(importlib.util.find_spec(module) is not None for module in modules)
        if not modules or not installed or build_check.ENGINE in backend.formats:
            continue
        models = [local for local in store.scan() if local.format in backend.formats]
        if models:
            smallest = min(models, key=attrgetter("size_bytes"))
            tests.append(examine_engine(backend, smallest, show))
        else:
            missing = f"not checked: no {backend.label} model is on this disk (localllm pull)"
            tests.append(EngineTest((f"{backend.label:<12} {missing}",)))
    return tests


def examine_engine(backend: Declaration, local: LocalModel, show: Show) -> EngineTest:
    """Run all checks of `backend` on the model `local`. Never raises: a crash is a failure."""
    releases = [f"{package} {metadata.version(package)}" for package in backend.packages]
    lines = [
        f"{backend.label:<12} {', '.join(releases)}",
        f"model        {local.quant or 'unquantised'}, {local.size_bytes:,} B",
    ]
    failures: list[str] = []
    checks = [_same_text(backend, local)]
    if checks[0]["outcome"] == "failed":
        said = _anonymous(checks[0]["said"], local)
        return EngineTest((*lines, f"FAILED       {checks[0]['check']}: {said}"), (said,))
    with tempfile.TemporaryDirectory() as folder:
        order = {
            "layers": -1,
            "text": kv_evidence.TEXT,
            "pairs": kv_evidence.pairs_of(backend),
            "file": str(Path(folder) / "stored"),
        }
        for what in ("device", "restart"):
            answers, failure = _answers(backend, what, local, order, show)
            checks += answers
            if failure:
                failures.append(failure)
    checks += [_as_planned(local, check) for check in checks if "kv_bytes" in check]
    checks.append(_same_after_restart(checks))
    for check in checks:
        line = f"{check['outcome']:<12} {check['check']}"
        if check["said"]:
            line += f": {check['said']}"
        lines.append(_anonymous(line, local))
        if check["outcome"] == "failed":
            failures.append(f"{check['check']}: {check['said']}")
    lines += [f"FAILED       {_anonymous(failure, local)}" for failure in failures]
    return EngineTest(tuple(lines), tuple(failures))


def _anonymous(text: str, local: LocalModel) -> str:
    """Remove folders and the model's name, which are private."""
    return build_check.plain(text).replace(local.path.name, "the model")


def _answers(
    backend: Declaration,
    what: str,
    local: LocalModel,
    order: Mapping[str, Any],
    show: Show,
) -> tuple[list[Answer], str]:
    """Run a part of the checks. Returns the outcomes, and one sentence if the process failed."""
    arguments = [backend.name, what, str(local.path), json.dumps(order)]
    replies = build_check.run(arguments, os.environ, timeout_s=_PATIENCE_S, show=show)
    ended = [answer for answer in replies.answers if "outcome" in answer]
    failure = replies.failure
    if failure and replies.answers and "outcome" not in replies.answers[-1]:
        failure = f"during the check that {replies.answers[-1]['check']}: {failure}"
    return ended, failure


def _same_text(backend: Declaration, local: LocalModel) -> Answer:
    """Compare ten tokens on the device with those on the CPU."""
    check = {"check": "ten tokens are those of the CPU", "outcome": "ok", "said": ""}
    expected, failure = _greedy(backend, local, {"layers": 0})
    if not failure:
        follow = expected["tokens"]
        answer, failure = _greedy(backend, local, {"layers": -1, "follow": follow})
    if not failure:
        reference = build_check.ReferenceAnswer(local.path, tuple(follow), expected["text"])
        verdict = build_check.compare(reference, answer)
        failure = verdict.failure
        check["said"] = verdict.summary
    if failure:
        return check | {"outcome": "failed", "said": failure}
    return check


def _greedy(
    backend: Declaration, local: LocalModel, order: Mapping[str, Any]
) -> tuple[Answer, str]:
    arguments = [backend.name, "greedy", str(local.path), json.dumps(order)]
    replies = build_check.run(arguments, os.environ)
    if replies.failure:
        return {}, replies.failure
    return replies.answers[-1], ""


def _as_planned(local: LocalModel, measured: Answer) -> Answer:
    """Compare the memory of a prompt with the planner's."""
    check = {"check": "memory is as planned", "outcome": "not here", "said": ""}
    model = open_model(local, load_catalog()).model
    if model is None:
        return check | {"said": "the model's shapes are not known"}
    settings = RunSettings(measured["n_tokens"]).with_kv_type(measured["kv_type"])
    planned_bytes = kv_sizes.mlx_kv_bytes(model, settings)
    text = (
        f"weights {measured['weights_bytes']:,} B (files {local.size_bytes:,} B), KV of "
        f"{measured['n_tokens']} tokens {measured['kv_bytes']:,} B (planned {planned_bytes:,} B)"
    )
    check |= {"outcome": "ok", "said": text}
    too_much = measured["kv_bytes"] > _MOST_OVER_PLAN * planned_bytes
    if planned_bytes and too_much:
        check["outcome"] = "failed"
    return check


def _same_after_restart(checks: Sequence[Answer]) -> Answer:
    """Compare the tokens after a stored prompt in both processes."""
    tokens = [check["tokens"] for check in checks if isinstance(check.get("tokens"), list)]
    check = {"check": "a restart changes no token", "outcome": "ok", "said": ""}
    if len(tokens) != 2 or tokens[0] != tokens[1]:
        return check | {"outcome": "failed", "said": "the tokens after a stored prompt differ"}
    return check
