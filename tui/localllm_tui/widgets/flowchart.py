"""Mermaid's flowcharts: their nodes and edges, read from the text."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from localllm_tui.control.terminal import printable

_MAX_NODES = 60
_MAX_EDGES = 100
_LABEL_CELLS = 28
_HEADER = re.compile(r"(?:flowchart|graph)\b *(?:TD|TB|BT|LR|RL)? *;?$")
_STYLING = re.compile(r"(style|classDef|class|linkStyle|click|direction)\b")
_NODE = re.compile(
    r"(?P<id>[\w.]+(?:-[\w.]+)*)(?P<shape>"
    r"\(\((?P<round>[^()]*)\)\)|\(\[(?P<stadium>[^\[\]]*)\]\)|\[\((?P<disk>[^()]*)\)\]"
    r'|\("(?P<quoted>[^"]*)"\)|\["(?P<text>[^"]*)"\]|\{"(?P<asked>[^"]*)"\}'
    r"|\[\[(?P<sub>[^\[\]]*)\]\]|\[[/\\]?(?P<box>[^\[\]]*?)[/\\]?\]|\((?P<soft>[^()]*)\)"
    r"|\{\{(?P<six>[^{}]*)\}\}|\{(?P<choice>[^{}]*)\}|>(?P<flag>[^\]]*)\])?(?::::?\w+)?"
)
_EDGE = re.compile(
    r"(?P<back><)?(?:--+(?P<solid>[^->|]+?)--+|==+(?P<thick>[^=>|]+?)==+|-\.+(?P<dotted>[^.>|-]+?)\.+-|"
    r"--+|==+|-\.+-|~~~)(?P<head>[>ox](?=[\s|\w]))?(?: *\|(?P<label>[^|]*)\|)?"
)


@dataclass(slots=True)
class ChartNode:
    """A node and its place. `x`: its middle column; `rank`: its storey. A node with no lines of text
    is a place where a long edge passes a storey."""

    lines: list[str] = field(default_factory=list)
    corners: str = "┌┐└┘"
    rank: int = 0
    x: int = 0
    width: int = 1


@dataclass(frozen=True, slots=True)
class ChartEdge:
    """An edge between two nodes, by number. `head`: it has an arrow at its end; `back`: at its
    beginning."""

    first: int
    last: int
    label: str = ""
    head: bool = True
    back: bool = False


class _UnreadableChartError(ValueError):
    """A line that is no node, edge or style, or a chart that is too large."""


class Flowchart:
    """The nodes and edges of a chart."""

    def __init__(self) -> None:
        self.nodes: list[ChartNode] = []
        self.edges: list[ChartEdge] = []
        self._ids: dict[str, int] = {}

    def read(self, lines: Sequence[str]) -> bool:
        """Read a chart; False if it can't be read."""
        if not _HEADER.match(lines[0]):
            return False
        try:
            for line in lines[1:]:
                for statement in _statements(line):
                    self._statement(statement)
        except _UnreadableChartError:
            return False
        return bool(self.nodes)

    def _statement(self, text: str) -> None:
        if _STYLING.match(text):
            return
        at, sources = self._group(text, 0)
        while at < len(text):
            edge = _EDGE.match(text, at)
            if edge is None:
                raise _UnreadableChartError(text)
            at, targets = self._group(text, edge.end())
            label = edge["label"] or edge["solid"] or edge["thick"] or edge["dotted"] or ""
            for first in sources:
                for last in targets:
                    self._add(first, last, label, edge)
            sources = targets

    def _add(self, first: int, last: int, label: str, edge: re.Match[str]) -> None:
        if first == last or len(self.edges) == _MAX_EDGES:
            raise _UnreadableChartError("an edge from a node to itself, or too many")
        short = " ".join(_texts(label))
        chart_edge = ChartEdge(
            first, last, short, edge["head"] is not None, edge["back"] is not None
        )
        self.edges.append(chart_edge)

    def _group(self, text: str, at: int) -> tuple[int, list[int]]:
        """The nodes of `A & B` from `at` on, and the place after them."""
        found: list[int] = []
        while True:
            at = _after_space(text, at)
            node = _NODE.match(text, at)
            if node is None:
                raise _UnreadableChartError(text)
            found.append(self._node(node))
            at = _after_space(text, node.end())
            if text[at : at + 1] != "&":
                return at, found
            at += 1

    def _node(self, found: re.Match[str]) -> int:
        number = self._ids.get(found["id"])
        if number is None:
            if len(self.nodes) == _MAX_NODES:
                raise _UnreadableChartError("too many nodes")
            number = self._ids[found["id"]] = len(self.nodes)
            self.nodes.append(ChartNode([printable(found["id"])]))
        if found["shape"]:
            node = self.nodes[number]
            texts = [text for text in found.groups()[2:] if text is not None]
            node.lines = _texts(texts[0]) or [" "]
            node.corners = _corners(found["shape"])
        return number


def _statements(line: str) -> list[str]:
    parts = [line]
    if '"' not in line and "&" not in line:
        parts = line.split(";")
    return [part.strip().rstrip(";") for part in parts if part.strip().rstrip(";")]


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _corners(shape: str) -> str:
    if shape[0] == "{" and shape[1] != "{":
        return "╱╲╲╱"
    if shape[0] == "(":
        return "╭╮╰╯"
    return "┌┐└┘"


def _texts(text: str) -> list[str]:
    """The lines of a text."""
    lines: list[str] = []
    for line in re.split(r"<br\s*/?>|\\n", html.unescape(text.strip().strip('"').strip("`"))):
        lines += textwrap.wrap(printable(line), _LABEL_CELLS)
    return lines
