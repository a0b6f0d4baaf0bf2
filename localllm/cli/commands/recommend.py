"""`localllm recommend`: recommended plans for this machine or a named one; --explain shows the
arithmetic."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

from localllm.cli.commands.shared import is_at_terminal
from localllm.cli.setting_options import with_setting_options
from localllm.errors import UsageError
from localllm.library.catalog import load_catalog
from localllm.load.candidates import device_named, overrides_for
from localllm.settings import Settings
from localllm_catalog.types import Purpose

if TYPE_CHECKING:
    from localllm.planner.types import Workload
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model

_PURPOSES = ("chat", "coding", "agents", "autocomplete", "long")
# Settings for the placement of a model's layers.
_PLACEMENT_SETTINGS = ("gpu_layers", "cpu_moe", "split")
# "2x dgx spark", "m3 ultra 512 + rtx 5090", and also "Ryzen AI Max+ 395".
_SEVERAL_MACHINES = re.compile(r"\s*\d+\s*[x×*]|.*\+", re.IGNORECASE)


# One parameter for each option: Typer reads them from the signature.
@with_setting_options(*_PLACEMENT_SETTINGS, "offline")
def recommend(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help='Another machine by name, such as "M4 Max 128GB".',
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m", "--model", metavar="MODEL", help="Show what each variant of one model would need."
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
            help="Lowest acceptable decode speed, in tok/s.",
        ),
    ] = 0.0,
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel",
            metavar="N",
            min=1,
            help="Requests to serve at the same time, each with that context.",
        ),
    ] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the arithmetic of the first plan.")
    ] = False,
    at: Annotated[
        float,
        typer.Option(
            "--at",
            metavar="TOK_S",
            min=0.0,
            help="With -m: list the machines that reach this decode speed.",
        ),
    ] = 0.0,
    fits: Annotated[
        str,
        typer.Option(
            "--fits",
            metavar="TOKENS",
            help="What makes so many tokens of context fit, such as 256k or 1M.",
        ),
    ] = "",
    budget: Annotated[
        float,
        typer.Option(
            "--budget",
            metavar="USD",
            min=0.0,
            help="List machines up to this price in US dollars, best first.",
        ),
    ] = 0.0,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            "--what-if",
            help="Compare machines: --compare NAME NAME … (in quotes); a single NAME is "
            "compared with this machine, or with --device.",
        ),
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the roofline (to FILE.svg if given).")
    ] = False,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE | NAME…]",
            help="With --plot: file for the picture; with --compare: machines.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every model that fits, and why others don't.")
    ] = False,
    sees: Annotated[bool, typer.Option("--sees", help="Only models that read images.")] = False,
    hears: Annotated[bool, typer.Option("--hears", help="Only models that read sounds.")] = False,
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="GB", help="The machine's memory in GB.")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option("--bandwidth", metavar="GBPS", help="Its memory bandwidth in GB/s."),
    ] = None,
    ram: Annotated[
        float | None,
        typer.Option(
            "--ram", metavar="GB", help="System memory of the machine with that GPU, in GB."
        ),
    ] = None,
    vram_headroom: Annotated[
        float | None,
        typer.Option(
            "--vram-headroom",
            metavar="GB",
            min=0.0,
            help="GB of the GPU's memory to leave to other programs.",
        ),
    ] = None,
    headroom: Annotated[
        float | None,
        typer.Option(
            "--headroom",
            metavar="GB",
            min=0.0,
            help="GB of system memory to leave to other programs.",
        ),
    ] = None,
    *,
    settings: Settings,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="LINK",
            help="Machines joined by 1gbe, 2.5gbe, 10gbe, thunderbolt5 or connectx7 (default: "
            "their fastest port).",
        ),
    ] = None,
    decoding: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="NAME",
            help="Prefill on --device and decode on this machine, over --link.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON (localllm/planner/recommend.schema.json).")
    ] = False,
    as_list: Annotated[
        bool, typer.Option("--plain", help="Print the list, even on a terminal.")
    ] = False,
) -> None:
    """Recommend models for this machine, with the memory and the speed to expect.

    On a terminal this opens a screen with sliders for context, purpose, machine, memory and wait.
    The screen can also download and start models. --plain, a pipe, --json and options that request
    one answer print a list.
    """
    from localllm.device.overrides import with_memory
    from localllm.planner.starting_settings import Overrides
    from localllm.planner.types import Workload

    workload = Workload(_purpose(purpose), context, parallel=parallel, min_decode_tok_s=min_speed)
    one_machine_only = _given_flags(
        sees=sees, hears=hears, at=at, fits=fits, budget=budget, compare=compare, plot=plot,
        memory=memory, bandwidth=bandwidth, ram=ram, vram_headroom=vram_headroom,
        headroom=headroom,
    )  # fmt: skip
    if JoinedMachines(device, decoding, link, one_machine_only).answer(
        model, workload, explains=explain, everything=everything, as_json=as_json
    ):
        return
    is_offline = bool(settings.value("offline"))
    list_options = (as_list, as_json, explain, at, fits, budget, compare, plot, names, everything)
    machine_options = (bandwidth, ram, vram_headroom is not None, headroom is not None)
    model_options = (
        model,
        sees,
        hears,
        parallel > 1,
        min_speed,
        settings.flags_among(_PLACEMENT_SETTINGS),
    )
    needs_list = (*list_options, *machine_options, *model_options)
    if not any(needs_list) and os.environ.get("TERM") != "dumb" and is_at_terminal():
        _open_models_screen(
            workload.purpose, context, device or "", memory or 0.0, offline=is_offline
        )
        return
    from localllm.cli.recommend.answers import KnownMachines, PlanQuery

    _check_names(names or [], compare=compare, plot=plot, at=at, model=model)
    _check_budget(budget, at, device)
    catalog = load_catalog()
    if at or budget:
        overrides_of_media = Overrides(sees=sees, hears=hears)
        KnownMachines(model, workload, overrides_of_media, catalog, is_offline, as_json).answer(
            at, budget
        )
        return
    machine = with_memory(
        device_named(device, memory, bandwidth),
        ram_gb=ram,
        vram_headroom_gb=vram_headroom,
        headroom_gb=headroom,
    )
    from localllm.load.offload import check_offload, offload_options

    offload = check_offload(offload_options(settings), machine)
    overrides = replace(overrides_for(machine, catalog), offload=offload, sees=sees, hears=hears)
    query = PlanQuery(machine, workload, overrides, catalog, everything, explain, as_json)
    if plot:
        query.roofline(names)
        return
    if fits:
        query.long_context(fits, model, offline=is_offline)
        return
    if names:
        query.side_by_side(names)
        return
    if model is not None:
        query.for_model(*_described(model, catalog, offline=is_offline))
        return
    query.for_machine()


def _described(reference: str, catalog: Catalog, *, offline: bool) -> tuple[Model, str]:
    """Return `library.describe.describe`. Only -m needs that module, which reads the hub."""
    from localllm.library.describe import describe

    return describe(reference, catalog, offline=offline)


def _given_flags(**options: object) -> list[str]:
    """Return the options that were given, as typed."""
    return [f"--{name.replace('_', '-')}" for name, value in options.items() if value]


class JoinedMachines(NamedTuple):
    """The machines of --device and --with, and the --link between them. `unused` are the given
    options that apply to one machine only."""

    device: str | None
    decoding: str | None
    link: str | None
    unused: list[str]

    def _usual_link(self) -> str | None:
        if self.device is None or not _SEVERAL_MACHINES.match(self.device):
            return None
        # This imports the planner, which would delay the screen.
        from localllm.cli.recommend.cluster import usual_link

        return usual_link(self.device)

    def answer(
        self,
        model: str | None,
        workload: Workload,
        *,
        explains: bool,
        everything: bool,
        as_json: bool,
    ) -> bool:
        """Print the answer for several connected machines, and return whether there are several.

        There are if --with or --link is given, or if the device names several ("2x dgx spark").
        Raises UsageError.
        """
        link = self.link or self._usual_link()
        if self.decoding is None and link is None:
            return False
        from localllm.cli.recommend import cluster, page, phases

        if self.unused:
            raise UsageError(
                f"{self.unused[0]} is for one machine, but several are given",
                hint="leave it out, or name one machine with --device",
                param=self.unused[0],
            )
        if self.decoding is not None:
            lines = phases.answer(
                self.device,
                self.decoding,
                self.link,
                model,
                workload,
                explains=explains,
                as_json=as_json,
            )
        else:
            lines = cluster.answer(
                self.device, link or "", model, workload, everything=everything, as_json=as_json
            )
        page.print_page(lines)
        return True


def _open_models_screen(
    purpose: Purpose, context: int, machine: str, memory_gb: float, *, offline: bool
) -> None:
    """Show the screen of models. If a model is chosen there, start the chat with it.

    Raises DeviceNotFoundError, and the errors of the chat.
    """
    import gc

    from localllm.cli.chat.config import apply_key_bindings
    from localllm.cli.chat.planning import PlanningProcess
    from localllm_tui.control.interfaces import PlanRequest

    apply_key_bindings()
    planning = PlanningProcess(offline=offline)
    request = PlanRequest(purpose, context, machine, memory_gb)
    try:
        preparation = planning.start(request)
        # The child imports the planner, while the screen is imported here.
        from localllm_tui.models_app import ModelsApp

        gc.enable()  # a screen stays open for long
        preparation.result()
        chosen = ModelsApp(planning, request).run()
    finally:
        planning.close()
    if chosen:
        from localllm.cli.commands.chat import chat

        chat(models=[chosen])


def _check_names(
    names: Sequence[str], *, compare: bool, plot: bool, at: float, model: str | None
) -> None:
    """Raise UsageError for names that no option reads, or for options that lack names or a model."""
    if at and model is None:
        raise UsageError(
            "--at needs -m: it lists the machines that run one model",
            hint="localllm recommend -m MODEL --at 30",
        )
    if plot and len(names) > 1:
        raise UsageError(f"--plot takes one file, not {len(names)}")
    if not plot and bool(names) != compare:
        raise UsageError(
            "machine names need --compare, and --compare needs names",
            hint='localllm recommend --compare "M4 Max 128GB" "RTX 5090"',
        )


def _check_budget(budget: float, at: float, device: str | None) -> None:
    """Raise UsageError for a budget together with a machine or a speed."""
    if not budget:
        return
    if device is not None:
        raise UsageError(
            "--budget lists machines, so it takes no --device",
            hint='compare two machines with --compare "NAME" "NAME"',
            param="--budget",
        )
    if at:
        raise UsageError(
            "--budget and --at are two questions",
            hint="a budget ranks by speed, too: use --min-speed for the lowest acceptable one",
            param="--budget",
        )


def _purpose(name: str) -> Purpose:
    """Return the purpose for `name`. Raises UsageError for unknown names."""
    if name not in (*_PURPOSES, "code"):
        raise UsageError(
            f"--for {name}: unknown purpose", hint=f"one of: {', '.join(_PURPOSES)}", param="--for"
        )
    # Agents use the plans for coding: same kind of prompts, cached prefixes and evidence.
    return cast("Purpose", "coding" if name in ("agents", "code") else name)
