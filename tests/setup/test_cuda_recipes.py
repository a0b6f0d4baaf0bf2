"""NVIDIA builds: a wheel or compiler with code for every card, chosen by the driver, the system's
compiler and its C library."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.device.name_lookup import resolve
from localllm.device.types import Device
from localllm.setup import cuda, recipes
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, Version, assumed
from localllm.setup.steps import BuildRecipe

HEADERS = Path(__file__).parent / "recorded" / "cuda_headers.txt"


def card(capability: str) -> Device:
    return replace(resolve("rtx 3090"), compute_capability=capability)


def found(device: Device, host: BuildHost | None = None, backend: str = "") -> list[BuildRecipe]:
    """Return all recipes of the chain, in order."""
    (recipe,) = recipes.recipes_for(device, host or assumed(device), backend)
    return [recipe, *recipe.alternatives]


def index(recipe: BuildRecipe) -> str:
    """Return the wheel's index, or "compiled"."""
    pip = recipe.steps[-1].pip
    return (
        pip[pip.index("--index-url") + 1].rpartition("/")[2] if "--index-url" in pip else "compiled"
    )


def architectures(recipe: BuildRecipe) -> str:
    told = re.search(r"-DCMAKE_CUDA_ARCHITECTURES=(\S+)", recipe.steps[-1].command())
    return told[1] if told else ""


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("rtx 5090", "120a-real"),
        ("dgx spark", "121a-real"),
        ("rtx 5060 ti", "120a-real"),
        ("b200", "100a-real"),
    ],
)
def test_blackwell_is_compiled_natively(name: str, architecture: str) -> None:
    first = found(resolve(name))[0]
    assert architectures(first) == architecture
    assert "cuda-toolkit" in first.steps[0].command()
    assert first.library_dirs


def test_a_system_compiler_that_is_new_enough_is_used_and_an_older_one_is_not() -> None:
    spark = resolve("dgx spark")
    here = replace(assumed(spark), nvcc=(13, 0), nvcc_path="/usr/local/cuda/bin/nvcc")
    first, second, *_ = found(spark, here)
    assert len(first.steps) == 1
    assert "-DCMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc" in first.steps[0].command()
    assert "cuda-toolkit" in second.steps[0].command(), (
        "where the system's fails, the packages' is tried"
    )
    assert "cuda-toolkit" in found(spark, replace(here, nvcc=(12, 4)))[0].steps[0].command()
    b200 = resolve("b200")
    older = replace(assumed(b200), nvcc=(12, 4), nvcc_path="/usr/bin/nvcc")
    assert "cuda-toolkit" in found(b200, older)[0].steps[0].command()


@pytest.mark.parametrize(
    ("nvcc", "libraries", "fetched"),
    [
        ((13, 1), "/usr/local/cuda/lib64", False),
        ((13, 1), "", True),
        ((12, 9), "/usr/local/cuda/lib64", True),
    ],
)
def test_a_wheel_uses_the_systems_cuda_libraries_if_their_version_matches(
    nvcc: Version, libraries: str, fetched: bool
) -> None:
    device = resolve("rtx 4090")
    first = found(device, replace(assumed(device), nvcc=nvcc, cuda_libraries=libraries))[0]
    assert ("cuda-toolkit" in first.steps[0].command()) == fetched
    assert (first.library_dirs == (libraries,)) != fetched


@pytest.mark.parametrize(
    ("nvcc", "gcc", "glibc", "said"),
    [
        ((13, 0), 15, (2, 42), "C library 2.42"),
        ((13, 1), 15, (2, 43), "C library 2.43"),
        ((13, 2), 15, (2, 42), ""),
        ((13, 3), 16, (2, 42), "GCC 16"),
        ((13, 4), 16, (2, 43), ""),
        ((12, 8), 15, (2, 39), "GCC 15"),
        ((12, 6), 13, (2, 39), "does not support 12.0"),
        ((13, 0), 14, (2, 41), ""),
        ((13, 0), None, None, ""),
    ],
)
def test_an_unusable_system_compiler_is_skipped_and_reported(
    nvcc: Version, gcc: int | None, glibc: Version | None, said: str
) -> None:
    new = resolve("rtx 5090")
    host = replace(assumed(new), nvcc=nvcc, nvcc_path="/opt/cuda/bin/nvcc", gcc=gcc, glibc=glibc)
    first = found(new, host)[0]
    assert ("/opt/cuda" in first.steps[-1].command()) == (not said)
    assert said in first.because


def test_the_packaged_compiler_accepts_the_gcc_versions_of_its_headers() -> None:
    """The recorded facts of the nvidia-cuda-crt packages are used: the newest GCC of each version,
    and whether its declaration of rsqrt matches glibc 2.42."""
    recorded = re.findall(
        r"(?m)^([0-9]+)\.([0-9]+)\S* gcc ([0-9]+) glibc-2.42 "
        r"(yes|no)$",
        HEADERS.read_text(),
    )
    assert len(recorded) >= 5
    new = resolve("rtx 5090")
    for major, minor, gcc, modern in recorded:
        version = (int(major), int(minor))
        host = replace(assumed(new), nvcc=version, nvcc_path="/opt/cuda/bin/nvcc")
        for other, taken in ((int(gcc), True), (int(gcc) + 1, False)):
            first = found(new, replace(host, gcc=other))[0]
            assert ("/opt/cuda" in first.steps[-1].command()) == taken
        first = found(new, replace(host, glibc=(2, 42)))[0]
        assert ("/opt/cuda" in first.steps[-1].command()) == (modern == "yes")
    newest_gcc, modern_libc = zip(
        *((int(gcc), modern) for _, _, gcc, modern in recorded), strict=True
    )
    oldest_packaged = re.search(r">=([0-9]+)\.([0-9]+)", cuda.PACKAGED)
    assert oldest_packaged
    row = [(int(a), int(b)) for a, b, *_ in recorded].index(
        (int(oldest_packaged[1]), int(oldest_packaged[2]))
    )
    assert (newest_gcc[row], modern_libc[row]) == (16, "yes")


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [
        ("8.6", (13, 0), "cu130"),
        ("8.6", (13, 2), "cu130"),
        ("8.6", (12, 8), "cu125"),
        ("8.6", (12, 4), "cu124"),
        ("7.5", (12, 2), "cu122"),
        ("8.9", (12, 1), "cu121"),
        ("8.9", (11, 8), "cu118"),
        ("9.0", (11, 8), "vulkan"),
        ("7.5", (11, 4), "vulkan"),
        ("6.1", (13, 0), "cu125"),
        ("6.1", None, "cu125"),
        ("7.0", (12, 4), "cu124"),
        ("6.0", (12, 0), "cu118"),
        ("5.2", (12, 8), "vulkan"),
        ("12.0", (12, 8), "cu125"),
    ],
)
def test_the_wheel_is_chosen_by_the_card_and_its_driver(
    capability: str, driver: Version | None, expected: str
) -> None:
    device = card(capability)
    runs = [
        made
        for made in found(device, replace(assumed(device), cuda_driver=driver))
        if not made.needs
    ]
    assert index(runs[0]) == expected
    if expected.startswith(("cu12", "cu118")):
        assert (
            f"cuda-toolkit[cudart,cublas]=={expected[2:4]}.{expected[4]}.*"
            in runs[0].steps[0].command()
        )
        assert runs[0].library_dirs[0].endswith("nvidia/cuda_runtime/lib")


def test_native_code_that_needs_a_newer_driver_is_reported() -> None:
    device = card("12.0")
    first = found(device, replace(assumed(device), cuda_driver=(12, 8)))[0]
    assert "580" in first.needs[0]


def test_without_a_compiler_the_newest_cards_use_a_wheel() -> None:
    device = resolve("rtx 5090")
    first, second, *_ = found(device, replace(assumed(device), cxx=False))
    assert "build-essential" in first.needs[0]
    assert (index(second), second.needs) == ("cu130", ())
    assert "PTX" in second.because


@pytest.mark.parametrize(
    ("capability", "first"),
    [("12.0", "cu130"), ("8.6", "cu130"), ("6.1", "cu125"), ("10.0", "cu130")],
)
def test_windows_gets_wheels_and_vulkan_and_never_linux_file_names(
    capability: str, first: str
) -> None:
    device = replace(card(capability), os="Windows")
    chain = found(device, replace(assumed(device), cuda_driver=(13, 0)))
    assert [index(chain[0]), index(chain[-1])] == [first, "vulkan"]
    told = " ".join(
        word
        for made in chain
        for word in (*made.library_dirs, *(step.command() for step in made.steps))
    )
    assert "/lib64" not in told
    assert "link the CUDA" not in told
    assert all("/bin" in folder for made in chain for folder in made.library_dirs)
    # CUDA 12.1 to 12.3 have no wheel for Windows.
    older = found(card("8.6"), replace(assumed(device), cuda_driver=(12, 3)))
    assert index(older[0]) == "cu118"


def test_every_recipe_runs_on_its_card_driver_and_system_or_names_what_is_missing() -> None:
    """For every pair of facts, no wheel is newer than the driver or lacks code for the card. The
    packaged compiler is used only on Linux."""
    numbers = [
        "5.0",
        "6.1",
        "7.0",
        "7.5",
        "8.0",
        "8.6",
        "8.7",
        "8.9",
        "9.0",
        "10.0",
        "12.0",
        "12.1",
    ]
    drivers: list[Version | None] = [
        None,
        (11, 4),
        (11, 8),
        (12, 0),
        (12, 3),
        (12, 8),
        (13, 0),
        (13, 4),
    ]
    for capability, driver, system, architecture in itertools.product(
        numbers, drivers, ("linux", "windows"), ("x86_64", "aarch64")
    ):
        device = replace(card(capability), os="Windows" if system == "windows" else "Linux")
        host = replace(assumed(device), architecture=architecture, cuda_driver=driver)
        try:
            chain = found(device, host)
        except SetupError as e:
            raise AssertionError(
                f"{capability} {driver} {system} {architecture}: {e.message}"
            ) from e
        assert chain[0].steps
        version = cuda.capabilities(device)[0]
        for made in chain:
            if made.backend != "cuda":
                continue
            if index(made) == "compiled":
                assert system == "linux"
                assert version >= (7, 5)
                assert made.needs or driver is None or driver >= (13, 0)
                continue
            (wheel,) = (w for w in cuda.WHEELS if w.index == index(made))
            assert driver is None or wheel.cuda <= driver
            assert wheel.runs_on(version)
            assert architecture == "x86_64"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rtx 3060 + rtx 5090", "86-real;120a-real"),
        ("rtx 4090 + 2x rtx 5090", "89-real;120a-real"),
        ("rtx 2080 ti + rtx 3090 + rtx 5060 ti", "75-real;86-real;120a-real"),
        ("2x rtx 5090", "120a-real"),
    ],
)
def test_cards_of_several_generations_are_all_compiled_for(name: str, expected: str) -> None:
    chain = found(resolve(name))
    assert architectures(chain[0]) == expected
    assert chain[0].name == f"cuda-{re.sub('a?-real', '', expected).replace(';', '-')}"
    # The wheel that follows runs on each card, with native code or from its PTX.
    (wheel,) = (w for w in cuda.WHEELS if w.index == index(chain[1]))
    assert all(map(wheel.runs_on, cuda.capabilities(resolve(name))))


@pytest.mark.parametrize(
    ("name", "nvcc", "first"),
    [
        ("rtx 3060 + rtx 4090", None, "cu130"),
        ("gtx 1080 ti + rtx 3090", None, "cu125"),
        # Only CUDA 12.8 and 12.9 compile for both. CUDA 12's wheel has native code for one and PTX
        # for the other.
        ("gtx 1080 ti + rtx 5090", None, "cu125"),
        ("gtx 1080 ti + rtx 5090", (12, 9), "compiled"),
        ("gtx 1080 ti + rtx 5090", (13, 4), "cu125"),
    ],
)
def test_one_build_runs_on_the_oldest_card_and_on_the_newest(
    name: str, nvcc: Version | None, first: str
) -> None:
    device = resolve(name)
    assert index(found(device, replace(assumed(device), nvcc=nvcc))[0]) == first


def test_any_two_cards_get_a_build_that_runs_on_both() -> None:
    for one, other in itertools.combinations(
        ["6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1"], 2
    ):
        both = replace(card(one), cards=(card(one), card(other)))
        for made in found(both):
            if index(made) == "compiled":
                assert all(f"{c.replace('.', '')}" in architectures(made) for c in (one, other))
            elif made.backend == "cuda":
                (wheel,) = (w for w in cuda.WHEELS if w.index == index(made))
                assert all(map(wheel.runs_on, cuda.capabilities(both)))
        assert found(both)[0].backend == "cuda"


def test_a_gpu_known_only_to_its_driver_gets_the_wheel_on_request() -> None:
    """A GPU slice of unknown size is planned as a machine without a GPU. The CUDA wheel is still
    available on request."""
    unplanned = replace(resolve("rtx 3090"), accelerator="cpu", compute_capability="")
    (recipe,) = recipes.recipes_for(
        unplanned, replace(assumed(unplanned), cuda_driver=(13, 1)), "cuda"
    )
    assert index(recipe) == "cu130"
    with pytest.raises(SetupError):
        recipes.recipes_for(unplanned, assumed(unplanned), "cuda")
