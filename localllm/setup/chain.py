"""Try a machine's recipes in order until a build works, and report why the others failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from localllm.setup import build_check, builds, install
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost
from localllm.setup.install import Run, Say
from localllm.setup.steps import BuildRecipe


def settle(
    recipe: BuildRecipe,
    host: BuildHost,
    model: Path,
    say: Say,
    *,
    again: bool = False,
    accept_slower: Callable[[str], bool] | None = None,
    run: Run | None = None,
) -> str:
    """Make, test and choose a build from `recipe` or its alternatives, and return its name.

    The build is tested on `model`. Existing builds are tried before new ones are made, unless
    `again`. `accept_slower` receives a sentence if a build is slower than the current one. The
    build is taken only if it returns True. Raises SetupError with the reason of each failure if no
    build works. The previous build then still runs.
    """
    kept = [] if again else builds.listed()
    there = {builds.OWN, *(build.name for build in kept if build.version == host.version)}
    wanted = sorted([recipe, *recipe.otherwise], key=lambda made: made.name not in there)
    failures: list[SetupError] = []
    for number, candidate in enumerate(wanted, 1):
        title = candidate.title
        if candidate.takes and candidate.name not in there:
            title += f" ({candidate.takes})"
        say(title)
        if number > 1:
            say(f"   because {candidate.because}")
        try:
            if candidate.needs:
                told = f"this machine lacks {'; '.join(candidate.needs)}"
                raise SetupError(told, hint="get that, then run `localllm setup` again")
            if candidate.name in there:
                _try_again(candidate, model, say)
                builds.choose(candidate.name)
                if candidate.name != recipe.name:
                    say(f"`localllm setup --again` tries what would be better: {recipe.title}")
            else:
                build = install.make(candidate, host, model, say, run, accept_slower=accept_slower)
                builds.choose(build.name)
                works = f"{build.name} works ({build.trial})"
                say(f"{works} and runs from the next start of a model on")
            return candidate.name
        except install.SlowerBuildError as e:
            say(f"not taken: {e.message}: {e.hint}")
            return builds.chosen()
        except SetupError as e:
            failures.append(e)
            if len(wanted) > 1:
                say(f"   not taken: {e.message}")
    raise _all_of(wanted, failures)


def _all_of(wanted: Sequence[BuildRecipe], failures: Sequence[SetupError]) -> SetupError:
    if len(failures) == 1:
        return failures[0]
    told = "; ".join(f"{made.title}: {e.message}" for made, e in zip(wanted, failures, strict=True))
    return SetupError(f"no build for the accelerator works here: {told}", hint=failures[0].hint)


def _try_again(recipe: BuildRecipe, model: Path, say: Say) -> None:
    """Test an existing build as a new one would be tested, because drivers and machines change."""
    if recipe.name == builds.OWN and recipe.backend == "cpu":
        say(recipe.because)
        return
    environment = dict(os.environ)
    builds.apply(builds.OWN, environment)
    expected = build_check.reference(model, environment)
    if isinstance(expected, str):
        raise SetupError(expected, hint="localllm doctor")
    builds.apply(recipe.name, environment)
    verdict = build_check.judge(recipe.backend, expected, environment)
    if verdict.failure:
        hint = (
            "`localllm setup --again` makes it anew, "
            "`localllm setup --use own` goes back to the one that came along"
        )
        raise SetupError(f"the build {recipe.name} is there, but {verdict.failure}", hint=hint)
    if recipe.name != builds.OWN:
        build = builds.named(recipe.name)
        builds.finish(replace(build, trial=verdict.said, drivers=builds.drivers_now()))
    say(f"the build {recipe.name} is there and works: {verdict.said}")
