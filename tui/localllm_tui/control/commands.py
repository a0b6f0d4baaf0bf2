"""The slash commands: their one table, from which parsing, completion, /help, the palette and plain mode all read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from localllm.errors import UsageError
from localllm_tui.control import doing
from localllm_tui.control.chat import Chat
from localllm_tui.control.keys import KEYS

Runs: TypeAlias = Callable[[Chat, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Command:
    """`name` without its slash and what it runs; `argument` as /help shows it ("" for none).

    `palette`: its title there, "" to stay out of it. `insist` is run for the name with a "!". `plain`: the chat without
    a screen knows it too.
    """

    name: str
    run: Runs
    help: str
    argument: str = ""
    palette: str = ""
    aliases: tuple[str, ...] = ()
    insist: Runs | None = None
    plain: bool = False


async def _help(chat: Chat, _: str) -> None:
    await chat.say(help_markdown(), markdown=True)


COMMANDS = (
    Command("new", doing.new, "start a new conversation", palette="New conversation", plain=True),
    Command(
        "list", doing.find, "find an earlier conversation and open it", "[WORDS]", "Find a conversation", ("history",)
    ),
    Command(
        "continue", doing.resume_last, "open the last conversation", "", "Continue the last conversation", ("resume",)
    ),
    Command("retry", doing.retry, "answer the last question again", "", "Retry the last answer", ("regenerate",)),
    Command(
        "earlier", doing.show_earlier, "show the other version of a retried answer",
        palette="Show the earlier version of the answer",
    ),
    Command(
        "edit", doing.edit, "change the last question in a copy of the conversation", palette="Edit the last question"
    ),
    Command(
        "compact", doing.compact, "leave out the oldest messages once not all fit the context", "[off]",
        "Compact the conversation", plain=True,
    ),
    Command(
        "copy", doing.copy, "copy the last answer, or its last (or Nth) code block", "[code [N]]", "Copy the last answer"
    ),
    Command(
        "save", doing.save, "write the conversation to a file (/save! overwrites)", "FILE.md", insist=doing.save_over
    ),
    Command("attach", doing.attach, "send a text file along with the next question", "FILE"),
    Command(
        "system", doing.system, "show or set the system prompt (/system - removes it)", "[TEXT]", "Show the system prompt"
    ),
    Command("model", doing.model, "show the models on this server, or use another", "[NAME]", "Show the models"),
    Command("help", _help, "show commands and keys", palette="Chat help", aliases=("?",)),
    Command("quit", doing.leave, "leave; everything is kept", aliases=("exit", "q"), plain=True),
)  # fmt: skip
_NAMES = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}

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
    return (_NAMES[name].name if name in _NAMES else name), (found[2] or "").strip()


async def run(chat: Chat, name: str, argument: str) -> None:
    """Do what `parse` found. Raises LocalLLMError where there is no such command, or it can't be done."""
    command = _NAMES.get(name.removesuffix("!"))
    runs = None if command is None else command.insist if name.endswith("!") else command.run
    if runs is None:
        raise UsageError(f"there is no command /{name}", hint=suggestion(name))
    await runs(chat, argument)


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
    keys = [f"- **{key.label}** {key.help}" for key in KEYS if key.help]
    return "\n".join(["**Commands**", "", *rows, "", "**Keys**", "", *keys])
