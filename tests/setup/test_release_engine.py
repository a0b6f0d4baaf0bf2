"""An engine from a release of llama.cpp: downloaded, verified, unpacked, tried and listed.

The releases are on a loopback server. The archive holds the libraries of the installed wheel, so
the trial computes with a real engine.
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm import paths
from localllm.cli import engine_builds, engine_releases, engine_setup
from localllm.cli.all_commands import app
from localllm.device.accelerators import KINDS
from localllm.device.name_lookup import resolve
from localllm.device.probes import llama_cpp_folder
from localllm.errors import DownloadError, LocalLLMError, NotFoundError
from localllm.library.hub import Patience
from localllm.setup import builds, chain
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, read
from setup.release_server import TAG, Releases, running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the archive holds Linux libraries")
ARCHITECTURE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "x64")
ARCHIVE = f"llama-{TAG}-bin-ubuntu-{ARCHITECTURE}.tar.gz"
# The folders of the headers in llama.cpp's source.
HEADERS = {"llama": "include", "ggml": "ggml/include", "gguf": "ggml/include", "mtmd": "tools/mtmd"}


def headers() -> dict[str, bytes]:
    """Return the installed headers at their paths in the source, with some unwanted files."""
    installed = llama_cpp_folder()
    assert installed is not None
    found = {"tools/mtmd/clip.cpp": b"", "include/llama-cpp.h": b""}
    for file in (installed.parents[1] / "include").glob("*.h"):
        folder = HEADERS.get(file.stem.partition("-")[0])
        if folder is not None:
            found[f"{folder}/{file.name}"] = file.read_bytes()
    return found


def packed() -> bytes:
    """Pack the wheel's libraries as llama.cpp's releases do: one file per library, and links to
    it."""
    folder = llama_cpp_folder()
    assert folder is not None
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        for file in sorted(folder.glob("lib*.so.*.*.*")):
            archive.add(file, f"llama-{TAG}/{file.name}")
            stem = file.name.partition(".so")[0]
            for name in (f"{stem}.so.0", f"{stem}.so"):
                link = tarfile.TarInfo(f"llama-{TAG}/{name}")
                link.type = tarfile.SYMTYPE
                link.linkname = file.name
                archive.addfile(link)
    return out.getvalue()


@pytest.fixture(scope="module")
def archive() -> bytes:
    return packed()


@pytest.fixture
def releases(archive: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Releases]:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with running(Releases({ARCHIVE: archive}, headers())) as found:
        yield found


@pytest.fixture
def host() -> BuildHost:
    return read(("cpu",))


def source(releases: Releases) -> engine_releases.GitHubReleases:
    patience = Patience(sleep=lambda _: None)
    return engine_releases.GitHubReleases(releases.api, lambda _: None, patience)


def silent(_: str) -> None:
    """Print nothing."""


def set_up(
    releases: Releases,
    host: BuildHost,
    model: Path,
    engine: str = "latest",
    say: Callable[[str], None] = silent,
) -> str:
    device = resolve("8GB laptop")
    found = source(releases)
    recipe = engine_setup.recipe_of(engine, device, host, "cpu")
    recipe = engine_setup.resolved(recipe, found)
    fetch = engine_setup.fetcher(found, device, host, say)
    return chain.choose_build(recipe, host, model, say, fetch=fetch)


def test_the_newest_release_is_installed_tried_and_listed_after_two_cuts(
    releases: Releases, host: BuildHost, tiny_model: Path
) -> None:
    releases.cuts = [300_000, 700_000]
    said: list[str] = []
    assert set_up(releases, host, tiny_model, say=said.append) == f"{TAG}-cpu"
    requests = [seen for seen in releases.seen if seen.startswith("/storage/")]
    assert requests == [
        f"/storage/{ARCHIVE}",
        f"/storage/{ARCHIVE} bytes=300000-",
        f"/storage/{ARCHIVE} bytes=1000000-",
    ]
    build = builds.named(f"{TAG}-cpu")
    assert "10 of 10 tokens" in build.trial
    assert build.title == f"llama.cpp v1.0.0 ({TAG}) for {KINDS['cpu'].label}"
    assert builds.chosen() == build.name
    names = {file.name for file in (build.folder / "include").glob("*.h")}
    assert {"llama.h", "ggml.h", "ggml-cpu.h", "gguf.h", "mtmd.h"} <= names
    assert names.isdisjoint({"llama-cpp.h", "clip.cpp"})
    assert not any((paths.builds_dir() / ".downloads").iterdir())

    environment = dict(os.environ)
    environment.pop("LOCALLLM_BUILD", None)
    shown = subprocess.run(
        [sys.executable, "-m", "localllm", "setup", "--list", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    own, new = json.loads(shown.stdout)
    assert (own["name"], own["runs"]) == ("own", False)
    assert (new["name"], new["version"], new["runs"]) == (build.name, TAG, True)
    assert new["folder"] == str(build.folder / "lib")
    assert new["n_architectures"] == own["n_architectures"] > 100
    assert "cpu" in new["accelerators"]
    code = (
        "from localllm.cli import engine_builds\n"
        "engine_builds.activate('serve')\n"
        "from localllm_backends.llamacpp import native\n"
        "native.start_native()\n"
        "print({file for _, _, file in native.mappings() if 'libllama' in file})"
    )
    mapped = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert mapped.stdout.strip() == str({str(build.folder / "lib" / "libllama.so.0.5.0")})


def test_a_second_request_for_the_same_release_only_tries_it_again(
    releases: Releases, host: BuildHost, tiny_model: Path
) -> None:
    set_up(releases, host, tiny_model)
    downloads = len([seen for seen in releases.seen if seen.startswith("/storage/")])
    assert set_up(releases, host, tiny_model, "v1.0.0") == f"{TAG}-cpu"
    assert set_up(releases, host, tiny_model, TAG) == f"{TAG}-cpu"
    assert len([seen for seen in releases.seen if seen.startswith("/storage/")]) == downloads


def test_a_download_that_was_stopped_continues_in_the_next_run(
    releases: Releases, host: BuildHost, tiny_model: Path
) -> None:
    releases.cuts = [400_000, *[0] * 20]
    with pytest.raises(SetupError, match="stopped at 400,000"):
        set_up(releases, host, tiny_model)
    assert builds.listed() == []
    releases.cuts.clear()
    releases.seen.clear()
    set_up(releases, host, tiny_model)
    assert f"/storage/{ARCHIVE} bytes=400000-" in releases.seen


def test_a_wrong_digest_is_refused_and_nothing_is_installed(
    releases: Releases, host: BuildHost, tiny_model: Path
) -> None:
    releases.stated[ARCHIVE] = "0" * 64
    with pytest.raises(SetupError, match="digest that its release states") as caught:
        set_up(releases, host, tiny_model)
    assert "nothing was installed" in caught.value.hint
    assert builds.listed() == []
    assert builds.chosen() == builds.OWN
    assert not any((paths.builds_dir() / ".downloads").iterdir())


def test_a_release_without_an_archive_for_this_system_gives_the_reason(
    releases: Releases, host: BuildHost, tiny_model: Path
) -> None:
    releases.files = {f"llama-{TAG}-bin-macos-arm64.tar.gz": b"x"}
    with pytest.raises(SetupError, match="has no archive for cpu on linux"):
        set_up(releases, host, tiny_model)
    assert builds.listed() == []


def test_an_archive_for_a_newer_system_is_refused_before_its_trial(
    releases: Releases, tiny_model: Path
) -> None:
    old = BuildHost("linux", platform.machine(), "0.3.36", 2, glibc=(2, 34))
    library = b"\0GLIBC_2.99\0"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo("libllama.so")
        info.size = len(library)
        archive.addfile(info, io.BytesIO(library))
    releases.files = {ARCHIVE: out.getvalue()}
    with pytest.raises(SetupError, match=r"needs glibc 2\.99, and this system has 2\.34"):
        set_up(releases, old, tiny_model)


def broken() -> bytes:
    """Return an archive whose library can't be loaded."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo("libllama.so")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"none"))
    return out.getvalue()


def test_a_release_that_fails_its_trial_is_removed_and_the_previous_engine_is_used(
    releases: Releases, host: BuildHost, tiny_model: Path
) -> None:
    releases.files = {ARCHIVE: broken()}
    with pytest.raises(SetupError, match="does not start"):
        set_up(releases, host, tiny_model)
    assert builds.listed() == []
    assert builds.chosen() == builds.OWN


def test_an_engine_that_fails_a_later_trial_is_replaced_by_the_last_good_one(
    releases: Releases, host: BuildHost, tiny_model: Path
) -> None:
    """The trial fails if files are damaged or a driver changes. After a trial that passes, it is
    used again."""
    name = set_up(releases, host, tiny_model)
    library = builds.named(name).folder / "lib" / "libllama.so"
    whole = library.readlink()
    library.unlink()
    library.write_bytes(b"none")
    said: list[str] = []
    with pytest.raises(SetupError, match="does not start"):
        set_up(releases, host, tiny_model, say=said.append)
    assert builds.chosen() == builds.OWN
    assert f"   the engine {name} is not used any more: own runs" in said
    (listed,) = [engine for engine in engine_setup.listed() if engine.name == name]
    assert listed.trial.startswith("not used any more: it does not start")
    library.unlink()
    library.symlink_to(whole)
    assert set_up(releases, host, tiny_model) == name
    assert (builds.chosen(), builds.named(name).fault) == (name, "")


def test_a_tag_that_does_not_exist_is_an_error_with_the_list_of_releases(
    releases: Releases,
) -> None:
    with pytest.raises(NotFoundError, match="no release b999") as caught:
        source(releases).find("b999")
    assert "github.com" in (caught.value.hint or "")


def test_without_network_the_error_names_the_reason(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = Patience(sleep=lambda _: None)
    found = engine_releases.GitHubReleases("http://127.0.0.1:9", lambda _: None, patience)
    with pytest.raises(DownloadError, match="can't be read"):
        found.find("latest")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="offline mode"):
        source(releases).find("latest")


def test_the_command_installs_a_release_and_goes_back_to_the_wheel(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_ENGINE_RELEASES", releases.api)
    runner = CliRunner()
    done = runner.invoke(app, ["setup", "--engine", "latest", "--backend", "cpu"])
    assert done.exception is None, done.output
    assert builds.chosen() == f"{TAG}-cpu"
    assert f"* {TAG}-cpu" in runner.invoke(app, ["setup", "--list"]).output
    back = runner.invoke(app, ["setup", "--engine", "wheel"])
    assert back.output == "own runs from the next start of a model on\n"
    listed = runner.invoke(app, ["setup", "--list"]).output
    assert listed.startswith("* own")
    assert f"  {TAG}-cpu" in listed


def test_a_folder_of_libraries_is_tested_and_used_in_place(
    host: BuildHost, tiny_model: Path, tmp_path: Path
) -> None:
    installed = llama_cpp_folder()
    assert installed is not None
    folder = tmp_path / "My llama" / "lib"
    folder.mkdir(parents=True)
    for library in installed.iterdir():
        (folder / library.name).symlink_to(library)
    recipe = engine_setup.recipe_of(str(folder), resolve("8GB laptop"), host, "")
    name = chain.choose_build(recipe, host, tiny_model, silent)
    assert name == "folder-my-llama"
    environment: dict[str, str] = {}
    builds.apply(name, environment)
    assert environment[builds.LIBRARY_VARIABLE] == str(folder)
    builds.apply(builds.OWN, environment)
    assert builds.LIBRARY_VARIABLE not in environment
    builds.remove(name)
    assert folder.is_dir()


def test_a_folder_in_the_environment_has_priority_and_is_listed_as_used(
    host: BuildHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = llama_cpp_folder()
    assert installed is not None
    monkeypatch.setenv(builds.LIBRARY_VARIABLE, str(installed))
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libllama.so").write_bytes(b"")
    engine_builds.activate("setup")
    found = {engine.name: engine for engine in engine_setup.listed()}
    assert not found["own"].used
    assert found["conda"].folder == str(tmp_path / "lib")
    assert found["conda"].trial == "not tried"
    monkeypatch.setenv(builds.LIBRARY_VARIABLE, str(tmp_path / "lib"))
    found = {engine.name: engine for engine in engine_setup.listed()}
    assert found["environment"].used == "LLAMA_CPP_LIB_PATH names its folder"


@pytest.mark.parametrize("engine", ["newest", "b1", "v", "/no/such/folder", "homebrew"])
def test_an_invalid_engine_name_is_refused_with_the_valid_forms(engine: str) -> None:
    result = CliRunner().invoke(app, ["setup", "--engine", engine])
    assert isinstance(result.exception, LocalLLMError)
    assert result.exception.exit_code == 2
    assert "latest, v1.0.0 or b12110" in str(result.exception.hint)
