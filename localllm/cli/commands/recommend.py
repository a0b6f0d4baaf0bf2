"""`localllm recommend`: the plans worth running on this machine, or on one you name, with the
arithmetic on request."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from localllm.cli import engine_builds
from localllm.cli.commands.shared import CpuMoe, GpuLayers, Split, at_a_terminal
from localllm.errors import UsageError
from localllm.library.catalog import age_days, load_catalog, user_folder
from localllm.load import candidates
from localllm.load.candidates import device_named, installed_names, of_quant, overrides_for
from localllm.load.plan_inputs import check_offload, offload_options
from localllm.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localllm.device.types import Device
    from localllm.planner.starting_settings import Overrides
    from localllm.planner.types import Plan, Recommendation, Workload
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model, Purpose

_PURPOSES = ("chat", "coding", "agents", "autocomplete", "long")


# As many parameters as the command has options, and as long for it: Typer reads them off the
# signature.
def recommend(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help='Another machine, as you would type it: "M4 Max 128GB".',
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m", "--model", metavar="MODEL", help="What one model would need here, every variant."
        ),
    ] = None,
    purpose: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="PURPOSE",
            help="chat, coding (agents), autocomplete or long (documents).",
        ),
    ] = "chat",
    context: Annotated[
        int,
        typer.Option(
            "--context", metavar="TOKENS", min=0, help="Context length (default: by purpose)."
        ),
    ] = 0,
    min_speed: Annotated[
        float,
        typer.Option(
            "--min-speed",
            metavar="TOK_S",
            min=0.0,
            help="The slowest decode speed you would accept.",
        ),
    ] = 0.0,
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel",
            metavar="N",
            min=1,
            help="Requests to serve at once, each with that context.",
        ),
    ] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="First the arithmetic of the first plan.")
    ] = False,
    at: Annotated[
        float,
        typer.Option(
            "--at",
            metavar="TOK_S",
            min=0.0,
            help="With -m: which machines reach this decode speed.",
        ),
    ] = 0.0,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            "--what-if",
            help="Machines side by side: --compare NAME NAME … (in quotes); one NAME alone beside "
            "this machine, or that of --device.",
        ),
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the roofline (to FILE.svg or FILE.png if given).")
    ] = False,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE | NAME…]",
            help="With --plot: the picture to write; with --compare: machines.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every model that fits, and why others don't.")
    ] = False,
    sees: Annotated[bool, typer.Option("--sees", help="Only models that read images.")] = False,
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="GB", help="The machine's memory in GB.")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option("--bandwidth", metavar="GBPS", help="Its memory bandwidth in GB/s."),
    ] = None,
    ram: Annotated[
        float | None,
        typer.Option("--ram", metavar="GB", help="System memory beside its GPU in GB."),
    ] = None,
    vram_headroom: Annotated[
        float | None,
        typer.Option(
            "--vram-headroom",
            metavar="GB",
            min=0.0,
            help="GB of its GPU's memory to leave to others.",
        ),
    ] = None,
    headroom: Annotated[
        float | None,
        typer.Option(
            "--headroom", metavar="GB", min=0.0, help="GB of system memory to leave to others."
        ),
    ] = None,
    gpu_layers: GpuLayers = None,
    cpu_moe: CpuMoe = None,
    split: Split = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="LINK",
            help="Machines joined by 10gbe, thunderbolt5 or connectx7 (with -m).",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON (localllm/planner/recommend.schema.json).")
    ] = False,
    as_list: Annotated[
        bool, typer.Option("--plain", help="Print the list, also on a terminal.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Never use the network (-m ORG/NAME does).")
    ] = False,
) -> None:
    """Recommend models for this machine, with the memory and the speed to expect.

    On a terminal this opens a screen with sliders for context, purpose, machine, memory and wait,
    which pulls and starts models too; --plain, a pipe, --json and the options that ask for one
    answer print a list.
    """
    from localllm.cli.recommend import answers, page
    from localllm.device.overrides import with_memory
    from localllm.library.describe import describe
    from localllm.planner.types import Workload

    workload = Workload(_purpose(purpose), context, parallel=parallel, min_decode_tok_s=min_speed)
    if link is not None:
        from localllm.cli.recommend import cluster

        page.out(cluster.answer(device, link, model, workload, as_json=as_json))
        return
    asks_one = (
        sees,
        as_list,
        as_json,
        explain,
        at,
        compare,
        plot,
        names,
        everything,
        model,
        bandwidth,
        ram,
        vram_headroom is not None,
        headroom is not None,
        parallel > 1,
        min_speed,
        gpu_layers,
        cpu_moe,
        split,
    )
    if not any(asks_one) and os.environ.get("TERM") != "dumb" and at_a_terminal():
        import gc

        gc.enable()  # a screen stays open
        _open_screen(workload.purpose, context, device or "", memory or 0.0, offline=offline)
        return
    _check_names(names or [], compare=compare, plot=plot)
    if at and model is None:
        raise UsageError(
            "--at asks which machines run one model", hint="localllm recommend -m MODEL --at 30"
        )
    catalog = load_catalog()
    no_network = bool(Settings({"offline": offline or None}).value("offline"))
    if model is not None and at:
        answers.reaching(
            describe(model, catalog, offline=no_network), workload, at, as_json=as_json
        )
        return
    machine = with_memory(
        device_named(device, memory, bandwidth),
        ram_gb=ram,
        vram_headroom_gb=vram_headroom,
        headroom_gb=headroom,
    )
    placed = check_offload(
        offload_options(Settings({"gpu_layers": gpu_layers, "cpu_moe": cpu_moe, "split": split})),
        machine,
    )
    overrides = replace(overrides_for(machine, catalog), offload=placed, sees=sees)
    question = _PlanQuery(machine, workload, overrides, catalog, as_json=as_json, explain=explain)
    if plot:
        answers.plot_roofline(machine, list(question.answer(everything).plans), names)
    elif names:
        _answer_side_by_side(question, names, everything=everything)
    elif model is not None:
        _answer_for_model(question, *describe(model, catalog, offline=no_network))
    else:
        _answer_for_machine(question, everything=everything)


_PICKS = 8


@dataclass(frozen=True)
class _PlanQuery:
    """What is asked of the planner, and how its answer is shown."""

    machine: Device
    workload: Workload
    overrides: Overrides
    catalog: Catalog
    as_json: bool
    explain: bool

    @property
    def models(self) -> Sequence[Model]:
        """Those that can be picked: where images are to be read, those that read them."""

        return (
            candidates.image_readers(self.catalog.models)
            if self.overrides.sees
            else self.catalog.models
        )

    def answer(self, everything: bool) -> Recommendation:
        from localllm.planner import recommend as planner

        limit = 0 if everything else _PICKS
        return planner.recommend(
            self.machine, self.models, self.workload, overrides=self.overrides, limit=limit
        )


def _answer_for_model(question: _PlanQuery, model: Model, quant: str) -> None:
    """Every variant of one model, whether it fits or not."""
    from localllm.cli.recommend import answers
    from localllm.planner import recommend as planner

    machine, workload, overrides, catalog = (
        question.machine,
        question.workload,
        question.overrides,
        question.catalog,
    )
    if overrides.sees:
        model = next(iter(candidates.image_readers([model])), model)
    plans = of_quant(planner.variants_of(machine, model, workload, overrides=overrides), quant)
    best = max((p for p in plans if p.fits != "no"), key=lambda p: p.score, default=None)
    if best is not None:
        plain, best = (
            best,
            planner.detailed_plan(machine, best, catalog.models, workload, overrides),
        )
        plans = [best if p is plain else p for p in plans]
    installed = _installed(plans, machine, catalog)
    explain, as_json = question.explain, question.as_json
    answers.show_model(
        model, plans, best, machine, workload, installed, explain=explain, as_json=as_json
    )


def _answer_side_by_side(question: _PlanQuery, names: Sequence[str], *, everything: bool) -> None:
    """The machines of these names; one alone beside the machine in question."""
    from localllm.cli.recommend import answers

    machines = [device_named(name, None, None) for name in names]
    sees = question.overrides.sees
    known = [replace(overrides_for(device, question.catalog), sees=sees) for device in machines]
    if len(names) == 1:
        machines = [question.machine, *machines]
        known = [question.overrides, *known]
    answers.side_by_side(
        machines,
        known,
        question.models,
        question.workload,
        limit=0 if everything else _PICKS,
        as_json=question.as_json,
    )


def _answer_for_machine(question: _PlanQuery, *, everything: bool) -> None:
    """The plans worth running."""
    from localllm.cli.recommend import page, view

    machine, answer = question.machine, question.answer(everything)
    if question.as_json:
        page.out([view.json_text(answer, machine)])
        return
    if question.explain and answer.plans:
        from localllm.planner.explain import explain as lines

        page.out([*lines(answer.plans[0], machine, columns=page.width()), ""])
    installed = _installed(answer.plans, machine, question.catalog)
    listings_days = age_days(user_folder())
    page.out(
        view.table(
            answer, machine, everything=everything, installed=installed, listings_days=listings_days
        )
    )
    page.out(engine_builds.note(machine, answer.plans))


def _open_screen(
    purpose: Purpose, context: int, machine: str, memory_gb: float, *, offline: bool
) -> None:
    """Show what fits; a model that is chosen there starts the chat. Raises DeviceNotFoundError and
    what the chat ends in."""
    from localllm.cli.chat.config import take_keys
    from localllm.cli.chat.planning import PlanningProcess
    from localllm_tui.control.interfaces import PlanRequest
    from localllm_tui.models_app import ModelsApp

    take_keys()
    desk = PlanningProcess(offline=offline)
    wish = PlanRequest(purpose, context, machine, memory_gb)
    desk.check(wish)
    try:
        chosen = ModelsApp(desk, wish).run()
    finally:
        desk.close()
    if chosen:
        from localllm.cli.commands.chat import chat

        chat(model=chosen)


def _installed(
    plans: Sequence[Plan], device: Device, catalog: Catalog
) -> frozenset[tuple[str, str]]:
    """Id and quant of those plans whose model is on this disk; of a simulated machine none."""
    return frozenset() if device.simulated else frozenset(installed_names(plans, catalog))


def _check_names(names: Sequence[str], *, compare: bool, plot: bool) -> None:
    """Raises UsageError for names that no option reads, and for options that lack theirs."""
    if plot and len(names) > 1:
        raise UsageError(f"--plot writes one picture, not {len(names)}")
    if not plot and bool(names) != compare:
        raise UsageError(
            "--compare and the machines' names belong together",
            hint='localllm recommend --compare "M4 Max 128GB" "RTX 5090"',
        )


def _purpose(name: str) -> Purpose:
    """Raises UsageError."""
    if name not in (*_PURPOSES, "code"):
        raise UsageError(
            f"--for {name}: not a purpose", hint=f"one of: {', '.join(_PURPOSES)}", param="--for"
        )
    # Agents are what coding plans are made for: their prompts, their cached prefixes, their
    # evidence.
    return cast("Purpose", "coding" if name in ("agents", "code") else name)
