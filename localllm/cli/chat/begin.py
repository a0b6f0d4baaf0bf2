"""Start a chat: one answer on stdout, or a conversation in one of three interfaces."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import typer

from localllm.cli.chat import engines
from localllm.conversation.history import ConversationSummary, History
from localllm.errors import NotFoundError, UsageError
from localllm.settings import Settings
from localllm_tui.control.answering import AnswerStream, PendingAnswer
from localllm_tui.control.attachments import with_files
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import ChatEngine, PlanRequest
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import TerminalQuestion, is_light, one_line


@dataclass(frozen=True, slots=True)
class ChatInvocation:
    """The parsed command line. `attached` contains (name, text) pairs. `other` is the second model
    of a comparison, or ""."""

    engine_request: engines.EngineRequest
    attached: list[tuple[str, str]]
    continues: bool
    system: str | None
    sampling: Mapping[str, float | int | str]
    other: str = ""


def other_name(invocation: ChatInvocation) -> str:
    """The name of the second model of a comparison, or "".

    Raises UsageError if it is the first one, and the errors for a model that is not found.
    """
    if not invocation.other:
        return ""
    with ExitStack() as stack:
        names = []
        for model in (invocation.engine_request.model, invocation.other):
            request = replace(invocation.engine_request, model=model)
            names.append(engines.engine_for(stack, request, None, at_once=True).model)
    if names[0] == names[1]:
        raise UsageError(f"-m names {names[0]} twice", hint="name two different models")
    return names[1]


def answer(stack: ExitStack, invocation: ChatInvocation, question: str) -> None:
    """Print one answer on stdout, or those of two models, each after its name.

    Two models are loaded in turn.
    """
    if not other_name(invocation):
        answer_once(stack, invocation, question)
        return
    for model in (invocation.engine_request.model, invocation.other):
        print(f"{model}:", flush=True)
        single = replace(
            invocation, engine_request=replace(invocation.engine_request, model=model), other=""
        )
        with ExitStack() as engine_of_one:
            answer_once(engine_of_one, single, question)


def answer_once(stack: ExitStack, invocation: ChatInvocation, question: str) -> None:
    """Print one answer on stdout. If a conversation is continued, the answer is saved as its next
    turn."""
    from localllm_tui.line_chat import ask_once

    if not invocation.continues:
        client, engine = _open_engine(stack, invocation, None)
        messages = []
        if invocation.system:
            messages.append({"role": "system", "content": invocation.system})
        messages.append({"role": "user", "content": with_files(question, invocation.attached)})
        ask_once(client, engine.model, messages, AnswerStream())
        return
    history = stack.enter_context(History())
    last = _last_conversation(history)
    if last is None:
        raise NotFoundError(
            "there is no earlier conversation to continue", hint="ask without --continue"
        )
    client, engine = _open_engine(stack, invocation, last)
    session = Session(history, engine.model, conv_id=last.id, system=invocation.system)
    session.ask(question, invocation.attached)
    answer = PendingAnswer(session)
    ask_once(client, engine.model, answer.messages, answer)
    answer.save()  # retry if an earlier save failed


def start_conversation(
    stack: ExitStack,
    invocation: ChatInvocation,
    background: TerminalQuestion | None,
    *,
    inline: bool,
) -> None:
    """Start a conversation on the full screen if the terminal was queried for its `background`.

    Otherwise it runs `inline` or line by line.
    """
    other = other_name(invocation)
    history = stack.enter_context(History())
    last = None
    notice = ""
    if invocation.continues:
        last = _last_conversation(history)
        if last is None:
            notice = "There is no earlier conversation to continue, so this is a new one."
    client, engine = _open_engine(stack, invocation, last, at_once=background is not None)
    options = ChatOptions(
        client,
        history,
        engine.model,
        None if last is None else last.id,
        invocation.system,
        tuple(invocation.attached),
        notice,
        own=partial(engines.own_engine, stack, invocation.engine_request) if engine.where else None,
        other_model=other,
    )
    if background is not None:
        session = _run_full_screen(stack, options, engine, background)
    elif inline:
        from localllm_tui.inline.chat import run_inline_chat

        session = run_inline_chat(options)
    else:
        from localllm_tui.line_chat import run_line_chat

        session = run_line_chat(options)
    if session.id is not None:
        print(f"{one_line(session.title)}: localllm chat --continue resumes it")


def _last_conversation(history: History) -> ConversationSummary | None:
    return next(iter(history.list(limit=1)), None)


def _open_engine(
    stack: ExitStack,
    invocation: ChatInvocation,
    last: ConversationSummary | None,
    *,
    at_once: bool = False,
) -> tuple[ChatClient, ChatEngine]:
    """Return the client and the engine that answers. With `at_once`, a screen shows the loading
    progress."""
    sampling = dict(invocation.sampling)
    if invocation.engine_request.settings.value("compaction") == "auto":
        sampling["truncation"] = "auto"
    if not at_once:
        gc.enable()  # the screen enables it after it is drawn
    model = None if last is None else last.model
    engine = engines.engine_for(stack, invocation.engine_request, model, at_once=at_once)
    return ChatClient(engine.base_url, engine.api_key, sampling, engine=engine), engine


def _run_full_screen(
    stack: ExitStack, options: ChatOptions, engine: ChatEngine, background: TerminalQuestion
) -> Session:
    """Run the full screen. Its engines, plans and tools end with `stack`."""
    from localllm.cli.chat.config import apply_key_bindings, tool_hosts
    from localllm.cli.chat.planning import PlanningProcess

    apply_key_bindings()
    settings = Settings()
    planning = PlanningProcess(offline=bool(settings.value("offline")))
    stack.callback(planning.close)
    if not engine.where:
        # The screen's imports use one processor core. The engine, which is loaded after them,
        # would slow down the first plan.
        planning.start(PlanRequest())
    from localllm_tui.app import ChatApp

    first_run = not engine.where and engines.only_the_starter(options.model)
    options = replace(
        options,
        model_service=planning,
        first_run=first_run,
        tools=tool_hosts(),
        thinking=settings.value("chat_thinking"),
    )
    terminal_answer, typed = background.answer()
    app = ChatApp(options, light=is_light(terminal_answer), typed=typed)
    gc.freeze()  # what is imported stays, so the collections between keys skip it
    app.run(mouse=settings.value("chat_mouse"))
    if app.return_code:
        raise typer.Exit(app.return_code)
    return app.chat.session
