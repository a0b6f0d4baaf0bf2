"""Files named *.gguf that are not models, and files that are not regular."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import pytest

from localllm import json_store, paths
from localllm.cli.serve import warm_file
from localllm.conversation.history import History
from localllm.errors import ModelFileError, UsageError
from localllm.library import folders, store
from localllm.library.resolve import by_path
from localllm.server.http.sockets import TlsFiles, check_tls
from localllm_backends import registry
from localllm_backends.contract import LoadError, LoadSpec
from localllm_backends.llamacpp.imatrix import read_imatrix
from localllm_tui.control import attachments
from localllm_tui.control.import_export import import_file
from models import tiny_mlx

pytestmark = pytest.mark.usefixtures("nothing_packaged")


def names_in(folder: Path) -> list[str]:
    return [model.path.name for model in folders.scan(folder)]


@pytest.fixture
def junk(tmp_path: Path, tiny_model: Path) -> Path:
    folder = tmp_path / "junk"
    folder.mkdir()
    (folder / "page.gguf").write_text("<!DOCTYPE html><html>log in</html>" * 9)
    with zipfile.ZipFile(folder / "zip.gguf", "w") as archive:
        archive.writestr("a.txt", "text")
    (folder / "json.gguf").write_text('{"error": "not found"}')
    (folder / "tiny.gguf").write_bytes(tiny_model.read_bytes())
    return folder


def test_a_file_that_is_no_gguf_is_not_listed(junk: Path) -> None:
    assert names_in(junk) == ["tiny.gguf"]


@pytest.mark.parametrize("name", ["page.gguf", "zip.gguf", "json.gguf"])
def test_a_file_that_is_no_gguf_is_refused_by_its_path(junk: Path, name: str) -> None:
    with pytest.raises(ModelFileError):
        by_path(str(junk / name))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("target", ["pipe", "device"])
def test_a_pipe_or_a_device_is_never_opened(tmp_path: Path, target: str) -> None:
    """A pipe or a device is never opened.

    Opening a pipe waits for a writer, and /dev/zero has no end.
    """
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("model.gguf", "config.json", "model.safetensors", "tokenizer_config.json"):
        if target == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero")
    assert names_in(folder) == []
    assert json_store.read(folder / "config.json") == {}
    with pytest.raises(ModelFileError):
        by_path(str(folder / "model.gguf"))
    with pytest.raises(ModelFileError):
        by_path(str(folder))
    assert store.scan() == []


@pytest.fixture(params=["pipe", "device", "folder", "large"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a path that no text reader may read: an endless file, a folder, or 1 TiB of holes."""
    path = tmp_path / "special"
    if request.param == "folder":
        path.mkdir()
    elif request.param == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif os.name == "nt":
        pytest.skip("Windows has no such files")
    elif request.param == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


def test_a_special_file_is_never_read(special: Path) -> None:
    with pytest.raises(OSError, match=r"not a file|larger than|Is a directory|Permission"):
        paths.file_bytes(special)


def test_a_special_file_named_by_a_user_is_an_error_with_a_reason(
    special: Path, tmp_path: Path
) -> None:
    """A special file that a user names causes a one-sentence error.

    Each reader belongs to an option or a chat command that takes a file.
    """
    refused = r"can't be read: .*(?:not a file|larger than|directory|denied)|at most"
    history = History(tmp_path / "conversations.db")
    for read in (
        lambda: warm_file.warming_request(str(special)),
        lambda: check_tls(TlsFiles(special, None)),
        lambda: attachments.read_text(special),
        lambda: import_file(history, special, "m"),
    ):
        with pytest.raises(UsageError, match=refused):
            read()
    history.close()


@pytest.mark.parametrize("name", ["config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_a_checkpoint_with_a_special_file_is_not_loaded(
    special: Path, tmp_path: Path, name: str
) -> None:
    """A checkpoint with a special file is not loaded.

    Libraries would open some files of a folder by themselves.
    """
    pytest.importorskip("mlx.core")
    folder = tiny_mlx.write_llama(tmp_path / "model")
    if special.is_dir():
        pytest.skip("a folder is never opened as a file")
    (folder / name).unlink(missing_ok=True)
    special.rename(folder / name)
    with pytest.raises(LoadError, match=re.escape(name)):
        registry.backends()["mlx"].load(LoadSpec(str(folder)))
    with pytest.raises(LoadError, match=re.escape(name)):
        registry.backends()["mlx"].vocabulary(str(folder))


def test_a_special_gguf_is_not_loaded(special: Path) -> None:
    with pytest.raises(LoadError):
        registry.backends()["llamacpp"].load(LoadSpec(str(special)))
    with pytest.raises(LoadError):
        read_imatrix(special)
