"""The terminal and its process: control characters, clipboard and signals."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any

from localllm.foreign_json import well_formed
from localllm.plain_output import raw_write
from localllm_tui.control.formatting import how_many

# C0 (but tab and newline), DEL and C1: a model's text could otherwise move the cursor or write the
# clipboard. Marks that turn the direction of writing reach beyond the text they are in, over the
# line of the screen.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Characters without a shape that a copy keeps: zero-width spaces, marks of direction, tags. The
# joiners of emoji and of Indic and Persian words are not among them.
_UNSEEN = re.compile(
    "[\u00ad\u061c\u180e\u200b\u200e\u200f\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
# Control codes for colours and the like in typed text. Line breaks and tabs stay.
_NOT_TYPED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BREAKS = re.compile("\r\n|[\u2028\u2029]")

# OSC 52, which Textual sends, is not understood by every terminal (Apple's is one): the system's
# own tool is first.
_CLIPBOARD_TOOLS = (
    ("pbcopy",),
    ("wl-copy",),
    ("xclip", "-selection", "clipboard"),
    ("xsel", "--clipboard", "--input"),
    ("clip.exe",),
)


def keyboard() -> int | None:
    """The descriptor of standard input, if that is a terminal. Once it was closed `isatty` of it is
    false: reading from it then ends at once, and no signal need come."""
    try:
        fd = sys.__stdin__.fileno() if sys.__stdin__ is not None else -1
    except (OSError, ValueError):
        return None
    if fd >= 0 and os.isatty(fd):
        return fd
    return None


def printable(text: str) -> str:
    """`text` without the control characters a terminal would obey, and well-formed."""
    return well_formed(_CONTROLS.sub("", _BREAKS.sub("\n", text)))


def typed_text(text: str) -> str:
    """A typed or pasted text as it is sent: well-formed, with one kind of line break, and without
    control characters."""
    return well_formed(_NOT_TYPED.sub("", re.sub("\r\n?", "\n", text)))


def copyable(text: str) -> tuple[str, str]:
    """`text` for the clipboard, and a note for the user; "" if it is all on the screen.

    Control characters are left out: a shell into which the text is pasted would obey them.
    """
    clean = printable(text)
    left_out = len(text.replace("\r\n", "\n")) - len(clean)
    unseen = len(_UNSEEN.findall(clean))
    notes = []
    if left_out:
        notes.append(f"without {how_many(left_out, 'control character')}")
    if unseen:
        notes.append(f"with {how_many(unseen, 'invisible character')}")
    return clean, ", ".join(notes)


def one_line(text: str) -> str:
    """`text` as a name in a line: printable, and without line breaks of its own."""
    return " ".join(printable(text).split())


def copy_with_tool(text: str) -> bool:
    """Put `text` on the clipboard with a program of the system. Returns False if that fails."""
    for command in _CLIPBOARD_TOOLS:
        with suppress(OSError, subprocess.SubprocessError):
            # a missing program raises OSError
            subprocess.run(
                command,
                input=text.encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2,
                check=True,
            )
            return True
    return False


def notice(text: str) -> str:
    """Return the codes that notify a user who is looking at another window.

    They are the bell, a notification (OSC 9 of iTerm2, which other terminals adopted), and a new
    window title. The previous title is saved first (XTWINOPS 22).
    """
    line = one_line(text)
    return f"\a\x1b]9;{line}\x1b\\\x1b[22;2t\x1b]2;{line}\x1b\\"


NOTICE_SEEN = "\x1b[23;2t"  # restores the saved title (XTWINOPS 23)

_BACKGROUND = re.compile(
    r"\x1b\]11;rgba?:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)[^\x07\x1b]*(?:\x07|\x1b\\)"
)
# Matches the terminal's answers, keys that are not letters, and a letter followed by Backspace.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[P\]].*?(?:\x07|\x1b\\)|.?)", re.DOTALL)
_ERASED = re.compile("[^\x08\x7f][\x08\x7f]")
_ATTRIBUTES = re.compile(r"\x1b\[\?[\d;]*c")
_ANSWERS_WITHIN_S = 0.15


_VERSION = re.compile(r"\x1bP>\|([^\x1b]*)\x1b\\")
# Variables of terminals that do not report a version, and wrap lines again when their window
# becomes narrower.
_REFLOWING = (
    "TMUX",
    "VTE_VERSION",
    "KITTY_WINDOW_ID",
    "WT_SESSION",
    "TERM_PROGRAM",
    "KONSOLE_VERSION",
    "ALACRITTY_WINDOW_ID",
)


class TerminalQuestion:
    """A question to the terminal. Its answer arrives while the program does other work, and
    `answer` waits for the rest of it.

    A second question follows that every terminal answers (DA1), so that a terminal that does not
    know the first costs no wait. Not for use while a screen is open, which would read the answers
    as keys. Keys that are typed meanwhile are not echoed: `answer` returns them.
    """

    def __init__(self, question: str) -> None:
        self._fd = -1
        self._unread = b""
        with suppress(ImportError, OSError, ValueError, AttributeError):
            import termios
            import tty

            fd = sys.__stdin__.fileno()  # type: ignore[union-attr]
            if os.isatty(fd) and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
                self._before = termios.tcgetattr(fd)
                self._end_s = time.monotonic() + _ANSWERS_WITHIN_S
                tty.setcbreak(fd, termios.TCSANOW)
                self._fd = fd
                raw_write(sys.stdout)(f"{question}\x1b[c")
                sys.stdout.flush()

    def answer(self) -> tuple[str, str]:
        """Returns the terminal's answers up to its attributes (DA1), and the keys that were typed
        meanwhile. The terminal is then in its earlier mode."""
        import select

        if self._fd >= 0:
            import termios

            try:
                while not _ATTRIBUTES.search(self._text):
                    left_s = max(0.0, self._end_s - time.monotonic())
                    ready, _, _ = select.select([self._fd], [], [], left_s)
                    if not ready:
                        break
                    self._unread += os.read(self._fd, 4096)
            finally:
                termios.tcsetattr(self._fd, termios.TCSANOW, self._before)
                self._fd = -1
        typed = _SEQUENCE.sub("", self._text)
        before = ""
        while typed != before:
            before = typed
            typed = _ERASED.sub("", typed)
        return self._text, printable(typed).replace("\n", "")

    @property
    def _text(self) -> str:
        return self._unread.decode("utf-8", "replace")


def reflows_lines() -> tuple[bool, str]:
    """Return whether the terminal wraps lines again when its window becomes narrower, and typed
    keys.

    xterm truncates the lines instead. The keys were typed while the terminal was asked for its
    version (XTVERSION).
    """
    answer, typed = TerminalQuestion("\x1b[>q").answer()
    found = _VERSION.search(answer)
    if found is not None:
        return not found.group(1).lower().startswith("xterm"), typed
    return any(os.environ.get(name) for name in _REFLOWING) and "STY" not in os.environ, typed


def ask_background() -> TerminalQuestion:
    """Ask for the terminal's background (OSC 11); `is_light` reads the answer."""
    return TerminalQuestion("\x1b]11;?\x07")


def is_light(answer: str) -> bool:
    """True if the answer to OSC 11 in `answer` is a light colour (its luma is over a half); False
    if there is no answer."""
    found = _BACKGROUND.search(answer)
    if found is None:
        return False
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    return bool(0.299 * red + 0.587 * green + 0.114 * blue > 0.5)


_AWAKE_AFTER_S = 0.1


def on_signals(
    leave: Callable[[], Coroutine[Any, Any, None]], wake: Callable[[], object] | None = None
) -> None:
    """Let SIGHUP and SIGTERM end the chat by `leave`, as a key would; `wake` is called for a
    SIGCONT after a SIGSTOP."""
    loop = asyncio.get_running_loop()
    gone = False
    leaving: asyncio.Task[Any] | None = None

    def end(number: int) -> None:
        nonlocal gone, leaving
        gone = number == getattr(signal, "SIGHUP", None)
        if gone:
            _write_nowhere()
        leaving = loop.create_task(leave())

    def again() -> None:
        if not gone and wake is not None:
            wake()

    def awake() -> None:
        loop.call_soon_threadsafe(loop.call_later, _AWAKE_AFTER_S, again)

    for name in ("SIGHUP", "SIGTERM"):
        with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(getattr(signal, name), end, getattr(signal, name))
    with suppress(AttributeError, ValueError):
        # Not in the handler, because the main thread may hold a lock of the screen. Later, because
        # a closed window's SIGHUP comes with a SIGCONT.
        _wake_only_from_sleep(awake)


def _write_nowhere() -> None:
    """Send later output to /dev/null after the terminal hung up. An error would end the screen's
    writing thread; the chat would then wait for its queue for ever."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            if stat.S_ISCHR(os.fstat(fd).st_mode):
                os.dup2(nowhere, fd)
        os.close(nowhere)


def _wake_only_from_sleep(otherwise: Callable[[], object]) -> None:
    """Let SIGCONT reach Textual only after a SIGTSTP; after others `otherwise` is called.

    Textual restarts at every SIGCONT, with another input thread that never ends. A closed window
    sends one after its SIGHUP, to programs that were not stopped.
    """
    sleep = signal.getsignal(signal.SIGTSTP)
    wake = signal.getsignal(signal.SIGCONT)
    if not callable(sleep) or not callable(wake):
        return
    sleeping = False

    def stopped(number: int, frame: FrameType | None) -> None:
        nonlocal sleeping
        sleeping = True
        sleep(number, frame)

    def continued(number: int, frame: FrameType | None) -> None:
        nonlocal sleeping
        if sleeping:
            sleeping = False
            wake(number, frame)
        else:
            otherwise()

    signal.signal(signal.SIGTSTP, stopped)
    signal.signal(signal.SIGCONT, continued)
