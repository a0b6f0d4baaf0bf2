"""A report of `doctor --report` gives the same machine when it is read on another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from device import recordings
from localllm.cli import all_commands
from localllm.device.machines import identify
from localllm.device.recording import recording_text
from localllm.device.types import Readings


@pytest.mark.parametrize(
    "name", ["cpu_only_ddr4_one_stick", "mac_m3_16gb", "rtx_4090_two", "strix_halo_default"]
)
def test_a_recording_is_detected_as_the_recorded_machine(name: str, tmp_path: Path) -> None:
    readings = recordings.load(name)
    (tmp_path / "again.txt").write_text(
        recording_text(readings, "a machine", "a test", ["OK  memory  fine"]), encoding="utf-8"
    )
    again = recordings.load("again", tmp_path)
    assert identify(again) == identify(readings)
    assert recordings.header("again", tmp_path)["machine"] == "a machine"


def test_serial_numbers_and_uuids_are_not_recorded() -> None:
    said = {"+dmi": "E:MEMORY_DEVICE_0_SERIAL_NUMBER=123ABC\nE:MEMORY_DEVICE_0_TYPE=DDR5"}
    asked = {
        "displays": '{"_spdisplays_display-serial-number" : "7c1", "sppci_model": "M3"}',
        "smi": "UUID: GPU-1f",
    }
    text = recording_text(Readings("linux", "x86_64", said, asked), "m", "t")
    assert not any(number in text for number in ("123ABC", "7c1", "GPU-1f"))
    assert "TYPE=DDR5" in text
    assert '"sppci_model": "M3"' in text


def test_doctor_writes_a_recording_for_an_issue(tmp_path: Path) -> None:
    file = tmp_path / "machine.txt"
    done = CliRunner().invoke(all_commands.app, ["doctor", "--report", str(file)])
    assert done.exit_code == 0, done.output
    assert identify(recordings.load("machine", tmp_path)).memory.total_bytes > 0
    assert "check(s) passed" in file.read_text(encoding="utf-8")
