"""Read the recorded machines in this folder: text files with one section per file or command, and
their source."""

from __future__ import annotations

import json
import re
from pathlib import Path

from localllm.device.types import Readings

FOLDER = Path(__file__).parent / "recorded"


def names(folder: Path = FOLDER) -> list[str]:
    """Return the names of all recorded machines in a folder."""
    return sorted(path.stem for path in folder.glob("*.txt"))


def header(name: str, folder: Path = FOLDER) -> dict[str, str]:
    """Return the "# key: value" lines: machine, source, system, note."""
    text = (folder / f"{name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"(?m)^# (\w+): (.*)$", text.split("\n===", 1)[0]))


def load(name: str, folder: Path = FOLDER) -> Readings:
    """Return one machine's readings. "(supplied)" marks a section that its source does not
    contain."""
    text = (folder / f"{name}.txt").read_text(encoding="utf-8")
    system, _, architecture = header(name, folder)["system"].partition(" ")
    files: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for kind, key, body in re.findall(
        r"(?ms)^=== (file|output) (.*?)(?: "
        r"\(supplied\))?\n(.*?)(?=^=== "
        r"|\Z)",
        text,
    ):
        (files if kind == "file" else outputs)[key] = body
    assert system in ("linux", "macos", "windows")
    return Readings(system, architecture, files, as_asked(outputs))


def as_asked(printed: dict[str, str]) -> dict[str, str]:
    """Convert posted tables and logs to the output that our probes' commands print."""
    outputs = dict(printed)
    if "nvidia-smi" in outputs:
        outputs["nvidia-smi"] = _smi_csv(outputs["nvidia-smi"])
    units = {"GiB": 1 << 30, "MB": 1_000_000}
    for said, number, unit in re.findall(
        r"(WorkingSetSize\s*[=:]\s*([0-9.,]+) "
        r"(GiB|MB))",
        outputs.get("metal", ""),
    ):
        size = round(float(number.replace(",", ".")) * units[unit])
        outputs["metal"] = outputs["metal"].replace(said, f"WorkingSetSize = {size} bytes")
    shown = re.search(
        r"(?s)Chipset Model: (.*?)\n.*Total Number of Cores: (\d+)",
        outputs.get("system_profiler", ""),
    )
    if shown:
        listed = {"sppci_model": shown[1], "sppci_cores": shown[2]}
        outputs["system_profiler"] = json.dumps({"SPDisplaysDataType": [listed]})
    if level := re.search(r"memory free percentage: (\d+)%", outputs.pop("memory_pressure", "")):
        outputs["sysctl"] += f"kern.memorystatus_level: {level[1]}\n"
    return outputs


def _smi_csv(printed: str) -> str:
    rows = re.findall(
        r"(?m)^\s*\|\s+[0-9]{1,3}\s{2,}(\S.*?)\s{2,}\S.*\|.*\|.*\|[ \t]*\n"
        r"\s*\|[^|\n]*\|\s*(?:([0-9]+)MiB\s*/\s*([0-9]+)MiB)?[^|\n]*\|",
        printed,
    ) + [(name, "", "") for name in re.findall(r"(?m)^\s+Product Name\s*: (.+)$", printed)]
    lines = [f"{name}, {used or '[N/A]'} MiB, {total or '[N/A]'} MiB" for name, used, total in rows]
    return "\n".join(["name, memory.used [MiB], memory.total [MiB]", *lines]) if rows else printed
