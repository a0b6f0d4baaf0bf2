"""systemd's units contain the command with any names, and systemd's output is parsed correctly."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import UsageError
from localllm.service.systemd import Systemd, service_unit, socket_unit
from localllm.service.types import Service, ServiceError
from service import recorded
from service.manager import Recorded, answered

SERVE = Service(
    ("/opt/py/bin/python", "-m", "localllm", "serve"), addresses=("127.0.0.1:11535", "[::1]:11535")
)


def words_of(unit: str) -> list[str]:
    """Split ExecStart as in systemd.service(5)."""
    line = next(x for x in unit.splitlines() if x.startswith("ExecStart=")).removeprefix(
        "ExecStart="
    )
    words = []
    for quoted, bare in re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line):
        word = bare or re.sub(r"\\(.)", r"\1", quoted)
        words.append(word.replace("%%", "%").replace("$$", "$"))
    return words


text = st.text(
    st.characters(codec="utf-8", exclude_characters="\n\r\0\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e"),
    max_size=12,
)


@given(st.lists(text, min_size=1, max_size=5))
def test_a_unit_contains_the_command_with_any_names(words: list[str]) -> None:
    assert words_of(service_unit(Service(tuple(words)), backs_off=True)) == words


def test_a_line_break_is_refused() -> None:
    with pytest.raises(UsageError):
        service_unit(Service(("a\nExecStart=/bin/other",)), backs_off=True)


def test_only_the_server_gets_the_stop_signal_and_workers_may_finish_writing() -> None:
    unit = service_unit(Service(("x",), settle=("x", "settle")), backs_off=True).splitlines()
    assert {
        "KillMode=process",
        "TimeoutStopSec=30",
        "ExecStopPost=-x settle",
        "OOMPolicy=continue",
    } <= set(unit)


def test_restart_delays_grow_after_each_failure_if_systemd_supports_it() -> None:
    assert "RestartSteps=6" in service_unit(SERVE, backs_off=True)
    old = service_unit(SERVE, backs_off=False)
    assert "RestartSteps" not in old
    assert "StartLimitBurst=20" in old


def test_a_unit_contains_the_memory_limit_and_the_variables() -> None:
    unit = service_unit(
        Service(
            ("x",), environment={"HF_HOME": "/data/my $models%"}, memory_max_bytes=24_000_000_000
        ),
        backs_off=True,
    )
    assert 'Environment="HF_HOME=/data/my $models%%"' in unit
    assert "MemoryMax=24000000000" in unit


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_finds_no_fault_in_the_units(tmp_path: Path) -> None:
    """systemd's own checker finds no fault in either unit.

    Its messages about other units of this system are ignored.
    """
    binary = Service(
        ("/bin/sh", "-c", 'echo "$HOME"'), settle=("/bin/true",), addresses=SERVE.addresses
    )
    (tmp_path / "localllm.service").write_text(service_unit(binary, backs_off=False))
    (tmp_path / "localllm.socket").write_text(socket_unit(binary))
    said = subprocess.run(
        ["systemd-analyze", "--user", "verify", "--man=no", tmp_path / "localllm.service",
        tmp_path / "localllm.socket"],
        capture_output=True, text=True, check=False,
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
    ).stderr  # fmt: skip
    assert [line for line in said.splitlines() if "localllm" in line] == []


def test_installing_starts_both_units_and_removing_leaves_nothing(tmp_path: Path) -> None:
    call = Recorded({"systemctl --version": answered(0, "systemd 255 (255.4-1)\n+PAM …")})
    manager = Systemd(tmp_path, call)
    changed = manager.install(SERVE)
    assert [path.name for path in changed] == ["localllm.service", "localllm.socket"]
    assert "RestartSteps" in changed[0].read_text()
    assert call.asked[-3:] == [
        "systemctl --user enable localllm.service localllm.socket",
        "systemctl --user start localllm.socket",
        "systemctl --user restart localllm.service",
    ]
    assert manager.install(SERVE) == []
    manager.stop()  # and the socket, because a connection to it would start the server again
    assert call.asked[-1] == "systemctl --user stop localllm.service localllm.socket"
    assert [path.name for path in manager.uninstall()] == ["localllm.socket", "localllm.service"]
    assert "systemctl --user disable --now localllm.socket localllm.service" in call.asked
    assert manager.uninstall() == []


def test_another_port_closes_the_old_socket_first_and_the_old_units_are_kept(
    tmp_path: Path,
) -> None:
    call = Recorded({})
    manager = Systemd(tmp_path, call)
    manager.install(SERVE)
    call.asked.clear()
    manager.install(Service(SERVE.command, addresses=("127.0.0.1:4000",)))
    assert call.asked.index(
        "systemctl --user stop localllm.service localllm.socket"
    ) < call.asked.index("systemctl --user start localllm.socket")
    assert "11535" in (manager.folder / "localllm.socket.bak").read_text()
    manager.install(Service(SERVE.command))
    assert not (manager.folder / "localllm.socket").exists()


def test_the_output_of_systemd_is_parsed() -> None:
    running = Systemd(
        Path("/nowhere"),
        Recorded({"systemctl --user show": answered(0, recorded.SYSTEMD_RUNNING)}),
    ).state()
    assert (running.installed, running.running, running.pid, running.restarts,
        running.at_login) == (
        True, True, 3487, 1, True,
    )  # fmt: skip
    assert running.memory_bytes is None
    failed = Systemd(
        Path("/nowhere"),
        Recorded({"systemctl --user show": answered(0, recorded.SYSTEMD_FAILED)}),
    ).state()
    assert (failed.installed, failed.running, failed.last_exit, failed.memory_bytes) == (
        True,
        False,
        3,
        None,
    )
    assert failed.detail == "failed (failed) exit-code"
    none = Systemd(
        Path("/nowhere"),
        Recorded({"systemctl --user show": answered(0, recorded.SYSTEMD_NONE)}),
    ).state()
    assert (none.installed, none.running) == (False, False)


def test_a_missing_user_manager_is_an_error_with_a_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Systemd(tmp_path, Recorded({"systemctl --user": answered(1, "", recorded.NO_BUS)}))
    with pytest.raises(ServiceError, match="No medium found") as caught:
        manager.install(SERVE)
    assert "enable-linger" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="systemctl is not installed"):
        Systemd(tmp_path).state()
