"""Archives are unpacked into one folder: only libraries, for any names in the archive."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from localllm.device.probes import llama_cpp_folder
from localllm.setup import archives
from localllm.setup.builds import SetupError


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def tar(path: Path, members: Iterable[tarfile.TarInfo], content: bytes = b"library") -> Path:
    with tarfile.open(path, "w:gz") as out:
        for info in members:
            if info.isreg():
                info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_libraries_are_extracted_without_folders_and_links_stay_links(tmp_path: Path) -> None:
    archive = tar(
        tmp_path / "a.tar.gz",
        [
            member("llama-b1/libllama.so", tarfile.SYMTYPE, "libllama.so.0"),
            member("llama-b1/libllama.so.0", tarfile.SYMTYPE, "libllama.so.0.5.0"),
            member("llama-b1/libllama.so.0.5.0"),
            member("llama-b1/libggml-cpu-haswell.so"),
            member("llama-b1/LICENSE"),
            member("llama-b1/llama-server"),
            member("llama-b1/script.sh"),
        ],
    )
    archives.unpack(archive, tmp_path / "lib")
    assert names(tmp_path / "lib") == {
        "libllama.so",
        "libllama.so.0",
        "libllama.so.0.5.0",
        "libggml-cpu-haswell.so",
        "LICENSE",
    }
    assert (tmp_path / "lib" / "libllama.so").readlink() == Path("libllama.so.0.5.0")
    assert (tmp_path / "lib" / "libllama.so").read_bytes() == b"library"


@pytest.mark.parametrize(
    "name",
    ["../../libx.so", "/etc/libx.so", "a/../../libx.so", "..\\..\\libx.so", "C:\\libx.so"],
)
def test_an_archive_name_outside_the_folder_is_extracted_inside_it(
    name: str, tmp_path: Path
) -> None:
    archive = tar(tmp_path / "a.tar.gz", [member(name)])
    archives.unpack(archive, tmp_path / "lib")
    assert names(tmp_path / "lib") == {"libx.so"}
    assert names(tmp_path) == {"a.tar.gz", "lib"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret.so", "liby.so"])
def test_a_link_to_a_path_outside_the_archive_is_refused(
    kind: bytes, target: str, tmp_path: Path
) -> None:
    (tmp_path / "secret.so").write_text("secret")
    archive = tar(
        tmp_path / "a.tar.gz",
        [member("libx.so", kind, target), member("libz.so"), member("liby.so", kind, "libx.so")],
    )
    with pytest.raises(SetupError, match="leads to no file of the archive"):
        archives.unpack(archive, tmp_path / "lib")
    assert names(tmp_path / "lib") == {"libz.so"}


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_devices_and_pipes_in_an_archive_are_not_created(kind: bytes, tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tar.gz", [member("libx.so", kind), member("libz.so")])
    archives.unpack(archive, tmp_path / "lib")
    assert names(tmp_path / "lib") == {"libz.so"}


def test_an_archive_beyond_the_size_limit_is_refused(tmp_path: Path) -> None:
    many = tar(tmp_path / "many.tar.gz", [member(f"lib{n}.so") for n in range(500)])
    with pytest.raises(SetupError, match="more than an engine has"):
        archives.unpack(many, tmp_path / "many")
    large = tar(tmp_path / "large.tar.gz", [member("libx.so"), member("liby.so")])
    with pytest.raises(SetupError, match="more than an engine has"):
        archives.unpack(large, tmp_path / "large", max_bytes=10)


@pytest.mark.parametrize(
    ("name", "content"), [("a.tar.gz", b"no archive"), ("a.zip", b"no archive"), ("b.tar.gz", b"")]
)
def test_a_damaged_archive_is_a_one_line_error(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SetupError, match="can't be unpacked"):
        archives.unpack(tmp_path / name, tmp_path / "lib")


def test_a_truncated_archive_is_a_one_line_error(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tar.gz", [member("libx.so")], bytes(range(256)) * 400)
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(SetupError, match="can't be unpacked"):
        archives.unpack(archive, tmp_path / "lib")


def test_an_archive_without_a_library_is_refused(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tar.gz", [member("index.html")])
    with pytest.raises(SetupError, match="holds no library"):
        archives.unpack(archive, tmp_path / "lib")


def test_a_zip_of_windows_libraries_is_unpacked_flat(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as out:
        out.writestr("llama.dll", "one")
        out.writestr("build/bin/ggml-base.dll", "two")
        out.writestr("../ggml.dll", "three")
        out.writestr("llama-server.exe", "four")
    archives.unpack(tmp_path / "a.zip", tmp_path / "lib")
    assert names(tmp_path / "lib") == {"llama.dll", "ggml-base.dll", "ggml.dll"}


def test_the_glibc_that_a_library_needs_is_read_from_it() -> None:
    """The installed wheel needs a glibc that is no newer than this system's."""
    folder = llama_cpp_folder()
    assert folder is not None
    needs = archives.glibc_of(folder / "libllama.so")
    assert needs is not None
    assert (2, 14) <= needs < (2, 60)
    assert "needs glibc" in archives.too_new(folder, (2, 2), None)
    assert archives.too_new(folder, needs, None) == ""


def mach_o(minimum: int) -> bytes:
    """The header of a 64-bit Mach-O file: LC_UUID, then LC_BUILD_VERSION with this oldest macOS."""
    uuid = struct.pack("<2I16s", 0x1B, 24, b"")
    build = struct.pack("<6I", 0x32, 24, 1, minimum, minimum, 0)
    header = struct.pack("<8I", 0xFEEDFACF, 0, 0, 6, 2, len(uuid) + len(build), 0, 0)
    return header + uuid + build


def test_the_macos_that_a_library_needs_is_read_from_it(tmp_path: Path) -> None:
    library = tmp_path / "libllama.dylib"
    library.write_bytes(mach_o(26 << 16))
    assert archives.macos_of(library) == (26, 0)
    told = archives.too_new(tmp_path, None, (15, 6))
    assert told == "libllama.dylib needs macOS 26.0, and this Mac has 15.6"
    assert archives.too_new(tmp_path, None, (26, 1)) == ""
    for damaged in (b"", b"\xcf\xfa\xed\xfe", mach_o(26 << 16)[:40], b"x" * 100):
        library.write_bytes(damaged)
        assert archives.macos_of(library) is None
