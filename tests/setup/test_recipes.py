"""Which build suits which machine: the whole of `setup --dry-run` on every recorded machine, and the choices behind it."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from device import recordings
from localllm.cli.commands import setup as command
from localllm.cli.compose import engine_builds
from localllm.device import ggml, in_use
from localllm.device.machines import identify
from localllm.device.named import resolve
from localllm.device.types import Figure
from localllm.setup import recipes
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, assumed

GOLDEN = Path(__file__).parent / "dry_runs.txt"


def host_of(name: str) -> BuildHost:
    readings = recordings.load(name)
    return replace(assumed(identify(readings), readings.architecture), version="0.3.36", n_cores=8)


def dry_run(name: str) -> str:
    machine = identify(recordings.load(name))
    lines = command.lines(machine, command.recipes_of(machine, host_of(name)))
    return "\n".join([f"== {name}", *lines, ""])


def test_every_recorded_machine_gets_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LOCALLLM_WRITE_GOLDEN=1` writes the file anew: read the difference before it is committed."""
    # What the planner predicts moves with every fit of it.
    monkeypatch.setattr(engine_builds, "preferred", lambda _: recipes.Preferred("vulkan", "it is as fast as ROCm"))
    written = "\n".join(map(dry_run, recordings.names()))
    if os.environ.get("LOCALLLM_WRITE_GOLDEN"):
        GOLDEN.write_text(written, encoding="utf-8")
    assert written == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("rtx 5090", "120a-real"),
        ("dgx spark", "121a-real"),
        ("rtx 5060 ti", "120a-real"),
    ],
)
def test_blackwell_is_compiled_natively(name: str, architecture: str) -> None:
    machine = resolve(name)
    (recipe,) = recipes.recipes_for(machine, assumed(machine))
    assert f"-DCMAKE_CUDA_ARCHITECTURES={architecture}" in recipe.steps[-1].command()
    assert "cuda-toolkit" in recipe.steps[0].command()
    assert recipe.library_dirs


def test_a_system_compiler_that_is_new_enough_is_used_and_an_older_one_is_not() -> None:
    spark = resolve("dgx spark")
    here = replace(assumed(spark), nvcc=(13, 0), nvcc_path="/usr/local/cuda/bin/nvcc")
    (recipe,) = recipes.recipes_for(spark, here)
    assert len(recipe.steps) == 1
    assert "-DCMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc" in recipe.steps[0].command()
    (old,) = recipes.recipes_for(spark, replace(here, nvcc=(12, 4)))
    assert "cuda-toolkit" in old.steps[0].command()
    b200 = resolve("b200")
    (older,) = recipes.recipes_for(b200, replace(assumed(b200), nvcc=(12, 4), nvcc_path="/usr/bin/nvcc"))
    assert "cuda-toolkit" in older.steps[0].command()


def test_a_driver_that_is_too_old_for_cuda_13_is_named() -> None:
    card = resolve("rtx 3090")
    (recipe,) = recipes.recipes_for(card, replace(assumed(card), cuda_driver=(12, 2)))
    assert "580" in recipe.needs[0]


def test_rocm_is_taken_where_it_is_faster_and_vulkan_where_nothing_is_known() -> None:
    halo = resolve("strix halo")
    (plain,) = recipes.recipes_for(halo, assumed(halo))
    assert plain.backend == "vulkan"
    (told,) = recipes.recipes_for(halo, assumed(halo), "", recipes.Preferred("rocm", "it is faster"))
    assert (told.backend, told.name) == ("rocm", "rocm")
    assert "it is faster" in told.because


def test_the_planner_is_asked_which_of_two_backends_is_faster() -> None:
    halo = resolve("strix halo")
    preferred = engine_builds.preferred(halo)
    assert preferred is not None
    assert preferred.backend in ("rocm", "vulkan")
    assert "rocm" in preferred.because
    without = command.recipes_of(halo, assumed(halo))
    assert [recipe.backend for recipe in without] == ["vulkan"]


def test_a_better_build_is_told_with_the_speed_to_expect() -> None:
    card = resolve("rtx 3090")
    plain = replace(card, name="a processor", bandwidth_gbps=Figure(50, "given"), host=None, match="")
    processor = in_use.as_used(card, plain, ggml.GgmlBuild())
    said = engine_builds.sentence(processor, card, engine_builds.yardstick_plan(processor))
    assert "tok/s" in said
    assert "localllm setup" in said
    assert re.search(r"CUDA build .* \d+-\d+ tok/s", said)
    assert engine_builds.note(processor, []) == [], "a simulated machine has no installed build"
    assert engine_builds.sentence(card, card, engine_builds.yardstick_plan(card)) == ""


def test_an_installed_build_that_drives_the_gpu_is_kept_unless_a_backend_is_named() -> None:
    card = resolve("rtx 3090")
    host = replace(assumed(card), own_backends=("cuda",))
    assert recipes.recipes_for(card, host)[0].name == "own"
    assert recipes.recipes_for(card, host, "cuda")[0].name == "cuda"
    # One that was made for older parts would have no code for this one.
    new = resolve("rtx 5090")
    assert recipes.recipes_for(new, replace(assumed(new), own_backends=("cuda",)))[0].name == "cuda-120"


@pytest.mark.parametrize(
    ("name", "backend"),
    [("rtx 5090", "metal"), ("M4 Max 128GB", "cuda"), ("M4 Max 128GB", "vulkan"), ("rtx 3090", "rocm")],
)
def test_a_backend_that_the_machine_has_no_gpu_for_is_refused(name: str, backend: str) -> None:
    machine = resolve(name)
    with pytest.raises(SetupError) as caught:
        recipes.recipes_for(machine, assumed(machine), backend)
    assert caught.value.hint


def test_what_is_missing_is_said_with_the_command_that_gets_it() -> None:
    machine = resolve("rtx 5090")
    (recipe,) = recipes.recipes_for(machine, replace(assumed(machine), cxx=False))
    assert any("build-essential" in need for need in recipe.needs)


def test_mlx_is_what_the_extras_of_the_package_say() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    said = {requirement.partition(";")[0] for name in ("mlx", "mlx-cuda") for requirement in extras[name]}
    assert said == {*recipes.MLX, *recipes.MLX_CPU, *recipes.MLX_CUDA}
