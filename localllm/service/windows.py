"""Windows: a task of Task Scheduler that starts at logon.

Written from Microsoft's schema; we have not run it on Windows.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from localllm.service.types import (
    NAME,
    Call,
    Service,
    ServiceError,
    State,
    checked,
    remove_all,
    write_all,
)
from localllm.service.types import call as run_program

# winerror.h: SCHED_S_TASK_RUNNING, and the code of a task that has not run yet.
_NO_EXIT_CODE = (0x41301, 0x41303)
# Ask PowerShell, because schtasks.exe answers in the language of the system.
_STATE_SCRIPT = f"""\
$t = Get-ScheduledTask -TaskName '{NAME}' -ErrorAction SilentlyContinue
if (-not $t) {{ '{{}}'; exit 0 }}
$i = $t | Get-ScheduledTaskInfo
@{{ state = [string]$t.State; result = [int64]$i.LastTaskResult; since = $i.LastRunTime.ToString('o') }} | ConvertTo-Json -Compress"""


@dataclass(frozen=True, slots=True)
class WindowsTasks:
    """Task Scheduler for the user `user` (`DOMAIN\\name`). `call` runs schtasks.exe and PowerShell."""

    folder: Path
    user: str
    log_file: Path
    call: Call = run_program
    name: str = "task-scheduler"

    @property
    def definition(self) -> Path:
        """The file of the task's definition."""
        return self.folder / "service.xml"

    def files(self, service: Service) -> dict[Path, str]:
        return {self.definition: task(service, self.user)}

    def install(self, service: Service) -> list[Path]:
        """Create the task and start it. It replaces an earlier one."""
        changed = write_all(self.files(service), "utf-16")
        self._ask("schtasks", "/Create", "/TN", NAME, "/XML", str(self.definition), "/F")
        self.restart()
        return changed

    def restart(self) -> None:
        """Stop the server and start it again.

        Its workers save their data, and end when the server's pipe closes.
        """
        self.stop()
        self._ask("schtasks", "/Run", "/TN", NAME)

    def stop(self) -> None:
        """Stop the server, if it runs. The task starts it at the next login."""
        self.call(["schtasks", "/End", "/TN", NAME])

    def uninstall(self) -> list[Path]:
        if self.state().installed:
            self.call(["schtasks", "/End", "/TN", NAME])
            self._ask("schtasks", "/Delete", "/TN", NAME, "/F")
        return remove_all([self.definition])

    def state(self) -> State:
        """Read the state with PowerShell's ScheduledTasks."""
        output = self._ask("powershell", "-NoProfile", "-NonInteractive", "-Command", _STATE_SCRIPT)
        return parse_state(output)

    def log_command(self, lines: int, follow: bool) -> list[str]:
        quoted = str(self.log_file).replace("'", "''")
        show = f"Get-Content -LiteralPath '{quoted}' -Encoding UTF8 -Tail {lines}"
        if follow:
            show += " -Wait"
        return ["powershell", "-NoProfile", "-Command", show]

    def _ask(self, *words: str) -> str:
        return checked(self.call(words)).stdout


def task(service: Service, user: str) -> str:
    """Return a task's definition.

    Source: https://learn.microsoft.com/windows/win32/taskschd/task-scheduler-schema

    Task Scheduler sets no environment variables, so they are passed as arguments of `localllm
    service run` (cli/commands/service.py).
    """
    program, *arguments = service.command
    return f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.4" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo><Description>Language models on this machine (localllm)</Description></RegistrationInfo>
  <Triggers><LogonTrigger><Enabled>true</Enabled><UserId>{escape(user)}</UserId></LogonTrigger></Triggers>
  <Principals><Principal id="Author"><UserId>{escape(user)}</UserId><LogonType>InteractiveToken</LogonType>\
<RunLevel>LeastPrivilege</RunLevel></Principal></Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>255</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author"><Exec><Command>{escape(program)}</Command>\
<Arguments>{escape(subprocess.list2cmdline(arguments))}</Arguments></Exec></Actions>
</Task>
"""


def parse_state(text: str) -> State:
    """Parse the JSON that `_STATE_SCRIPT` prints. Raises ServiceError for other texts."""
    try:
        answer = json.loads(text)
        state = str(answer.get("state", ""))
        code = answer.get("result")
    except (ValueError, AttributeError) as e:
        raise ServiceError(f"PowerShell's output can't be parsed: {text.strip()[:200]}") from e
    if not state:
        return State(installed=False)
    if code in _NO_EXIT_CODE:
        code = None
    return State(
        installed=True,
        running=state == "Running",
        detail=state,
        since=str(answer.get("since", "")),
        last_exit=code,
        at_login=state != "Disabled",
    )
