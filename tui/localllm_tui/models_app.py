"""The screen of models alone, as `localllm recommend` shows it: ends with the model that is to be chatted with."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import App
from textual.filter import LineFilter

from localllm_tui.control.interfaces import ModelService, PlanRequest
from localllm_tui.control.keys import remapped
from localllm_tui.control.model_list import Pulls
from localllm_tui.screens.models import ModelsScreen
from localllm_tui.widgets.line_filters import CSS as NO_COLOR_CSS
from localllm_tui.widgets.line_filters import NoColors, NoControls


class ModelsApp(App[str | None]):
    TITLE = "localllm recommend"
    CSS = NO_COLOR_CSS
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, service: ModelService, request: PlanRequest) -> None:
        super().__init__()
        self._service, self._request = service, request
        self.pulls = Pulls(service)

    def on_mount(self) -> None:
        self.set_keymap(remapped())
        self.push_screen(ModelsScreen(self._service, self.pulls, request=self._request), self.exit)

    async def action_quit(self) -> None:
        self.pulls.stop_all()
        self.exit(None)

    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = [*super().get_line_filters(), NoControls()]
        return [*filters, NoColors()] if self.no_color else filters
