"""The layer of the chat's screen that brings other models: the screen of models, downloads, and the page of the first run."""

from __future__ import annotations

import asyncio

from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control import model_list
from localllm_tui.control.chat import Opening
from localllm_tui.control.interfaces import Offer, Wish
from localllm_tui.control.model_list import Pulls
from localllm_tui.screens.loading import LoadingScreen
from localllm_tui.screens.working import start
from localllm_tui.widgets.first_run import FirstRun


class ShoppingScreen(LoadingScreen):
    """Pulls models while one chats."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        self._desk = opening.desk
        self.pulls = Pulls(opening.desk) if opening.desk is not None else None
        self._starter = opening.model if opening.first_run and opening.desk is not None else ""
        self._offers: list[Offer] | None = None
        self._told: set[int] = set()  # the downloads whose end was said

    @property
    def pulling(self) -> str:
        """The downloads on their way, in a line."""
        return self.pulls.words() if self.pulls is not None else ""

    def show_pulls(self) -> None:
        """Keep what is said of the downloads up to date, and say when one has ended."""
        if self.pulls is None or not self.pulls.all():
            return
        for pull in self.pulls.all():
            if pull.ended and id(pull) not in self._told:
                self._told.add(id(pull))
                way_on = f": /model {pull.name} uses it" if pull.done else "; /models goes on" if pull.error else ""
                severity = "error" if pull.error else "information"
                self.notify(pull.words() + way_on, severity=severity, timeout=8, markup=False)  # type: ignore[arg-type]
        self._show_head()
        self._show_first_run()

    async def show_models(self) -> None:
        """Show what would fit and what is installed, and use what is chosen there. Raises UsageError."""
        if self._desk is None or self.pulls is None:
            raise UsageError("this chat was started without a list of models")
        from localllm_tui.screens.models import ModelsScreen  # when it is asked for: the chat is there sooner

        def chosen(name: str | None) -> None:
            if name and name != self.model:
                self.call_later(self.run_command, "model", name)

        await self.app.push_screen(ModelsScreen(self._desk, self.pulls, current=self.model), chosen)

    # -- the first run --------------------------------------------------------------------------------------------

    async def redraw(self) -> None:
        await super().redraw()
        if self._starter and not self.session.turns and self.pulls is not None:
            said = model_list.first_run_lines(
                self._starter, self._offers or (), self.pulls, planned=self._offers is not None
            )
            await self.transcript.mount(FirstRun(said))
            if self._offers is None:
                start(self, self._plan_first_run, "first run")

    async def _remove_welcome(self) -> None:
        await super()._remove_welcome()
        await self.transcript.query(FirstRun).remove()

    async def _plan_first_run(self) -> None:
        assert self._desk is not None
        try:
            self._offers = [*(await asyncio.to_thread(self._desk.plan, Wish())).offers]
        except LocalLLMError:
            self._offers = []
        self._show_first_run()

    def _show_first_run(self) -> None:
        assert self.pulls is not None
        said = model_list.first_run_lines(
            self._starter, self._offers or (), self.pulls, planned=self._offers is not None
        )
        for page in self.transcript.query(FirstRun):
            page.update("\n".join(said))

    async def action_pull(self, nth: int) -> None:
        """Pull one of the plans of the first run, counted from 1; use it once it is here."""
        best = model_list.worth_pulling(self._starter, self._offers or ()) if self._starter else []
        if self.pulls is None or nth > len(best):
            return
        offer = best[nth - 1]
        pull = self.pulls.of(offer.ref)
        if pull is not None and pull.done:
            await self.run_command("model", pull.name)
        else:
            self.pulls.start(offer.ref)
            self.show_pulls()
