"""What the slash commands need of a chat (control.chat.Chat), line by line: the same commands as on a screen."""

from __future__ import annotations

import sys
from collections.abc import Callable

from localllm.conversation.history import History, StoredMessage
from localllm_tui.control.attachments import typed_in
from localllm_tui.control.client import ChatClient, ListedModel
from localllm_tui.control.commands import as_text, commands
from localllm_tui.control.session import Answer, Session
from localllm_tui.control.terminal import copy_with_tool, printable
from localllm_tui.control.tools import ToolBox

FOUND_SHOWN = 20


class LineChat:
    """A chat on standard output and error. An answer that is wanted is `wanted`, for whoever runs this to print."""

    def __init__(
        self, client: ChatClient, model: str, session: Session, copy: Callable[[str], bool] = copy_with_tool
    ) -> None:
        self.client = client
        self.model = model
        self.session = session
        self.history: History = session.history
        self.n_ctx: int | None = None
        self.system_asked: str | None = session.system or None
        self.attached: list[tuple[str, str]] = []
        self.answering = False
        self.answer_text = ""
        self.wanted: Answer | None = None
        self.tools = ToolBox()
        self.left = False
        self._copy = copy
        self._editing: StoredMessage | None = None

    async def ask(self, text: str) -> None:
        """Store a question, or what changes a turn, and want an answer."""
        editing, self._editing = self._editing, None
        if editing is not None and editing.role == "assistant":
            self.session.change_answer(editing, text)
            return
        self.session.ask(text, self.attached, instead=editing)
        self.attached = []
        self.wanted = self.session.answer()

    async def say(self, text: str, *, markdown: bool = False) -> None:
        print(text, file=sys.stderr)

    async def open(self, session: Session, at: int = 0) -> None:
        self.session, self._editing = session, None
        if session.turns:
            await self.say(f"{printable(session.title)}: {len(session.turns)} turns")
            await self.redraw()

    async def choose(self, words: str, *, within: bool = False) -> None:
        """List what was found; a number on the next line opens it. `within`: what was found here is listed alone."""
        if within:
            hits = [h for h in self.history.search(words) if h.conversation_id == self.session.id] if words else []
            for hit in hits[:FOUND_SHOWN]:
                print(f"  {'you' if hit.role == 'user' else 'answer'}: {printable(hit.snippet)}", file=sys.stderr)
            await self.say(f"{len(hits)} turns" if words else "/find WORDS")
            return
        found = self.history.list(words or None, limit=FOUND_SHOWN)
        for n, summary in enumerate(found, 1):
            print(f"{n:>3}  {printable(summary.title)}", file=sys.stderr)
        if not found:
            await self.say("nothing found")
            return
        try:
            picked = input("number, or Enter for none: ").strip()
        except EOFError:
            return
        if picked.isdigit() and 1 <= int(picked) <= len(found):
            await self.open(Session(self.history, self.model, conv_id=found[int(picked) - 1].id))

    async def stop_answer(self) -> bool:
        """Nothing runs while a command is typed."""
        return False

    async def answer_again(self, to: StoredMessage | None = None, *, goes_on: bool = False) -> None:
        self.wanted = self.session.answer(to, goes_on=goes_on)

    async def redraw(self) -> None:
        """Print the last turn."""
        if self.session.turns:
            turn = self.session.turns[-1]
            print(printable(turn.content if turn.role == "assistant" else f"> {typed_in(turn)}"))

    async def show_glass(self) -> None:
        """There is no panel without a screen."""

    def refresh_head(self) -> None:
        """There is no head."""

    async def show_models(self) -> None:
        """There is no such screen without a screen."""

    async def use_own_engine(self) -> None:
        """Only the screen can wait for one."""

    async def show_help(self) -> None:
        await self.say(as_text(commands(plain=True)))

    def edit(self, turn: StoredMessage) -> None:
        """The next line stands beside `turn`."""
        self._editing = turn
        print(f"was: {printable(typed_in(turn))}\ntype it anew:", file=sys.stderr)

    def attach(self, name: str, text: str) -> None:
        self.attached.append((name, text))
        print(f"attached {printable(name)}: it goes with the next question", file=sys.stderr)

    def detach(self) -> None:
        self.attached = []

    def use_model(self, name: str, models: list[ListedModel]) -> None:
        self.model = self.session.model = name
        self.n_ctx = next((m.n_ctx for m in models if m.name == name), None)

    def to_clipboard(self, text: str, what: str) -> None:
        done = self._copy(text)
        said = f"copied {what}" if done else "this machine has no tool that takes a copy (pbcopy, wl-copy, xclip, xsel)"
        print(said, file=sys.stderr)

    async def leave(self) -> None:
        self.left = True
