"""A build uses the processor library that was compiled here, and is rejected if it is slower than
the build before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm import paths
from localllm.setup import builds, chain
from setup.test_install import CPU, HOST, WHEEL, Doctor, installer, make, processor_libraries, whole
from support.native_library import put_in_front


def runs_with_its_own_part_alone(package: Path) -> None:
    """Abort if the processor library of another build replaces this build's own."""
    part = package / "lib" / "libggml-cpu.so"
    put_in_front(
        package,
        f"""
        #include <stdlib.h>
        #include <sys/stat.h>
        __attribute__((constructor)) static void start(void) {{
            struct stat found;
            if (lstat("{part}", &found) || !S_ISLNK(found.st_mode)) abort();
        }}
        """,
    )


def of_another_version(package: Path) -> None:
    for library in (package / "lib").glob("libggml-base.so.*.*"):
        library.rename(library.with_name("libggml-base.so.0.0.1"))


def test_a_ready_made_build_uses_the_processor_part_compiled_here(
    tiny_model: Path,
) -> None:
    build = make(whole, tiny_model, WHEEL)
    libraries = processor_libraries(build)
    assert libraries
    # The wheel's own libraries, which are links in this test, are moved aside.
    assert not any(library.is_symlink() for library in libraries)
    assert all(library.read_bytes() == libraries[0].read_bytes() for library in libraries)


@pytest.mark.parametrize("doctor", [runs_with_its_own_part_alone, of_another_version])
def test_if_the_processor_part_does_not_compile_that_of_the_wheel_stays(
    doctor: Doctor, tiny_model: Path
) -> None:
    build = make(doctor, tiny_model, WHEEL)
    assert all(library.is_symlink() for library in processor_libraries(build))
    assert "10 of 10 tokens" in build.trial


def turns_take(seconds: float) -> Doctor:
    """Return a change that delays every step of a build by `seconds`."""

    def doctor(package: Path) -> None:
        put_in_front(
            package,
            f"""
            #include <dlfcn.h>
            #include <unistd.h>
            #include "llama.h"
            int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch) {{
                int32_t (*decode)(struct llama_context *, struct llama_batch);
                decode = dlsym(RTLD_NEXT, "llama_decode");
                usleep({round(seconds * 1e6)});
                return decode(ctx, batch);
            }}
            """,
        )

    return doctor


@pytest.mark.parametrize(
    ("before", "now", "accepts", "taken"),
    [
        (0.0, 0.005, False, False),
        pytest.param(0.005, 0.0, False, True, marks=pytest.mark.long),
        pytest.param(0.0, 0.005, True, True, marks=pytest.mark.long),
    ],
)
def test_a_slower_build_than_the_previous_one_is_used_only_on_request(
    before: float, now: float, accepts: bool, taken: bool, tiny_model: Path
) -> None:
    """One trial measures both builds. The previous build counts as an accelerated one here, because
    the speed of a processor build is not compared."""
    old = builds.Build("cpu", "vulkan", "the one before", HOST.version, "2026-01-01")
    log = paths.private_dir(paths.log_dir()) / "before.log"
    installer(turns_take(before))(["--target", str(old.folder / "site")], {}, log)
    builds.finish(old)
    builds.choose("cpu")
    asked: list[str] = []

    def accept(sentence: str) -> bool:
        asked.append(sentence)
        return accepts

    said: list[str] = []
    name = chain.choose_build(
        CPU,
        HOST,
        tiny_model,
        said.append,
        again=True,
        accept_slower=accept,
        run=installer(turns_take(now)),
    )
    assert name == "cpu"
    assert bool(asked) == (now > before)
    assert (builds.named("cpu").title == "a build") == taken
    assert builds.chosen() == "cpu"
    assert any("--keep" in sentence for sentence in said) == (not taken)


@pytest.mark.long
@pytest.mark.parametrize(("now", "taken"), [(0.01, False), (0.0, True)])
def test_another_release_is_also_compared_with_the_used_build_on_a_cpu(
    now: float, taken: bool, tiny_model: Path
) -> None:
    other, said = replace(HOST, version="0.3.99"), list[str]()
    recipe = replace(CPU, name="cpu-0.3.99")
    name = chain.choose_build(
        recipe, other, tiny_model, said.append, run=installer(turns_take(now))
    )
    assert name == ("cpu-0.3.99" if taken else builds.OWN)
    assert builds.chosen() == name
    assert [build.version for build in builds.listed()] == (["0.3.99"] if taken else [])
    assert any("each 5 times" in sentence for sentence in said)
