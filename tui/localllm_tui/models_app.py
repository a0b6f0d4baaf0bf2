"""The screen of models alone, as `localllm recommend` shows it: ends with the model that is to be
chatted with."""

from __future__ import annotations

from localllm_tui.control.interfaces import ModelService, PlanRequest
from localllm_tui.control.keys import remapped
from localllm_tui.control.model_list import Pulls
from localllm_tui.control.terminal import ask_background, is_light
from localllm_tui.look import LookApp
from localllm_tui.screens.models import ModelsScreen


class ModelsApp(LookApp[str | None]):
    TITLE = "localllm recommend"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, service: ModelService, request: PlanRequest) -> None:
        super().__init__()
        self._request = request
        self.pulls = Pulls(service)
        self.theme = self.fitting_theme(light=is_light(ask_background().answer()[0]))

    def on_mount(self) -> None:
        self.set_keymap(remapped())
        self.push_screen(ModelsScreen(self.pulls, request=self._request), self.exit)

    async def action_quit(self) -> None:
        self.pulls.stop_all()
        self.exit(None)
