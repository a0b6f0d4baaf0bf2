"""Models to pull: the lines of the model screen and of the first run, and the downloads while one
chats."""

from __future__ import annotations

import asyncio
import itertools
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(slots=True)
class Pull:
    """One download. `name` is what it is called on this disk once it is `done`; `error` what it
    ended in."""

    ref: str
    now: PullProgress = field(default_factory=lambda: PullProgress("starting"))
    name: str = ""
    error: LocalLLMError | None = None
    ended: bool = False
    announced: bool = False  # its end
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return bool(self.name)

    @property
    def next_steps(self) -> str:
        """What one can do once it has ended."""
        if self.done:
            return f": /model {self.name} uses it"
        if self.error is not None:
            return "; /models goes on"
        return ""

    def words(self) -> str:
        if self.done:
            return f"{self.ref} is here"
        if self.error is not None:
            return f"{self.ref}: {self.error.message}"
        if self.ended:
            return (
                f"{self.ref} stopped at {byte_size(self.now.done_bytes)}: pulling it again "
                "goes "
                "on there"
            )
        now = self.now
        if now.total_bytes:
            share = now.done_bytes / now.total_bytes
        else:
            share = 0.0
        if now.total_bytes:
            of = f" {share:.0%} of {byte_size(now.total_bytes)}"
        else:
            of = ""
        if now.speed_bytes_s:
            speed = f", {byte_size(now.speed_bytes_s)}/s"
        else:
            speed = ""
        if now.left_s is not None:
            left = f", {span(now.left_s)} left"
        else:
            left = ""
        return f"{now.phase} {self.ref}{of}{speed}{left}"


class Pulls(dict[str, Pull]):
    """All downloads of a chat by what is pulled, the newest last."""

    def __init__(self, service: ModelService) -> None:
        super().__init__()
        self.service = service

    def running(self) -> list[Pull]:
        return [p for p in self.values() if not p.ended]

    def newly_ended(self) -> list[Pull]:
        """Those that have ended since this was asked last."""
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
        """Stop at the next progress report; what has arrived stays."""
        if ref in self:
            self[ref].stopping.set()

    def stop_all(self) -> None:
        for ref in self:
            self.stop(ref)

    def words(self) -> str:
        """The running downloads, in a line; "" where there are none."""
        running = self.running()
        if not running:
            return ""
        return running[0].words() + (f" (and {len(running) - 1} more)" if len(running) > 1 else "")

    def _run(self, pull: Pull) -> None:
        def report(progress: PullProgress) -> None:
            if pull.stopping.is_set():
                raise asyncio.CancelledError  # no error that a retry is for
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


_MOST_NAME = 34
_LEAST_NAME = 8
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
    """A column of a list, `cells` wide, shown where a line has at least `from_width` cells."""

    head: str
    cells: int
    from_width: int
    value: Callable[[Any], str]

    def cell(self, text: str) -> str:
        """`text` in its cells: words to the left, figures to the right."""
        side = "<" if self.head in _WORDS else ">"
        return f"{elide(text, self.cells):{side}{self.cells}}"


_WORDS = ("quant", "of usable", " kept by")
PLAN_COLUMNS = (
    Column("quant", 10, 50, lambda c: str(c.plan["variant"]["quant"])),
    Column("quality", 7, 72, lambda c: _points(c.plan)),
    Column("memory", 8, 0, lambda c: byte_size(c.plan["memory"]["total_bytes"])),
    Column(
        "of usable",
        10,
        92,
        lambda c: bar(c.plan["memory"]["total_bytes"], max(1, c.plan["memory"]["limit_bytes"])),
    ),
    Column("context", 8, 92, lambda c: context_words(c.plan["n_ctx"])),
    Column(
        "tok/s",
        9,
        0,
        lambda c: f"{_rate(c.plan['decode_tok_s']['low'])}–{_rate(c.plan['decode_tok_s']['high'])}",
    ),
    Column("wait", 8, 50, lambda c: span(c.wait_s)),
)
DISK_COLUMNS = (
    Column("quant", 10, 0, lambda m: str(m.quant)),
    Column("size", 8, 0, lambda m: byte_size(m.size_bytes)),
    Column(" kept by", 18, 60, lambda m: f" {m.owner}"),
)


def list_line(columns: Sequence[Column], width: int, name: str, texts: Mapping[str, str]) -> str:
    """A line of a list: a name behind two cells of marks, and of these columns, whose texts go by
    their heads, those that there is room for."""
    shown = [column for column in columns if width >= column.from_width]
    taken = sum(column.cells + 1 for column in shown)
    cells = 2 + min(_MOST_NAME, max(_LEAST_NAME, width - 2 - taken))
    name = elide(name, cells)
    parts = [column.cell(texts.get(column.head, "")) for column in shown]
    return " ".join([name + " " * (cells - cell_len(name)), *parts]).rstrip()


def _points(plan: Mapping[str, Any]) -> str:
    return str(round(plan["quality"]["points"]))  # never "-0"


# Orders of the plans: what is best as the planner has it, the fastest, the smallest.
ORDERS: dict[str, Callable[[PlanChoice], float]] = {
    "best": lambda _: 0.0,
    "speed": lambda choice: -float(choice.plan["decode_tok_s"]["value"]),
    "memory": lambda choice: float(choice.plan["memory"]["total_bytes"]),
}


def plan_details(
    choice: PlanChoice, width: int, pull: Pull | None = None, accounts: Sequence[str] = ()
) -> list[str]:
    """What a plan comes to; `accounts` say what of the memory is left for a model."""
    plan = choice.plan
    memory = choice.plan["memory"]
    if pull is not None:
        step = pull.words()
    elif choice.installed:
        step = "installed: Enter uses it here"
    else:
        step = f"Enter pulls {byte_size(plan['variant']['bytes'])}: {choice.ref}"
    used = byte_size(memory["total_bytes"])
    limit = byte_size(memory["limit_bytes"])
    lines = [
        f"{plan['name']}: {_FITS.get(plan['fits'], plan['fits'])}, {used} of {limit} with "
        f"{plan['n_ctx']:,} tokens ({plan['kv_type']})",
        *textwrap.wrap(printable(plan["why"]), max(20, width)),
        f"quality {_points(plan)}: {plan['quality']['basis']}",
        step,
        *accounts[:1],
    ]
    return [elide(line, width) for line in lines]


def disk_details(model: InstalledModel, fit: str, width: int) -> list[str]:
    if model.ours:
        may = "Delete twice removes them"
    else:
        may = "not removed from here"
    lines = [fit or "weighing …", model.path, f"kept by {model.owner}; {may}"]
    wrapped = [textwrap.wrap(printable(line), max(20, width)) for line in lines]
    return [*itertools.chain.from_iterable(wrapped)]


def _rate(tok_s: float) -> str:
    if tok_s < 9.95:
        return f"{tok_s:.1f}"
    return f"{tok_s:.0f}"


FIRST_RUN_KEYS = ("F5", "F6", "F7")
_ALL_MODELS = "  F4  all models, with what each needs and why"
STARTER = (
    "This is the starter model: 135 million parameters in 98 MB, bundled so that there is "
    "something to talk to at once. "
    "It shows how everything works, and is a toy: it often gets things wrong."
)


_OFFERED = "Worth having on this machine; one key pulls one, while you chat on:"
_GUESSED = "By an assumed speed (`localllm device --measure` finds it). One key pulls one:"


@dataclass(slots=True)
class FirstRun:
    """What the page of the first run offers beside the `starter`: plans to pull, None while they
    are made. `guessed`: they go by a speed of memory that is assumed."""

    starter: str
    pulls: Pulls
    choices: Sequence[PlanChoice] | None = None
    guessed: bool = False

    async def plan(self, plans: dict[PlanRequest, PlanList]) -> None:
        """Plan what this machine could run; what is planned joins `plans`."""
        request = PlanRequest()
        found = PlanList("", ())
        with suppress(LocalLLMError):
            found = plans[request] = await asyncio.to_thread(self.pulls.service.plan, request)
        self.choices = found.choices
        self.guessed = found.guessed

    @property
    def best(self) -> list[PlanChoice]:
        """What is offered, a key each: the best that are not the starter."""
        larger = [
            c for c in self.choices or () if not self.starter.startswith(c.ref.partition(":")[0])
        ]
        return larger[: len(FIRST_RUN_KEYS)]

    def lines(self) -> list[str]:
        """The page; as many lines while it is planned as there will be: nothing moves when they
        come."""
        if self.choices is None:
            dots = [f"  {key}  …" for key in FIRST_RUN_KEYS]
            return [STARTER, "", "Planning what this machine could run …", *dots, _ALL_MODELS]
        if not self.best:
            return [STARTER, "", "Nothing larger fits this machine: F4 shows why."]
        offers = [
            f"  {key}  {self._offer(key, choice)}"
            for key, choice in zip(FIRST_RUN_KEYS, self.best, strict=False)
        ]
        return [STARTER, "", _GUESSED if self.guessed else _OFFERED, *offers, _ALL_MODELS]

    def _offer(self, key: str, choice: PlanChoice) -> str:
        pull = self.pulls.get(choice.ref)
        if pull is None:
            speed = choice.plan["decode_tok_s"]
            rate = f"{speed['low']:.0f} to {speed['high']:.0f} tok/s"
            return f"{choice.title}: {byte_size(choice.plan['variant']['bytes'])}, {rate}"
        if pull.done:
            return f"{choice.plan['name']} is here: {key} uses it"
        return pull.words()
