"""Make this process, and every Python that it starts, look like Windows to our modules. Names that
only POSIX has are missing for all imports in them. The standard library and other packages see the
real system."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import os
import sys
import types
from typing import Any

OURS = ("localllm", "localllm_backends", "localllm_catalog", "localllm_tui")
# These packages keep this system's names: the machine is probed and used for computing as it is.
STILL_HERE = ("localllm.device", "localllm_backends", "localllm.memory")
NOT_THERE = {
    "os": {
        "getuid", "geteuid", "getgid", "getegid", "getpgid", "killpg", "fork", "setsid",
        "sched_getaffinity", "sched_setaffinity",
        "posix_fadvise", "statvfs", "uname", "getloadavg", "fchmod", "chown", "fchown", "mkfifo",
        "nice", "sysconf", "pread",
        "pwrite", "preadv", "pwritev", "openpty", "ttyname", "WNOHANG", "O_NOFOLLOW", "O_DIRECTORY",
        "O_CLOEXEC", "O_NONBLOCK",
        "register_at_fork", "wait", "getpriority", "setpriority", "posix_spawn", "lchown",
        "sendfile", "readv", "writev",
    },
    "signal": {
        "SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGWINCH", "SIGTSTP", "SIGCONT",
        "SIGSTOP", "SIGQUIT", "SIGPIPE",
        "SIGCHLD", "pthread_sigmask", "setitimer", "alarm", "pause", "sigwait", "siginterrupt",
        "SIG_BLOCK", "SIG_UNBLOCK",
    },
    "socket": {"AF_UNIX", "SO_REUSEPORT", "SCM_RIGHTS", "socketpair_unix", "fromfd_unix",
    "send_fds", "recv_fds"},
    "time": {"clock_settime", "tzset", "pthread_getcpuclockid"},
    "sys": set(),
}  # fmt: skip
NO_MODULES = {
    "fcntl",
    "resource",
    "pwd",
    "grp",
    "termios",
    "tty",
    "pty",
    "syslog",
    "readline",
    "curses",
    "spwd",
}


class Windowsed(types.ModuleType):
    """A module without what Windows lacks."""

    def __init__(self, real: types.ModuleType) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        real = self.__dict__["_real"]
        if name in NOT_THERE.get(real.__name__, ()):
            raise AttributeError(
                f"module {real.__name__!r} has no attribute {name!r} (as on Windows)"
            )
        told = {("os", "name"): "nt", ("sys", "platform"): "win32"}.get((real.__name__, name))
        return told if told is not None else getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_real"], name, value)


def _refuse(*_: Any, **__: Any) -> None:
    raise NotImplementedError


def _install() -> None:
    seen = {name: Windowsed(importlib.import_module(name)) for name in NOT_THERE}
    real_import = builtins.__import__

    def as_on_windows(
        name: str,
        globals: Any = None,  # noqa: A002 - the names of __import__
        locals: Any = None,  # noqa: A002
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        rest = (locals, fromlist, level)
        who = str((globals or {}).get("__name__", ""))
        if who.split(".")[0] not in OURS or who.startswith(STILL_HERE):
            return real_import(name, globals, *rest)
        if name in NO_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r} (as on Windows)", name=name)
        return seen.get(name) or real_import(name, globals, *rest)

    builtins.__import__ = as_on_windows
    # A replacement for the C runtime's lock, as far as we use it.
    locks = types.ModuleType("msvcrt")
    locks.LK_NBLCK, locks.LK_UNLCK = 2, 0  # type: ignore[attr-defined]

    def locking(fd: int, mode: int, _count: int) -> None:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_UN if mode == 0 else fcntl.LOCK_EX | fcntl.LOCK_NB)

    locks.locking = locking  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = locks
    if hasattr(asyncio, "unix_events"):
        asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = _refuse  # type: ignore[method-assign]
    os.environ["LOCALLLM_LOOKS_LIKE_WINDOWS"] = "1"


_install()
