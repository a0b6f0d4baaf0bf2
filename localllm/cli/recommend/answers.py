"""The answers of `localllm recommend` beside its list: machines side by side, machines for a speed,
one model, the roofline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.recommend import machines_view, page, view
from localllm.errors import ModelNotFoundError

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.planner.starting_settings import Overrides
    from localllm.planner.types import Plan, Workload
    from localllm_catalog.types import Model


def side_by_side(
    machines: list[Device],
    known: list[Overrides],
    models: Sequence[Model],
    workload: Workload,
    *,
    limit: int,
    as_json: bool,
) -> None:
    from localllm.planner import recommend as planner

    answers = [
        planner.recommend(d, models, workload, overrides=o, limit=limit)
        for d, o in zip(machines, known, strict=True)
    ]

    def elsewhere(number: int, model: Model) -> Plan | None:
        plans = planner.recommend(
            machines[number], [model], workload, overrides=known[number]
        ).plans
        return plans[0] if plans else None

    page.out(machines_view.comparison(machines, answers, as_json=as_json, elsewhere=elsewhere))


def reaching(asked: tuple[Model, str], workload: Workload, tok_s: float, *, as_json: bool) -> None:
    """The machines of the table that run one model, in the quant asked for, at a speed."""

    from localllm.device.named import everything
    from localllm.library.names import same_quant
    from localllm.planner import recommend
    from localllm.planner.starting_settings import Overrides

    model, quant = asked
    if quant:
        model = replace(
            model, variants=tuple(v for v in model.variants if same_quant(quant, v.quant))
        )
    # Both engines: the question is about machines one does not have, not about this installation.
    reach = recommend.reaching(everything(), model, workload, tok_s, overrides=Overrides())
    page.out(machines_view.reach(model, tok_s, reach, as_json=as_json))


def show_model(
    model: Model,
    plans: list[Plan],
    best: Plan | None,
    device: Device,
    workload: Workload,
    installed: frozenset[tuple[str, str]],
    *,
    explain: bool,
    as_json: bool,
) -> None:
    from localllm.planner.types import Recommendation

    if not plans:
        raise ModelNotFoundError(
            f"{model.name} has no files that this machine's engines can read",
            hint="see `localllm models info`",
        )
    if as_json:
        page.out([view.json_text(Recommendation(tuple(plans), (), workload), device)])
        return
    if explain:
        from localllm.planner.explain import explain as lines

        page.out([*lines(best or plans[0], device, columns=page.width()), ""])
    page.out(view.model_table(model, plans, device, installed=installed))
    if best is not None:
        page.out(view.further(best, f"about {best.variant.quant}, the best of them here:"))


def plot_roofline(device: Device, plans: list[Plan], files: Sequence[str] | None) -> None:
    from localllm.planner import roofline

    picture = roofline.of(device, plans)
    if not files:
        page.out(roofline.text(picture))
        return
    target = Path(files[0])
    if target.suffix == ".png":
        target.write_bytes(roofline.png(picture))
    else:
        target.write_text(roofline.svg(picture), encoding="utf-8")
    print(f"wrote {target}", file=sys.stderr)
