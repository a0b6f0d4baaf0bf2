"""Matrices, cases and lines of equations."""

from __future__ import annotations

from collections.abc import Sequence

from localllm_tui.widgets.boxes import EMPTY, Box, flat, in_row, table

# The brackets around an environment's table, and how its columns are aligned.
TABLES = {
    "matrix": ("", "", "c"), "smallmatrix": ("", "", "c"), "pmatrix": ("(", ")", "c"),
    "bmatrix": ("[", "]", "c"), "Bmatrix": ("{", "}", "c"), "vmatrix": ("|", "|", "c"),
    "Vmatrix": ("‖", "‖", "c"), "array": ("", "", "c"), "cases": ("{", "", "l"),
    "dcases": ("{", "", "l"), "rcases": ("", "}", "l"),
}  # fmt: skip
EQUATIONS = ("align", "aligned", "alignat", "split", "eqnarray", "gather", "gathered", "equation",
          "multline", "flalign")  # fmt: skip


def ruled(rows: Sequence[Sequence[Box]], columns: str, sign: str) -> tuple[list[list[Box]], str]:
    """The rows with the rules between their columns, as in `cc|c`, and the columns' alignments.
    `sign`: of the rules."""
    letters = columns.strip("|")
    filled = [[*row] for row in rows]
    for at, letter in enumerate(letters):
        if letter == "|":
            for row in filled:
                row[at:at] = [_rule(row, sign)]
    return filled, letters.replace("|", "c")


def _rule(row: Sequence[Box], sign: str) -> Box:
    level = in_row(row)
    return Box((sign,) * len(level.lines), level.base)


def aligned_equations(rows: Sequence[Sequence[Box]]) -> Box:
    """Lines of equations, one below the other, and several in a line apart from each other."""
    if not rows:
        return EMPTY
    if len(rows) == 1:
        return in_row(rows[0])
    n_columns = max(map(len, rows))
    columns = "rl" * n_columns if n_columns > 1 else "l"
    return table([_apart(row) for row in rows], columns, 1)


def _apart(row: Sequence[Box]) -> list[Box]:
    """A row with more room before each equation but the first."""
    cells = []
    for n, cell in enumerate(row):
        if n and n % 2 == 0:
            cell = in_row([flat("  "), cell], cell.kind)
        cells.append(cell)
    return cells


def flat_table(rows: Sequence[Sequence[Box]], left: str, right: str) -> Box:
    """A matrix on one line: [a b; c d]."""
    if (left == "{") == (right == "}"):
        inside = flat_rows(rows, " ").text
        return flat(f"{left or '['}{inside}{right or ']'}", "close")
    inside = flat_rows(rows, ", ").text
    if left:
        left += " "
    return flat(f"{left}{inside}{right}", "close")


def flat_rows(rows: Sequence[Sequence[Box]], between: str) -> Box:
    lines = []
    for row in rows:
        cells = [cell.text for cell in row]
        if between == ", ":
            cells = [cell.rstrip(",") for cell in cells]
        lines.append(between.join(cells))
    return flat("; ".join(lines), "row")
