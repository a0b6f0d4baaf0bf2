"""Two versions of the last answer, for example of two models, to be shown next to each other."""

from __future__ import annotations

from localllm.conversation.history import StoredMessage
from localllm.errors import UsageError
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import how_many
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import one_line, printable


def compared(session: Session, argument: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """(title, text) of the version with the number `argument`, and of the shown answer.

    Without a number, the first is the version before the shown one. Raises UsageError if there is
    no such version.
    """
    answer = session.last_answer
    if answer is None or len(session.versions(answer)) == 1:
        raise UsageError(
            "there is nothing to compare yet",
            hint="/retry MODEL answers the last question with another model",
        )
    versions = session.versions(answer)
    shown = session.place(answer)[0]
    other = shown - 1 or len(versions)
    if argument:
        other = _number(argument, shown, len(versions))
    return _described(versions, other), _described(versions, shown)


def _number(argument: str, shown: int, n_versions: int) -> int:
    if argument.isdecimal() and 1 <= int(argument) <= n_versions and int(argument) != shown:
        return int(argument)
    raise UsageError(
        f"/compare can't use {argument[:40]!r}: it needs the number of another version",
        hint=f"the answer has {n_versions} versions, and version {shown} is shown",
    )


def _described(versions: list[StoredMessage], number: int) -> tuple[str, str]:
    answer = versions[number - 1]
    title = f"{number}/{len(versions)}"
    if answer.meta.get("model"):
        title += f" {one_line(str(answer.meta['model']))}"
    n_tokens = answer.meta.get("completion_tokens")
    if isinstance(n_tokens, int) and not answer.meta.get("estimated"):
        title += f", {how_many(n_tokens, 'token')}"
    return title, printable(answer.content)


async def compare(chat: ChatController, argument: str) -> None:
    """Show two versions of the last answer one after the other."""
    for title, text in compared(chat.session, argument):
        await chat.face.show_note(f"{title}\n{text}")
