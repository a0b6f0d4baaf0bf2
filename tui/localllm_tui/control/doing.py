"""What each slash command does. All raise LocalLLMError for what can't be done, before anything is changed."""

from __future__ import annotations

from pathlib import Path

from localllm.errors import UsageError
from localllm_tui.control.attach import check_room, read_text
from localllm_tui.control.chat import Chat
from localllm_tui.control.session import Session, code_blocks


async def new(chat: Chat, _: str) -> None:
    """An empty conversation with the same system prompt."""
    system = chat.session.system or chat.system_asked
    await chat.open(Session(chat.history, chat.model, system=system))


async def find(chat: Chat, words: str) -> None:
    """The list of conversations."""
    await chat.choose(words)


async def resume_last(chat: Chat, _: str) -> None:
    """The newest conversation that is not on screen."""
    found = [c for c in chat.history.list(limit=2) if c.id != chat.session.id]
    if not found:
        raise UsageError("there is no earlier conversation", hint="this one is kept as soon as you ask something")
    await resume(chat, found[0].id)


async def resume(chat: Chat, conv_id: str) -> None:
    """An earlier conversation, by its id."""
    await chat.open(Session(chat.history, chat.model, conv_id=conv_id))


async def retry(chat: Chat, _: str) -> None:
    """Another answer to the last question; the one there was is kept beside it."""
    await chat.stop_answer()
    await chat.answer_again()


async def show_earlier(chat: Chat, _: str) -> None:
    """The next version of the last answer."""
    await chat.stop_answer()
    await chat.replace_answer(chat.session.swap_earlier())


async def edit(chat: Chat, which: str) -> None:
    """The last question back into the input."""
    if which not in ("", "last"):
        raise UsageError("only the last question can be edited", hint="use /edit")
    await chat.stop_answer()
    chat.edit(chat.session.last_question)


async def compact(chat: Chat, argument: str) -> None:
    """Let the oldest messages be left out, or not any more; a question that did not fit is asked again."""
    if argument not in ("", "off"):
        raise UsageError(f"/compact {argument} is not known", hint="use /compact or /compact off")
    chat.session.set_compacts(not argument)
    if argument:
        always = "; but the setting `compaction` is auto" if chat.client.compacts else ""
        await chat.say(f"a conversation that does not fit the context is an error again{always}")
        return
    if not chat.answering and chat.session.dialogue[-1].role == "user":
        await retry(chat, "")
        return
    await chat.say(
        "once the conversation does not fit, its oldest messages are left out of what the model gets; all of it "
        "stays here and on disk"
    )


async def copy(chat: Chat, what: str) -> None:
    """The answer, or one of its code blocks, to the clipboard."""
    answer = chat.answer_text or (chat.session.last_answer.content if chat.session.last_answer else "")
    if not answer:
        raise UsageError("there is no answer to copy yet")
    kind, _, number = what.partition(" ")
    if kind == "":
        chat.to_clipboard(answer, "the answer")
        return
    if kind != "code" or (number and not number.strip().isdigit()):
        raise UsageError(f"/copy {what} is not known", hint="use /copy, /copy code or /copy code 2")
    blocks = code_blocks(answer)
    at = int(number) if number else len(blocks)
    if not 1 <= at <= len(blocks):
        raise UsageError(f"the last answer has {len(blocks)} code blocks" + (f", not {at}" if number else ""))
    chat.to_clipboard(blocks[at - 1], f"code block {at} of {len(blocks)}")


async def save(chat: Chat, name: str) -> None:
    """The conversation as a new Markdown file."""
    await _save(chat, name, mode="x")


async def save_over(chat: Chat, name: str) -> None:
    """The same, over what is there."""
    await _save(chat, name, mode="w")


async def _save(chat: Chat, name: str, mode: str) -> None:
    if not name:
        raise UsageError("/save needs a file name", hint="for example /save chat.md")
    path = Path(name).expanduser()
    try:
        with path.open(mode, encoding="utf-8") as f:
            f.write(chat.session.to_markdown())
    except FileExistsError:
        raise UsageError(f"{path} exists already", hint=f"/save! {name} overwrites it") from None
    except OSError as e:
        raise UsageError(f"{path} can't be written: {e.strerror or e}") from e
    await chat.say(f"saved to {path}")


async def attach(chat: Chat, name: str) -> None:
    """A text file for the next question."""
    if not name:
        raise UsageError("/attach needs a file name", hint="for example /attach notes.txt")
    attached = read_text(Path(name))
    check_room([*chat.attached, attached], chat.n_ctx)
    chat.attach(*attached)


async def system(chat: Chat, text: str) -> None:
    """The system prompt, shown or changed."""
    if text:
        chat.session.set_system("" if text == "-" else text)
    now = chat.session.system
    await chat.say(f"system prompt: {now}" if now else "no system prompt; /system TEXT sets one")


async def model(chat: Chat, name: str) -> None:
    """The models there are, or another one in use."""
    models = await chat.client.models()
    names = [m.name for m in models]
    if not name:
        lines = [f"{'>' if m == chat.model else ' '} {m}" for m in names]
        more = "\n/model NAME uses another" if len(names) > 1 else "\nlocalllm chat -m NAME starts with another"
        await chat.say("models on this server:\n" + "\n".join(lines) + more)
        return
    if name not in names:
        raise UsageError(f"this server has no model {name!r}", hint="it has " + ", ".join(names))
    chat.use_model(name, models)
    await chat.say(f"{name} answers from here on")


async def leave(chat: Chat, _: str) -> None:
    """The end of the chat."""
    await chat.leave()
