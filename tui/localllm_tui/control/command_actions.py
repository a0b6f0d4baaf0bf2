"""The actions of the slash commands and of the keys on a selected turn. Each raises LocalLLMError
before it changes anything."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from localllm.conversation.history import StoredMessage
from localllm.errors import UsageError
from localllm_tui.control import import_export, sampling, shell
from localllm_tui.control.attachments import (
    check_fits_context,
    code_block,
    fenced,
    is_media,
    read_files,
    read_text,
    typed_in,
    with_files,
)
from localllm_tui.control.chat import ChatController
from localllm_tui.control.client import ListedModel
from localllm_tui.control.compaction import summarise
from localllm_tui.control.formatting import how_many, title_of
from localllm_tui.control.html_page import to_html
from localllm_tui.control.import_export import to_json, to_markdown
from localllm_tui.control.prompts import Prompts
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import one_line


async def new(chat: ChatController, _: str) -> None:
    """Start an empty conversation with the same system prompt, and show a note about that
    prompt."""
    system = chat.session.system
    await chat.open(Session(chat.history, chat.model, system=system))
    if system:
        await chat.face.show_note(
            "the system prompt is set and shown at the top; /system - removes it"
        )


async def resume_last(chat: ChatController, _: str) -> None:
    """Continue the answer on screen if it was stopped or cut; else open the newest other
    conversation."""
    last = chat.session.turns[-1] if chat.session.turns else None
    if last is not None and chat.session.unfinished(last) and not chat.answering:
        await on_last("more", chat)
        return
    found = [c for c in chat.history.list(limit=2) if c.id != chat.session.id]
    if not found:
        raise UsageError(
            "there is no earlier conversation",
            hint="this conversation is saved with its first question",
        )
    await resume(chat, found[0].id)


async def resume(chat: ChatController, conv_id: str, at: int = 0) -> None:
    """Open an earlier conversation, at a turn of it if one is given."""
    if chat.session.id == conv_id:
        session = chat.session
    else:
        session = Session(chat.history, chat.model, conv_id=conv_id)
    if at in session.all_turns:
        await chat.stop_answer()
        session.show(at)
    await chat.open(session, at)


async def retry(chat: ChatController, name: str) -> None:
    """Answer the last question again with the named model ("": the current one). The earlier
    answer remains as another version."""
    if name:
        await _model_named(chat, name)
    await chat.stop_answer()
    await chat.answer_again(model=name)


async def on_last(text: str, chat: ChatController, _: str = "") -> None:
    """Do the action of a turn's key: "edit" on the last question, "version" one back from the last
    answer, others on the last turn."""
    await chat.stop_answer()
    session = chat.session
    if text == "edit" or not session.turns:
        turn = session.last_question
    elif text == "version" and session.last_answer is not None:
        turn = session.last_answer
    else:
        turn = session.turns[-1]
    await run_on_turn(chat, text, turn, -1)


async def drop(chat: ChatController, _: str) -> None:
    """Remove the last question if it has no answer."""
    await chat.stop_answer()
    chat.session.drop_question()
    await chat.face.redraw()


async def compact(chat: ChatController, argument: str) -> None:
    """Replace the earlier messages by a summary, which keeps what `argument` names; "off" undoes
    this. If the last question did not fit, ask it again without the oldest messages."""
    if argument != "off" and chat.session.turns and not chat.session.unanswered:

        async def work() -> None:
            await chat.reporting(summarise(chat, argument))

        await chat.face.show_note("the model writes a summary…")
        chat.face.run_in_background(work, "compaction")
        return
    chat.session.set_compacts(argument != "off")
    if argument == "off" and chat.client.compacts:
        await chat.face.show_note(
            "a conversation that does not fit the context is an error again, unless the setting "
            "`compaction` is auto"
        )
    elif argument == "off":
        await chat.face.show_note(
            "the model gets all messages again, and a conversation that does not fit is an error"
        )
    elif not chat.answering:
        await retry(chat, "")


async def copy(chat: ChatController, text: str) -> None:
    answer = ""
    if chat.session.last_answer is not None:
        answer = chat.session.last_answer.content
    if chat.streaming is not None and chat.streaming.text:
        answer = chat.streaming.text
    if not answer:
        raise UsageError("there is no answer to copy yet")
    kind, _, number = text.partition(" ")
    if kind == "":
        chat.face.copy(answer, "the answer")
        return
    if kind != "code" or (number and not number.strip().isdigit()):
        raise UsageError(f"/copy {text} is unknown", hint="use /copy, /copy code or /copy code 2")
    chat.face.copy(*code_block(answer, int(number) if number else None, "the last answer"))


_WRITERS = {".json": to_json, ".html": to_html, ".htm": to_html}
# Names of files that would not open as what they are called.
_NOT_WRITTEN = (".pdf", ".docx", ".doc", ".odt", ".rtf")


async def save(chat: ChatController, name: str, mode: str = "x") -> None:
    """Write the conversation to a file: as JSON or HTML if its name ends so, else as Markdown.

    `mode`: "x" creates a new file, "w" overwrites an existing one.
    """
    if not name:
        raise UsageError("/save needs a file name", hint="for example /save chat.md")
    path = Path(name).expanduser()
    if path.suffix.lower() in _NOT_WRITTEN:
        raise UsageError(
            f"/save can't write a {path.suffix} file", hint="use FILE.md, FILE.html or FILE.json"
        )
    written_as = _WRITERS.get(path.suffix.lower(), to_markdown)
    text = written_as(chat.session)
    try:
        with path.open(mode, encoding="utf-8") as f:
            f.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already", hint=f"/save! {name} overwrites it") from None
    except OSError as e:
        raise UsageError(f"{path} can't be written: {e.strerror or e}") from e
    await chat.face.show_note(f"saved to {path}")


async def title(chat: ChatController, text: str) -> None:
    if chat.session.id is None:
        raise UsageError("a conversation gets its title with the first question")
    if text:
        chat.session.rename(title_of(text))
    await chat.face.show_note(f"title: {chat.session.title}")


async def import_from(chat: ChatController, name: str) -> None:
    """Import the conversation of a file, and open it."""
    if not name:
        raise UsageError("/import needs a file name", hint="for example /import chat.json")
    imported = import_export.import_file(chat.history, Path(name), chat.model)
    await resume(chat, imported.ids[0])
    await chat.face.show_note(imported.note(Path(name)))


async def save_prompt(chat: ChatController, text: str) -> None:
    """Save a prompt: "NAME TEXT", or the last question as NAME."""
    name, _, prompt = text.partition(" ")
    if not name:
        raise UsageError(
            "/save-prompt needs a name",
            hint="for example /save-prompt review Look for bugs in this",
        )
    _prompts(chat).save(name, prompt.strip() or typed_in(chat.session.last_question))
    await chat.face.show_note(f"saved: /prompt {name} puts it into the input")


async def use_prompt(chat: ChatController, text: str) -> None:
    """Put a prompt into the input, and the text after its name below it; without a name, list the
    prompts."""
    name, _, more = text.partition(" ")
    if name:
        parts = [_prompts(chat).text(name), more.strip()]
        await chat.face.write("\n\n".join(part for part in parts if part))
        return
    names = _prompts(chat).names()
    note = "there is no saved prompt; /save-prompt NAME TEXT saves one"
    if names:
        note = f"prompts: {', '.join(names)}"
    await chat.face.show_note(note)


def _prompts(chat: ChatController) -> Prompts:
    return Prompts(chat.history.path.parent / "prompts")


async def own(chat: ChatController, _: str) -> None:
    """Load the model in this chat instead of using a server. The conversation continues."""
    if chat.options.own is None:
        raise UsageError("this chat uses its own engine already")
    await chat.stop_answer()
    await chat.use_engine(await asyncio.to_thread(chat.options.own, chat.model))
    await chat.face.show_note(
        f"{one_line(chat.model)} is loaded in this chat; /retry asks the last question again"
    )


async def attach(chat: ChatController, name: str) -> None:
    """Attach a file to the next question; "-" removes all attachments."""
    if not name:
        raise UsageError(
            "/attach needs a file name",
            hint="for example /attach notes.txt; /attach - removes all",
        )
    if name == "-":
        chat.attached = []
        return
    if Path(name).expanduser().is_dir():
        await _attach_folder(chat, Path(name))
        return
    name, text = await asyncio.to_thread(read_text, Path(name))
    if is_media(text):
        question = [{"role": "user", "content": fenced(name, text)}]
        _, why_not = await chat.client.counted(chat.model, question)
        if why_not:
            raise UsageError(
                f"{one_line(name)} can't be attached: {why_not}",
                hint="another model may support it: /model",
            )
    await attach_text(chat, name, text)


async def _attach_folder(chat: ChatController, folder: Path) -> None:
    files, left_out = await asyncio.to_thread(read_files, folder)
    check_fits_context([*chat.attached, *files], chat.listed.n_ctx)
    question = [{"role": "user", "content": with_files("", files)}]
    tokens = await chat.client.count(chat.model, question)
    for name, text in files:
        chat.attach(name, text)
    note = f"{one_line(str(folder))}: attached {how_many(len(files), 'file')}"
    if tokens is not None:
        note += f", {tokens:,} tokens"
    if left_out:
        note += f"; {left_out} are skipped, because they are not text"
    await chat.face.show_note(f"{note}; /attach - removes them")


async def attach_text(chat: ChatController, name: str, text: str) -> None:
    """Attach a text to the next question. Raises ContextLengthError if it can't fit."""
    check_fits_context([*chat.attached, (name, text)], chat.listed.n_ctx)
    chat.attach(name, text)
    if not chat.face.full_screen:  # the input's frame lists the files
        await chat.face.show_note(f"attached {one_line(name)}: it is sent with the next question")


async def system(chat: ChatController, text: str) -> None:
    if text:
        await chat.stop_answer()
        chat.session.set_system("" if text == "-" else text)
    note = "no system prompt; /system TEXT sets one"
    if chat.session.system:
        note = f"system prompt: {chat.session.system}"
    if text and chat.session.turns:
        note += (
            "\nIt comes before all messages, so the whole conversation "
            f"({chat.session.used_tokens:,} tokens) is prefilled again for the next answer"
        )
    await chat.face.show_note(note)


async def model(chat: ChatController, name: str) -> None:
    if name:
        chat.use_model(await _model_named(chat, name))
        await chat.face.show_note(
            f"{name} answers from now on; the next question loads it if necessary"
        )
        return
    lines = ["models on this server:"]
    models = await chat.client.models()
    for listed in models:
        mark = ">" if listed.name == chat.model else " "
        lines.append(f"{mark} {one_line(listed.name)}")
    if len(models) > 1:
        lines.append("/model NAME uses another")
    else:
        lines.append("localllm chat -m NAME starts with another")
    await chat.face.show_note("\n".join(lines))


async def _model_named(chat: ChatController, name: str) -> ListedModel:
    """The server's entry for this model. Raises UsageError if it has no such model."""
    models = {m.name: m for m in await chat.client.models()}
    found = models.get(name) or await chat.client.model(name)  # it may be new, or an alias
    if found is None:
        raise UsageError(
            f"this server has no model {name!r}", hint="it has these: " + ", ".join(models)
        )
    return replace(found, name=name)


async def run_shell(chat: ChatController, command: str) -> None:
    """Attach a shell command's output to the next question, and show it. Asks before the first
    command of a chat."""
    if not command:
        raise UsageError("/run needs a command", hint="for example !git diff")
    if not chat.runs_commands and not await chat.face.approve(
        "run this command? Later commands run without a question", command
    ):
        await chat.face.show_note(f"not run: {one_line(command)}")
        return
    chat.runs_commands = True
    output = await shell.output_of(command)
    name = f"$ {one_line(command)}"
    _, _, block = fenced(name, output).partition("\n")
    await chat.face.show_note(block, markdown=True)
    await attach_text(chat, name, output)


async def set_sampling(chat: ChatController, text: str) -> None:
    if text:
        chat.client.sampling = sampling.changed(chat.client.sampling, text)
    listed = await chat.client.listed(chat.model)
    now = sampling.words(listed.sampling, chat.client.sampling) or "the model's own"
    await chat.face.show_note(
        f"sampling: {now}\n/sampling temperature 0.2 changes it, /sampling - resets all"
    )


async def switch_tools(chat: ChatController, text: str) -> None:
    """Switch tools on or off, and list them."""
    word, _, name = text.partition(" ")
    if word not in ("", "on", "off"):
        raise UsageError(
            f"/tools {text} is unknown",
            hint="use /tools, /tools on, /tools on NAME or /tools off",
        )
    if word == "off":
        await chat.tools.switch_off()
    elif word == "on":
        await chat.tools.switch_on(name.strip())
    note = chat.tools.overview()
    if chat.tools.on:
        note += "\nEach call shows its arguments and needs your approval"
    elif chat.tools.hosts:
        note += "\n/tools on starts them"
    await chat.face.show_note(note)


async def leave(chat: ChatController, _: str) -> None:
    await chat.leave()


async def run_on_turn(
    chat: ChatController, text: str, turn: StoredMessage, argument: int = 0
) -> None:
    """Do the action `text` of a key on `turn`. Raises LocalLLMError if it can't be done."""
    if text == "copy":
        chat.face.copy(typed_in(turn), "the question" if turn.role == "user" else "the answer")
        return
    if text == "code":
        chat.face.copy(*code_block(turn.content, argument, "this turn"))
        return
    stopped = await chat.stop_answer()
    if text == "edit":
        chat.edit(turn)
    elif text in ("again", "more"):
        await chat.answer_again(turn, continues=text == "more")
    elif text == "remove":
        chat.session.remove(turn)
        await chat.face.redraw()
    elif text == "version":
        chat.session.other_version(turn, argument)
        await chat.face.redraw()
    elif text == "branch":
        own = chat.session.branch_off(turn)
        await chat.open(own)
        await chat.face.show_note(
            f"this is now a separate conversation: {own.title}; /list shows both"
        )
    # these keys only show other turns, so stopping an answer is a side effect that needs a note
    if stopped and text in ("version", "branch"):
        await chat.face.show_note("the running answer was stopped; g at its turn continues it")
