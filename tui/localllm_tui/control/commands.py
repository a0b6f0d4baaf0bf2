"""The slash commands: one table for parsing, completion, the palette, plain mode and the help of
F1."""

from __future__ import annotations

import difflib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from localllm.errors import UsageError
from localllm_tui.control import command_actions as actions
from localllm_tui.control.chat import ChatController
from localllm_tui.control.comparison import compare
from localllm_tui.control.keys import (
    APP,
    CHAT,
    COMMAND,
    COMPOSER,
    KEYS,
    MODELS,
    SLIDER,
    TURN,
    Key,
    label_of,
)
from localllm_tui.control.terminal import typed_text

CommandAction: TypeAlias = Callable[[ChatController, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command.

    `name`: without the slash.
    `run`: its action. If it is None, the face has an action of its own.
    `argument`: as shown by F1 ("": it takes no argument).
    `palette`: its title in the command palette ("": not listed).
    `insist`: the action of the name with a "!".
    `screen`: the function of localllm_tui.screens that a full-screen chat calls instead
    ("module:function").
    `plain`: it works without a screen.
    `keys`: keys that run it without an argument, in Textual's names.
    """

    name: str
    run: CommandAction | None
    help: str
    argument: str = ""
    palette: str = ""
    aliases: tuple[str, ...] = ()
    insist: CommandAction | None = None
    screen: str = ""
    plain: bool = True
    keys: str = ""

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def completed(self) -> str:
        """The text that Tab completes to."""
        return f"/{self.name} " if self.argument else f"/{self.name}"

    @property
    def needs_argument(self) -> bool:
        """True if the command requires its argument."""
        return bool(self.argument) and not self.argument.startswith("[")


async def _help(chat: ChatController, _: str) -> None:
    await chat.face.show_note(section_text(command_section(plain=True)))


_CONVERSATIONS = (
    Command("new", actions.new, "start a new conversation", palette="New conversation"),
    Command(
        "list", None, "open the list of conversations: search them, open one at a turn", "[WORDS]",
        "Find a conversation", ("history", "chats"), screen="picker:open_conversations",
        keys="ctrl+o",
    ),
    Command(
        "find", None, "find words in this conversation, on every branch", "[WORDS]",
        "Find in this conversation", screen="picker:open_find", keys="ctrl+f",
    ),
    Command(
        "continue", actions.resume_last,
        "continue a stopped answer; else open the last conversation", "",
        "Continue the last conversation", ("resume",)
    ),
)  # fmt: skip
_TURNS = (
    Command(
        "retry", actions.retry,
        "answer the last question again, optionally with another model", "[MODEL]",
        "Retry the last answer", ("regenerate",)
    ),
    Command(
        "more", partial(actions.on_last, "more"), "continue an answer that was stopped or cut",
        palette="Continue the stopped answer"
    ),
)  # fmt: skip
_VERSIONS = (
    Command(
        "earlier", partial(actions.on_last, "version"),
        "show the previous version of the last answer",
        palette="Show the previous version of the answer",
    ),
    Command(
        "compare", compare, "show two versions of the last answer side by side", "[NUMBER]",
        "Compare two answers", screen="dialogs:open_comparison",
    ),
    Command(
        "edit", partial(actions.on_last, "edit"),
        "change the last question; the old version is kept",
        palette="Edit the last question"
    ),
    Command(
        "branch", partial(actions.on_last, "branch"),
        "continue in a separate conversation with the same messages",
        palette="Branch here"
    ),
)  # fmt: skip
_TEXTS = (
    Command(
        "drop", actions.drop, "remove the last question if it has no answer",
        palette="Remove the last question"
    ),
    Command(
        "compact", actions.compact, "have the model sum up the messages and use that as context",
        "[WHAT]", "Compact the conversation",
    ),
    Command(
        "copy", actions.copy, "copy the last answer, or its last (or Nth) code block", "[code [N]]",
        "Copy the last answer"
    ),
    Command(
        "save", actions.save,
        "write the conversation to a file: Markdown, HTML or JSON (/save! overwrites)",
        "FILE.md|.html|.json", insist=partial(actions.save, mode="w")
    ),
    Command("title", actions.title, "show or change the conversation's title", "[TEXT]"),
    Command(
        "import", actions.import_from,
        "import conversations from JSON: of /save, ChatGPT or Open WebUI", "FILE"
    ),
)  # fmt: skip
_QUESTION = (
    Command(
        "attach", actions.attach,
        "attach a file or a folder to the next question (- removes it)", "FILE"
    ),
    Command(
        "run", actions.run_shell,
        "attach a command's output to the next question, like !COMMAND", "COMMAND",
        screen="background_work:run_in_background",
    ),
    Command("prompt", actions.use_prompt, "use a saved prompt, or list them", "[NAME]"),
    Command(
        "save-prompt", actions.save_prompt,
        "save a prompt under a name: a text, or the last question", "NAME [TEXT]"
    ),
    Command(
        "asked", None, "search earlier questions of all conversations and ask one again",
        "[WORDS]", "Earlier questions", screen="picking:open_questions", plain=False, keys="ctrl+r",
    ),
    Command(
        "editor", None, "write the message in $VISUAL or $EDITOR", "", "Write in the editor",
        screen="background_work:open_editor", plain=False, keys="ctrl+g",
    ),
)  # fmt: skip
_MODEL = (
    Command(
        "system", actions.system, "show or set the system prompt (/system - removes it)", "[TEXT]",
        "Show the system prompt"
    ),
    Command(
        "model", actions.model, "show the models on this server, or use another", "[NAME]",
        "Show the models"
    ),
    Command(
        "own", actions.own, "load the model in this chat instead of using the server",
        palette="Load the model in this chat"
    ),
    Command(
        "tools", actions.switch_tools,
        "let the model call tools of the programs in config.toml; each call needs your approval",
        "[on [NAME]|off]", "Tools", plain=False,
    ),
    Command(
        "sampling", actions.set_sampling, "show or set the sampling: temperature, top_p, seed …",
        "[NAME VALUE]", "Sampling"
    ),
)  # fmt: skip
_SCREENS = (
    Command(
        "models", None, "show models that fit and installed models; pull, use and remove them",
        "", "Models", screen="models:open_models", plain=False, keys="f4",
    ),
    Command(
        "glass", None, "show or hide the cost of a token and where the time went", "",
        "Cost of a token", screen="dialogs:open_glass", plain=False, keys="f3",
    ),
    Command(
        "help", _help, "show all commands and keys", "", "Keys and commands", ("?",),
        screen="dialogs:open_help", keys="f1",
    ),
    Command("quit", actions.leave, "quit; everything is saved", aliases=("exit", "q")),
)  # fmt: skip
COMMANDS = (
    *_CONVERSATIONS, *_TURNS, *_VERSIONS, *_TEXTS, *_QUESTION, *_MODEL, *_SCREENS,
)  # fmt: skip
_NAMES: dict[str, Command] = {}
for _command in COMMANDS:
    for _name in (_command.name, *_command.aliases):
        _NAMES[_name] = _command


def _key_of(command: Command) -> Key:
    action = f"command('{command.name}')"
    label = label_of(command.keys)
    return Key(COMMAND, command.keys, label, action, command.help, priority=True)


ALL_KEYS = (*KEYS, *(_key_of(command) for command in COMMANDS if command.keys))

# Only one word, so that a path like /etc/hosts is a question and not a command.
_COMMAND = re.compile(r"/([a-z?-]+!?)(?:[ \t]+(.*))?$", re.DOTALL | re.IGNORECASE)


# The command starts right after the "!": "! dear" and "!?" are not commands.
_SHELL = re.compile(r"![^\s!?.]")


def parse(text: str) -> tuple[str, str] | None:
    """(name, argument) when `text` is a slash command, known or not; None when it is a question.

    Two slashes send a question that begins with one; two exclamation marks too.
    """
    if _SHELL.match(text.strip()):
        return "run", text.strip()[1:]
    found = _COMMAND.match(text.strip())
    if found is None:
        return None
    name = found[1].lower()
    if name in _NAMES:
        name = _NAMES[name].name  # not its alias
    return name, (found[2] or "").strip()


async def submit(chat: ChatController, text: str) -> None:
    """Run a typed command, or send a question: now, or after the answer in progress has ended."""
    text = typed_text(text)
    command = parse(text)
    if command is not None:
        await run_and_report(chat, *command)
    elif chat.answering:
        chat.queued = text  # sent when the answer in progress ends
        chat.face.changed()
    elif chat.recent_of(text):
        await actions.resume(chat, chat.recent_of(text))
    elif text or chat.attached:
        await chat.send(question(text))


async def run_and_report(chat: ChatController, name: str, argument: str) -> None:
    """Run a command, by the face's own action if it has one, and show an error if it fails."""
    await chat.reporting(_run(chat, name, argument))
    chat.face.changed()


async def _run(chat: ChatController, name: str, argument: str) -> None:
    if await chat.face.run_on_screen(name, argument):
        return
    command = known(name)
    action = None
    if command is not None:
        action = command.insist if name.endswith("!") else command.run
    if action is None:
        names = [known_command.name for known_command in COMMANDS]
        close = difflib.get_close_matches(name.rstrip("!"), names, n=1)
        hint = f"did you mean /{close[0]}?" if close else "/help lists the commands"
        raise UsageError(f"there is no command /{name}", hint=hint)
    await action(chat, argument)


def known(name: str) -> Command | None:
    """The command of this name, insisted on or not."""
    return _NAMES.get(name.removesuffix("!"))


def question(text: str) -> str:
    """The question as sent: without the slash that kept it from being a command."""
    if text.startswith(("//", "!!")):
        return text[1:]
    return text


def offered(typed: str) -> list[Command]:
    """The commands to offer for an incomplete one: those whose names begin with it, then those
    whose names contain it."""
    if not re.fullmatch(r"/[a-z-]*", typed):
        return []
    found = [c for c in COMMANDS if typed[1:] in c.name]
    first = [c for c in found if c.name.startswith(typed[1:])]
    return first + [c for c in found if c not in first]


# A title, and rows of a key or command with its effect.
HelpSection: TypeAlias = tuple[str, Sequence[tuple[str, str]]]


def help_sections() -> tuple[HelpSection, ...]:
    return (
        _key_section("In the input", COMPOSER),
        _key_section("Anywhere in the chat", CHAT, APP, COMMAND),
        _key_section("With a turn selected", TURN),
        _key_section("Among the models", MODELS, SLIDER),
        command_section(),
    )


def command_section(*, plain: bool = False) -> HelpSection:
    """The slash commands; `plain`: those that work without a screen."""
    return "Commands", [(c.usage, c.help) for c in COMMANDS if c.plain or not plain]


def _key_section(title: str, *owners: str) -> HelpSection:
    keys: list[tuple[str, str]] = []
    for owner in owners:
        keys += [(k.label_now, k.help) for k in ALL_KEYS if k.owner == owner and k.help]
    return title, keys


def section_text(section: HelpSection) -> str:
    title, entries = section
    width = max(len(how) for how, _ in entries)
    return "\n".join([title, *(f"  {how.ljust(width)}  {help_text}" for how, help_text in entries)])
