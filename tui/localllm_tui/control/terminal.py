"""What goes between a model's text and a terminal: control characters taken out, the clipboard found."""

from __future__ import annotations

import re
import shutil
import subprocess

# C0 (but tab and newline), DEL and C1: a model's text could otherwise move the cursor or write the clipboard.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# OSC 52, which Textual sends, is not understood by every terminal (Apple's is one): the system's own tool is first.
_CLIPBOARD_TOOLS = (
    ("pbcopy",),
    ("wl-copy",),
    ("xclip", "-selection", "clipboard"),
    ("xsel", "--clipboard", "--input"),
    ("clip.exe",),
)


def printable(text: str) -> str:
    """`text` without the control characters a terminal would obey."""
    return _CONTROLS.sub("", text.replace("\r\n", "\n"))


def copy_with_tool(text: str) -> bool:
    """Put `text` on the clipboard with the system's tool; False when there is none, or it fails."""
    for command in _CLIPBOARD_TOOLS:
        if shutil.which(command[0]):
            try:
                done = subprocess.run(
                    command, input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=2
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0:
                return True
    return False
