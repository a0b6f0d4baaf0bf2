"""The screen of models: plans that fit the sliders' settings, files on this disk, and downloads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.errors import LocalLLMError, UsageError
from localllm.formatting import byte_size
from localllm_tui.bindings import HasKeys
from localllm_tui.control import commands, wording
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import elide, in_lines
from localllm_tui.control.interfaces import (
    CONTEXTS,
    MACHINES,
    MEMORIES_GB,
    PURPOSE_WORDS,
    WAITS_S,
    InstalledModel,
    PlanChoice,
    PlanList,
    PlanRequest,
)
from localllm_tui.control.keys import MODELS, hints
from localllm_tui.control.model_list import (
    ORDERS,
    Pulls,
    context_words,
    disk_details,
    plan_details,
)
from localllm_tui.control.model_rows import ModelRows, machine_words, memory_words, wait_words
from localllm_tui.control.terminal import printable
from localllm_tui.screens.background_work import start
from localllm_tui.screens.dialogs import TextDialog
from localllm_tui.widgets.inputs import SearchInput
from localllm_tui.widgets.slider import Slider

T = TypeVar("T")

_POLL_S = 0.2
# Rows are shown this long after they were planned, at most.
ARRIVED_S = 0.1
# One line of details per this many lines of the screen, because the list is more important.
_ROWS_PER_DETAIL = 6
_MAX_DETAILS = 6
# Minimum columns of a screen for two settings in a line.
_MIN_DETAILS_WIDTH = 64


class ModelsScreen(HasKeys, ModalScreen[str | None], keys=MODELS):
    """Dismisses with the name of a model that is installed and is to be used, or None. `current`
    answers now."""

    DEFAULT_CSS = """
    ModelsScreen { background: $background; }
    ModelsScreen > Vertical { padding: 0 2; }
    ModelsScreen #summary { height: auto; max-height: 2; text-style: bold; }
    ModelsScreen .sliders { height: 1; }
    ModelsScreen .sliders > Slider { margin-right: 2; }
    ModelsScreen #columns { height: 1; color: $hint; text-wrap: nowrap; margin-top: 1; }
    ModelsScreen OptionList {
        height: 1fr; border: none; padding: 0; background: transparent; text-wrap: nowrap; text-overflow: ellipsis;
    }
    ModelsScreen OptionList > .option-list--option { padding: 0; }
    ModelsScreen OptionList:focus { border: none; }
    ModelsScreen.-narrow .sliders { layout: vertical; height: 2; }
    ModelsScreen.-disk Slider { display: none; }
    ModelsScreen.-disk .sliders { display: none; }
    ModelsScreen #details { height: auto; max-height: 7; border-top: solid $panel; }
    ModelsScreen #pulls { height: auto; max-height: 3; color: $accent-text; }
    ModelsScreen #keys { height: auto; color: $hint; }
    ModelsScreen Input { display: none; }
    ModelsScreen Input.-asked { display: block; }
    """

    def __init__(
        self,
        pulls: Pulls,
        *,
        current: str = "",
        request: PlanRequest | None = None,
        known: dict[PlanRequest, PlanList] | None = None,
    ) -> None:
        """`known` are plans made before, shown until they are made again; those made here join
        them."""
        super().__init__()
        self._known: dict[PlanRequest, PlanList] = known if known is not None else {}
        self._service = pulls.service
        self._pulls = pulls
        self.rows = ModelRows(pulls, current)
        self._request = request or PlanRequest()
        self._fits: dict[str, str] = {}
        self._removing = ""
        self._done: set[str] = set()
        self._replan_wanted = self.planning = False
        self._arrived: list[PlanChoice] = []  # of the plan in progress
        self._moved = False  # by the user, from the first row
        self._first_key = ""

    def compose(self) -> ComposeResult:
        request = self._request
        machines = [*dict.fromkeys(("", *MACHINES, request.machine))]
        contexts = sorted({*CONTEXTS, request.context})
        with Vertical():
            yield Static("", id="summary", markup=False)
            yield Slider(
                "context", "←→", contexts, context_words, value=request.context, name="context"
            )
            with Horizontal(classes="sliders"):
                yield Slider(
                    "for",
                    "P",
                    [*PURPOSE_WORDS],
                    PURPOSE_WORDS.__getitem__,
                    value=request.purpose,
                    name="purpose",
                    scale=False,
                )
                yield Slider(
                    "answer in",
                    "T",
                    WAITS_S,
                    wait_words,
                    value=int(request.longest_wait_s),
                    name="wait",
                )
            with Horizontal(classes="sliders"):
                yield Slider(
                    "machine",
                    "M",
                    machines,
                    machine_words,
                    value=request.machine,
                    name="device",
                    scale=False,
                )
                yield Slider(
                    "memory",
                    "G",
                    MEMORIES_GB,
                    memory_words,
                    value=int(request.memory_gb),
                    name="memory",
                )
            yield SearchInput(
                placeholder='a machine: "M4 Max 64GB", "2x rtx 3090", "dgx spark --with m4 max --link 10gbe"',
                id="machine",
                compact=True,
            )
            yield SearchInput(
                placeholder="part of a name: the list shows the matches", id="filter", compact=True
            )
            yield Static("", id="columns", markup=False)
            yield OptionList()
            yield Static("", id="details", markup=False)
            yield Static("", id="pulls", markup=False)
            yield Static("", id="keys", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._write("#summary", "planning …")
        self.set_interval(_POLL_S, self._show_downloads)
        self.set_interval(ARRIVED_S, self._show_arrived)
        self._replan()
        start(self, self._look_at_disk, "disk")  # known long before the plan

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < _MIN_DETAILS_WIDTH, "-narrow")
        self.call_after_refresh(self._list)

    # -- planning ----------------------------------------------------------------------------------

    def on_slider_moved(self) -> None:
        self.rows.shows_disk = False
        self._replan()

    def _plan_request(self) -> PlanRequest:
        return PlanRequest(
            self.query_one("#purpose", Slider).value,
            self.query_one("#context", Slider).value,
            self.query_one("#device", Slider).value,
            float(self.query_one("#memory", Slider).value),
            float(self.query_one("#wait", Slider).value),
        )

    def _replan(self) -> None:
        """Plan in a thread. Of the requests made during planning, only the last one is planned
        next."""
        self._replan_wanted = True
        if self._plan_request() in self._known:
            self.rows.planned = self._known[self._plan_request()]
            self._list()
        if not self.planning:
            self.planning = True
            start(self, self._plan, "plan", exclusive=False)

    async def _plan(self) -> None:
        try:
            while self._replan_wanted:
                self._replan_wanted = False
                request = self._plan_request()
                self._arrived = []
                planned = await self._answer(self._service.plan, request, self._arrive)
                if planned is not None:
                    self.rows.planned = self._known[request] = planned
                    self._request = request
                    self._list()
        finally:
            self.planning = False

    async def _answer(self, method: Callable[..., T], *given: object) -> T | None:
        """The service's result; None if it raises an error, which is shown as a notification."""
        try:
            return await asyncio.to_thread(method, *given)
        except LocalLLMError as e:
            self.notify(wording.in_a_line(e), severity="warning", markup=False)
            return None

    def _arrive(self, choice: PlanChoice) -> None:
        """Keep a plan, which a thread made. The first one is listed at once, others soon."""
        self._arrived.append(choice)
        if len(self._arrived) == 1:
            self.call_later(self._show_arrived)

    def _show_arrived(self) -> None:
        """List what is planned so far, the best first, unless it was planned before or is not what
        the sliders say any more."""
        request = self._plan_request()
        if not self.planning or self._replan_wanted or request in self._known:
            return
        arrived = sorted(self._arrived, key=_score, reverse=True)
        so_far = PlanList("", tuple(arrived), complete=False)
        if arrived and so_far != self.rows.planned:
            self._request = request
            self.rows.planned = so_far
            self._list()

    # -- what is listed ----------------------------------------------------------------------------

    @property
    def _columns(self) -> int:
        return max(30, self.size.width - 5)

    def _list(self) -> None:
        listed = self.query_one(OptionList)
        self.set_class(self.rows.shows_disk, "-disk")
        at = listed.highlighted
        was = self._highlighted_key()
        self._moved = self._moved or was != self._first_key
        self._write("#columns", self.rows.head(self._columns))
        self._write("#summary", in_lines(self.rows.summary(), self._columns))
        words = self.query_one("#filter", Input).value.lower().split()
        rows = self.rows.rows(self._columns, words)
        options = []
        for row in rows:
            line = Content.styled(row.line, "$hint" if row.late else "")
            options.append(Option(line, id=row.key))
        listed.set_options(options)
        ids = [row.key for row in rows]
        self._first_key = ids[0] if ids else ""
        if self._moved and was in ids:
            listed.highlighted = ids.index(was)
        elif self._moved and rows:
            listed.highlighted = min(at or 0, len(rows) - 1)
        elif rows:  # better plans may have come in above the first one
            listed.highlighted = 0
            self.call_after_refresh(listed.scroll_home, animate=False)
        self._show_details()

    def _write(self, where: str, text: str) -> None:
        self.query_one(where, Static).update(text)

    def _highlighted_key(self) -> str:
        option = self.query_one(OptionList).highlighted_option
        if option is not None:
            return option.id or ""
        return ""

    @property
    def _choice(self) -> PlanChoice | None:
        return self.rows.choice(self._highlighted_key())

    @property
    def _model(self) -> InstalledModel | None:
        return self.rows.model(self._highlighted_key())

    def _show_details(self) -> None:
        keys = hints("models")
        model = self._model
        if self.rows.shows_disk:
            removable = model is not None and model.ours
            keys = hints("on disk", without="" if removable else "models.remove")
            if model is not None and model.path not in self._fits:
                start(self, partial(self._weigh, model), "fit")
        self._write("#keys", in_lines(keys, self._columns))
        max_rows = min(_MAX_DETAILS, self.size.height // _ROWS_PER_DETAIL)
        if self.rows.shows_disk:
            max_rows = _MAX_DETAILS  # there are no sliders
        self._write("#details", "\n".join(islice(self._details(), max_rows)))

    def _details(self) -> Iterator[str]:
        """The lines about the highlighted row."""
        choice = self._choice
        model = self._model
        if choice is not None:
            pull = self._pulls.get(choice.ref)
            for line in plan_details(choice, self._columns, pull, self.rows.planned.accounts):
                yield elide(line, self._columns)
        elif model is not None:
            unknown = "weighing …" if self.rows.shows_disk else "Enter uses it"
            fit = self._fits.get(model.path, unknown)
            yield from disk_details(model, fit, self._columns)
        elif not self.rows.of_files:
            yield "nothing fits: try a shorter context or another purpose"

    async def _weigh(self, model: InstalledModel) -> None:
        try:
            self._fits[model.path] = await asyncio.to_thread(self._service.fit, model)
        except LocalLLMError as e:
            self._fits[model.path] = e.message
        self._show_details()

    def on_option_list_option_highlighted(self) -> None:
        self._removing = ""
        self._show_details()

    def _show_downloads(self) -> None:
        ended = [p for p in self._pulls.values() if p.ended and p.ref not in self._done]
        self._done = {p.ref for p in self._pulls.values() if p.ended}
        shown = [p.words() for p in [*self._pulls.running(), *ended]]
        if self._pulls.running() or ended:
            self._write("#pulls", "\n".join(elide(line, self._columns) for line in shown[-3:]))
            self._show_details()
        if ended:
            start(self, self._look_at_disk, "disk")
            self._replan()

    # -- keys --------------------------------------------------------------------------------------

    def on_option_list_option_selected(self) -> None:
        """Use the model if it is installed, otherwise pull it."""
        choice = self._choice
        model = self._model
        if model is not None:
            self.dismiss(model.name)
        if choice is None:
            return
        name = choice.installed
        if not name and choice.ref in self._pulls:
            name = self._pulls[choice.ref].name
        if name:
            self.dismiss(name)
        elif self._request.machine:
            self.notify(
                "that machine is simulated: return to this machine to pull", severity="warning"
            )
        else:
            self._pulls.start(choice.ref)
            self._list()

    def action_close(self) -> None:
        box = next(iter(self.query("Input.-asked").results(Input)), None)
        if box is None:
            self.dismiss(None)
            return
        if box.id == "filter":
            box.value = ""
        self._ask(f"#{box.id}", is_explicit=False)

    def action_step(self, which: str, step: int) -> None:
        """Move a slider, even without the focus."""
        if not isinstance(self.focused, Input):
            self.query_one(f"#{which}", Slider).action_move(step)

    def action_next(self, which: str) -> None:
        """Choose a slider's next value, even without the focus."""
        if not isinstance(self.focused, Input):
            self.query_one(f"#{which}", Slider).action_next()

    def action_ask(self, which: str) -> None:
        """Open the input for another machine, or for words that the rows must have."""
        self._ask(f"#{which}", is_explicit=True)

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self._list()

    def _ask(self, which: str, *, is_explicit: bool) -> None:
        box = self.query_one(which, Input)
        box.set_class(is_explicit, "-asked")
        if is_explicit:
            box.focus()
        else:
            self.query_one(OptionList).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self.query_one(OptionList).focus()  # the filter stays active until Esc
            return
        self.query_one("#device", Slider).choose(event.value.strip())
        self._ask("#machine", is_explicit=False)

    def action_why(self) -> None:
        if self._choice is not None:
            start(self, partial(self._explain, self._choice), "why")

    async def _explain(self, choice: PlanChoice) -> None:
        columns = min(108, self.size.width - 8)
        lines = await self._answer(self._service.explain, self._request, choice.ref, columns)
        if lines is not None:
            why = printable("\n".join([*lines, "", *choice.plan["reasons"]]))
            await self.app.push_screen(TextDialog(f"why {choice.title}", why))

    def action_sort(self) -> None:
        """List by the next order: best, speed, memory."""
        self.rows.order = ORDERS[(ORDERS.index(self.rows.order) + 1) % len(ORDERS)]
        self._moved = False
        self._first_key = self._highlighted_key()
        self._list()

    def action_disk(self) -> None:
        self.rows.shows_disk = not self.rows.shows_disk
        self._list()

    async def _look_at_disk(self) -> None:
        found = await asyncio.to_thread(self._service.on_disk)
        self.rows.disk = [model for model in found if not model.fault]
        self.rows.faulty = [model for model in found if model.fault]
        self._list()

    def action_stop(self) -> None:
        """Stop the download of the plan, else the newest."""
        running = [pull.ref for pull in self._pulls.running()]
        if self._choice is not None and self._choice.ref in running:
            self._pulls.stop(self._choice.ref)
        elif running:
            self._pulls.stop(running[-1])

    def action_remove(self) -> None:
        """Remove files after the key is pressed twice."""
        model = self._model
        if model is None:
            self.notify("select an installed model to remove its files: D lists them", markup=False)
        elif model.name == self.rows.current:
            self.notify(
                f"{model.name} is used by this chat: use another model first",
                severity="warning",
                markup=False,
            )
        elif not model.ours:
            self.notify(
                f"{model.name} is owned by {model.owner}: remove it with that program",
                severity="warning",
                markup=False,
            )
        elif self._removing != model.path:
            self._removing = model.path
            size = byte_size(model.size_bytes)
            self._write("#details", f"Delete again removes {model.name} ({size}) permanently")
        else:
            self._removing = ""
            start(self, partial(self._remove, model), "remove")

    async def _remove(self, model: InstalledModel) -> None:
        freed = await self._answer(self._service.remove, model)
        if freed is not None:
            self.notify(f"removed {model.name}: {byte_size(freed)} freed", markup=False)
        await self._look_at_disk()
        self._replan()


def _score(choice: PlanChoice) -> float:
    return float(choice.plan["score"])


async def open_models(screen: Screen[Any], chat: ChatController, _: str) -> None:
    """/models: show what would fit and what is installed, and use what is chosen there. Raises
    UsageError."""
    if chat.pulls is None:
        raise UsageError("this chat has no list of models")

    def chosen(name: str | None) -> None:
        if name and name != chat.model:
            screen.call_later(commands.run_and_report, chat, "model", name)

    models = ModelsScreen(chat.pulls, current=chat.model, known=chat.plans)
    await screen.app.push_screen(models, chosen)
