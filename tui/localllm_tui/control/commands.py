"""The slash commands: their one table, from which parsing, completion, /help and the command palette all read."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """`name` without its slash; `argument` as /help shows it ("" for none); `palette` title, "" to stay out of it."""

    name: str
    argument: str
    help: str
    palette: str = ""


COMMANDS = (
    Command("new", "", "start a new conversation", "New conversation"),
    Command("list", "[WORDS]", "find an earlier conversation and open it", "Find a conversation"),
    Command("continue", "", "open the last conversation", "Continue the last conversation"),
    Command("retry", "", "answer the last question again", "Retry the last answer"),
    Command("earlier", "", "show the other version of a retried answer", "Show the earlier version of the answer"),
    Command("edit", "", "change the last question in a copy of the conversation", "Edit the last question"),
    Command(
        "compact", "[off]", "leave out the oldest messages once not all fit the context", "Compact the conversation"
    ),
    Command("copy", "[code [N]]", "copy the last answer, or its last (or Nth) code block", "Copy the last answer"),
    Command("save", "FILE.md", "write the conversation to a file (/save! overwrites)"),
    Command("attach", "FILE", "send a text file along with the next question"),
    Command("system", "[TEXT]", "show or set the system prompt (/system - removes it)", "Show the system prompt"),
    Command("model", "[NAME]", "show the models on this server, or use another", "Show the models"),
    Command("help", "", "show commands and keys", "Chat help"),
    Command("quit", "", "leave; everything is kept"),
)
_ALIASES = {"exit": "quit", "q": "quit", "resume": "continue", "history": "list", "regenerate": "retry", "?": "help"}

KEYS = (
    ("Enter", "send"),
    ("Ctrl+J, Shift+Enter", "new line (Shift+Enter where the terminal tells it apart)"),
    ("Esc", "stop the answer and keep its text"),
    ("Ctrl+C", "copy the selected text; else stop the answer; twice: quit"),
    ("Ctrl+D, Ctrl+Q", "quit; what was typed is kept for next time"),
    ("Up, Down", "in an empty input: earlier questions"),
    ("PageUp, PageDown", "scroll the conversation"),
    ("Ctrl+T", "show or hide the model's thinking"),
    ("Tab", "complete a command"),
    ("Ctrl+P", "command palette, themes too"),
)

# A word, so that a path like /etc/hosts is a question and not a command.
_COMMAND = re.compile(r"/([a-z?]+!?)(?:[ \t]+(.*))?$", re.DOTALL | re.IGNORECASE)


def parse(text: str) -> tuple[str, str] | None:
    """(name, argument) when `text` is a slash command, known or not; None when it is a question.

    Two slashes send a question that begins with one.
    """
    found = _COMMAND.match(text.strip())
    if found is None:
        return None
    name = found[1].lower()
    return _ALIASES.get(name, name), (found[2] or "").strip()


def question(text: str) -> str:
    """The question as sent: without the slash that kept it from being a command."""
    return text[1:] if text.startswith("//") else text


def matching(prefix: str) -> list[Command]:
    """The commands a half-typed "/pre" can become."""
    if not prefix.startswith("/") or not re.fullmatch(r"/[a-z]*", prefix):
        return []
    return [c for c in COMMANDS if c.name.startswith(prefix[1:])]


def suggestion(name: str) -> str:
    """What to say about a command that does not exist."""
    close = difflib.get_close_matches(name.rstrip("!"), [c.name for c in COMMANDS], n=1)
    return f"did you mean /{close[0]}?" if close else "/help lists the commands"


def help_markdown() -> str:
    """What /help shows."""
    rows = [f"- `/{c.name}{' ' + c.argument if c.argument else ''}` {c.help}" for c in COMMANDS]
    keys = [f"- **{key}** {what}" for key, what in KEYS]
    return "\n".join(["**Commands**", "", *rows, "", "**Keys**", "", *keys])
