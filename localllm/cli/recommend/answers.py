"""The answers of `localllm recommend`: recommended plans, one model, comparison of machines,
machines for a speed, roofline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from localllm import paths
from localllm.cli import engine_builds
from localllm.cli.recommend import machines_view, page, view
from localllm.device import name_lookup
from localllm.device.types import Device
from localllm.errors import ModelNotFoundError
from localllm.library.catalog import age_days, user_folder
from localllm.library.names import same_quant
from localllm.load import candidates
from localllm.load.measured_losses import with_losses
from localllm.planner import recommend as planner
from localllm.planner.explain import explain
from localllm.planner.starting_settings import Overrides
from localllm.planner.types import Plan, Recommendation, Workload
from localllm_catalog.catalog import Catalog
from localllm_catalog.types import Model

_PICKS = 8


class PlanQuery(NamedTuple):
    """A query to the planner, and the format of its answer.

    `everything`: print all plans that fit.
    `explains`: print the arithmetic of the first plan.
    `as_json`: print JSON.
    """

    machine: Device
    workload: Workload
    overrides: Overrides
    catalog: Catalog
    everything: bool
    explains: bool
    as_json: bool

    def for_machine(self) -> None:
        """Print the recommended plans."""
        detailed = self.as_json or self.everything or self.explains
        answer = self._recommended(self.machine, self.overrides, detailed=detailed)
        machine = self.machine
        if self.as_json:
            page.print_page([view.json_text(answer, machine)])
            return
        shown = view.table(
            answer,
            machine,
            everything=self.everything,
            installed=self._installed(answer.plans),
            listings_days=age_days(user_folder()),
        )
        page.print_page([*self._arithmetic(answer.plans), *shown])
        page.print_page(engine_builds.note(machine, answer.plans))

    def for_model(self, model: Model, quant: str) -> None:
        """Print every variant of one model, whether it fits or not. Raises ModelNotFoundError."""
        machine = self.machine
        workload = self.workload
        overrides = self.overrides
        model = next(iter(candidates.media_readers([model], overrides)), model)
        (model,) = with_losses([model])
        variants = planner.variants_of(machine, model, workload, overrides=overrides)
        plans = candidates.plans_of_quant(variants, quant)
        if not plans:
            reason = dict(overrides.too_new).get(model.id, "")
            raise ModelNotFoundError(
                f"{model.name} has no files that this machine's engines can read",
                hint=reason or "see `localllm models info`",
            )
        fitting = [plan for plan in plans if plan.fits != "no"]
        best = max(fitting, key=attrgetter("score"), default=None)
        if best is not None:
            best_estimate = best
            best = planner.detailed_plan(
                machine, best_estimate, self.catalog.models, workload, overrides
            )
            plans = [best if plan is best_estimate else plan for plan in plans]
        if self.as_json:
            page.print_page([view.json_text(Recommendation(tuple(plans), (), workload), machine)])
            return
        shown = view.model_table(model, plans, machine, installed=self._installed(plans))
        page.print_page([*self._arithmetic([best or plans[0]]), *shown])
        if best is not None:
            page.print_page(
                view.reasons_of(
                    best, f"about {best.variant.quant}, the best variant on this machine:"
                )
            )

    def side_by_side(self, names: Sequence[str]) -> None:
        """Print the answers for the named machines. A single one is compared with the current
        machine."""
        machines = [candidates.device_named(name, None, None) for name in names]
        overrides_of = [
            replace(
                candidates.overrides_for(machine, self.catalog),
                sees=self.overrides.sees,
                hears=self.overrides.hears,
            )
            for machine in machines
        ]
        if len(names) == 1:
            machines = [self.machine, *machines]
            overrides_of = [self.overrides, *overrides_of]
        answers = [
            self._recommended(d, overrides)
            for d, overrides in zip(machines, overrides_of, strict=True)
        ]

        def plan_on(number: int, model: Model) -> Plan | None:
            answer = planner.recommend(
                machines[number], [model], self.workload, overrides=overrides_of[number]
            )
            return next(iter(answer.plans), None)

        shown = machines_view.comparison(machines, answers, plan_on, as_json=self.as_json)
        page.print_page(shown)

    def long_context(self, tokens: str, reference: str | None, *, offline: bool) -> None:
        """Print what makes so many tokens of context fit, for one model or the first pick.

        Raises UsageError and ModelNotFoundError.
        """
        from localllm.cli.recommend import context_view
        from localllm.library.describe import describe
        from localllm.planner import long_context

        n_tokens = context_view.tokens_of(tokens)
        model = None
        if reference is not None:
            model, _ = describe(reference, self.catalog, offline=offline)
        models = self.catalog.models
        answer = long_context.find(
            self.machine, name_lookup.every_sold_machine(), models, model, n_tokens, self.overrides
        )
        if answer is None:
            raise ModelNotFoundError(
                "no model of the catalog fits this machine",
                hint="name a model: localllm recommend -m MODEL --fits 256k",
            )
        if self.as_json:
            page.print_page([context_view.as_json(answer)])
            return
        page.print_page(context_view.lines(self.machine, answer))

    def roofline(self, files: Sequence[str] | None) -> None:
        """Print the roofline chart of the recommended plans, or write it to a file."""
        from localllm.planner import roofline

        plans = self._recommended(self.machine, self.overrides).plans
        picture = roofline.of(self.machine, list(plans))
        if not files:
            page.print_page(roofline.text(picture))
            return
        target = Path(files[0]).with_suffix(".svg")
        paths.write_text(target, roofline.svg(picture))
        print(f"wrote {target}", file=sys.stderr)

    def _recommended(
        self, machine: Device, overrides: Overrides, *, detailed: bool = True
    ) -> Recommendation:
        models = with_losses(candidates.media_readers(self.catalog.models, overrides))
        limit = 0 if self.everything else _PICKS
        return planner.recommend(
            machine,
            models,
            self.workload,
            overrides=overrides,
            limit=limit,
            detailed=detailed,
        )

    def _arithmetic(self, plans: Sequence[Plan]) -> list[str]:
        if not self.explains or not plans:
            return []
        return [*explain(plans[0], self.machine, columns=page.width()), ""]

    def _installed(self, plans: Sequence[Plan]) -> frozenset[tuple[str, str]]:
        """Return (id, quant) of the plans whose model is installed. Empty for a simulated
        machine."""
        if self.machine.simulated:
            return frozenset()
        return frozenset(candidates.installed_names(plans, self.catalog))


class KnownMachines(NamedTuple):
    """A question about all known machines, for the named model or for any.

    `overrides`: the media that the model must read. The engines are not fixed, because the question
    is about other machines, not about this installation.
    """

    model_name: str | None
    workload: Workload
    overrides: Overrides
    catalog: Catalog
    offline: bool
    as_json: bool

    def answer(self, tok_s: float, budget_usd: float) -> None:
        """Print the machines up to a price, or those that run the model at a speed.

        Raises UsageError if no machine costs that little, and ModelNotFoundError.
        """
        models = self.catalog.models
        if self.model_name is not None:
            models = (self._named(self.model_name),)
        if budget_usd:
            self._on_sale(budget_usd, models)
        else:
            self._reaching(tok_s, models[0])

    def _named(self, name: str) -> Model:
        """Return the model with the variants of the requested quant."""
        from localllm.library.describe import describe

        model, quant = describe(name, self.catalog, offline=self.offline)
        if not quant:
            return model
        variants = tuple(v for v in model.variants if same_quant(quant, v.quant))
        return replace(model, variants=variants)

    def _reaching(self, tok_s: float, model: Model) -> None:
        reach = planner.reaching(
            name_lookup.every_sold_machine(), model, self.workload, tok_s, overrides=self.overrides
        )
        page.print_page(machines_view.reach(model, tok_s, reach, as_json=self.as_json))

    def _on_sale(self, budget_usd: float, models: Sequence[Model]) -> None:
        from localllm.cli.recommend import budget_view

        readers = with_losses(candidates.media_readers(models, self.overrides))
        shown = budget_view.answer(
            budget_usd, readers, self.workload, self.overrides, as_json=self.as_json
        )
        page.print_page(shown)
