"""`localllm recommend`: recommended plans for this machine or a named one; --explain shows the
arithmetic."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, cast

import typer

from localllm.cli.commands.shared import at_a_terminal
from localllm.cli.setting_options import takes
from localllm.errors import UsageError
from localllm.library.catalog import load_catalog
from localllm.load.candidates import device_named, overrides_for
from localllm.settings import Settings
from localllm_catalog.types import Purpose

_PURPOSES = ("chat", "coding", "agents", "autocomplete", "long")
# Settings for the placement of a model's layers.
_PLACING = ("gpu_layers", "cpu_moe", "split")


# One parameter for each option: Typer reads them from the signature.
@takes(*_PLACING, "offline")
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
        bool, typer.Option("--plot", help="Draw the roofline (to FILE.svg if given).")
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
    *,
    settings: Settings,
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
) -> None:
    """Recommend models for this machine, with the memory and the speed to expect.

    On a terminal this opens a screen with sliders for context, purpose, machine, memory and wait.
    The screen can also download and start models. --plain, a pipe, --json and options that request
    one answer print a list.
    """
    from localllm.device.overrides import with_memory
    from localllm.library.describe import describe
    from localllm.planner.types import Workload

    workload = Workload(_purpose(purpose), context, parallel=parallel, min_decode_tok_s=min_speed)
    if link is not None:
        from localllm.cli.recommend import cluster, page

        page.out(cluster.answer(device, link, model, workload, as_json=as_json))
        return
    no_network = bool(settings.value("offline"))
    of_list = (as_list, as_json, explain, at, compare, plot, names, everything)
    of_machine = (bandwidth, ram, vram_headroom is not None, headroom is not None)
    of_models = (model, sees, parallel > 1, min_speed, settings.given(_PLACING))
    asks_one = (*of_list, *of_machine, *of_models)
    if not any(asks_one) and os.environ.get("TERM") != "dumb" and at_a_terminal():
        import gc

        gc.enable()  # a screen stays open for long
        _open_screen(workload.purpose, context, device or "", memory or 0.0, offline=no_network)
        return
    from localllm.cli.recommend.answers import PlanQuery, reaching

    _check_names(names or [], compare=compare, plot=plot)
    if at and model is None:
        raise UsageError(
            "--at asks which machines run one model", hint="localllm recommend -m MODEL --at 30"
        )
    catalog = load_catalog()
    if model is not None and at:
        reaching(describe(model, catalog, offline=no_network), workload, at, as_json=as_json)
        return
    machine = with_memory(
        device_named(device, memory, bandwidth),
        ram_gb=ram,
        vram_headroom_gb=vram_headroom,
        headroom_gb=headroom,
    )
    from localllm.load.plan_inputs import check_offload, offload_options

    placed = check_offload(offload_options(settings), machine)
    overrides = replace(overrides_for(machine, catalog), offload=placed, sees=sees)
    query = PlanQuery(machine, workload, overrides, catalog, everything, explain, as_json)
    if plot:
        query.roofline(names)
        return
    if names:
        query.side_by_side(names)
        return
    if model is not None:
        query.for_model(*describe(model, catalog, offline=no_network))
        return
    query.for_machine()


def _open_screen(
    purpose: Purpose, context: int, machine: str, memory_gb: float, *, offline: bool
) -> None:
    """Show the screen of models. If a model is chosen there, start the chat with it.

    Raises DeviceNotFoundError, and the errors of the chat.
    """
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


def _check_names(names: Sequence[str], *, compare: bool, plot: bool) -> None:
    """Raise UsageError for names that no option reads, or for options that lack names."""
    if plot and len(names) > 1:
        raise UsageError(f"--plot writes one picture, not {len(names)}")
    if not plot and bool(names) != compare:
        raise UsageError(
            "--compare and the machines' names belong together",
            hint='localllm recommend --compare "M4 Max 128GB" "RTX 5090"',
        )


def _purpose(name: str) -> Purpose:
    """Return the purpose for `name`. Raises UsageError for unknown names."""
    if name not in (*_PURPOSES, "code"):
        raise UsageError(
            f"--for {name}: not a purpose", hint=f"one of: {', '.join(_PURPOSES)}", param="--for"
        )
    # Agents use the plans for coding: same kind of prompts, cached prefixes and evidence.
    return cast("Purpose", "coding" if name in ("agents", "code") else name)
