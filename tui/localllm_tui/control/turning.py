"""What can be done with one turn of the conversation, whichever it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from localllm.conversation.history import StoredMessage
from localllm.errors import UsageError
from localllm_tui.control.chat import Chat
from localllm_tui.control.texts import code_blocks, typed_in


async def run(chat: Chat, what: str, turn: StoredMessage, argument: int = 0) -> None:
    """Do `what` with `turn`. Raises LocalLLMError where it can't be done."""
    stopped = what not in ("copy", "code") and await chat.stop_answer()
    await _DONE[what](chat, turn, argument)
    if stopped and what in ("version", "branch"):  # a key for looking around: nobody asked for that
        await chat.say("the answer that was being written was stopped; g at its turn goes on with it")


async def _edit(chat: Chat, turn: StoredMessage, _: int) -> None:
    chat.edit(turn)


async def _again(chat: Chat, turn: StoredMessage, _: int) -> None:
    await chat.answer_again(turn)


async def _more(chat: Chat, turn: StoredMessage, _: int) -> None:
    await chat.answer_again(turn, goes_on=True)


async def _version(chat: Chat, turn: StoredMessage, step: int) -> None:
    chat.session.other_version(turn, step)
    await chat.redraw()


async def _copy(chat: Chat, turn: StoredMessage, _: int) -> None:
    chat.to_clipboard(typed_in(turn), "the question" if turn.role == "user" else "the answer")


async def _code(chat: Chat, turn: StoredMessage, number: int) -> None:
    blocks = code_blocks(turn.content)
    if not 1 <= number <= len(blocks):
        raise UsageError(f"this turn has {len(blocks)} code blocks" + (f", not {number}" if blocks else ""))
    chat.to_clipboard(blocks[number - 1], f"code block {number} of {len(blocks)}")


async def _branch(chat: Chat, turn: StoredMessage, _: int) -> None:
    branch = chat.session.branch_off(turn)
    await chat.open(branch)
    await chat.say(f"a conversation of its own from here on: {branch.title}; /list has both")


async def _remove(chat: Chat, turn: StoredMessage, _: int) -> None:
    chat.session.remove(turn)
    await chat.redraw()


_DONE: dict[str, Callable[[Chat, StoredMessage, int], Awaitable[None]]] = {
    "edit": _edit, "again": _again, "more": _more, "version": _version, "copy": _copy, "code": _code,
    "branch": _branch, "remove": _remove,
}  # fmt: skip
