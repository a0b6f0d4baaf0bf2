"""Select the build of llama.cpp for this process and its workers.

Also predicts the speed of other builds on this machine.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm import paths
from localllm.errors import LocalLLMError, UsageError
from localllm.settings import read_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localllm.device.types import Accelerator, Device
    from localllm.planner.types import Plan
    from localllm.setup.steps import Preferred

# Commands that choose, show or repair builds and settings must run with any configured build.
_NEVER_FAIL = ("setup", "config", "doctor", "device")
# Commands whose answers would be wrong if the build computed wrong results.
_RUN_MODELS = ("chat", "serve", "doctor")
# Tokens read and written in a typical turn, for comparing two builds.
_READ_TOKENS = 2048
_WRITTEN_TOKENS = 400
_MAX_TIME_SHARE = 0.95
# A well-known model that fits nearly every GPU.
_REFERENCE_MODEL = ("qwen3-8b", "Q4_K_M")


def activate(command: str | None) -> None:
    """Put the chosen build first on Python's path.

    Precedence: LOCALLLM_BUILD, config.toml's `build`, the choice of `setup --use`. Raises
    BuildNotFoundError if a named build does not exist.
    """

    named_build = os.environ.get("LOCALLLM_BUILD") or configured()
    if not named_build and not paths.builds_dir().is_dir():
        return
    from localllm.setup import builds

    try:
        name = named_build or builds.chosen()
        builds.apply(name, os.environ, sys.path)
        if command in _RUN_MODELS and name != builds.OWN:
            reason = builds.why_stale(builds.named(name), builds.drivers_now())
            if reason:
                print(f"note: {reason}", file=sys.stderr)
    except LocalLLMError as e:
        if named_build and command not in _NEVER_FAIL:
            raise
        print(f"note: {e.message}, so the build installed with localllm runs", file=sys.stderr)
        builds.apply(builds.OWN, os.environ, sys.path)


# A build is replaced after this many loads in a row during which its process ended.
_MAX_FAILED_LOADS = 2


class EngineFallback:
    """Returns to the last good build if the chosen one can't be used, or ends twice while it loads
    a model.

    It is a LoadObserver. A build that the user named for this run is not replaced.
    """

    def died(self) -> bool:
        """Count a failed load. Returns True if the model is to be loaded again."""
        from localllm.setup import builds

        name = self._replaceable()
        if not name:
            return False
        try:
            if builds.count_failed_load(name) < _MAX_FAILED_LOADS:
                return True
        except OSError:
            return False
        return self._replace(name, "its process ended twice while it loaded a model")

    def unusable(self, reason: str) -> bool:
        """Replace the build at once. Returns True if the model is to be loaded again."""
        name = self._replaceable()
        return bool(name) and self._replace(name, reason)

    def loaded(self) -> None:
        name = self._replaceable()
        if name:
            from localllm.setup import builds

            with suppress(OSError):
                builds.forget_failed_loads(name)

    def _replace(self, name: str, reason: str) -> bool:
        """Use the last good build from now on. Returns False if there is none."""
        import logging

        from localllm.setup import builds

        try:
            previous = builds.go_back(reason)
            builds.forget_failed_loads(name)
            builds.apply(previous, os.environ, sys.path)
        except (LocalLLMError, OSError):
            return False
        logging.getLogger(__name__).warning(
            "the engine %s can't be used: %s; %s runs now (`localllm setup --use %s` goes back)",
            name,
            reason,
            previous,
            name,
        )
        return True

    def _replaceable(self) -> str:
        """Return the chosen build if it runs and may be replaced, or ""."""
        if os.environ.get("LOCALLLM_BUILD") or configured() or not paths.builds_dir().is_dir():
            return ""
        # Imported only here: requests wait for the end of a load.
        from localllm.setup import builds

        folder = os.environ.get(builds.LIBRARY_VARIABLE, "")
        name = builds.chosen()
        if name == builds.OWN or (folder and not builds.is_build_library(folder)):
            return ""
        return name


def configured() -> str:
    """Return config.toml's `build`, or "" if it is missing or the file can't be read.

    Other readers of config.toml report that error.
    """
    try:
        return str(read_config().get("build") or "")
    except UsageError:
        return ""


def preferred(machine: Device) -> Preferred | None:
    """Choose between the machine's accelerator and the lighter one for the same GPU.

    The choice depends on the predicted seconds for a turn of the reference model. Returns None if
    there is no such choice or it can't be planned.
    """
    from localllm.device.accelerators import KINDS
    from localllm.setup.steps import Preferred

    own = machine.accelerator
    lighter = KINDS[machine.accelerator].lighter
    if lighter is None:
        return None
    own_s = _turn_s(machine, own)
    lighter_s = _turn_s(machine, lighter)
    if own_s is None or lighter_s is None:
        return None
    # The lighter accelerator needs only the installed driver, so the other one must be enough
    # faster to justify an installation.
    best = lighter
    if own_s < _MAX_TIME_SHARE * lighter_s:
        best = own
    times_text = f"{own} {own_s:.1f} s, {lighter} {lighter_s:.1f} s"
    return Preferred(best, f"a turn of {_REFERENCE_MODEL[0]} would take: {times_text}")


def _turn_s(machine: Device, accelerator: Accelerator) -> float | None:
    plan = reference_plan(replace(machine, accelerator=accelerator))
    if plan is None or not plan.decode_tok_s.value or not plan.prefill_tok_s.value:
        return None
    return _READ_TOKENS / plan.prefill_tok_s.value + _WRITTEN_TOKENS / plan.decode_tok_s.value


def reference_plan(machine: Device) -> Plan | None:
    from localllm.library.catalog import load_catalog
    from localllm.planner.plan import plan_for
    from localllm.planner.types import Workload

    model = load_catalog().get(_REFERENCE_MODEL[0])
    if model is None:
        return None
    variants = [v for v in model.variants if not v.is_folder]
    if not variants:
        return None
    variant = next((v for v in variants if v.quant == _REFERENCE_MODEL[1]), variants[0])
    return plan_for(machine, model, variant, Workload())


def note(machine: Device, plans: Sequence[Plan]) -> list[str]:
    """Return a note for plans made for `machine`, if the installed build can't use this machine's
    GPU.

    Otherwise, and for a simulated machine, the list is empty.
    """
    if machine.simulated or not any(
        finding.fix == "localllm setup" for finding in machine.findings
    ):
        return []
    from localllm.device.detect import hardware

    if plans:
        text = speed_note(machine, hardware(), plans[0])
    else:
        text = speed_note(machine, hardware(), reference_plan(machine))
    if text:
        return [f"Note: {text}."]
    return []


def speed_note(planned_for: Device, machine: Device, plan: Plan | None) -> str:
    """Describe the speed of `plan` on `machine`, which is `planned_for` with its GPU in use.

    Returns "" if that is not faster.
    """
    from localllm.device.accelerators import KINDS
    from localllm.planner.plan import plan_for
    from localllm.planner.types import Workload

    if plan is None or machine.accelerator == planned_for.accelerator:
        return ""
    best = preferred(machine)
    if best is not None:
        machine = replace(machine, accelerator=best.backend)
    faster_plan = plan_for(machine, plan.model, plan.variant, Workload())
    if faster_plan.fits == "no" or faster_plan.decode_tok_s.value <= plan.decode_tok_s.value:
        return ""
    speed = faster_plan.decode_tok_s
    accelerator = KINDS[machine.accelerator].label
    name = f"{plan.model.name} {plan.variant.quant}"
    rate = f"{speed.low:.0f}-{speed.high:.0f} tok/s"
    return f"with a {accelerator} build of llama.cpp {name} would generate {rate}: `localllm setup`"
