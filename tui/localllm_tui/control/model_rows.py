"""The rows of the screen of models: the plans that fit this machine or another, or the files on
this disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localllm.formatting import byte_size
from localllm_tui.control.interfaces import InstalledModel, PlanChoice, PlanList
from localllm_tui.control.model_list import (
    DISK_COLUMNS,
    PLAN_COLUMNS,
    Pulls,
    disk_texts,
    list_line,
    place_in,
    plan_texts,
)
from localllm_tui.control.terminal import one_line


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A line of the list; `late`: the plan fits and answers too late."""

    key: str
    line: str
    late: bool = False

    def has_all(self, words: Sequence[str]) -> bool:
        text = f"{self.key} {self.line}".lower()
        return all(word in text for word in words)


_NO_PLANS = PlanList("", (), complete=False)


@dataclass(slots=True)
class ModelRows:
    """`disk` is None while not known; `current` is the model that answers now; `faulty` can't be
    loaded."""

    pulls: Pulls
    current: str = ""
    planned: PlanList = _NO_PLANS
    disk: Sequence[InstalledModel] | None = None
    faulty: Sequence[InstalledModel] = ()
    shows_disk: bool = False
    order: str = "best"

    @property
    def of_files(self) -> bool:
        """True if the rows are installed models: by the user's choice, or because nothing is
        planned yet."""
        return self.shows_disk or not (self.planned.complete or self.planned.choices)

    @property
    def ordered(self) -> list[PlanChoice]:
        """Return the model in use first, then the others in the chosen order."""
        return sorted([*self.planned.choices, *self.planned.too_slow], key=self._place)

    def _place(self, choice: PlanChoice) -> tuple[bool, bool, float]:
        late = choice in self.planned.too_slow
        return not self._in_use(choice), late, place_in(self.order, choice)

    def _in_use(self, choice: PlanChoice) -> bool:
        return bool(choice.installed) and choice.installed == self.current

    def choice(self, key: str) -> PlanChoice | None:
        if self.of_files:
            return None
        return next((o for o in self.ordered if o.ref == key), None)

    def model(self, key: str) -> InstalledModel | None:
        return next((m for m in self.disk or () if m.path == key), None)

    def head(self, width: int) -> str:
        columns = DISK_COLUMNS if self.of_files else PLAN_COLUMNS
        return list_line(columns, width, "  model", {c.head: c.head for c in columns})

    def rows(self, width: int, words: Sequence[str]) -> list[ModelRow]:
        """The rows that have all of these words."""
        rows = self._file_rows(width) if self.of_files else self._plan_rows(width)
        return [row for row in rows if row.has_all(words)]

    def _file_rows(self, width: int) -> Iterator[ModelRow]:
        """The files on this disk, the model in use first."""
        for model in sorted(self.disk or (), key=self._is_another):
            mark = " " if self._is_another(model) else "▸"
            name = f"{mark} {one_line(model.name)}"
            yield ModelRow(model.path, list_line(DISK_COLUMNS, width, name, disk_texts(model)))

    def _is_another(self, model: InstalledModel) -> bool:
        return model.name != self.current

    def _plan_rows(self, width: int) -> Iterator[ModelRow]:
        # another quant, or a model that others beat, is in no plan
        used = next((m for m in self.disk or () if m.name == self.current), None)
        if used is not None and not any(self._in_use(o) for o in self.ordered):
            texts = {"quant": used.quant, "memory": byte_size(used.size_bytes)}
            name = f"▸ {one_line(used.name)}"
            yield ModelRow(used.path, list_line(PLAN_COLUMNS, width, name, texts))
        for choice in self.ordered:
            name = f"{self._mark(choice)} {one_line(choice.plan['name'])}"
            line = list_line(PLAN_COLUMNS, width, name, plan_texts(choice))
            yield ModelRow(choice.ref, line, choice in self.planned.too_slow)

    def _mark(self, choice: PlanChoice) -> str:
        """`▸` answers now, `●` is installed, `↓` on its way."""
        pull = self.pulls.get(choice.ref)
        if self._in_use(choice):
            return "▸"
        if choice.installed or (pull is not None and pull.done):
            return "●"
        if pull is not None and not pull.ended:
            return "↓"
        return " "

    def summary(self) -> str:
        if self.shows_disk:
            return self._disk_summary()
        if self.of_files:
            return f"{self._disk_summary()} · planning other models …"
        planned = self.planned
        if not planned.complete:
            return f"{len(planned.choices)} fit so far · planning the others …"
        counts = [f"{len(planned.choices)} fit"]
        counts += [f"{n} {why}" for why, n in planned.left_out.items()]
        if planned.too_slow:
            counts.append(f"{len(planned.too_slow)} answer too slowly")
        summary = f"{', '.join(counts)} · {planned.machine}"
        if self.order == "best":
            return summary
        return f"by {self.order} · {summary}"

    def _disk_summary(self) -> str:
        if self.disk is None:
            return "looking …"
        size = sum(model.size_bytes for model in self.disk)
        summary = f"{len(self.disk)} on this disk, {byte_size(size)}"
        if not self.faulty:
            return summary
        names = ", ".join(one_line(model.name) for model in self.faulty)
        return f"{summary}; cut short, so not listed: {names}"


def wait_words(seconds: int) -> str:
    return f"at most {seconds} s" if seconds else "any time"


def machine_words(machine: str) -> str:
    return machine or "this one"


def memory_words(size_gb: int) -> str:
    return f"{size_gb} GB" if size_gb else "as it has"
