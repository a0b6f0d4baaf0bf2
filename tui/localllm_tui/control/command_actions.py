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
    check_room,
    code_block,
    fenced,
    is_image,
    read_files,
    read_text,
    typed_in,
    with_files,
)
from localllm_tui.control.chat import ChatController
from localllm_tui.control.client import ListedModel
from localllm_tui.control.formatting import how_many, title_of
from localllm_tui.control.import_export import to_json, to_markdown
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import one_line


async def new(chat: ChatController, _: str) -> None:
    """Start an empty conversation with the same system prompt, and show a note about that
    prompt."""
    system = chat.session.system
    await chat.open(Session(chat.history, chat.model, system=system))
    if system:
        await chat.face.show_note(
            "the system prompt is kept, and shown at the top: /system - removes it"
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
            "there is no earlier conversation", hint="this one is kept as soon as you ask something"
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
    """Answer the last question again, by the model of this name ("": the one in use); the earlier
    answer remains as another version."""
    if name:
        await _model_named(chat, name)
    await chat.stop_answer()
    await chat.answer_again(model=name)


async def on_last(what: str, chat: ChatController, _: str = "") -> None:
    """Do the action of a turn's key: "edit" on the last question, "version" one back from the last
    answer, others on the last turn."""
    await chat.stop_answer()
    session = chat.session
    if what == "edit" or not session.turns:
        turn = session.last_question
    elif what == "version" and session.last_answer is not None:
        turn = session.last_answer
    else:
        turn = session.turns[-1]
    await run_on_turn(chat, what, turn, -1)


async def drop(chat: ChatController, _: str) -> None:
    """Remove the last question if it has no answer."""
    await chat.stop_answer()
    chat.session.drop_question()
    await chat.face.redraw()


async def compact(chat: ChatController, argument: str) -> None:
    """Allow context compaction, or forbid it again; a question that did not fit is asked again."""
    if argument not in ("", "off"):
        raise UsageError(f"/compact {argument} is not known", hint="use /compact or /compact off")
    chat.session.set_compacts(not argument)
    if argument and chat.client.compacts:
        await chat.face.show_note(
            "a conversation that does not fit the context is an error again; but the setting "
            "`compaction` is auto"
        )
    elif argument:
        await chat.face.show_note("a conversation that does not fit the context is an error again")
    elif not chat.answering and chat.session.turns[-1].role == "user":
        await retry(chat, "")
    else:
        await chat.face.show_note(
            "once the conversation does not fit, its oldest messages are left out of what the "
            "model gets; all of it stays here and on disk"
        )


async def copy(chat: ChatController, what: str) -> None:
    answer = ""
    if chat.session.last_answer is not None:
        answer = chat.session.last_answer.content
    if chat.streaming is not None and chat.streaming.text:
        answer = chat.streaming.text
    if not answer:
        raise UsageError("there is no answer to copy yet")
    kind, _, number = what.partition(" ")
    if kind == "":
        chat.face.copy(answer, "the answer")
        return
    if kind != "code" or (number and not number.strip().isdigit()):
        raise UsageError(f"/copy {what} is not known", hint="use /copy, /copy code or /copy code 2")
    chat.face.copy(*code_block(answer, int(number) if number else None, "the last answer"))


async def save(chat: ChatController, name: str, mode: str = "x") -> None:
    """Write the conversation to a file, as JSON if the name ends in .json, else as Markdown.

    `mode`: "x" creates a new file, "w" overwrites an existing one.
    """
    if not name:
        raise UsageError("/save needs a file name", hint="for example /save chat.md")
    path = Path(name).expanduser()
    written_as = to_json if path.suffix.lower() == ".json" else to_markdown
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
        raise UsageError("a conversation has a title once something was asked")
    if text:
        chat.session.rename(title_of(text))
    await chat.face.show_note(f"title: {chat.session.title}")


async def import_from(chat: ChatController, name: str) -> None:
    """Import the conversation of a file, and open it."""
    if not name:
        raise UsageError("/import needs a file name", hint="for example /import chat.json")
    await resume(chat, import_export.store(chat.history, Path(name), chat.model))
    await chat.face.show_note(f"read from {name}; /list has it too")


async def attach(chat: ChatController, name: str) -> None:
    """Attach a file to the next question; "-" removes all attachments."""
    if not name:
        raise UsageError(
            "/attach needs a file name",
            hint="for example /attach notes.txt; /attach - takes all back",
        )
    if name == "-":
        chat.attached = []
        return
    if Path(name).expanduser().is_dir():
        await _attach_folder(chat, Path(name))
        return
    name, text = await asyncio.to_thread(read_text, Path(name))
    if is_image(text):
        asked = [{"role": "user", "content": fenced(name, text)}]
        _, why_not = await chat.client.counted(chat.model, asked)
        if why_not:
            raise UsageError(
                f"{one_line(name)} can't go along: {why_not}",
                hint="another model may read it: /model",
            )
    await attach_text(chat, name, text)


async def _attach_folder(chat: ChatController, folder: Path) -> None:
    files, left_out = await asyncio.to_thread(read_files, folder)
    check_room([*chat.attached, *files], chat.listed.n_ctx)
    asked = [{"role": "user", "content": with_files("", files)}]
    tokens = await chat.client.count(chat.model, asked)
    for name, text in files:
        chat.attach(name, text)
    note = f"{one_line(str(folder))}: {how_many(len(files), 'file')} go along"
    if tokens is not None:
        note += f", {tokens:,} tokens"
    if left_out:
        note += f"; {left_out} that are no text stay"
    await chat.face.show_note(f"{note}; /attach - takes them back")


async def attach_text(chat: ChatController, name: str, text: str) -> None:
    """Attach a text to the next question. Raises ContextLengthError for one that can't fit."""
    check_room([*chat.attached, (name, text)], chat.listed.n_ctx)
    chat.attach(name, text)
    if not chat.face.full_screen:  # whose frame lists the files
        await chat.face.show_note(f"attached {one_line(name)}: it goes with the next question")


async def system(chat: ChatController, text: str) -> None:
    if text:
        await chat.stop_answer()
        chat.session.set_system("" if text == "-" else text)
    note = "no system prompt; /system TEXT sets one"
    if chat.session.system:
        note = f"system prompt: {chat.session.system}"
    if text and chat.session.turns:
        note += (
            "\nIt stands before everything that was said, so all of it "
            f"({chat.session.used_tokens:,} tokens) is read again for the next answer"
        )
    await chat.face.show_note(note)


async def model(chat: ChatController, name: str) -> None:
    if name:
        chat.use_model(await _model_named(chat, name))
        await chat.face.show_note(
            f"{name} answers from here on; where it is not in memory yet, the next question loads it"
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
        raise UsageError(f"this server has no model {name!r}", hint="it has " + ", ".join(models))
    return replace(found, name=name)


async def run_shell(chat: ChatController, command: str) -> None:
    """Attach the output of a shell command to the next question, and show it; asks before the first
    command of a chat."""
    if not command:
        raise UsageError("/run needs a command", hint="for example !git diff")
    if not chat.runs_commands and not await chat.face.approve(
        "a command is to run here; the next ones are not asked about", command
    ):
        await chat.face.show_note(f"not run: {one_line(command)}")
        return
    chat.runs_commands = True
    said = await shell.output_of(command)
    name = f"$ {one_line(command)}"
    _, _, block = fenced(name, said).partition("\n")
    await chat.face.show_note(block, markdown=True)
    await attach_text(chat, name, said)


async def set_sampling(chat: ChatController, text: str) -> None:
    if text:
        chat.client.sampling = sampling.changed(chat.client.sampling, text)
    listed = await chat.client.listed(chat.model)
    now = sampling.words(listed.sampling, chat.client.sampling) or "the model's own"
    await chat.face.show_note(
        f"sampling: {now}\n/sampling temperature 0.2 changes it, /sampling - takes all back"
    )


async def switch_tools(chat: ChatController, what: str) -> None:
    """Switch tools on or off, and list them."""
    word, _, name = what.partition(" ")
    if word not in ("", "on", "off"):
        raise UsageError(
            f"/tools {what} is not known",
            hint="use /tools, /tools on, /tools on NAME or /tools off",
        )
    if word == "off":
        await chat.tools.switch_off()
    elif word == "on":
        await chat.tools.switch_on(name.strip())
    note = chat.tools.overview()
    if chat.tools.on:
        note += "\nEach call waits for your yes, with its arguments shown"
    elif chat.tools.hosts:
        note += "\n/tools on starts them"
    await chat.face.show_note(note)


async def leave(chat: ChatController, _: str) -> None:
    await chat.leave()


async def run_on_turn(
    chat: ChatController, what: str, turn: StoredMessage, argument: int = 0
) -> None:
    """Do the action `what` of a key on `turn`. Raises LocalLLMError if it can't be done."""
    if what == "copy":
        chat.face.copy(typed_in(turn), "the question" if turn.role == "user" else "the answer")
        return
    if what == "code":
        chat.face.copy(*code_block(turn.content, argument, "this turn"))
        return
    stopped = await chat.stop_answer()
    if what == "edit":
        chat.edit(turn)
    elif what in ("again", "more"):
        await chat.answer_again(turn, continues=what == "more")
    elif what == "remove":
        chat.session.remove(turn)
        await chat.face.redraw()
    elif what == "version":
        chat.session.other_version(turn, argument)
        await chat.face.redraw()
    elif what == "branch":
        own = chat.session.branch_off(turn)
        await chat.open(own)
        await chat.face.show_note(
            f"a conversation of its own from here on: {own.title}; /list has both"
        )
    # these keys are for looking around: stopping an answer is a side effect
    if stopped and what in ("version", "branch"):
        await chat.face.show_note(
            "the answer that was being written was stopped; g at its turn goes on with it"
        )
