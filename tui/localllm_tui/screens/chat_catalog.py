"""The layer of the chat's screen with the engine that answers, other models, downloads, and the page of the first run."""

from __future__ import annotations

import asyncio

from textual.timer import Timer

from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control import model_list
from localllm_tui.control.chat import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import PlanChoice, PlanList, PlanRequest
from localllm_tui.control.model_list import Pulls
from localllm_tui.screens.background import start
from localllm_tui.screens.chat_streaming import ChatStreamingScreen
from localllm_tui.widgets.turns import FirstRunPage

_LOOK_S = 0.1
_WAY_ON = "What you type is kept. /model shows what else is installed here, /retry asks again once that is settled."


class ChatCatalogScreen(ChatStreamingScreen):
    """Starts the engine once the screen is there and says how far it is; pulls models while one chats."""

    def __init__(self, options: ChatOptions) -> None:
        super().__init__(options)
        self.model_service = options.model_service
        self.pulls = Pulls(options.model_service) if options.model_service is not None else None
        self._starter = options.model if options.first_run and options.model_service is not None else ""
        self._choices: list[PlanChoice] | None = None
        self.plans: dict[PlanRequest, PlanList] = {}  # made so far
        self._engine_factory = options.engine_factory
        self._engine_timer: Timer | None = None
        self._last_error: LocalLLMError | None = None
        self._announced: set[int] = set()  # the downloads whose end was said

    async def trouble(self, error: LocalLLMError, way_on: str = "") -> None:
        self._last_error = error
        await super().trouble(error, way_on)

    def begin(self) -> None:
        """Start the engine, where there is one to be started, and learn what it offers once it is there."""
        engine = self.client.engine
        if engine is None or self.client.ready:
            start(self, self._ask_models, "models")
            return
        engine.start()
        if self._engine_timer is None:
            self._engine_timer = self.set_interval(_LOOK_S, self._poll_engine)

    def _poll_engine(self) -> None:
        engine = self.client.engine
        assert engine is not None
        progress = engine.progress()
        if progress.state != "loading":
            assert self._engine_timer is not None
            self._engine_timer.stop()
            self._engine_timer = None
            if progress.error is None or not progress.down:
                start(self, self._ask_models, "models")
            # a waiting answer reports it by itself
            if progress.error not in (None, self._last_error) and not self.answering:
                assert progress.error is not None
                self.call_later(self.trouble, progress.error, _WAY_ON)
        self.show_counts()

    async def use_own_engine(self) -> None:
        """Load the model in this chat, instead of asking the server. Raises LocalLLMError."""
        engine = self.client.engine
        if self._engine_factory is None or (engine is not None and not engine.where and not engine.progress().down):
            raise UsageError("this chat has an engine of its own already")
        await self.stop_answer()
        own = self._engine_factory(self.model)
        await self.client.aclose()
        self.client = ChatClient.of(own, self.client.sampling)
        self.model = self.session.model = own.model
        self.n_ctx = self.physics = None
        self.begin()
        self.show_counts()
        await self.say(f"loading {own.model} in this chat: what is asked meanwhile waits for it")

    # -- other models ---------------------------------------------------------------------------------------------

    @property
    def pulling(self) -> str:
        return self.pulls.words() if self.pulls is not None else ""

    def show_pulls(self) -> None:
        """Update the download line and notify when a download has ended."""
        if self.pulls is None or not self.pulls.all():
            return
        for pull in self.pulls.all():
            if pull.ended and id(pull) not in self._announced:
                self._announced.add(id(pull))
                way_on = f": /model {pull.name} uses it" if pull.done else "; /models goes on" if pull.error else ""
                severity = "error" if pull.error else "information"
                self.notify(pull.words() + way_on, severity=severity, timeout=8, markup=False)  # type: ignore[arg-type]
        self._show_head()
        self._show_first_run()

    # -- the first run --------------------------------------------------------------------------------------------

    async def redraw(self) -> None:
        await super().redraw()
        if self._starter and not self.session.turns and self.pulls is not None:
            said = model_list.first_run_lines(
                self._starter, self._choices or (), self.pulls, planned=self._choices is not None
            )
            await self.transcript.mount(FirstRunPage(said))
            if self._choices is None:
                start(self, self._plan_first_run, "first run")

    async def _remove_welcome(self) -> None:
        await super()._remove_welcome()
        await self.transcript.query(FirstRunPage).remove()

    async def _plan_first_run(self) -> None:
        assert self.model_service is not None
        try:
            request = PlanRequest()
            self.plans[request] = await asyncio.to_thread(self.model_service.plan, request)
            self._choices = [*self.plans[request].choices]
        except LocalLLMError:
            self._choices = []
        self._show_first_run()

    def _show_first_run(self) -> None:
        assert self.pulls is not None
        said = model_list.first_run_lines(
            self._starter, self._choices or (), self.pulls, planned=self._choices is not None
        )
        for page in self.transcript.query(FirstRunPage):
            page.update("\n".join(said))

    async def action_pull(self, nth: int) -> None:
        """Pull one of the plans of the first run, counted from 1; use it once it is here."""
        best = model_list.worth_pulling(self._starter, self._choices or ()) if self._starter else []
        if self.pulls is None or nth > len(best):
            return
        choice = best[nth - 1]
        pull = self.pulls.of(choice.ref)
        if pull is not None and pull.done:
            await self.run_command("model", pull.name)
        else:
            self.pulls.start(choice.ref)
            self.show_pulls()


async def use_own_engine(chat: ChatCatalogScreen, _: str) -> None:
    """/own: load the model in this chat, after its server went away."""
    await chat.use_own_engine()
