"""What the screen of models lists: the plans that fit this machine or another, or the files on this
disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.formatting import byte_size
from localllm_tui.control.interfaces import InstalledModel, PlanChoice, PlanList
from localllm_tui.control.model_list import (
    DISK_COLUMNS,
    ORDERS,
    PLAN_COLUMNS,
    Pulls,
    list_line,
)
from localllm_tui.control.terminal import one_line


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A line of the list; `late`: the plan fits and answers too late."""

    key: str
    line: str
    late: bool = False


_NOTHING_YET = PlanList("", (), complete=False)


@dataclass(slots=True)
class ModelRows:
    """`disk` is None while not known; `current` is the model that answers now."""

    pulls: Pulls
    current: str = ""
    planned: PlanList = _NOTHING_YET
    disk: Sequence[InstalledModel] | None = None
    shows_disk: bool = False
    order: str = "best"

    @property
    def of_files(self) -> bool:
        """Whether the rows are files on this disk: asked for, or all that is known yet."""
        return self.shows_disk or not (self.planned.complete or self.planned.choices)

    @property
    def ordered(self) -> list[PlanChoice]:
        """The model in use first, then in the order that was asked for."""
        late = self.planned.too_slow
        by = ORDERS[self.order]
        return sorted(
            [*self.planned.choices, *late], key=lambda o: (not self._in_use(o), o in late, by(o))
        )

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
        if self.of_files:
            rows = self._file_rows(width)
        else:
            rows = self._plan_rows(width)
        for word in words:
            rows = [row for row in rows if word in f"{row.key} {row.line}".lower()]
        return rows

    def _file_rows(self, width: int) -> list[ModelRow]:
        rows = []
        for m in sorted(self.disk or (), key=lambda m: m.name != self.current):
            name = ("▸ " if m.name == self.current else "  ") + one_line(m.name)
            texts = {c.head: c.value(m) for c in DISK_COLUMNS}
            rows.append(ModelRow(m.path, list_line(DISK_COLUMNS, width, name, texts)))
        return rows

    def _plan_rows(self, width: int) -> list[ModelRow]:
        rows = []
        # another quant, or a model that others beat: no plan has it
        used = next((m for m in self.disk or () if m.name == self.current), None)
        if used is not None and not any(self._in_use(o) for o in self.ordered):
            texts = {"quant": used.quant, "memory": byte_size(used.size_bytes)}
            name = f"▸ {one_line(used.name)}"
            rows.append(ModelRow(used.path, list_line(PLAN_COLUMNS, width, name, texts)))
        for o in self.ordered:
            name = f"{self._mark(o)} {one_line(o.plan['name'])}"
            texts = {c.head: c.value(o) for c in PLAN_COLUMNS}
            rows.append(
                ModelRow(
                    o.ref, list_line(PLAN_COLUMNS, width, name, texts), o in self.planned.too_slow
                )
            )
        return rows

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
        if self.of_files:
            said = "looking …"
            if self.disk is not None:
                said = (
                    f"{len(self.disk)} on this disk, "
                    f"{byte_size(sum(m.size_bytes for m in self.disk))}"
                )
            if self.shows_disk:
                return said
            return f"{said} · planning what else fits …"
        if not self.planned.complete:
            return f"{len(self.planned.choices)} fit so far · planning the others …"
        order = "" if self.order == "best" else f"by {self.order} · "
        if self.planned.too_slow:
            slow = f", {len(self.planned.too_slow)} answer too late"
        else:
            slow = ""
        others = "".join(f", {n} {why}" for why, n in self.planned.left_out.items())
        return f"{order}{len(self.planned.choices)} fit{others}{slow} · {self.planned.machine}"
