"""Try a machine's recipes in order until a build works, and report why the others failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from localllm.setup import build_check, builds, install
from localllm.setup.builds import Build, SetupError
from localllm.setup.host import BuildHost
from localllm.setup.install import Report, Run
from localllm.setup.release_step import FetchRelease
from localllm.setup.steps import BuildRecipe


def choose_build(
    recipe: BuildRecipe,
    host: BuildHost,
    model: Path,
    report: Report,
    *,
    again: bool = False,
    accept_slower: Callable[[str], bool] | None = None,
    run: Run | None = None,
    fetch: FetchRelease | None = None,
) -> str:
    """Make, test and choose a build from `recipe` or its alternatives, and return its name.

    The build is tested on `model`. Existing builds are tried before new ones are made, unless
    `again`. `accept_slower` receives a sentence if a build is slower than the current one. The
    build is taken only if it returns True. `fetch` puts a release of llama.cpp into a folder.
    Raises SetupError with the reason of each failure if no build works. The previous build then
    still runs.
    """
    installed = [] if again else builds.listed()
    existing_names = {builds.OWN}
    # Releases of llama.cpp have versions of their own.
    existing_names |= {b.name for b in installed if b.version == host.version or b.libraries}
    candidates = sorted(
        [recipe, *recipe.alternatives], key=lambda made: made.name not in existing_names
    )
    failures: list[SetupError] = []

    def make(candidate: BuildRecipe) -> Build:
        return install.make(
            candidate, host, model, report, run, accept_slower=accept_slower, fetch=fetch
        )

    for number, candidate in enumerate(candidates, 1):
        title = candidate.title
        if candidate.effort and candidate.name not in existing_names:
            title += f" ({candidate.effort})"
        report(title)
        if number > 1:
            report(f"   because {candidate.because}")
        try:
            if candidate.needs:
                reason = f"this machine lacks {'; '.join(candidate.needs)}"
                raise SetupError(reason, hint="install it, then run `localllm setup` again")
            if candidate.name in existing_names:
                _use_existing(candidate, recipe, model, report)
            else:
                _use_new(make(candidate), report)
            return candidate.name
        except install.SlowerBuildError as e:
            report(f"not used: {e.message}: {e.hint}")
            return builds.chosen()
        except SetupError as e:
            failures.append(e)
            if len(candidates) > 1:
                report(f"   not used: {e.message}")
    raise _combined_error(candidates, failures)


def _use_new(build: Build, report: Report) -> None:
    builds.choose(build.name)
    message = f"{build.name} works ({build.trial})"
    report(f"{message} and is used when a model is loaded next")


def _use_existing(candidate: BuildRecipe, best: BuildRecipe, model: Path, report: Report) -> None:
    _retest(candidate, model, report)
    builds.choose(candidate.name)
    if candidate.name != best.name:
        report(f"`localllm setup --again` tries the better build again: {best.title}")


def _combined_error(
    candidates: Sequence[BuildRecipe], failures: Sequence[SetupError]
) -> SetupError:
    if len(failures) == 1:
        return failures[0]
    causes = "; ".join(
        f"{recipe.title}: {e.message}" for recipe, e in zip(candidates, failures, strict=True)
    )
    return SetupError(f"no build for the accelerator works here: {causes}", hint=failures[0].hint)


def _retest(recipe: BuildRecipe, model: Path, report: Report) -> None:
    """Test an existing build as a new one would be tested, because drivers and machines change."""
    if recipe.name == builds.OWN and recipe.backend == "cpu":
        report(recipe.because)
        return
    environment = builds.own_build_environment()
    expected = build_check.reference(model, environment)
    if isinstance(expected, str):
        raise SetupError(expected, hint="localllm doctor")
    builds.apply(recipe.name, environment)
    verdict = build_check.judge(recipe.backend, expected, environment)
    if verdict.failure:
        if recipe.name == builds.chosen() != builds.OWN:
            previous = builds.go_back(verdict.failure)
            report(f"   the engine {recipe.name} is not used any more: {previous} runs")
        hint = (
            "`localllm setup --again` makes it again, `localllm setup --use own` returns to the "
            "build installed with localllm"
        )
        raise SetupError(f"the build {recipe.name} is installed, but {verdict.failure}", hint=hint)
    if recipe.name != builds.OWN:
        build = builds.named(recipe.name)
        builds.finish(replace(build, trial=verdict.summary, drivers=builds.drivers_now(), fault=""))
    report(f"the build {recipe.name} is installed and works: {verdict.summary}")
