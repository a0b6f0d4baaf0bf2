"""Output with hostile names of files, headers and arguments.

No control character and no traceback is printed, and JSON stays valid.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli.main import run
from models import tiny_gguf

_ANY_CONTROL = re.compile(
    b"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae\xa8\xa9\x8e\x8f]|\xe2\x81[\xa6-\xa9]"
)
_PIECES = (
    "\x1b[2J", "\x1b]52;c;aGk=\x07", "\x1b]0;t\x1b\\", "\x9b31m", "\x90q\x9c", "\r", "\n", "\t",
    "\x08", "\x7f", "\u202e", "\u2066",
    "\u2028", "模型", "naïve", "x", " ", "'", '"', "@", "[Q4]", "-Q4_K_M", "\udce9", "\udcff", "🙂",
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a new home directory without any models."""
    for name in (
        "HOME",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "LOCALLLM_DATA_DIR",
        "LOCALLLM_CONFIG_DIR",
        "LOCALLLM_CACHE_DIR",
    ):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name).mkdir()
    return tmp_path


def said(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, bytes, bytes]:
    """Return the exit code, stdout and stderr of a command run in this process."""
    with pytest.raises(SystemExit) as ended:
        run(list(argv))
    sys.stdout.flush()
    out, err = capfd.readouterr()
    return (
        ended.value.code if isinstance(ended.value.code, int) else 0,
        out.encode("utf-8", "surrogateescape"),
        err.encode("utf-8", "surrogateescape"),
    )


def named(rng: random.Random) -> str:
    return (
        "".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 6))).replace("/", "").strip(".")
        or "x"
    )


def laid_out(folder: Path, model: bytes, count: int) -> list[Path]:
    """Write `count` models under random names that the file system accepts."""
    rng = random.Random(51)
    made: list[Path] = []
    while len(made) < count:
        path = folder / f"{len(made) // 50}" / f"{named(rng)}{len(made)}.gguf"
        with contextlib.suppress(OSError, ValueError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(model)
            made.append(path)
    return made


def test_two_thousand_hostile_names_print_no_control_character(
    home: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import gguf

    path = tmp_path / "m"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    for key in ("name", "license", "basename"):
        writer.add_string(
            f"general.{key}", "Nice\x1b]0;owned\x07\x1b[2J\x9b31mName\nsecond \u202eline"
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    made = laid_out(tmp_path / "models", path.read_bytes(), 2_000)
    some = made[::401]
    commands = [("models", "adopt", str(tmp_path / "models")), ("models", "list"), ("ls", "--json")]
    commands += [("models", "info", str(p)) for p in some] + [
        ("models", "info", str(p), "--json") for p in some
    ]
    commands += [("recommend", "-m", str(p), "--device", "RTX 4090") for p in some[:2]] + [
        ("pull", str(p)) for p in some
    ]
    commands += [
        ("models", "verify", str(some[0])),
        ("models", "rm", some[1].stem),
        ("chat", "-m", str(some[2]), "hi"),
    ]
    for argv in commands:
        code, out, err = said(capfd, *argv)
        for stream in (out, err):
            assert not _ANY_CONTROL.search(stream), (argv, stream)
            assert b"Traceback" not in stream, argv
        if argv[-1] == "--json" and code == 0:
            body = json.loads(out)
            paths = [m["path"] for m in body.get("models", [])] or [body["local"]["path"]]
            assert all(os.path.exists(p) for p in paths), "no name is lost"
        if argv[:2] == ("models", "list"):
            assert sum(line.endswith(b"folder") for line in out.split(b"\n")) == 2_000, (
                "each is one line"
            )


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "cp437", "utf-8"])
def test_an_encoding_that_lacks_letters_of_a_name_loses_no_line(
    home: Path, tmp_path: Path, encoding: str
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("模型-Q4_K_M", "naïve-Q8_0", "latin\udce9-Q5_0"):
        tiny_gguf.write_llama(tmp_path / "m.gguf")
        (folder / f"{name}.gguf").write_bytes((tmp_path / "m.gguf").read_bytes())
    code = (
        "import sys\nfrom localllm.cli.main import run\n"
        "for argv in (['models', 'adopt', sys.argv[1]], ['models', 'list'], ['models', 'list', "
        "'--json'], ['bench', '-h']):\n"
        "    try:\n        run(argv)\n    except SystemExit as e:\n        assert not e.code, "
        "argv\n"
    )
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, env=env, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    start, end = done.stdout.index(b'{\n  "models"'), done.stdout.index(b"\n}\n")
    models = json.loads(done.stdout[start : end + 2].decode("utf-8"))["models"]
    assert {os.path.basename(m["path"]) for m in models} >= {
        os.path.basename(p) for p in map(str, folder.iterdir())
    }


def test_arguments_that_are_not_utf_8_are_refused_with_a_clear_error(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = said(capfd, "chat", "-m", "starter", "say \udcff")
    assert code == 2
    assert b"not valid UTF-8" in err
    assert b"Traceback" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("argv", [["models", "list", "--json"], ["doctor"], ["--help"], ["config"]])
def test_an_output_that_cannot_be_written_is_an_error(home: Path, argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "localllm", *argv],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: the output can't be used: No space left on device\n\nhint: "
    )
    assert done.stderr.count("\n") == 3


def test_a_home_that_cannot_be_written_is_an_error(
    home: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    tiny_gguf.write_llama(folder / "m-Q8_0.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(
        "LOCALLLM_DATA_DIR", str(tmp_path / "file" / "in")
    )  # read-only even for root, like a read-only mount
    code, _, err = said(capfd, "models", "adopt", str(folder))
    assert code == 1
    assert err.startswith(b"error: ")
    assert b"file" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    "text", ["\ufeffcontext = 4096\n", "\ufeffcontext = 4096\r\n# a note\r\n", "\ufeff"]
)
def test_a_byte_order_mark_before_the_configuration_is_ignored(
    home: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    config = home / "LOCALLLM_CONFIG_DIR" / "config.toml"
    config.write_bytes(text.encode())
    code, _, err = said(capfd, "config", "set", "threads", "3")
    assert (code, err) == (0, b"")
    assert ("context = 4096" in config.read_text()) == ("context" in text)
    assert "threads" in config.read_text()


@pytest.mark.parametrize("value", ["C:\\Users\\me", "C:\\models", "D:\\x\\n"])
def test_a_windows_path_in_double_quotes_is_explained(
    home: Path, capfd: pytest.CaptureFixture[str], value: str
) -> None:
    (home / "LOCALLLM_CONFIG_DIR" / "config.toml").write_text(f'model = "{value}"\n')
    code, _, err = said(capfd, "config")
    assert code == 2
    assert b"single quotes" in err
