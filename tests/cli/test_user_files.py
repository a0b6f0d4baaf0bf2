"""Unreadable or invalid user files cause one message that names the file, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm import paths
from localllm.cli.main import run

MINE = """
[[models]]
id = "mine-1b"
name = "Mine 1B"
params = 1_235_800_000
layers = 16
hidden = 2048
ffn = 8192
heads = 32
kv_heads = 8
head_dim = 64
vocab = 128256
context = 8192
[[models.gguf]]
repo = "me/mine-GGUF"
file = "mine-{quant}.gguf"
estimate = ["Q4_K_M"]
"""

# The fault, and a word that the message contains.
BAD: dict[str, tuple[bytes, str]] = {
    "not TOML": (b"[[models]\n", "line 1"),
    "not UTF-8": (b'[[models]]\nid = "\xff"\n', "utf-8"),
    "nested too deeply": (b"a = " + b"[" * 100_000, "nested"),
    "no models": (b'family = "mine"\n', "[[models]]"),
    "an unknown key": (MINE.replace("heads = 32", "haeds = 32").encode(), "haeds"),
    "a missing key": (MINE.replace("layers = 16\n", "").encode(), "layers"),
    "text for a number": (MINE.replace("layers = 16", 'layers = "many"').encode(), "mine-1b"),
    "a list for a table": (MINE.replace("vocab = 128256", "vocab = 128256\nsampling = []").encode(),
    "mine-1b"),
    "infinite": (MINE.replace("hidden = 2048", "hidden = inf").encode(), "mine-1b"),
    "nothing wide": (MINE.replace("hidden = 2048", "hidden = 0").encode(), "hidden"),
    "negative": (MINE.replace("heads = 32", "heads = -32").encode(), "heads"),
    "a number for text": (MINE.replace('"Mine 1B"', "1").encode(), "name"),
    "more active than there are": (
        MINE.replace("vocab = 128256",
        "vocab = 128256\nexperts = {count = 1, active = 8, ffn = 64}").encode(), "8 of 1",
    ),
    "layers without end": (MINE.replace("layers = 16", "layers = 1_000_000_000_000").encode(),
    "layers"),
    "an unknown MLX format": (
        MINE.encode() + b'[[models.mlx]]\nrepo = "me/mine-mlx"\nquant = "77bit"\n', "77bit",
    ),
}  # fmt: skip
COMMANDS = (
    ("recommend",), ("recommend", "--device", "RTX 4090", "--json"),
    ("recommend", "-m", "qwen3-8b"),
    ("pull", "qwen3-8b", "--offline"), ("models", "info", "qwen3-8b"),
)  # fmt: skip


def refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the stderr of a command that must fail, with exit code 2 and an empty stdout."""
    with pytest.raises(SystemExit) as ended:
        run(list(arguments))
    said = capsys.readouterr()
    assert ended.value.code == 2, said.err
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert "\nhint: " in said.err
    return said.err


def put(content: bytes) -> Path:
    folder = paths.config_dir() / "models"
    folder.mkdir(parents=True)
    file = folder / "mine.toml"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_command_that_reads_the_catalog_names_the_file(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    file = put(b"[[models]\n")
    said = refused(arguments, capsys)
    assert file.name in said
    assert str(file.parent) in said


@pytest.mark.parametrize("what", BAD)
def test_any_fault_in_a_user_file_is_one_message(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content, says = BAD[what]
    file = put(content)
    said = refused(("recommend", "--device", "RTX 4090"), capsys)
    assert file.name in said
    assert says in said


def test_a_file_that_cannot_be_opened_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    file = put(b"")
    file.unlink()
    file.mkdir()
    assert str(file) in refused(("recommend",), capsys)


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="needs a user whom permissions stop"
)
def test_a_folder_that_cannot_be_searched_is_one_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = put(MINE.encode()).parent
    folder.chmod(0)
    try:
        assert str(folder) in refused(("recommend",), capsys)
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize(
    "content", [b"[x", b'model = "\xff"\n', b"a = " + b"[" * 100_000, b"portt = 1\n"]
)
@pytest.mark.parametrize(
    "arguments", [("config",), ("pull", "qwen3-8b", "--offline")], ids=" ".join
)
def test_bad_settings_are_one_message(
    content: bytes, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    file = paths.config_dir() / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert str(file) in refused(arguments, capsys)


def test_a_valid_user_file_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    put(MINE.encode())
    with pytest.raises(SystemExit) as ended:
        run(["recommend", "--device", "RTX 4090", "-m", "mine-1b"])
    assert ended.value.code == 0
    assert "Mine 1B" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit for the size of a file")
def test_a_report_that_a_full_disk_cuts_leaves_the_earlier_one(tmp_path: Path) -> None:
    report = tmp_path / "machine.txt"
    report.write_text("earlier")
    program = (
        "import resource, sys; from pathlib import Path; from localllm import paths\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: paths.write_text(Path(sys.argv[1]), 'x' * 8192)\n"
        "except OSError as e: print(e.filename)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(report)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(report)
    assert report.read_text() == "earlier"
    assert [*tmp_path.iterdir()] == [report]


def test_a_report_can_be_written_to_a_device() -> None:
    paths.write_text(Path(os.devnull), "anything")
    assert not Path(os.devnull).is_file()
