"""A build is made next to the others, tried, and kept or removed. The engine is real, intact or
modified."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from localllm import paths
from localllm.cli import engine_builds
from localllm.errors import UsageError
from localllm.setup import build_check, builds, chain, install, steps
from localllm.setup.builds import BuildNotFoundError, SetupError
from localllm.setup.host import BuildHost
from localllm.setup.steps import BuildRecipe, Step
from support.native_library import include_folder, put_in_front

HOST = BuildHost("linux", "x86_64", "0.3.36", 2)
CPU = BuildRecipe(
    "cpu",
    "cpu",
    "a build",
    "a test",
    (Step("the package", ("install", "--target", "{build}/site")),),
)
Doctor = Callable[[Path], None]


def whole(_: Path) -> None:
    """Leave the installed build unchanged."""


def symbol_missing(package: Path) -> None:
    """Replace libllama by a library that lacks the symbols of the bindings, as another release
    would."""
    (package / "lib" / "libllama.so").unlink()
    (package / "lib" / "libllama.so").symlink_to((package / "lib" / "libggml-base.so").resolve())


def device_lost(package: Path) -> None:
    """Abort the process in the middle of a step, as CUDA does if the GPU is lost."""
    put_in_front(
        package,
        """
        #include <stdlib.h>
        #include "llama.h"
        int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch) { abort(); }
        """,
    )


def wrong_tokens(package: Path) -> None:
    """Read the wrong token row, as a faulty kernel would: the build runs but its output is
    wrong."""
    put_in_front(
        package,
        """
        #include <dlfcn.h>
        #include "llama.h"
        int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch) {
            int32_t (*decode)(struct llama_context *, struct llama_batch);
            decode = dlsym(RTLD_NEXT, "llama_decode");
            for (int i = 0; i < batch.n_tokens; i++) batch.token[i] = (batch.token[i] + 77) % 500;
            return decode(ctx, batch);
        }
        """,
    )


def installer(doctor: Doctor, code: int = 0) -> install.Run:
    """Return a replacement for pip that copies the installed package to pip's target and modifies
    it."""

    def run(command: list[str], environment: Mapping[str, str], log: Path) -> int:
        target = Path(command[command.index("--target") + 1])
        log.write_text("collecting\nerror: nothing to be had\n")
        if code:
            (target / "half").mkdir(parents=True)
            return code
        spec = find_spec("llama_cpp")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent
        shutil.copytree(
            source, target / "llama_cpp", ignore=shutil.ignore_patterns("lib", "__pycache__")
        )
        (target / "llama_cpp" / "lib").mkdir()
        for library in (source / "lib").iterdir():
            (target / "llama_cpp" / "lib" / library.name).symlink_to(library)
        shutil.copytree(include_folder(), target / "include")
        doctor(target / "llama_cpp")
        return 0

    return run


def finished() -> builds.Build:
    """Record a build that was finished earlier."""
    build = builds.Build("cpu", "cpu", "an older one", "0.3.36", "2026-01-01")
    (build.folder / "site" / "llama_cpp").mkdir(parents=True)
    builds.finish(build)
    return build


def silent(_: str) -> None:
    pass


def make(doctor: Doctor, model: Path, recipe: BuildRecipe = CPU, code: int = 0) -> builds.Build:
    return install.make(recipe, HOST, model, silent, installer(doctor, code))


def processor_libraries(build: builds.Build) -> list[Path]:
    return sorted((build.folder / "site" / "llama_cpp" / "lib").glob("libggml-cpu.so*"))


def test_a_build_that_computes_like_the_cpu_is_kept_and_used(tiny_model: Path) -> None:
    build = make(whole, tiny_model)
    assert all(library.is_symlink() for library in processor_libraries(build)), (
        "what was compiled is left as it is"
    )
    assert builds.listed() == [build]
    assert builds.chosen() == builds.OWN
    builds.choose("cpu")
    assert "10 of 10 tokens" in build.trial
    done = subprocess.run(
        [sys.executable, "-m", "localllm", "device", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["llama_cpp"]["folder"] == str(
        build.folder / "site" / "llama_cpp"
    )
    listed = subprocess.run(
        [sys.executable, "-m", "localllm", "setup", "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "* cpu" in listed.stdout


@pytest.mark.parametrize(
    ("doctor", "said"),
    [
        (symbol_missing, "does not start"),
        (device_lost, "SIGABRT"),
        (wrong_tokens, "its tokens differ"),
    ],
)
def test_a_broken_build_is_removed_and_the_previous_one_still_runs(
    doctor: Doctor, said: str, tiny_model: Path
) -> None:
    before = finished()
    builds.choose("cpu")
    with pytest.raises(SetupError) as caught:
        make(doctor, tiny_model)
    assert said in caught.value.message
    assert "log" in caught.value.hint
    assert builds.listed() == [before]
    assert builds.chosen() == "cpu"
    there = {p.name for p in paths.builds_dir().iterdir()} - {".making"}
    assert there == {"cpu", "in-use", "used-before"}


def test_a_build_that_does_not_find_its_device_is_removed(tiny_model: Path) -> None:
    recipe = BuildRecipe("cuda-120", "cuda", "a build", "a test", CPU.steps)
    with pytest.raises(SetupError, match="sees no cuda device"):
        make(whole, tiny_model, recipe)
    assert builds.listed() == []
    assert not builds.folder_of("cuda-120").exists()


def test_a_failed_step_gives_the_reason_and_leaves_no_files(tiny_model: Path) -> None:
    with pytest.raises(SetupError, match="error: nothing to be had"):
        make(whole, tiny_model, code=1)
    assert not builds.folder_of("cpu").exists()


def test_two_setups_cannot_run_at_once_and_a_killed_one_does_not_block(tiny_model: Path) -> None:
    mark = paths.private_dir(paths.builds_dir()) / ".making"
    code = (
        "import sys; from huggingface_hub.utils import WeakFileLock\n"
        "with WeakFileLock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(mark)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(SetupError, match="is running"):
        make(whole, tiny_model, code=1)
    other.kill()
    other.communicate()
    with pytest.raises(SetupError, match="nothing to be had"):
        make(whole, tiny_model, code=1)


def test_a_build_replaced_by_a_killed_setup_is_restored(tiny_model: Path) -> None:
    folder = builds.folder_of("cpu")
    kept = folder.with_name(".cpu.before")
    (kept / "site" / "llama_cpp").mkdir(parents=True)
    before = builds.Build("cpu", "cpu", "an older one", "0.3.36", "2026-01-01")
    (kept / "build.json").write_text(
        json.dumps({**{f: getattr(before, f) for f in before.__slots__}})
    )
    (folder / "site").mkdir(parents=True)
    assert builds.listed() == []
    with pytest.raises(SetupError):
        make(whole, tiny_model, code=1)
    assert builds.listed() == [before]


def test_removing_the_used_build_returns_to_the_packaged_one() -> None:
    finished()
    builds.choose("cpu")
    builds.remove("cpu")
    assert (builds.chosen(), builds.listed()) == (builds.OWN, [])
    with pytest.raises(BuildNotFoundError):
        builds.remove("cpu")
    with pytest.raises(UsageError):
        builds.remove(builds.OWN)


@pytest.mark.parametrize("name", ["../elsewhere", "", "A B", "/tmp/x", ".hidden"])
def test_a_build_name_is_never_a_path(name: str) -> None:
    with pytest.raises(UsageError):
        builds.choose(name)


def test_a_damaged_choice_or_description_counts_as_missing() -> None:
    folder = builds.folder_of("cpu")
    folder.mkdir(parents=True)
    (folder / "build.json").write_text("{")
    (paths.builds_dir() / "in-use").write_bytes(b"\xff../..")
    assert (builds.listed(), builds.chosen()) == ([], builds.OWN)


def test_a_single_run_can_use_another_build_and_an_unknown_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCALLLM_BUILD", "nowhere")
    with pytest.raises(BuildNotFoundError):
        engine_builds.activate("serve")
    engine_builds.activate("setup")


def test_changed_drivers_of_a_build_are_reported_until_setup_tests_it_again(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "drivers_now", lambda: "nvidia 2.0; ROCm 7.2")
    build = finished()
    builds.finish(replace(build, drivers="nvidia 1.0; ROCm 7.2"))
    builds.choose("cpu")
    engine_builds.activate("config")
    assert capsys.readouterr().err == ""
    engine_builds.activate("serve")
    assert "(nvidia 2.0)" in capsys.readouterr().err
    chain.choose_build(CPU, HOST, tiny_model, silent)
    assert builds.named("cpu").drivers == "nvidia 2.0; ROCm 7.2"
    engine_builds.activate("serve")
    assert capsys.readouterr().err == ""


def test_driver_versions_are_read_from_the_system(tmp_path: Path) -> None:
    def file(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert builds.drivers_now(tmp_path) == ""
    file("sys/module/nvidia/version", "580.95.05\n")
    file("proc/sys/kernel/osrelease", "6.17.1-generic\n")
    file("opt/rocm/.info/version", "7.2.0-43\n")
    before = builds.drivers_now(tmp_path)
    assert before == "nvidia 580.95.05; ROCm 7.2.0-43"
    (tmp_path / "sys/module/amdgpu").mkdir()
    file("usr/share/vulkan/icd.d/radeon.json", "{}")
    now = builds.drivers_now(tmp_path)
    assert "Linux 6.17;" in now
    said = builds.why_stale(builds.Build("rocm", "rocm", "", "", "", drivers=before), now)
    assert "Vulkan " in said
    assert "ROCm" not in said


def test_a_missing_chosen_build_is_reported_once_and_the_packaged_one_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(builds.folder_of("gone") / "site"))
    paths.builds_dir().mkdir(parents=True)
    (paths.builds_dir() / "in-use").write_text("gone\n")
    engine_builds.activate("serve")
    assert "gone" in capsys.readouterr().err
    assert "PYTHONPATH" not in builds.os.environ


def test_an_activated_build_is_first_on_the_path_and_can_be_deactivated() -> None:
    build = finished()
    environment, path = {"PYTHONPATH": "/mine"}, ["/a", "/b"]
    builds.apply("cpu", environment, path)
    builds.apply("cpu", environment, path)
    site = str(build.folder / "site")
    assert (environment["PYTHONPATH"], path) == (f"{site}:/mine", [site, "/a", "/b"])
    builds.apply(builds.OWN, environment, path)
    assert (environment["PYTHONPATH"], path) == ("/mine", ["/a", "/b"])


def test_a_builds_own_libraries_are_found_while_it_runs() -> None:
    build = replace(finished(), library_dirs=("{build}/toolkit/nvidia/cu13/lib",))
    builds.finish(build)
    environment = {builds.library_variable(): "/theirs"}
    builds.apply("cpu", environment)
    assert (
        environment[builds.library_variable()] == f"{build.folder}/toolkit/nvidia/cu13/lib:/theirs"
    )
    builds.apply(builds.OWN, environment)
    assert environment[builds.library_variable()] == "/theirs"


def test_a_trial_accepts_near_ties_and_rejects_wrong_tokens() -> None:
    expected = build_check.ReferenceAnswer(Path("m"), (1, 2, 3), "abc")
    close = {"gaps": [0.0, 0.3, 0.0], "text": "abd", "decode_s": 0.01}
    assert build_check.compare(expected, close).failure == ""
    for gaps in ([0.0, 9.0, 0.0], [0.0, float("nan"), 0.0], [0.0], [0.0, 1e30, 0.0]):
        assert build_check.compare(expected, {**close, "gaps": gaps}).failure


def test_the_cuda_packages_get_the_library_names_needed_for_linking(tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    (lib / "stubs").mkdir(parents=True)
    for name in ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13.0.1", "stubs/libcuda.so"):
        (lib / name).write_text("")
    install.link_cuda(tmp_path)
    install.link_cuda(tmp_path)
    for name in ("libcudart.so", "libcublas.so", "libcublasLt.so", "libcuda.so"):
        assert (tmp_path / "lib64" / name).exists(), name
    with pytest.raises(SetupError):
        install.link_cuda(tmp_path / "nothing")


def test_after_a_failed_recipe_the_next_one_runs_and_each_reason_is_reported(
    tiny_model: Path,
) -> None:
    """A wheel that crashes and a missing compiler are skipped with their reasons, and the next
    recipe is used."""
    said: list[str] = []
    broken = replace(CPU, name="broken", title="a wheel")
    lacking = replace(
        CPU, name="lacking", title="compiled", needs=("a C++ compiler: apt install one",)
    )
    works = replace(CPU, name="works", title="another wheel", because="it is the next")
    recipe = steps.chain(broken, lacking, works)

    def run(command: list[str], environment: Mapping[str, str], log: Path) -> int:
        doctor = device_lost if "broken" in command[command.index("--target") + 1] else whole
        return installer(doctor)(command, environment, log)

    assert chain.choose_build(recipe, HOST, tiny_model, said.append, run=run) == "works"
    assert builds.chosen() == "works"
    assert [build.name for build in builds.listed()] == ["works"]
    told = "\n".join(said)
    assert "SIGABRT" in told
    assert "a C++ compiler" in told
    assert "because it is the next" in told
    # An existing build is tried first, so no other is downloaded or tried again.
    assert chain.choose_build(recipe, HOST, tiny_model, said.append, run=lambda *_: 1) == "works"
    assert "--again" in said[-1]
    assert "a wheel" in said[-1]


def test_if_no_recipe_works_the_error_has_every_reason_and_the_old_build_still_runs(
    tiny_model: Path,
) -> None:
    before = finished()
    builds.choose("cpu")
    recipe = steps.chain(
        replace(CPU, name="one", title="a wheel"), replace(CPU, name="two", needs=("a driver",))
    )
    with pytest.raises(SetupError) as caught:
        chain.choose_build(recipe, HOST, tiny_model, silent, run=installer(wrong_tokens))
    assert "its tokens differ" in caught.value.message
    assert "a driver" in caught.value.message
    assert (builds.chosen(), builds.listed()) == ("cpu", [before])


WHEEL = replace(
    CPU,
    name="wheel",
    steps=(
        Step(
            "a wheel", ("install", "--target", "{build}/site", "--only-binary", "llama-cpp-python")
        ),
    ),
)
