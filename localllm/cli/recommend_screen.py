"""`localllm recommend` on a terminal: the screen of models, and the chat with the one that is chosen there."""

from __future__ import annotations

from localllm_catalog.types import Purpose


def open_screen(purpose: Purpose, context: int, machine: str, memory_gb: float, *, offline: bool) -> None:
    """Show what fits; a model that is chosen there starts the chat. Raises DeviceNotFoundError and what the chat ends in."""
    from localllm.cli.chat_config import take_keys
    from localllm.cli.model_desk import ModelDesk
    from localllm_tui.control.desk import Wish
    from localllm_tui.models_app import ModelsApp

    take_keys()
    desk = ModelDesk(offline=offline)
    wish = Wish(purpose, context, machine, memory_gb)
    desk.check(wish)
    chosen = ModelsApp(desk, wish).run()
    if chosen:
        from localllm.cli.chat import chat

        chat(model=chosen)
