"""The layer of the chat's screen that knows who answers: an engine that loads behind it, or a server it is attached to."""

from __future__ import annotations

from textual.timer import Timer

from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control.chat import Opening
from localllm_tui.control.client import ChatClient
from localllm_tui.screens.asking import AskingScreen
from localllm_tui.screens.working import start

_LOOK_S = 0.1
_WAY_ON = "What you type is kept. /model shows what else is installed here, /retry asks again once that is settled."


class LoadingScreen(AskingScreen):
    """Starts the engine once the screen is there, and says how far it is."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        self._makes_own = opening.own
        self._looking: Timer | None = None
        self._troubled: LocalLLMError | None = None

    async def trouble(self, error: LocalLLMError, way_on: str = "") -> None:
        """Say what went wrong, and the way on."""
        self._troubled = error
        await super().trouble(error, way_on)

    def begin(self) -> None:
        """Start the engine, where there is one to be started, and learn what it offers once it is there."""
        engine = self.client.engine
        if engine is None or self.client.ready:
            start(self, self._ask_models, "models")
            return
        engine.start()
        if self._looking is None:
            self._looking = self.set_interval(_LOOK_S, self._look)

    def _look(self) -> None:
        engine = self.client.engine
        assert engine is not None
        progress = engine.progress()
        if progress.state != "loading":
            assert self._looking is not None
            self._looking.stop()
            self._looking = None
            if progress.error is None or not progress.down:
                start(self, self._ask_models, "models")
            # An answer that waits ends in it, or has.
            if progress.error not in (None, self._troubled) and not self.answering:
                assert progress.error is not None
                self.call_later(self.trouble, progress.error, _WAY_ON)
        self._show_state()

    async def use_own_engine(self) -> None:
        """Load the model in this chat, in place of the server that answered so far. Raises LocalLLMError."""
        engine = self.client.engine
        if self._makes_own is None or (engine is not None and not engine.where and not engine.progress().down):
            raise UsageError("this chat has an engine of its own already")
        await self.stop_answer()
        own = self._makes_own(self.model)
        await self.client.aclose()
        self.client = ChatClient.of(own, self.client.sampling)
        self.model = self._session.model = own.model
        self.n_ctx = self.physics = None
        self.begin()
        self._show_counts()
        await self.say(f"loading {own.model} in this chat: what is asked meanwhile waits for it")
