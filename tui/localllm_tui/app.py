"""The chat app in a terminal: its first screen, and the behaviour of all screens."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from functools import partial

from textual.app import App, SystemCommand
from textual.screen import ModalScreen, Screen
from textual.theme import Theme
from textual.widgets import Input, TextArea

from localllm import json_store
from localllm_tui.bindings import HasKeys
from localllm_tui.control import commands
from localllm_tui.control.chat import QUIT_WITHIN_S
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.keys import APP, remapped
from localllm_tui.control.terminal import (
    NOTICE_SEEN,
    copy_with_tool,
    notice,
    on_signals,
)
from localllm_tui.look import LookApp
from localllm_tui.screens.chat import ChatScreen


class ChatApp(HasKeys, LookApp[None], keys=APP):
    TITLE = "localllm"
    # Notifications are at the top, because at the bottom they would cover the input.
    CSS = (
        """
    ToastRack { dock: top; align: right top; margin-top: 1; margin-bottom: 0; }
    """
        + LookApp.CSS
    )

    def __init__(
        self,
        options: ChatOptions,
        copy: Callable[[str], bool] = copy_with_tool,
        *,
        light: bool = False,
        typed: str = "",
    ) -> None:
        """`light`: the terminal has a light background. `typed`: text that was typed before the
        chat had an input."""
        super().__init__()
        self._fitting = self.fitting_theme(light=light)
        self.page = ChatScreen(options, copy, typed)
        self.chat = self.page.chat
        self._preferences = options.history.path.with_name("chat.json")
        self._interrupted_s = float("-inf")
        self._notified_unfocused = False

    def get_default_screen(self) -> Screen[None]:
        return self.page

    def on_mount(self) -> None:
        self.set_keymap(remapped())
        on_signals(self.chat.leave, self._on_continue)
        self.app_resume_signal.subscribe(self, self._redraw_all)
        chosen = json_store.read(self._preferences).get("theme")
        self.theme = chosen if chosen in self.available_themes else self._fitting
        self.theme_changed_signal.subscribe(self, self._keep_theme)
        # the command starts with gc disabled, because the objects of the start live as long as the
        # chat
        self.page.call_after_refresh(gc.enable)

    def _redraw_all(self, _: App[None]) -> None:
        self.refresh(layout=True)

    def _keep_theme(self, theme: Theme) -> None:
        json_store.keep(self._preferences, {"theme": theme.name})

    def _on_continue(self) -> None:
        """Set up the terminal again after a SIGSTOP. A program can't handle SIGSTOP, and a shell
        used the terminal."""
        if self._driver is not None:
            self._driver.suspend_application_mode()
            self._driver.resume_application_mode()
            self.call_later(self.refresh, layout=True)

    def notify_unfocused(self, text: str) -> None:
        """Notify a user who looks at another window, if the terminal reports which window has the
        focus."""
        if not self.app_focus and self._driver is not None:
            self._driver.write("\a" if self._notified_unfocused else notice(text))
            self._notified_unfocused = True

    def on_app_focus(self) -> None:
        if self._notified_unfocused and self._driver is not None:
            self._notified_unfocused = False
            self._driver.write(NOTICE_SEEN)

    # -- keys and commands on every screen ---------------------------------------------------------

    async def action_interrupt(self) -> None:
        """Close the dialog on top; else copy the selection, clear the input or stop the answer;
        pressed twice, quit."""
        if isinstance(self.screen, ModalScreen):
            self.screen.dismiss(None)
            return
        if await self.page.interrupted():
            return
        now = time.monotonic()
        if now - self._interrupted_s < QUIT_WITHIN_S:
            await self.chat.leave()
        self._interrupted_s = now
        self.notify("Ctrl+C again quits", timeout=QUIT_WITHIN_S)

    async def action_end_of_input(self) -> None:
        """Quit if the input is empty; in a text the key removes the next character, as
        everywhere."""
        await self.page.composer.keys_handled()
        focused = self.focused
        typed = ""
        if isinstance(focused, TextArea):
            typed = focused.text
        elif isinstance(focused, Input):
            typed = focused.value
        if isinstance(focused, (TextArea, Input)) and typed:
            focused.action_delete_right()
        else:
            await self.chat.leave()

    async def action_quit(self) -> None:
        await self.chat.leave()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The command palette: the chat's own commands, and the themes."""
        for command in commands.COMMANDS:
            if command.palette:
                run = partial(self.call_later, commands.run_and_report, self.chat, command.name, "")
                yield SystemCommand(command.palette, command.help, run)
        for name in sorted(self.available_themes):
            yield SystemCommand(
                f"Theme: {name}", "use these colours from now on", partial(self._use_theme, name)
            )

    def _use_theme(self, name: str) -> None:
        self.theme = name
