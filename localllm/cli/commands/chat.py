"""`localllm chat`: the chat on this terminal, or one answer on stdout."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from localllm.cli.commands.shared import (
    CpuMoe,
    GpuLayers,
    Lora,
    Power,
    Split,
    at_a_terminal,
    installed_names,
)
from localllm.errors import NotFoundError, UsageError
from localllm.plain_output import is_text
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.cli.chat.engines import Wanted
    from localllm.conversation.history import ConversationSummary, History
    from localllm_tui.control.chat_options import ChatOptions
    from localllm_tui.control.client import ChatClient
    from localllm_tui.control.interfaces import ChatEngine
    from localllm_tui.control.session import Session
    from localllm_tui.control.terminal import TerminalQuestion

# Asked when there is neither a terminal nor a question (`localllm chat </dev/null`): shows that
# everything works.
FIRST_QUESTION = "Say hello and tell me in one sentence what you can help with."


def chat(
    prompt: Annotated[str | None, typer.Argument(help="Answer this on stdout and exit.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            autocompletion=installed_names,
            help="Model: a name, a hub repo or a path.",
        ),
    ] = None,
    attach: Annotated[
        list[Path] | None,
        typer.Option(
            "--attach",
            metavar="PATH",
            help="Send a text, an image or a folder's texts along (repeatable).",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Line by line, without the full screen.")
    ] = False,
    inline: Annotated[
        bool,
        typer.Option("--inline", help="In the terminal's own scrollback, without the full screen."),
    ] = False,
    continue_: Annotated[
        bool, typer.Option("--continue", help="Go on with the last conversation.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(min=1, help="Context in tokens (default: what fits).")
    ] = None,
    lora: Lora = None,
    gpu_layers: GpuLayers = None,
    cpu_moe: CpuMoe = None,
    split: Split = None,
    power: Power = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="Ask the server at this address (with /v1 or without)."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="That server's key (or LOCALLLM_API_KEY).")
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="Load the model here, also where a running server has it.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy (default: the model's own).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Make sampling repeatable.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.")] = None,
) -> None:
    """Chat in the terminal. With a PROMPT or without a terminal: stream one answer to stdout and
    exit.

    A `localllm serve` that runs on this machine and has the model, or may load it, answers; else
    the model is loaded here. Text piped in is read as part of the question. Conversations are kept
    on this machine; one answer on stdout is kept only with --continue.
    """

    from localllm.cli.chat import engines
    from localllm_tui.control.attachments import check_room

    # Everything that can be wrong with what was typed is said before a model is loaded.
    if prompt is not None and not prompt.strip() and not attach:
        raise UsageError(
            "the question is empty", hint='ask something: localllm chat "What is a lighthouse?"'
        )
    attached = list(chain.from_iterable(_texts(path) for path in attach or ()))
    check_room(attached, context)
    question = None if prompt is None and at_a_terminal() else _question(prompt, bool(attached))
    how: _How = "inline" if inline else "screen"
    if plain or os.environ.get("TERM") == "dumb":
        how = "plain"
    drawn = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    sampling: dict[str, float | int | str] = {
        name: value for name, value in drawn.items() if value is not None
    }
    try:
        with ExitStack() as stack:
            loading = {
                "lora": lora,
                "gpu_layers": gpu_layers,
                "cpu_moe": cpu_moe,
                "split": split,
                "power": power,
            }
            wanted = engines.checked(engines.Wanted(model, context, loading, url, api_key, own))
            _run(
                stack,
                _Asked(wanted, question, attached, how, continue_, system, sampling),
            )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _texts(path: Path) -> list[tuple[str, str]]:
    """(name, text) of a file, or of each text below a folder."""
    from localllm_tui.control.attachments import read_folder, read_text
    from localllm_tui.control.terminal import one_line

    if not path.expanduser().is_dir():
        return [read_text(path)]
    texts, left_out = read_folder(path)
    if left_out:
        typer.echo(
            f"{one_line(str(path))}: {left_out} of {len(texts) + left_out} files are no "
            "text "
            "and "
            "stay",
            err=True,
        )
    return texts


_How: TypeAlias = Literal["screen", "inline", "plain"]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was typed, read: no `question` means a chat; `attached` are (name, text)."""

    wanted: Wanted
    question: str | None
    attached: list[tuple[str, str]]
    how: _How
    continues: bool
    system: str | None
    sampling: dict[str, float | int | str]


def _run(stack: ExitStack, asked: _Asked) -> None:
    import gc

    screen, background = asked.question is None and asked.how == "screen", None
    if screen:
        from localllm_tui.control.terminal import ask_background

        background = ask_background()  # the terminal answers while the code of the chat is read
        stack.callback(background.answer)
    from localllm.cli.chat import engines
    from localllm.conversation.history import History
    from localllm_tui.control.chat_options import ChatOptions
    from localllm_tui.control.client import ChatClient
    from localllm_tui.control.session import Session

    history: History | None = None
    last: ConversationSummary | None = None
    if asked.question is None or asked.continues:
        history = stack.enter_context(History())
        last = next(iter(history.list(limit=1)), None) if asked.continues else None
        if asked.continues and asked.question is not None and last is None:
            raise NotFoundError(
                "there is no earlier conversation to continue", hint="ask without --continue"
            )
    sampling = dict(asked.sampling)
    if Settings().value("compaction") == "auto":
        sampling["truncation"] = "auto"
    if not screen:
        gc.enable()  # the screen does so once it is drawn
    engine = engines.engine_for(
        stack, asked.wanted, last.model if last is not None else None, at_once=screen
    )
    client = ChatClient(engine.base_url, engine.api_key, sampling, engine=engine)
    name = engine.model
    resume = last.id if last else None
    if asked.question is not None:
        session = (
            None if history is None else Session(history, name, conv_id=resume, system=asked.system)
        )
        _ask_once(client, name, asked, session)
        return
    assert history is not None
    nothing_to_continue = asked.continues and last is None
    greeting = (
        "There is no earlier conversation to continue: this is a new one."
        if nothing_to_continue
        else ""
    )
    opening = ChatOptions(
        client, history, name, resume, asked.system, tuple(asked.attached), greeting
    )
    if not screen:
        _in_lines(opening, asked.how)
        return
    assert background is not None
    _on_screen(_with_helpers(stack, opening, engine), background)


def _ask_once(client: ChatClient, name: str, asked: _Asked, session: Session | None) -> None:
    """One answer on stdout, as a turn of the `session` that is continued (None: kept nowhere)."""
    from localllm_tui.control.attachments import with_files
    from localllm_tui.line_chat import ask_once

    assert asked.question is not None
    if session is not None:
        session.ask(asked.question, asked.attached)
        answer = session.answer()
        ask_once(client, name, answer.messages, answer)
        return
    messages = [{"role": "system", "content": asked.system}] if asked.system else []
    ask_once(
        client,
        name,
        [*messages, {"role": "user", "content": with_files(asked.question, asked.attached)}],
    )


def _with_helpers(stack: ExitStack, opening: ChatOptions, engine: ChatEngine) -> ChatOptions:
    """What the screen may call, which ends with `stack`: engines, plans and tools."""

    from localllm.cli.chat import engines
    from localllm.cli.chat.config import take_keys, tool_hosts
    from localllm.cli.chat.planning import PlanningProcess

    take_keys()
    desk = PlanningProcess(offline=bool(Settings().value("offline")))
    stack.callback(desk.close)
    return replace(
        opening,
        model_service=desk,
        first_run=not engine.where and engines.only_the_starter(opening.model),
        tools=tool_hosts(),
    )


def _in_lines(opening: ChatOptions, how: _How) -> None:
    if how == "inline":
        from localllm_tui.inline.chat import talk_inline as talk
    else:
        from localllm_tui.line_chat import talk
    _say_how_to_go_on(talk(opening))


def _on_screen(opening: ChatOptions, background: TerminalQuestion) -> None:
    from localllm_tui.app import ChatApp
    from localllm_tui.control.terminal import is_light

    said, typed = background.answer()
    app = ChatApp(opening, light=is_light(said), typed=typed)
    app.run()
    if app.return_code:
        raise typer.Exit(app.return_code)
    _say_how_to_go_on(app.chat.session)


def _say_how_to_go_on(session: Session) -> None:
    from localllm_tui.control.terminal import one_line

    if session.id is not None:
        print(f"{one_line(session.title)}: localllm chat --continue goes on with it")


def _question(prompt: str | None, attached: bool) -> str:
    """The question from the command line and what is piped in, which goes first."""

    if prompt is not None and not is_text(prompt):
        raise UsageError("the question holds bytes that are no UTF-8 text", hint="type it in UTF-8")

    piped = ""
    if sys.stdin is not None and not (prompt is not None and sys.stdin.isatty()):
        if sys.stdin.isatty():
            print("type the question and end it with Ctrl-D", file=sys.stderr)
        try:
            piped = sys.stdin.buffer.read().decode("utf-8-sig").strip()
        except UnicodeDecodeError as e:
            raise UsageError(
                "what is piped in is not UTF-8 text",
                hint="convert it first, for example with iconv",
            ) from e
    question = "\n\n".join(part for part in (piped, (prompt or "").strip()) if part)
    if not question and attached:
        raise UsageError(
            "--attach needs a question",
            hint='for example: localllm chat --attach notes.txt "Summarise this"',
        )
    if not question:
        question = FIRST_QUESTION
        print(f"no question was given, so this one: {question}", file=sys.stderr)
    return question
