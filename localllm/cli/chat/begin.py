"""Start a chat: one answer on stdout, or a conversation in one of three interfaces."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import typer

from localllm.cli.chat import engines
from localllm.conversation.history import ConversationSummary, History
from localllm.errors import NotFoundError
from localllm.settings import Settings
from localllm_tui.control.answering import AnswerStream, PendingAnswer
from localllm_tui.control.attachments import with_files
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import ChatEngine
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import TerminalQuestion, is_light, one_line


@dataclass(frozen=True, slots=True)
class Asked:
    """The parsed command line. `attached` contains (name, text) pairs."""

    wanted: engines.Wanted
    attached: list[tuple[str, str]]
    continues: bool
    system: str | None
    sampling: Mapping[str, float | int | str]


def answer_once(stack: ExitStack, asked: Asked, question: str) -> None:
    """Print one answer on stdout. If a conversation is continued, the answer is saved as its next
    turn."""
    from localllm_tui.line_chat import ask_once

    if not asked.continues:
        client, engine = _opened(stack, asked, None)
        messages = []
        if asked.system:
            messages.append({"role": "system", "content": asked.system})
        messages.append({"role": "user", "content": with_files(question, asked.attached)})
        ask_once(client, engine.model, messages, AnswerStream())
        return
    history = stack.enter_context(History())
    last = _last(history)
    if last is None:
        raise NotFoundError(
            "there is no earlier conversation to continue", hint="ask without --continue"
        )
    client, engine = _opened(stack, asked, last)
    session = Session(history, engine.model, conv_id=last.id, system=asked.system)
    session.ask(question, asked.attached)
    answer = PendingAnswer(session)
    ask_once(client, engine.model, answer.messages, answer)
    answer.save()  # retry if an earlier save failed


def converse(
    stack: ExitStack, asked: Asked, background: TerminalQuestion | None, *, inline: bool
) -> None:
    """Start a conversation on the full screen if the terminal was queried for its `background`.

    Otherwise it runs `inline` or line by line.
    """
    history = stack.enter_context(History())
    last = None
    notice = ""
    if asked.continues:
        last = _last(history)
        if last is None:
            notice = "There is no earlier conversation to continue: this is a new one."
    client, engine = _opened(stack, asked, last, at_once=background is not None)
    opening = ChatOptions(
        client,
        history,
        engine.model,
        None if last is None else last.id,
        asked.system,
        tuple(asked.attached),
        notice,
    )
    if background is not None:
        session = _on_screen(stack, opening, engine, background)
    elif inline:
        from localllm_tui.inline.chat import talk_inline

        session = talk_inline(opening)
    else:
        from localllm_tui.line_chat import talk

        session = talk(opening)
    if session.id is not None:
        print(f"{one_line(session.title)}: localllm chat --continue goes on with it")


def _last(history: History) -> ConversationSummary | None:
    return next(iter(history.list(limit=1)), None)


def _opened(
    stack: ExitStack, asked: Asked, last: ConversationSummary | None, *, at_once: bool = False
) -> tuple[ChatClient, ChatEngine]:
    """Return the client and the engine that answers. With `at_once`, a screen shows the loading
    progress."""
    sampling = dict(asked.sampling)
    if asked.wanted.settings.value("compaction") == "auto":
        sampling["truncation"] = "auto"
    if not at_once:
        gc.enable()  # the screen enables it after it is drawn
    model = None if last is None else last.model
    engine = engines.engine_for(stack, asked.wanted, model, at_once=at_once)
    return ChatClient(engine.base_url, engine.api_key, sampling, engine=engine), engine


def _on_screen(
    stack: ExitStack, opening: ChatOptions, engine: ChatEngine, background: TerminalQuestion
) -> Session:
    """Run the full screen. Its engines, plans and tools end with `stack`."""
    from localllm.cli.chat.config import take_keys, tool_hosts
    from localllm.cli.chat.planning import PlanningProcess
    from localllm_tui.app import ChatApp

    take_keys()
    desk = PlanningProcess(offline=bool(Settings().value("offline")))
    stack.callback(desk.close)
    first_run = not engine.where and engines.only_the_starter(opening.model)
    opening = replace(opening, model_service=desk, first_run=first_run, tools=tool_hosts())
    said, typed = background.answer()
    app = ChatApp(opening, light=is_light(said), typed=typed)
    app.run()
    if app.return_code:
        raise typer.Exit(app.return_code)
    return app.chat.session
