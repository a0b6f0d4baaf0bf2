"""Models to pull: the lines of the model screen and of the first run, and the downloads while one
chats."""

from __future__ import annotations

import asyncio
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rich.cells import cell_len

from localllm.errors import LocalLLMError
from localllm.formatting import byte_size, span
from localllm_tui.control.formatting import bar, elide
from localllm_tui.control.interfaces import (
    InstalledModel,
    ModelService,
    PlanChoice,
    PlanList,
    PlanRequest,
    PullProgress,
)
from localllm_tui.control.terminal import printable

_STARTING = PullProgress("starting")


@dataclass(slots=True)
class Pull:
    """One download. `name` is what it is called on this disk once it is `done`; `error` what it
    ended in."""

    ref: str
    now: PullProgress = _STARTING
    name: str = ""
    error: LocalLLMError | None = None
    ended: bool = False
    announced: bool = False  # its end
    goes_on: bool = False  # the chat goes on with this model when it is installed
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return bool(self.name)

    @property
    def next_steps(self) -> str:
        """The next steps after it has ended."""
        if self.done and not self.goes_on:
            return f": /model {self.name} uses it"
        if self.error is not None:
            return "; /models resumes it"
        return ""

    def words(self) -> str:
        if self.done:
            return f"{self.ref} is installed"
        if self.error is not None:
            return f"{self.ref}: {self.error.message}"
        now = self.now
        if self.ended:
            at = byte_size(now.done_bytes)
            return f"{self.ref} stopped at {at}: pulling it again continues from there"
        words = f"{now.phase} {self.ref}"
        if now.total_bytes:
            share = now.done_bytes / now.total_bytes
            words += f" {share:.0%} of {byte_size(now.total_bytes)}"
        if now.speed_bytes_s:
            words += f", {byte_size(now.speed_bytes_s)}/s"
        if now.left_s is not None:
            words += f", {span(now.left_s)} left"
        return words


class Pulls(dict[str, Pull]):
    """All downloads of a chat by what is pulled, the newest last."""

    def __init__(self, service: ModelService) -> None:
        super().__init__()
        self.service = service

    def running(self) -> list[Pull]:
        return [p for p in self.values() if not p.ended]

    def newly_ended(self) -> list[Pull]:
        """Return the downloads that ended since the last call."""
        ended = [p for p in self.values() if p.ended and not p.announced]
        for pull in ended:
            pull.announced = True
        return ended

    def start(self, ref: str) -> Pull:
        """Start or resume a download; one in progress is left alone."""
        pull = self.pop(ref, None)
        if pull is None or pull.ended:
            pull = Pull(ref)
            threading.Thread(
                target=self._run, args=(pull,), name=f"pull {ref}", daemon=True
            ).start()
        self[ref] = pull
        return pull

    def stop(self, ref: str) -> None:
        """Stop at the next progress report; the downloaded part remains."""
        if ref in self:
            self[ref].stopping.set()

    def stop_all(self) -> None:
        for ref in self:
            self.stop(ref)

    def words(self) -> str:
        """The running downloads in a line; "" if there is no download."""
        running = self.running()
        if not running:
            return ""
        words = running[0].words()
        if len(running) > 1:
            words += f" (and {len(running) - 1} more)"
        return words

    def _run(self, pull: Pull) -> None:
        def report(progress: PullProgress) -> None:
            if pull.stopping.is_set():
                raise asyncio.CancelledError  # a retry can't fix this error
            pull.now = progress

        try:
            pull.name = self.service.pull(pull.ref, report)
            pull.now = replace(pull.now, phase="done", left_s=None)
        except asyncio.CancelledError:
            pass
        except LocalLLMError as e:
            pull.error = e
        except Exception as e:
            pull.error = LocalLLMError(f"the download failed: {e}")
        finally:
            pull.ended = True


_MAX_NAME = 34
_MIN_NAME = 8
_FITS = {"yes": "fits", "tight": "tight", "split": "split", "no": "too large"}


def context_words(tokens: int) -> str:
    """Tokens of context: 32k; 0 is the purpose's own."""
    if not tokens:
        return "by purpose"
    if tokens >= 1024:
        return f"{tokens // 1024}k"
    return str(tokens)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a list, `cells` wide, shown if a line has at least `from_width` cells."""

    head: str
    cells: int
    from_width: int

    def cell(self, text: str) -> str:
        """`text` in its cells: words to the left, figures to the right."""
        side = "<" if self.head in _WORDS else ">"
        return f"{elide(text, self.cells):{side}{self.cells}}"


_WORDS = ("quant", "of usable", " kept by")
PLAN_COLUMNS = (
    Column("quant", 10, 50),
    Column("quality", 7, 72),
    Column("memory", 8, 0),
    Column("of usable", 10, 92),
    Column("context", 8, 92),
    Column("tok/s", 9, 0),
    Column("answer in", 9, 50),
)
DISK_COLUMNS = (Column("quant", 10, 0), Column("size", 8, 0), Column(" kept by", 18, 60))


def plan_texts(choice: PlanChoice) -> dict[str, str]:
    """The texts of a plan, by the heads of PLAN_COLUMNS."""
    plan = choice.plan
    needed = plan["memory"]["total_bytes"]
    limit = plan["memory"]["limit_bytes"]
    speed = plan["decode_tok_s"]
    return {
        "quant": plan["variant"]["quant"],
        "quality": _points(plan),
        "memory": byte_size(needed),
        "of usable": bar(needed, max(1, limit)),
        "context": context_words(plan["n_ctx"]),
        "tok/s": f"{_rate(speed['low'])}–{_rate(speed['high'])}",
        "answer in": span(choice.wait_s),
    }


def disk_texts(model: InstalledModel) -> dict[str, str]:
    """The texts of a model on this disk, by the heads of DISK_COLUMNS."""
    return {
        "quant": model.quant,
        "size": byte_size(model.size_bytes),
        " kept by": f" {model.owner}",
    }


def list_line(columns: Sequence[Column], width: int, name: str, texts: Mapping[str, str]) -> str:
    """A line of a list: two cells of marks and a name, then those columns that fit. `texts` are by
    the heads of the columns."""
    shown = [column for column in columns if width >= column.from_width]
    used_cells = sum(column.cells + 1 for column in shown)
    cells = 2 + min(_MAX_NAME, max(_MIN_NAME, width - 2 - used_cells))
    name = elide(name, cells)
    line = name + " " * (cells - cell_len(name))
    for column in shown:
        line += " " + column.cell(texts.get(column.head, ""))
    return line.rstrip()


def _points(plan: Mapping[str, Any]) -> str:
    """The quality in points, or a word: nobody needs to decode a negative figure or a guess."""
    quality = plan["quality"]
    if not quality.get("rated", True):
        return "unrated"
    if round(quality["points"]) < 0:
        return "weak"
    return str(round(quality["points"]))  # never "-0"


# Orders of the plans: the planner's own, the fastest first, the smallest first.
ORDERS = ("best", "speed", "memory")


def place_in(order: str, choice: PlanChoice) -> float:
    """A number by which to sort plans in one of the ORDERS; plans of equal numbers keep the
    planner's order."""
    if order == "speed":
        return -float(choice.plan["decode_tok_s"]["value"])
    if order == "memory":
        return float(choice.plan["memory"]["total_bytes"])
    return 0.0


def plan_details(
    choice: PlanChoice, width: int, pull: Pull | None = None, accounts: Sequence[str] = ()
) -> Iterator[str]:
    """The lines about a plan; `accounts` say how much of each memory is left for a model."""
    plan = choice.plan
    used = byte_size(plan["memory"]["total_bytes"])
    limit = byte_size(plan["memory"]["limit_bytes"])
    fits = f"{plan['name']}: {_FITS[plan['fits']]}, {used} of {limit}"
    yield f"{fits} with {plan['n_ctx']:,} tokens ({plan['kv_type']})"
    for text in (choice.note, plan["why"]):
        yield from textwrap.wrap(printable(text), max(20, width))
    yield f"quality {_points(plan)}: {plan['quality']['basis']}"
    if pull is not None:
        yield pull.words()
    elif choice.installed:
        yield "installed: Enter uses it here"
    else:
        yield f"Enter pulls {byte_size(plan['variant']['bytes'])}: {choice.ref}"
    yield from accounts[:1]


def disk_details(model: InstalledModel, fit: str, width: int) -> Iterator[str]:
    """The lines about a model's files on this disk."""
    ownership = f"owned by {model.owner}; it can't be removed here"
    if model.ours:
        ownership = f"owned by {model.owner}; Delete twice removes them"
    for line in (fit, model.path, ownership):
        yield from textwrap.wrap(printable(line), max(20, width))


def _rate(tok_s: float) -> str:
    if tok_s < 9.95:
        return f"{tok_s:.1f}"
    return f"{tok_s:.0f}"


FIRST_RUN_KEYS = ("F5", "F6", "F7")
_ALL_MODELS = "  F4  all models, with what each needs and why"
STARTER = (
    "This is the starter model: 135 million parameters in 98 MB, bundled for a first chat "
    "without a download. It is a toy that shows how everything works, and it is often wrong."
)


_OFFERED = (
    "Models for this machine. One key downloads one while you chat; the chat then goes on with it:"
)
_GUESSED = (
    "Models for this machine, if its memory is as fast as assumed (`localllm device --measure` "
    "measures it). One key downloads one while you chat; the chat then goes on with it:"
)
# The connection for which a download's time is given: 50 Mbit/s.
_LINK_BYTES_S = 6_250_000


def _is_unmeasured(choice: PlanChoice) -> bool:
    """True if the quality of a model is a rank that was guessed by its size."""
    return not choice.plan["quality"].get("rated", True)


@dataclass(slots=True)
class FirstRun:
    """The page of the first run: plans to pull in place of the `starter`, None until they are made.
    `guessed`: they assume a speed of the memory."""

    starter: str
    pulls: Pulls
    choices: Sequence[PlanChoice] | None = None
    guessed: bool = False

    async def plan(self, plans: dict[PlanRequest, PlanList]) -> None:
        """Plan the models that this machine could run, and add the plans to `plans`, unless they
        are there."""
        request = PlanRequest()
        found = plans.get(request, PlanList("", ()))
        if request not in plans:
            with suppress(LocalLLMError):
                found = plans[request] = await asyncio.to_thread(self.pulls.service.plan, request)
        self.choices = found.choices
        self.guessed = found.guessed

    @property
    def best(self) -> list[PlanChoice]:
        """The best plans that are not the starter, one for each key: measured models first."""
        larger = []
        for choice in self.choices or ():
            model = choice.ref.partition(":")[0]
            if not self.starter.startswith(model):
                larger.append(choice)
        larger.sort(key=_is_unmeasured)  # the order is otherwise kept
        return larger[: len(FIRST_RUN_KEYS)]

    def lines(self) -> list[str]:
        """The lines of the page. It has as many lines before the plans are made as after."""
        if self.choices is None:
            dots = [f"  {key}  …" for key in FIRST_RUN_KEYS]
            return [STARTER, "", "Planning what this machine could run …", *dots, _ALL_MODELS]
        if not self.best:
            return [STARTER, "", "Nothing larger fits this machine: F4 shows why."]
        lines = [STARTER, "", _GUESSED if self.guessed else _OFFERED]
        for key, choice in zip(FIRST_RUN_KEYS, self.best, strict=False):
            lines.append(f"  {key}  {self._offer(key, choice)}")
        return [*lines, _ALL_MODELS]

    def _offer(self, key: str, choice: PlanChoice) -> str:
        pull = self.pulls.get(choice.ref)
        if pull is None:
            speed = choice.plan["decode_tok_s"]
            size_bytes = choice.plan["variant"]["bytes"]
            minutes = max(1, round(size_bytes / _LINK_BYTES_S / 60))
            return (
                f"{choice.title}: {byte_size(size_bytes)} ({minutes:,} min at 50 Mbit/s), "
                f"{speed['low']:.0f} to {speed['high']:.0f} tok/s"
            )
        if pull.done:
            return f"{choice.plan['name']} is installed: {key} uses it"
        return pull.words()
