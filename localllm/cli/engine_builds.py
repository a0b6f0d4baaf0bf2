"""Builds of llama.cpp: which one this run uses, told once to this process and to every worker it
starts; and what another one would give on this machine, by the planner's prediction."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm import paths
from localllm.device.accelerators import KINDS
from localllm.errors import LocalLLMError, UsageError
from localllm.library.catalog import load_catalog
from localllm.settings import read_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localllm.device.types import Accelerator, Device
    from localllm.planner.types import Plan
    from localllm.setup.steps import Preferred

# Those that choose, show or mend builds and settings must run whatever is chosen.
_NEVER_FAIL = ("setup", "config", "doctor", "device")
# Those whose answers a build that computes nonsense would spoil.
_RUN_MODELS = ("chat", "serve", "doctor")
# What a turn of a conversation is, where two builds are weighed: tokens read and written.
_READ_TOKENS = 2048
_WRITTEN_TOKENS = 400
_WORTH_IT = 0.95
# A model everybody knows, that fits nearly every GPU.
_YARDSTICK = ("qwen3-8b", "Q4_K_M")


def activate(command: str | None) -> None:
    """Put the chosen build first on Python's path. The environment (LOCALLLM_BUILD) goes before
    config.toml's `build`, that before what `setup --use` chose. Raises BuildNotFoundError where one
    was named that is not there."""

    named = os.environ.get("LOCALLLM_BUILD") or _configured()
    if not named and not paths.builds_dir().is_dir():
        return
    from localllm.setup import builds

    try:
        name = named or builds.chosen()
        builds.apply(name, os.environ, sys.path)
        if command in _RUN_MODELS and name != builds.OWN:
            reason = builds.stale(builds.named(name), builds.drivers_now())
            if reason:
                print(f"note: {reason}", file=sys.stderr)
    except LocalLLMError as e:
        if named and command not in _NEVER_FAIL:
            raise
        print(f"note: {e.message}: the build that came with localllm runs", file=sys.stderr)
        builds.apply(builds.OWN, os.environ, sys.path)


def _configured() -> str:
    """config.toml's `build`; "" where it says nothing, or can't be read (whoever needs the rest of
    it says so)."""
    try:
        return str(read_config().get("build") or "")
    except UsageError:
        return ""


def preferred(machine: Device) -> Preferred | None:
    """The machine's accelerator or the lighter one that drives the same GPU, by the seconds a turn
    of the yardstick would take; None where there is no such choice, or it can't be planned."""
    from localllm.setup.steps import Preferred

    own = machine.accelerator
    lighter = KINDS[machine.accelerator].lighter
    if lighter is None:
        return None
    own_s = _turn_s(machine, own)
    lighter_s = _turn_s(machine, lighter)
    if own_s is None or lighter_s is None:
        return None
    # The lighter one needs nothing but the driver that is there: the other has to be worth
    # installing.
    best = lighter
    if own_s < _WORTH_IT * lighter_s:
        best = own
    told = f"{own} {own_s:.1f} s, {lighter} {lighter_s:.1f} s"
    return Preferred(best, f"a turn of {_YARDSTICK[0]} would take: {told}")


def _turn_s(machine: Device, accelerator: Accelerator) -> float | None:
    plan = yardstick_plan(replace(machine, accelerator=accelerator))
    if plan is None or not plan.decode_tok_s.value or not plan.prefill_tok_s.value:
        return None
    return _READ_TOKENS / plan.prefill_tok_s.value + _WRITTEN_TOKENS / plan.decode_tok_s.value


def yardstick_plan(machine: Device) -> Plan | None:
    from localllm.planner.plan import plan_for
    from localllm.planner.types import Workload

    model = load_catalog().get(_YARDSTICK[0])
    if model is None:
        return None
    variants = [v for v in model.variants if not v.is_folder]
    if not variants:
        return None
    variant = next((v for v in variants if v.quant == _YARDSTICK[1]), variants[0])
    return plan_for(machine, model, variant, Workload())


def note(machine: Device, plans: Sequence[Plan]) -> list[str]:
    """One line for a list of plans made for `machine`, where this machine has a GPU that the
    installed build can't use; nothing anywhere else, and nothing for a simulated one."""
    if machine.simulated or not any(f.fix == "localllm setup" for f in machine.findings):
        return []
    from localllm.device.detect import hardware

    if plans:
        text = sentence(machine, hardware(), plans[0])
    else:
        text = sentence(machine, hardware(), yardstick_plan(machine))
    if text:
        return [f"Note: {text}."]
    return []


def sentence(planned_for: Device, machine: Device, plan: Plan | None) -> str:
    """What `plan`, made for `planned_for`, would reach on `machine`: the same one with its GPU in
    use. "" where that gives nothing more."""
    from localllm.planner.plan import plan_for
    from localllm.planner.types import Workload

    if plan is None or machine.accelerator == planned_for.accelerator:
        return ""
    best = preferred(machine)
    if best is not None:
        machine = replace(machine, accelerator=best.backend)
    other = plan_for(machine, plan.model, plan.variant, Workload())
    if other.fits == "no" or other.decode_tok_s.value <= plan.decode_tok_s.value:
        return ""
    speed = other.decode_tok_s
    kind = KINDS[machine.accelerator].label
    name = f"{plan.model.name} {plan.variant.quant}"
    rate = f"{speed.low:.0f}-{speed.high:.0f} tok/s"
    return f"with a {kind} build of llama.cpp {name} would write {rate}: `localllm setup`"
