"""`localllm service`: the unit that keeps the server running for this user, printed or written (systemd, launchd)."""

from __future__ import annotations

import plistlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from localllm.errors import UsageError

NAME = "localllm"
LABEL = "org.localllm.serve"
# What a unit's argument may hold unquoted; `%` and `$` mean something to systemd everywhere.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=@+,")


def service(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="What to serve.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the unit, keeping a backup of another one.")] = False,
    manager: Annotated[str | None, typer.Option(help="systemd or launchd (default: this system's).")] = None,
    unix: Annotated[str | None, typer.Option(metavar="PATH", help="Listen on a Unix socket instead of a port.")] = None,
) -> None:
    """Print (or write) the unit that runs `localllm serve` when you log in, and how to start it."""
    import os

    kind = manager or manager_of(sys.platform)
    command = serve_command(models or [], unix)
    if kind == "systemd":
        base = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
        path, text = base / "systemd" / "user" / f"{NAME}.service", systemd_unit(command)
        start = f"systemctl --user daemon-reload && systemctl --user enable --now {NAME}"
    elif kind == "launchd":
        path, text = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist", launchd_plist(command)
        start = f"launchctl bootstrap gui/$(id -u) '{path}'"
    else:
        raise UsageError(f"--manager must be systemd or launchd, not {kind!r}")
    if not write:
        print(f"# {path}" if kind == "systemd" else f"<!-- {path} -->")
        print(text, end="")
    elif write_unit(path, text):
        print(f"wrote {path}", file=sys.stderr)
    else:
        print(f"{path} says this already", file=sys.stderr)
    print(f"start it: {start}", file=sys.stderr)


def manager_of(platform: str) -> str:
    """The service manager of `sys.platform`; raises UsageError where there is none we write for."""
    if platform.startswith("linux"):
        return "systemd"
    if platform == "darwin":
        return "launchd"
    raise UsageError(
        f"no service manager is known for {platform}",
        hint="on Windows, Task Scheduler runs `localllm serve` at logon: schtasks /Create /SC ONLOGON /TN localllm …",
    )


def serve_command(models: Sequence[str], unix: str | None) -> list[str]:
    """The command line of the server, with paths that hold wherever it is started from."""
    named = [str(Path(m).expanduser().resolve()) if Path(m).expanduser().exists() else m for m in models]
    socket = ["--unix", str(Path(unix).expanduser().absolute())] if unix else []
    return [sys.executable, "-m", "localllm", "serve", *named, *socket]


def systemd_unit(command: Sequence[str]) -> str:
    """A user unit (https://www.freedesktop.org/software/systemd/man/latest/systemd.service.html)."""
    return f"""\
[Unit]
Description=Language models on this machine (localllm)

[Service]
ExecStart={" ".join(_quoted(word) for word in command)}
Restart=on-failure
RestartSec=5
TimeoutStopSec=20

[Install]
WantedBy=default.target
"""


def launchd_plist(command: Sequence[str]) -> str:
    """A launch agent (launchd.plist(5))."""
    agent = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ProcessType": "Interactive",
    }
    return plistlib.dumps(agent, sort_keys=False).decode()


def write_unit(path: Path, text: str) -> bool:
    """Write `text` to `path`, another text there moved to `.bak`; False when it says the same already."""
    if path.exists():
        if path.read_text("utf-8") == text:
            return False
        shutil.copy2(path, path.with_name(path.name + ".bak"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return True


def _quoted(word: str) -> str:
    """`word` as one argument of ExecStart (systemd.service(5), "Command lines")."""
    if "\n" in word or "\0" in word:
        raise UsageError("a unit's command can't hold a line break")
    escaped = word.replace("%", "%%").replace("$", "$$")
    if word and set(word) <= _PLAIN:
        return escaped
    body = escaped.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{body}"'
