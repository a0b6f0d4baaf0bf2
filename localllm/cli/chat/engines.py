"""Who answers a chat: a server that is named, one that runs on this machine, or an engine of the chat's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from localllm.errors import ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from localllm.cli.chat.attach import Attached
    from localllm_tui.control.interfaces import ChatEngine, EngineFactory, EngineProgress


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for on the command line: `placed` is where the model is to lie, `own` insists on an engine of the
    chat's own."""

    model: str | None = None
    context: int | None = None
    placed: Mapping[str, str | None] = field(default_factory=dict)
    url: str | None = None
    api_key: str | None = None
    own: bool = False

    @property
    def loads_otherwise(self) -> bool:
        """Whether it says how the model is to be loaded, which a running server has decided."""
        return self.context is not None or any(self.placed.values())


class Attachment:
    """A server that runs already (implements localllm_tui.control.interfaces.Engine)."""

    def __init__(self, attached: Attached) -> None:
        self.base_url, self.model, self.where = attached.base_url, attached.model, attached.where
        self.api_key, self.unix_socket = attached.api_key, attached.unix_socket

    def start(self) -> None:
        """It runs."""

    def progress(self) -> EngineProgress:
        """It has loaded what it has, and says itself what it loads when it is asked."""
        from localllm_tui.control.interfaces import EngineProgress

        return EngineProgress()

    def stop(self) -> None:
        """It is not ours."""


def checked(wanted: Wanted) -> Wanted:
    """`wanted`, unless it contradicts itself: then UsageError."""
    if wanted.url is not None and wanted.own:
        raise UsageError("--url and --own exclude each other", hint="leave one of them out")
    if wanted.url is not None and wanted.loads_otherwise:
        raise UsageError(
            "how a model is loaded was decided by the server at --url",
            hint="leave out --context, --gpu-layers, --cpu-moe and --split",
        )
    return wanted


def engine_for(stack: ExitStack, wanted: Wanted, last: str | None, *, at_once: bool) -> ChatEngine:
    """Who answers, for as long as `stack` is open. `last`: the model of the conversation that is gone on with. An engine of
    the chat's own is loaded here, unless `at_once`: then it is to be started by whoever shows how far it is.

    Raises LocalLLMError for what is known to go wrong."""
    from localllm.cli.chat import attach

    model = wanted.model or last
    if wanted.url is not None:
        try:
            return Attachment(attach.at(wanted.url, model, wanted.api_key))
        except ModelNotFoundError:
            if wanted.model is not None or last is None:
                raise
            return Attachment(attach.at(wanted.url, None, wanted.api_key))
    if not wanted.own and not wanted.loads_otherwise:
        attached = attach.here(model or _configured(), wanted.api_key, lambda: _installed(model))
        if attached is not None:
            return Attachment(attached)
    return _own(stack, replace(wanted, model=model), at_hand=wanted.model is None, at_once=at_once)


def maker(stack: ExitStack, wanted: Wanted) -> EngineFactory:
    """Makes engines of the chat's own, which end with `stack`."""

    def make(model: str) -> ChatEngine:
        return _own(stack, replace(wanted, model=model), at_hand=True, at_once=True)

    return make


def _own(stack: ExitStack, wanted: Wanted, *, at_hand: bool, at_once: bool) -> ChatEngine:
    """`at_hand`: the best model at hand goes on where there is no such model here."""
    from localllm.cli.chat.own_server import OwnEngine, loaded

    try:
        engine = OwnEngine(wanted.model, wanted.context, wanted.placed)
    except ModelNotFoundError:
        # It was removed since the conversation, or was a path.
        if wanted.model is None or not at_hand:
            raise
        engine = OwnEngine(None, wanted.context, wanted.placed)
    if at_once:
        stack.callback(engine.stop)
        return engine
    return stack.enter_context(loaded(engine))


def _configured() -> str | None:
    from localllm.settings import Settings

    found: str | None = Settings().value("model")
    return found


def _installed(model: str | None) -> str | None:
    """What `model` is called on this disk."""
    from localllm.errors import LocalLLMError
    from localllm.library.resolve import resolve

    try:
        return resolve(model).name if model else None
    except LocalLLMError:
        return None


def only_the_starter(model: str) -> bool:
    """Whether `model` is the bundled starter, and nothing else is installed."""
    from localllm.library import starter, store

    return model == starter.NAME and all(local.origin == "starter" for local in store.scan())
