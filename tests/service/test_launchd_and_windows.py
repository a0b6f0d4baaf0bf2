"""launchd's agent and Windows' task contain the command, and those managers' output is parsed.

Both managers are simulated.
"""

from __future__ import annotations

import plistlib
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.service.launchd import Launchd, agent
from localllm.service.types import Service, ServiceError
from localllm.service.windows import WindowsTasks, task
from service import recorded
from service.manager import Recorded, answered

# XML cannot contain the other characters.
xml_text = st.text(
    st.characters(min_codepoint=32, codec="utf-8", exclude_characters="\x7f\ufffe\uffff")
)
TASK = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


@given(st.lists(xml_text, min_size=1))
def test_a_plist_contains_the_command_with_any_names(words: list[str]) -> None:
    read = plistlib.loads(agent(Service(tuple(words)), Path("/tmp/serve.log")).encode())
    assert read["ProgramArguments"] == words
    assert read["KeepAlive"] == {"SuccessfulExit": False}
    assert read["AbandonProcessGroup"] is True


@given(st.lists(xml_text, min_size=1, max_size=4))
def test_a_task_contains_the_command_with_any_names(words: list[str]) -> None:
    root = ElementTree.fromstring(task(Service(tuple(words)), "PC\\me & <you>").encode("utf-16"))
    execute = root.find(f"{TASK}Actions/{TASK}Exec")
    assert execute is not None
    assert (execute.findtext(f"{TASK}Command"), execute.findtext(f"{TASK}Arguments")) == (
        words[0], subprocess.list2cmdline(words[1:]),
    )  # fmt: skip
    assert root.findtext(f"{TASK}Triggers/{TASK}LogonTrigger/{TASK}UserId") == "PC\\me & <you>"
    assert root.findtext(f"{TASK}Settings/{TASK}ExecutionTimeLimit") == "PT0S"


def launchd(home: Path, **answers: subprocess.CompletedProcess[str]) -> tuple[Launchd, Recorded]:
    call = Recorded({f"launchctl {verb}": said for verb, said in answers.items()})
    return Launchd(home, 501, home / "logs" / "serve.log", call, wait=lambda _seconds: None), call


def test_installing_an_agent_replaces_a_running_one(tmp_path: Path) -> None:
    manager, call = launchd(
        tmp_path, bootout=answered(3, "", "Boot-out failed: 3: No such process")
    )
    assert manager.install(Service(("python",))) == [manager.plist]
    assert call.asked == [
        "launchctl bootout gui/501/org.localllm.serve",
        f"launchctl bootstrap gui/501 {manager.plist}",
    ]
    manager.restart()
    assert call.asked[-1] == "launchctl kickstart -k gui/501/org.localllm.serve"
    manager.stop()
    assert call.asked[-1] == "launchctl bootout gui/501/org.localllm.serve"
    assert manager.uninstall() == [manager.plist]


def test_an_install_is_retried_while_the_old_agent_stops_and_then_reports_the_error(
    tmp_path: Path,
) -> None:
    manager, call = launchd(
        tmp_path, bootstrap=answered(5, "", "Bootstrap failed: 5: Input/output error")
    )
    with pytest.raises(ServiceError, match="Input/output error"):
        manager.install(Service(("python",)))
    assert len(call.asked) > 5


def test_the_output_of_launchd_is_parsed(tmp_path: Path) -> None:
    running = launchd(tmp_path, print=answered(0, recorded.LAUNCHD_RUNNING))[0].state()
    assert (running.running, running.pid, running.restarts, running.last_exit) == (
        True,
        913,
        2,
        None,
    )
    failed = launchd(tmp_path, print=answered(0, recorded.LAUNCHD_FAILED))[0].state()
    assert (failed.installed, failed.running, failed.last_exit, failed.detail) == (
        True,
        False,
        78,
        "not running",
    )
    none = launchd(tmp_path, print=answered(113, "", "Could not find service"))[0].state()
    assert not none.installed


def windows(
    folder: Path, answers: dict[str, subprocess.CompletedProcess[str]]
) -> tuple[WindowsTasks, Recorded]:
    call = Recorded(answers)
    return WindowsTasks(folder, "PC\\me", folder / "serve.log", call), call


def test_a_task_is_made_from_its_definition_and_run(tmp_path: Path) -> None:
    manager, call = windows(tmp_path, {"powershell": answered(0, recorded.WINDOWS_RUNNING)})
    manager.install(Service(("C:\\py\\pythonw.exe", "-m", "localllm")))
    assert manager.definition.read_bytes()[:2] in (b"\xff\xfe", b"\xfe\xff")
    assert call.asked == [
        f"schtasks /Create /TN localllm /XML {manager.definition} /F",
        "schtasks /End /TN localllm",
        "schtasks /Run /TN localllm",
    ]
    manager.uninstall()
    assert call.asked[-1] == "schtasks /Delete /TN localllm /F"
    assert not manager.definition.exists()


def test_the_output_of_task_scheduler_is_parsed(tmp_path: Path) -> None:
    def state(out: str) -> tuple[bool, bool, int | None]:
        found = windows(tmp_path, {"powershell": answered(0, out)})[0].state()
        return found.installed, found.running, found.last_exit

    assert state(recorded.WINDOWS_RUNNING) == (True, True, None)
    assert state(recorded.WINDOWS_FAILED) == (True, False, 3)
    assert state("{}") == (False, False, None)
    with pytest.raises(ServiceError, match="can't be parsed"):
        state("Get-ScheduledTask : not recognized")


def test_a_restart_loads_a_stopped_agent(tmp_path: Path) -> None:
    manager, call = launchd(tmp_path, print=answered(113, "", "Could not find service"))
    manager.restart()
    assert call.asked[-1] == f"launchctl bootstrap gui/501 {manager.plist}"
