"""Answer requests of the chat's models screen with the planner, device and library.

Implements localllm_tui.control.interfaces.ModelService.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

from localllm.errors import LocalLLMError, ModelNotFoundError
from localllm.library import store
from localllm.library.catalog import load_catalog
from localllm.library.types import OWNERS
from localllm.load import candidates
from localllm.settings import Settings
from localllm_catalog.types import Purpose
from localllm_tui.control.interfaces import (
    InstalledModel,
    PlanChoice,
    PlanList,
    PlanRequest,
    PullProgress,
    ignore_part,
)

if TYPE_CHECKING:
    from localllm.cli.recommend.phases import JoinedNames, Prefilling
    from localllm.device.types import Device
    from localllm.library.transfer import DownloadProgress
    from localllm.library.types import LocalModel
    from localllm.planner.starting_settings import Overrides
    from localllm.planner.types import Plan, Workload
    from localllm_catalog.catalog import Catalog

_REJECTION_TEXTS = {
    "memory": "too large", "speed": "too slow", "context": "of a shorter context",
    "purpose": "for other purposes", "engine": "for a newer llama.cpp",
    "ranking": "no better than listed ones",
}  # fmt: skip
_STATE_TEXTS = {
    "listing": "reading the hub's listing of", "checking": "checking", "downloading": "pulling",
    "waiting": "waiting for the hub:",
    "verifying": "verifying", "done": "done",
}  # fmt: skip


class LocalModelService:
    """Implements ModelService. `offline`: no downloads."""

    def __init__(self, *, offline: bool = False) -> None:
        self._offline = offline
        self._devices: dict[tuple[str, float], tuple[Device, Overrides]] = {}

    def plan(
        self, request: PlanRequest, on_choice: Callable[[PlanChoice], object] = ignore_part
    ) -> PlanList:
        from localllm.planner import recommend as planner
        from localllm.planner import scoring
        from localllm.planner.scoring import need_of
        from localllm.planner.serialise import plan_to_json

        catalog = self.catalog
        device, overrides = self._device(request)
        workload = _workload(request)
        need = need_of(workload)
        installed = [] if request.machine else store.scan()
        limit_s = request.longest_wait_s or float("inf")
        prefilling = _prefilling(request)

        def choice_of(plan: Plan) -> PlanChoice:
            installed_names = candidates.installed_names([plan], catalog, installed)
            name = installed_names.get((plan.model.id, plan.variant.quant), "")
            note = ""
            if prefilling is not None:
                note = prefilling.one_line(plan, device, workload)
            return PlanChoice(plan_to_json(plan), scoring.answer_s(plan, need), name, note)

        def report(plan: Plan) -> None:
            choice = choice_of(plan)
            if choice.wait_s <= limit_s:
                on_choice(choice)

        answer = planner.recommend(
            device, catalog.models, workload, overrides=overrides, limit=0, on_plan=report
        )
        choices = [choice_of(plan) for plan in answer.plans]
        n_rejected = Counter(_REJECTION_TEXTS[rejected.kind] for rejected in answer.rejected)
        machine = _device_text(device)
        if prefilling is not None:
            machine += f"; {prefilling.words}"
        return PlanList(
            machine,
            tuple(c for c in choices if c.wait_s <= limit_s),
            dict(n_rejected.most_common(2)),
            tuple(c for c in choices if c.wait_s > limit_s),
            tuple(device.accounts),
            guessed=device.bandwidth_gbps.basis == "assumed",
        )

    def prepare(self, request: PlanRequest) -> None:
        """Plan one model for the request's machine, which loads all that further plans need.

        The machine's figures are not kept: the next plans read them again. Raises
        DeviceNotFoundError or UsageError if the machine can't be planned for.
        """
        from localllm.planner import recommend as planner

        device, overrides = self._device_now(*_decoding_machine(request))
        _prefilling(request)
        first_model = self.catalog.models[:1]
        planner.recommend(device, first_model, _workload(request), overrides=overrides, limit=0)

    def explain(self, request: PlanRequest, ref: str, columns: int) -> Sequence[str]:
        from localllm.library.describe import describe
        from localllm.planner import recommend as planner
        from localllm.planner.explain import explain

        device, overrides = self._device(request)
        model, quant = describe(ref, self.catalog)
        workload = _workload(request)
        variants = planner.variants_of(device, model, workload, overrides=overrides)
        plans = candidates.plans_of_quant(variants, quant)
        if plans:
            lines = [*explain(plans[0], device, columns=columns)]
            prefilling = _prefilling(request)
            if prefilling is not None:
                lines = [*prefilling.lines(plans[0], device, workload, explains=True), "", *lines]
            return lines
        return [reason for model_id, reason in overrides.too_new if model_id == model.id]

    def on_disk(self) -> Sequence[InstalledModel]:
        return [_installed_model(local) for local in store.everything()]

    def fit(self, model: InstalledModel) -> str:
        from localllm.load.load_plan import make_load_plan

        try:
            plan = make_load_plan(self._local_model(model), Settings(), "chat").plan
        except LocalLLMError as e:
            return e.message
        if plan is None:
            return "its header lacks data for a plan, so the engine chooses the placement"
        account = plan.memory
        memory = f"{account.total_bytes / 1e9:.1f} of {account.limit_bytes / 1e9:.1f} GB"
        context = f"{plan.settings.n_ctx:,} tokens of {plan.settings.kv_type} context"
        speed = f"{plan.decode_tok_s.low:.0f} to {plan.decode_tok_s.high:.0f} tokens/s"
        return f"needs {memory} with {context}; {speed}"

    def remove(self, model: InstalledModel) -> int:
        return store.rm(self._local_model(model))

    def pull(self, ref: str, on_progress: Callable[[PullProgress], None]) -> str:
        from localllm.library.pull import pull

        def report_progress(progress: DownloadProgress) -> None:
            state_text = _STATE_TEXTS[progress.state]
            on_progress(
                PullProgress(
                    state_text,
                    progress.done_bytes,
                    progress.total_bytes,
                    progress.speed_bytes_s,
                    progress.eta_s,
                )
            )

        choose = candidates.variant_choice(ref)
        model = pull(
            ref, on_progress=report_progress, choose=choose, offline=self._offline, mmproj=True
        )
        return model.name

    # -- loaded once ------------------------------------------------------------------------------

    @cached_property
    def catalog(self) -> Catalog:
        return load_catalog()

    def _device(self, request: PlanRequest) -> tuple[Device, Overrides]:
        key = _decoding_machine(request)
        if key in self._devices:
            return self._devices[key]
        device_and_overrides = self._device_now(*key)
        if not device_and_overrides[0].bandwidth_gbps.busy:  # a busy machine is measured again
            self._devices[key] = device_and_overrides
        return device_and_overrides

    def _device_now(self, machine: str, memory_gb: float) -> tuple[Device, Overrides]:
        return candidates.device_and_overrides(machine or None, memory_gb or None, self.catalog)

    def _local_model(self, model: InstalledModel) -> LocalModel:
        for local in store.scan():
            if str(local.path) == model.path:
                return local
        raise ModelNotFoundError(
            f"{model.name} is no longer on this disk: `localllm pull` downloads it again"
        )


def _decoding_machine(request: PlanRequest) -> tuple[str, float]:
    """The name of the machine that writes answers ("": this one), and the size of its memory."""
    names = _joined_names(request.machine)
    machine = request.machine.strip() if names is None else names.decoding
    return machine, request.memory_gb


def _joined_names(machine: str) -> JoinedNames | None:
    if not machine:
        return None  # this machine needs no import
    from localllm.cli.recommend.phases import joined_names

    return joined_names(machine)


def _prefilling(request: PlanRequest) -> Prefilling | None:
    """The machine that reads prompts, if the request names one. Raises DeviceNotFoundError and
    UsageError."""
    names = _joined_names(request.machine)
    if names is None:
        return None
    from localllm.cli.recommend.phases import prefilling_of

    return prefilling_of(names)


def _workload(request: PlanRequest) -> Workload:
    from localllm.planner.types import Workload

    return Workload(cast("Purpose", request.purpose), request.context)


def _device_text(device: Device) -> str:
    bandwidth = device.bandwidth_gbps
    basis: str = bandwidth.basis
    if bandwidth.busy:
        basis += " while other programs ran; it will be measured again"
    name = device.name
    if device.simulated:
        name += " (simulated)"
    usable = f"{device.memory.limit_bytes / 1e9:.1f} GB usable"
    return f"{name}: {usable}, {bandwidth.value:,.0f} GB/s ({basis})"


def _installed_model(local: LocalModel) -> InstalledModel:
    owner = OWNERS[local.origin]
    in_own_cache = local.origin == "hf-cache"
    return InstalledModel(
        local.name, local.quant, local.size_bytes, owner, str(local.path), in_own_cache, local.fault
    )
