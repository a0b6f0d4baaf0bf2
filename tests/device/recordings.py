"""Reads the recorded machines beside it: text files with one section per file or command, and where they came from."""

from __future__ import annotations

import re
from pathlib import Path

from localllm.device.types import Readings

FOLDER = Path(__file__).parent / "recorded"


def names(folder: Path = FOLDER) -> list[str]:
    """Every recorded machine of a folder."""
    return sorted(path.stem for path in folder.glob("*.txt"))


def header(name: str, folder: Path = FOLDER) -> dict[str, str]:
    """The "# key: value" lines: machine, source, system, note."""
    text = (folder / f"{name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"(?m)^# (\w+): (.*)$", text.split("\n===", 1)[0]))


def load(name: str, folder: Path = FOLDER) -> Readings:
    """One machine's readings. "(supplied)" marks a section its source does not contain."""
    text = (folder / f"{name}.txt").read_text(encoding="utf-8")
    system, _, architecture = header(name, folder)["system"].partition(" ")
    files: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for kind, key, body in re.findall(r"(?ms)^=== (file|output) (.*?)(?: \(supplied\))?\n(.*?)(?=^=== |\Z)", text):
        (files if kind == "file" else outputs)[key] = body
    assert system in ("linux", "macos", "windows")
    return Readings(system, architecture, files, outputs)
