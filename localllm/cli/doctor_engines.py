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
_CHECKS_TIMEOUT_S = 1800.0
# Buffers grow in blocks, so short prompts take more than planned.
_MAX_RATIO_TO_PLAN = 1.6
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
        is_installed = all(importlib.util.find_spec(module) is not None for module in modules)
        if not modules or not is_installed or build_check.ENGINE in backend.formats:
            continue
        models = [local for local in store.scan() if local.format in backend.formats]
        if models:
            smallest = min(models, key=attrgetter("size_bytes"))
            tests.append(examine_engine(backend, smallest, show))
        else:
            not_checked = f"not checked: no {backend.label} model is on this disk (localllm pull)"
            tests.append(EngineTest((f"{backend.label:<12} {not_checked}",)))
    return tests


def examine_engine(backend: Declaration, local: LocalModel, show: Show) -> EngineTest:
    """Run all checks of `backend` on the model `local`. Never raises: a crash is a failure."""
    releases = [f"{package} {metadata.version(package)}" for package in backend.packages]
    lines = [
        f"{backend.label:<12} {', '.join(releases)}",
        f"model        {local.quant or 'unquantised'}, {local.size_bytes:,} B",
    ]
    failures: list[str] = []
    checks = [_check_tokens(backend, local)]
    if checks[0]["outcome"] == "failed":
        explanation = _anonymous(checks[0]["said"], local)
        return EngineTest(
            (*lines, f"FAILED       {checks[0]['check']}: {explanation}"), (explanation,)
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "layers": -1,
            "text": kv_evidence.TEXT,
            "pairs": kv_evidence.pairs_of(backend),
            "file": str(Path(folder) / "stored"),
        }
        for part in ("device", "restart"):
            answers, failure = _run_part(backend, part, local, arguments, show)
            checks += answers
            if failure:
                failures.append(failure)
    checks += [_check_memory(local, check) for check in checks if "kv_bytes" in check]
    checks.append(_check_restart(checks))
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
    return build_check.without_folders(text).replace(local.path.name, "the model")


def _run_part(
    backend: Declaration,
    part: str,
    local: LocalModel,
    options: Mapping[str, Any],
    show: Show,
) -> tuple[list[Answer], str]:
    """Run a part of the checks. Returns the outcomes, and one sentence if the process failed."""
    arguments = [backend.name, part, str(local.path), json.dumps(options)]
    replies = build_check.run(arguments, os.environ, timeout_s=_CHECKS_TIMEOUT_S, show=show)
    outcomes = [answer for answer in replies.answers if "outcome" in answer]
    failure = replies.failure
    if failure and replies.answers and "outcome" not in replies.answers[-1]:
        failure = f"during the check that {replies.answers[-1]['check']}: {failure}"
    return outcomes, failure


def _check_tokens(backend: Declaration, local: LocalModel) -> Answer:
    """Compare ten tokens on the device with those on the CPU."""
    check = {"check": "ten tokens are those of the CPU", "outcome": "ok", "said": ""}
    expected, failure = _greedy_tokens(backend, local, {"layers": 0})
    if not failure:
        forced_tokens = expected["tokens"]
        answer, failure = _greedy_tokens(backend, local, {"layers": -1, "follow": forced_tokens})
    if not failure:
        reference = build_check.ReferenceAnswer(local.path, tuple(forced_tokens), expected["text"])
        verdict = build_check.compare(reference, answer)
        failure = verdict.failure
        check["said"] = verdict.summary
    if failure:
        return check | {"outcome": "failed", "said": failure}
    return check


def _greedy_tokens(
    backend: Declaration, local: LocalModel, options: Mapping[str, Any]
) -> tuple[Answer, str]:
    arguments = [backend.name, "greedy", str(local.path), json.dumps(options)]
    replies = build_check.run(arguments, os.environ)
    if replies.failure:
        return {}, replies.failure
    return replies.answers[-1], ""


def _check_memory(local: LocalModel, measured: Answer) -> Answer:
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
    is_above_plan = measured["kv_bytes"] > _MAX_RATIO_TO_PLAN * planned_bytes
    if planned_bytes and is_above_plan:
        check["outcome"] = "failed"
    return check


def _check_restart(checks: Sequence[Answer]) -> Answer:
    """Compare the tokens after a stored prompt in both processes."""
    tokens = [check["tokens"] for check in checks if isinstance(check.get("tokens"), list)]
    check = {"check": "a restart changes no token", "outcome": "ok", "said": ""}
    if len(tokens) != 2 or tokens[0] != tokens[1]:
        return check | {"outcome": "failed", "said": "the tokens after a stored prompt differ"}
    return check
