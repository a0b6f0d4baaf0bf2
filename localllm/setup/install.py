"""Make a build from its recipe, test it, and keep it or undo everything.

Steps are pip commands that install into the build's own folder. Their output goes to a log that is
kept. An older build with the same name is moved away until the new one has passed. After a failure
or Ctrl-C, the previous build is restored.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from localllm import paths
from localllm.device.accelerators import KINDS
from localllm.device.backend_view import query_build
from localllm.device.probes import programs
from localllm.errors import LocalLLMError
from localllm.setup import build_check, builds, installer, processor_part
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, installed_version
from localllm.setup.release_step import FetchRelease
from localllm.setup.releases import Release
from localllm.setup.steps import FOLDER, MLX, BuildRecipe, Step

Report = Callable[[str], None]
Run = Callable[[list[str], Mapping[str, str], Path], int]
_PROGRESS_S = 15.0
# Limits on the slowdown. Two runs of the same build on an idle machine differ by a few per cent. A
# build of another release must stay closer, and is measured with more runs.
_MAX_SLOWDOWN = 1.1
_N_TURNS = 2
_MAX_RELEASE_SLOWDOWN = 1.03
_N_RELEASE_TURNS = 5


def make(
    recipe: BuildRecipe,
    host: BuildHost,
    model: Path,
    report: Report,
    run: Run | None = None,
    *,
    accept_slower: Callable[[str], bool] | None = None,
    fetch: FetchRelease | None = None,
) -> builds.Build:
    """Make the recipe's build and let it compute ten tokens of `model`. It is not chosen yet.

    - `report` receives progress messages.
    - `run` runs a command with an environment and a log (default: subprocess).
    - `accept_slower` receives a sentence if the current accelerated build is faster.
    - `fetch` puts a release of llama.cpp into the build's folder.

    Raises SetupError after it has restored the previous build. Raises SlowerBuildError if the new
    build works but was not accepted.
    """
    log = _log_path(recipe.name)
    folder = builds.folder_of(recipe.name)
    with _one_at_a_time(), _moved_away(folder) as old:
        folder.mkdir(parents=True)
        release = None
        for number, step in enumerate(recipe.steps, 1):
            report(f"{number} of {len(recipe.steps)}: {step.text}")
            if step.release:
                release = _fetched_release(step, recipe.backend, folder, fetch)
            else:
                _run_step(step, folder, log, report, run or _run)
        report("the test: its devices, and ten tokens compared with the CPU's")
        # The reference is the build that was installed with localllm, on the CPU.
        own_environment = builds.own_build_environment()
        expected = build_check.reference(model, own_environment)
        if isinstance(expected, str):
            raise SetupError(f"{recipe.name} was built, but {expected}", hint="localllm doctor")
        environment = builds.with_folder(
            folder, recipe.library_dirs, own_environment, recipe.libraries
        )
        verdict = _verdict(recipe, folder, expected, environment, own_environment, report)
        if verdict.failure:
            raise SetupError(
                f"the build {recipe.name} was removed again: {verdict.failure}",
                hint=f"the previous build stays in use; the complete output is in {log}",
            )
        build = _described_build(recipe, host, release, verdict)
        compared_environment = _environment_to_compare(
            recipe, old, build.version, host, own_environment
        )
        is_other_release = build.version != installed_version()
        slowdown = ""
        if compared_environment is not None:
            slowdown = _slowdown(
                model, compared_environment, environment, report, other_release=is_other_release
            )
        if slowdown and (accept_slower is None or not accept_slower(slowdown)):
            raise SlowerBuildError(f"{recipe.name} works, but {slowdown}")
        builds.finish(build)
        return build


def _described_build(
    recipe: BuildRecipe,
    host: BuildHost,
    release: Release | None,
    verdict: build_check.TrialVerdict,
) -> builds.Build:
    """Return the description of a tested build. `release`: the release of llama.cpp in it."""
    title = recipe.title
    version = host.version
    if release is not None:
        title = f"llama.cpp {release.title} for {KINDS[recipe.backend].label}"
        version = release.tag
    return builds.Build(
        name=recipe.name,
        backend=recipe.backend,
        title=title,
        version=version,
        made=datetime.date.today().isoformat(),
        devices=verdict.devices,
        trial=verdict.summary,
        library_dirs=recipe.library_dirs,
        libraries=recipe.libraries,
        drivers=builds.drivers_now(),
    )


class SlowerBuildError(
    SetupError,
    code="build_slower",
    default_hint="`localllm setup --again --keep` keeps it anyway",
):
    """A build works but is slower than the current one, which stays in use."""


def _fetched_release(step: Step, backend: str, folder: Path, fetch: FetchRelease | None) -> Release:
    """Put the step's release into `folder`. Other errors than SetupErrors become SetupErrors."""
    if fetch is None:
        raise SetupError("llama.cpp's releases can't be downloaded here")
    try:
        return fetch(step.release, backend, folder)
    except SetupError:
        raise
    except LocalLLMError as e:
        raise SetupError(e.message, hint=e.hint) from e


def _verdict(
    recipe: BuildRecipe,
    folder: Path,
    expected: build_check.ReferenceAnswer,
    environment: Mapping[str, str],
    own_environment: Mapping[str, str],
    report: Report,
) -> build_check.TrialVerdict:
    """Test the build.

    A ready-made build is first tested with the CPU library of the build that was compiled here. If
    that fails, its own CPU library is restored.
    """
    package = folder / "site" / "llama_cpp"
    own_package = ""
    if any("--only-binary" in step.pip for step in recipe.steps):
        own_package = query_build(own_environment).folder
    if own_package and processor_part.exchange(package, Path(own_package)):
        verdict = build_check.judge(recipe.backend, expected, environment)
        failure = (
            verdict.failure or build_check.check_tokens(expected, environment, layers=0).failure
        )
        if not failure:
            message = "its CPU backend is replaced by that of the build installed with localllm"
            report(f"   {message}, which was compiled for this CPU")
            return verdict
        message = "with the CPU backend of the build installed with localllm"
        report(f"   {message} {failure}, so its own CPU backend is restored")
        processor_part.put_back(package)
    return build_check.judge(recipe.backend, expected, environment)


def _environment_to_compare(
    recipe: BuildRecipe,
    old_folder: Path,
    version: str,
    host: BuildHost,
    own_environment: Mapping[str, str],
) -> Mapping[str, str] | None:
    """Return the environment of the current build, for a speed comparison, or None.

    `old_folder` is the folder of a current build that has this recipe's name and was moved away. A
    current build that computes on the CPU is no standard for a GPU, because the starter model is
    too small for one. Another build of the same release cannot be slower on the CPU either, so the
    result is None. A build of another release can be slower, so it is compared.
    """
    if recipe.libraries:
        # The user named it, or no ready wheel drives this accelerator.
        return None
    chosen = builds.chosen()
    compares_cpu = version != installed_version() and recipe.backend == "cpu"
    if chosen == builds.OWN:
        if compares_cpu or host.own_backends != ("cpu",):
            return own_environment
        return None
    folder = old_folder if chosen == recipe.name else builds.folder_of(chosen)
    build = builds.read(folder)
    if build is None or (build.backend == "cpu" and not compares_cpu):
        return None
    return builds.with_folder(folder, build.library_dirs, own_environment, build.libraries)


def _slowdown(
    model: Path,
    old_environment: Mapping[str, str],
    new_environment: Mapping[str, str],
    report: Report,
    *,
    other_release: bool,
) -> str:
    """Measure the new build and the previous one in turns, and describe the slowdown.

    Returns "" if the new one is not slower, or if the previous one no longer runs.
    """
    limit = _MAX_RELEASE_SLOWDOWN if other_release else _MAX_SLOWDOWN
    turns = _N_RELEASE_TURNS if other_release else _N_TURNS
    report(f"comparing it with the current build: a short turn, {turns} times each")
    old_s = new_s = math.inf
    for turn in range(turns):
        # The two builds alternate in going first.
        for is_new in (turn % 2 == 1, turn % 2 == 0):
            seconds = build_check.measured_turn_s(
                model, new_environment if is_new else old_environment
            )
            if seconds is None:
                return ""
            if is_new:
                new_s = min(new_s, seconds)
            else:
                old_s = min(old_s, seconds)
    comparison = (
        f"a turn takes {new_s * 1e3:.0f} ms, but {old_s * 1e3:.0f} ms with the current build"
    )
    report(f"   {comparison}")
    if new_s > limit * old_s:
        return comparison
    return ""


def make_in_environment(recipe: BuildRecipe, report: Report, run: Run | None = None) -> None:
    """Run steps that change the installation itself (MLX), and undo them if MLX then fails."""
    log = _log_path(recipe.name)
    was_installed = importlib.util.find_spec(MLX.name) is not None
    for step in recipe.steps:
        report(step.text)
        _run_step(step, Path(sys.prefix), log, report, run or _run)
    failure = programs.ask("mlx.devices").failure
    if not failure:
        return
    hint = f"the complete output is in {log}"
    if was_installed:
        raise SetupError(f"the previous MLX was not restored: {failure}", hint=hint)
    uninstall = installer.command(["uninstall", "--yes", *MLX.distributions])
    (run or _run)(uninstall, dict(os.environ), log)
    raise SetupError(f"MLX was uninstalled again: {failure}", hint=hint)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Allow only one setup at a time, because two would delete each other's folders.

    If a setup is killed, the system releases its lock.
    """
    from huggingface_hub.utils import WeakFileLock

    lock_file = paths.private_dir(paths.builds_dir()) / ".making"
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(WeakFileLock(lock_file, timeout=0.1))
        except TimeoutError:
            raise SetupError(
                "another `localllm setup` is running", hint="wait until it ends, or stop it"
            ) from None
        yield


@contextmanager
def _moved_away(folder: Path) -> Iterator[Path]:
    """Clear `folder` for the block.

    An earlier build in it is moved to the path that the block receives. If the block fails, the new
    folder is deleted and the earlier build is restored.
    """
    old = folder.with_name(f".{folder.name}.before")
    if old.exists() and not (folder / "build.json").exists():
        # An earlier run was killed before it finished.
        shutil.rmtree(folder, ignore_errors=True)
        old.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
    if (folder / "build.json").exists():
        folder.replace(old)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield old
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if old.exists():
            old.replace(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _run_step(step: Step, folder: Path, log: Path, report: Report, run: Run) -> None:
    if step.links:
        link_cuda(Path(step.links.replace(FOLDER, str(folder))))
        return
    # pip must not see another build that is in use.
    environment = builds.own_build_environment()
    for name, value in step.environment:
        environment[name] = _merged_setting(name, value.replace(FOLDER, str(folder)))
    words = [word.replace(FOLDER, str(folder)) for word in step.pip]
    started = time.monotonic()
    code = run(installer.command(words), environment, log)
    if code:
        raise SetupError(
            f"{step.text}: the installation ended with exit code {code}: {last_output(log)}",
            hint=f"the previous build stays in use; the complete output is in {log}",
        )
    report(f"   done in {time.monotonic() - started:.0f} s")


def _merged_setting(name: str, value: str) -> str:
    """The user's CMAKE_ARGS come before ours. The user's number of jobs replaces ours."""
    from_user = os.environ.get(name, "")
    if name == "CMAKE_ARGS":
        return f"{from_user} {value}".strip()
    return from_user or value


def link_cuda(toolkit: Path) -> None:
    """Create the links that CMake and nvcc need in the CUDA packages.

    The packages contain libcudart.so.13 and similar names. The linker needs the names without a
    version, and nvcc a folder lib64. Both need the driver's library, which is not in the packages,
    so a link to this machine's library or to a stub is made.
    """
    folder = toolkit / "lib"
    if not folder.is_dir():
        raise SetupError(f"the CUDA packages lack {folder}", hint="localllm setup --backend vulkan")
    if not (toolkit / "lib64").exists():
        (toolkit / "lib64").symlink_to("lib")
    for file in sorted(folder.glob("lib*.so.*")):
        unversioned = folder / (file.name.partition(".so.")[0] + ".so")
        if not unversioned.exists():
            unversioned.symlink_to(file.name)
    if (folder / "libcuda.so").exists():
        return
    driver_library = next((path for path in _DRIVER_LIBRARIES if (folder / path).exists()), None)
    if driver_library is None:
        raise SetupError(
            "libcuda.so.1 of the NVIDIA driver was not found",
            hint="install the NVIDIA driver, then run `localllm setup` again",
        )
    (folder / "libcuda.so").symlink_to(driver_library)


_DRIVER_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/lib/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "stubs/libcuda.so",  # This stub is in the packages.
)


def _run(command: list[str], environment: Mapping[str, str], log: Path) -> int:
    """Run `command` with its output appended to `log`.

    Progress lines with the elapsed time go to standard error.
    """
    started = time.monotonic()
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(_PROGRESS_S)
                progress = f"   … {time.monotonic() - started:.0f} s: {last_output(log)[:90]}"
                print(progress, file=sys.stderr, flush=True)
        except BaseException:
            process.terminate()
            process.wait()
            raise


def last_output(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4000))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    if not lines:
        return ""
    return (errors or lines)[-1][:300]


def _log_path(name: str) -> Path:
    log = paths.private_dir(paths.log_dir()) / f"setup-{name}.log"
    log.unlink(missing_ok=True)
    return log
