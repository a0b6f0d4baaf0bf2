"""The build for each machine: the full output of `setup --dry-run` for every recorded machine, and
the rules behind it."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from device import recordings
from localllm.cli import engine_builds
from localllm.cli.commands import setup as command
from localllm.device import backend_view, ggml
from localllm.device.machines import identify
from localllm.device.name_lookup import resolve
from localllm.device.types import Figure, Readings
from localllm.setup import recipes, steps
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, Version, assumed

GOLDEN = Path(__file__).parent / "dry_runs.txt"


# Machines that matter for builds, in addition to those of tests/device.
MORE = Path(__file__).parent / "recorded" / "machines"
MACHINES = [
    *((recordings.FOLDER, name) for name in recordings.names()),
    *((MORE, name) for name in recordings.names(MORE)),
]


def host_of(readings: Readings) -> BuildHost:
    host = assumed(identify(readings))
    return replace(
        host, architecture=readings.architecture or host.architecture, version="0.3.36", n_cores=8
    )


def dry_run(folder: Path, name: str) -> str:
    readings = recordings.load(name, folder)
    machine = identify(readings)
    host = host_of(readings)
    found = command.recipes_of(machine, host)
    lines = command.lines(
        machine, [recipes.with_archives(recipe, machine, host) for recipe in found]
    )
    return "\n".join([f"== {name}", *lines, ""])


def test_every_recorded_machine_gets_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run of every recorded machine matches the golden file. `LOCALLLM_WRITE_GOLDEN=1`
    rewrites the file: read the difference before committing it."""
    # The planner's predictions change with each fit, so they are replaced.
    monkeypatch.setattr(
        engine_builds, "preferred", lambda _: steps.Preferred("vulkan", "it is as fast as ROCm")
    )
    written = "\n".join(dry_run(folder, name) for folder, name in MACHINES)
    if os.environ.get("LOCALLLM_WRITE_GOLDEN"):
        GOLDEN.write_text(written, encoding="utf-8")
    assert written == GOLDEN.read_text(encoding="utf-8")


def test_rocm_is_used_if_it_is_faster_and_vulkan_if_no_speed_is_known() -> None:
    halo = resolve("strix halo")
    (plain,) = recipes.recipes_for(halo, assumed(halo))
    assert plain.backend == "vulkan"
    with_rocm = replace(assumed(halo), rocm=(7, 13))
    (told,) = recipes.recipes_for(halo, with_rocm, "", steps.Preferred("rocm", "it is faster"))
    assert [made.backend for made in told.alternatives] == ["vulkan"]
    assert (told.backend, told.name) == ("rocm", "rocm")
    assert "it is faster" in told.because


def test_for_a_card_without_graphics_rocm_is_the_first_choice() -> None:
    instinct = replace(resolve("mi300x"), compute_capability="gfx942")
    (recipe,) = recipes.recipes_for(
        instinct, assumed(instinct), "", steps.Preferred("vulkan", "it is faster")
    )
    assert [made.backend for made in (recipe, *recipe.alternatives)] == ["rocm", "vulkan"]
    assert "ROCm 7" in recipe.needs[0]


@pytest.mark.parametrize("name", ["snapdragon x elite", "ryzen 9 9950x"])
def test_unknown_facts_about_a_cpu_are_no_reason_for_a_build(name: str) -> None:
    machine = resolve(name)
    said = "\n".join(command.lines(machine, command.recipes_of(machine, assumed(machine))))
    assert "no build needed" in said
    assert "--bandwidth" not in said


def test_the_planner_decides_which_of_two_backends_is_faster() -> None:
    halo = resolve("strix halo")
    preferred = engine_builds.preferred(halo)
    assert preferred is not None
    assert preferred.backend in ("rocm", "vulkan")
    assert "rocm" in preferred.because
    without = command.recipes_of(halo, assumed(halo))
    assert [recipe.backend for recipe in without] == ["vulkan"]


def test_a_better_build_is_suggested_with_the_expected_speed() -> None:
    card = resolve("rtx 3090")
    plain = replace(
        card, name="a processor", bandwidth_gbps=Figure(50, "given"), host=None, match=""
    )
    processor = backend_view.as_build_uses(card, plain, ggml.GgmlBuild())
    said = engine_builds.speed_note(processor, card, engine_builds.reference_plan(processor))
    assert "tok/s" in said
    assert "localllm setup" in said
    assert re.search(r"CUDA build .* \d+-\d+ tok/s", said)
    assert engine_builds.note(processor, []) == [], "a simulated machine has no installed build"
    assert engine_builds.speed_note(card, card, engine_builds.reference_plan(card)) == ""


def test_an_installed_build_that_drives_the_gpu_is_kept_unless_a_backend_is_named() -> None:
    card = resolve("rtx 3090")
    host = replace(assumed(card), own_backends=("cuda",))
    assert recipes.recipes_for(card, host)[0].name == "own"
    assert recipes.recipes_for(card, host, "cuda")[0].name == "cuda"
    # A llama.cpp built for older GPUs has no code for this one.
    new = resolve("rtx 5090")
    assert (
        recipes.recipes_for(new, replace(assumed(new), own_backends=("cuda",)))[0].name
        == "cuda-120"
    )


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("rtx 5090", "metal"),
        ("M4 Max 128GB", "cuda"),
        ("M4 Max 128GB", "vulkan"),
        ("M4 Max 128GB", "cpu"),
        ("rtx 3090", "rocm"),
    ],
)
def test_a_backend_that_the_machine_has_no_gpu_for_is_refused(name: str, backend: str) -> None:
    machine = resolve(name)
    with pytest.raises(SetupError) as caught:
        recipes.recipes_for(machine, assumed(machine), backend)
    assert caught.value.hint


def test_vulkan_is_offered_for_cards_missing_in_the_table() -> None:
    """A card that no probe knows makes the machine look like its processor alone. Vulkan is still
    offered, and its trial finds the card."""
    unknown = identify(recordings.load("cpu_only_vm"))
    (recipe,) = recipes.recipes_for(unknown, assumed(unknown), "vulkan")
    assert (recipe.backend, recipe.steps[0].pip[0]) == ("vulkan", "install")


def test_vulkan_is_compiled_as_the_second_choice_if_a_compiler_is_installed() -> None:
    arc = resolve("arc b580")
    (recipe,) = recipes.recipes_for(arc, replace(assumed(arc), glslc=True))
    assert [made.title.rpartition(", ")[2] for made in (recipe, *recipe.alternatives)] == [
        "llama-cpp-python's own wheel",
        "compiled here",
    ]


@pytest.mark.parametrize(
    ("gfx", "rocm", "said"),
    [
        ("gfx1151", (7, 2), "7.13"),
        ("gfx1151", (6, 4), "ROCm 7"),
        ("gfx1100", None, "the wheel does not include"),
        ("gfx1103", (7, 2), "no code for gfx1103"),
        ("gfx1152", (7, 2), "no code for gfx1152"),
    ],
)
def test_requirements_of_rocm_are_reported_before_the_download(
    gfx: str, rocm: Version | None, said: str
) -> None:
    radeon = replace(resolve("strix halo"), compute_capability=gfx)
    host = replace(assumed(radeon), rocm=rocm)
    try:
        (recipe,) = recipes.recipes_for(radeon, host, "rocm")
    except SetupError as e:
        told = e.message
    else:
        told = " ".join((*recipe.needs, *recipe.notes))
    assert said in told
    # If Vulkan would be faster, its recipe gives the reason too.
    (instead,) = recipes.recipes_for(radeon, host, "", steps.Preferred("rocm", "it is faster"))
    assert said in " ".join((*instead.needs, *instead.notes))


def test_a_driver_without_response_is_reported_and_not_taken_for_a_missing_gpu() -> None:
    """After a driver update without a restart, NVML fails. The card is on the bus, and `setup`
    reports that its driver does not answer."""
    readings = recordings.load("cpu_only_vm")
    card = "/sys/bus/pci/devices/0000:01:00.0"
    broken = identify(
        replace(
            readings,
            files={**readings.files, f"{card}/vendor": "0x10de", f"{card}/class": "0x030000"},
        )
    )
    said = "\n".join(command.lines(broken, command.recipes_of(broken, assumed(broken))))
    assert "its driver does not answer" in said
    assert "nvidia-smi" in said
    assert "no build needed" not in said


def test_missing_tools_are_reported_with_the_command_that_installs_them() -> None:
    machine = resolve("rtx 5090")
    (recipe,) = recipes.recipes_for(machine, replace(assumed(machine), cxx=False))
    assert any("build-essential" in need for need in recipe.needs)


def test_the_mlx_recipe_matches_the_extras_of_the_package() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    said = {
        requirement.partition(";")[0]
        for name in ("mlx", "mlx-cuda")
        for requirement in extras[name]
    }
    assert said == set(chain.from_iterable(steps.MLX.requirements.values()))
