"""Draws flowcharts in box characters: nodes in storeys, edges between them.

The storeys follow Sugiyama, Tagawa and Toda (1981): the longest path to a node, edges of a cycle
reversed, and nodes near the middle of their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from localllm_tui.widgets.canvas import Canvas
from localllm_tui.widgets.flowchart import ChartEdge, ChartNode, Flowchart

_GAPS = (3, 4, 5, 6, 7)  # cells between nodes: with another gap, lines are in other columns
_SWEEPS = 4
_MAX_ROWS = 200


def flowchart_rows(lines: Sequence[str], width: int) -> list[str]:
    """The rows of a chart whose first line is `flowchart` or `graph`; [] if it can't be read or
    needs more cells than `width`."""
    for gap in _GAPS:
        chart = Flowchart()
        if not chart.read(lines):
            return []
        layout = _ChartLayout(chart.nodes, chart.edges, gap)
        if layout.width > width:
            return []
        rows = layout.drawn()
        if rows:
            return rows
    return []


class _ChartLayout:
    def __init__(self, nodes: list[ChartNode], edges: Sequence[ChartEdge], gap: int) -> None:
        self._nodes = nodes
        self._gap = gap
        self._edges: list[ChartEdge] = []  # from each storey to the next
        down = _without_cycles(len(nodes), edges)
        _set_ranks(nodes, down)
        for edge in down:
            self._add(edge)
        n_ranks = 1 + max(node.rank for node in nodes)
        self._ranks: list[list[int]] = [[] for _ in range(n_ranks)]
        for n, node in enumerate(nodes):
            self._ranks[node.rank].append(n)
        self._into: dict[int, list[ChartEdge]] = {n: [] for n in range(len(nodes))}
        self._out: dict[int, list[ChartEdge]] = {n: [] for n in range(len(nodes))}
        for edge in self._edges:
            self._into[edge.last].append(edge)
            self._out[edge.first].append(edge)
        self._order()
        self._place()
        self.width = max(node.x + node.width // 2 + 1 for node in nodes)

    def _add(self, edge: ChartEdge) -> None:
        """Add an edge, in pieces if it passes storeys."""
        at = edge.first
        label = edge.label
        back = edge.back
        for rank in range(self._nodes[edge.first].rank + 1, self._nodes[edge.last].rank):
            self._nodes.append(ChartNode(rank=rank))
            passing = len(self._nodes) - 1
            self._edges.append(ChartEdge(at, passing, label, False, back))
            at = passing
            label = ""
            back = False
        self._edges.append(ChartEdge(at, edge.last, label, edge.head, back))

    # -- places ------------------------------------------------------------------------------------

    def _order(self) -> None:
        """Order the nodes of each storey by the middle of their neighbours."""
        place: dict[int, float] = {}
        for rank in self._ranks:
            place |= {n: float(k) for k, n in enumerate(rank)}
        for sweep in range(_SWEEPS):
            ranks = self._ranks[:: 1 - 2 * (sweep % 2)]
            for rank in ranks:
                middles = {}
                for n in rank:
                    near = self._near(n, above=sweep % 2 == 0) or [n]
                    middles[n] = sum(place[m] for m in near) / len(near)
                rank.sort(key=middles.__getitem__)
                for k, n in enumerate(rank):
                    place[n] = float(k)

    def _near(self, n: int, *, above: bool) -> list[int]:
        if above:
            return [edge.first for edge in self._into[n]]
        return [edge.last for edge in self._out[n]]

    def _place(self) -> None:
        for n, node in enumerate(self._nodes):
            node.width = self._width_of(n)
        for rank in self._ranks:
            x = 0
            for n in rank:
                self._nodes[n].x = x + self._nodes[n].width // 2
                x += self._nodes[n].width + self._gap
        for sweep in range(_SWEEPS):
            above = sweep % 2 == 0
            ranks = self._ranks[:: 1 - 2 * (sweep % 2)]
            for rank in ranks:
                self._pull(rank, above=above)
        left = min(node.x - node.width // 2 for node in self._nodes)
        for node in self._nodes:
            node.x -= left

    def _width_of(self, n: int) -> int:
        """An odd number of cells, with room for the edges and the labels above it."""
        lines = self._nodes[n].lines
        into = sum(max(1, cell_len(edge.label)) + 2 for edge in self._into[n])
        if not lines:
            return max(1, cell_len(self._into[n][0].label)) | 1
        return max(max(map(cell_len, lines)) + 4, into, 2 * len(self._starts(n)) + 3) | 1

    def _pull(self, rank: Sequence[int], *, above: bool) -> None:
        """Move the nodes of a storey towards their neighbours, as far as there is room."""
        wanted = []
        for n in rank:
            near = self._near(n, above=above) or [n]
            wanted.append(sum(self._nodes[m].x for m in near) // len(near))
        moved = 0
        right = -(10**6)
        for n, x in zip(rank, wanted, strict=True):
            node = self._nodes[n]
            node.x = max(x, right + self._gap + node.width // 2 + 1)
            right = node.x + node.width // 2
            moved += node.x - x
        for n in rank:
            self._nodes[n].x -= moved // len(rank)

    # -- drawing -----------------------------------------------------------------------------------

    def _starts(self, n: int) -> list[list[ChartEdge]]:
        """The edges that leave a node below, by their first column: those with an arrow at
        the node have a place of their own."""
        together = [edge for edge in self._out[n] if not edge.back]
        starts = [[edge] for edge in self._out[n] if edge.back]
        if together:
            starts.insert(0, together)
        return starts

    def drawn(self) -> list[str]:
        heights = []
        channels = []
        for rank in self._ranks:
            heights.append(max(self._height(n) for n in rank))
            channels.append(self._channel(rank))
        n_rows = sum(heights) + sum(map(_rows_of, channels))
        if n_rows > _MAX_ROWS or not all(map(_is_free, channels)):
            return []
        canvas = Canvas(self.width, n_rows)
        y = 0
        for rank, height, channel in zip(self._ranks, heights, channels, strict=True):
            for n in rank:
                self._draw_node(canvas, n, y, height)
            y += height
            _draw_channel(canvas, channel, y)
            for n in rank:
                self._join(canvas, n, y - 1, height)
            y += _rows_of(channel)
        return canvas.rows()

    def _height(self, n: int) -> int:
        lines = self._nodes[n].lines
        if not lines:
            return 1
        return len(lines) + 2

    def _draw_node(self, canvas: Canvas, n: int, y: int, height: int) -> None:
        node = self._nodes[n]
        if not node.lines:
            canvas.down(node.x, y, y + height - 1)
            return
        left = node.x - node.width // 2
        corners = node.corners
        bar = "─" * (node.width - 2)
        canvas.put(left, y, f"{corners[0]}{bar}{corners[1]}")
        for k, line in enumerate(node.lines, 1):
            free = node.width - 2 - cell_len(line)
            canvas.put(left, y + k, f"│{' ' * (free // 2)}{line}{' ' * (free - free // 2)}│")
        bottom = y + len(node.lines) + 1
        canvas.put(left, bottom, f"{corners[2]}{bar}{corners[3]}")

    def _join(self, canvas: Canvas, n: int, last: int, height: int) -> None:
        """Join a node's lower edge with the lines below its storey, whose last row is `last`."""
        bottom = last - height + self._height(n)
        if not self._nodes[n].lines:
            return
        for x in self._starting_places(n):
            canvas.down(x, bottom, last)
            canvas.put(x, bottom, "┬")

    def _starting_places(self, n: int) -> list[int]:
        return _spread(self._nodes[n], len(self._starts(n)))

    def _ends(self, n: int) -> dict[ChartEdge, int]:
        """The column in which each edge ends above a node."""
        node = self._nodes[n]
        edges = sorted(self._into[n], key=self._begin_of)
        if not node.lines:
            return {edges[0]: node.x}
        cells = [max(1, cell_len(edge.label)) + 2 for edge in edges]
        x = node.x - sum(cells) // 2
        ends = {}
        for edge, room in zip(edges, cells, strict=True):
            ends[edge] = x + room // 2
            x += room
        return ends

    def _begin_of(self, edge: ChartEdge) -> int:
        return self._nodes[edge.first].x

    def _channel(self, rank: Sequence[int]) -> list[_ChartLine]:
        """The lines below a storey."""
        lines = []
        for n in rank:
            places = self._starting_places(n)
            for x, edges in zip(places, self._starts(n), strict=True):
                ends = [self._ends(edge.last)[edge] for edge in edges]
                lines.append(_ChartLine(x, edges, ends))
        return lines


@dataclass(frozen=True, slots=True)
class _ChartLine:
    """The edges that begin in column `x`, and the columns in which they end."""

    x: int
    edges: Sequence[ChartEdge]
    ends: Sequence[int]

    @property
    def bends(self) -> bool:
        """False for a straight line."""
        return any(end != self.x for end in self.ends)

    @property
    def has_label(self) -> bool:
        return any(edge.label for edge in self.edges)

    @property
    def begins_with_arrow(self) -> bool:
        return any(edge.back for edge in self.edges)


def _spread(node: ChartNode, n: int) -> list[int]:
    """`n` columns around the middle of a node."""
    if not node.lines:
        return [node.x] * n
    return [node.x + 2 * k - (n - 1) for k in range(n)]


def _rows_of(channel: Sequence[_ChartLine]) -> int:
    """The rows between two storeys: one for each line that bends, labels, and arrows."""
    if not channel:
        return 0
    labels = any(line.has_label for line in channel)
    return _first_bend(channel) + sum(line.bends for line in channel) + labels + 1


def _first_bend(channel: Sequence[_ChartLine]) -> int:
    """The row of the first bend: 1 below arrows, else 0."""
    return int(any(line.begins_with_arrow for line in channel))


def _is_free(channel: Sequence[_ChartLine]) -> bool:
    """True if each line has columns of its own."""
    used_cells: dict[int, int] = {}
    for k, line in enumerate(channel):
        for column in (line.x, *line.ends):
            if used_cells.setdefault(column, k) != k:
                return False
    return True


def _draw_channel(canvas: Canvas, channel: Sequence[_ChartLine], top: int) -> None:
    bottom = top + _rows_of(channel) - 1
    next_bend = top + _first_bend(channel)
    for line in channel:
        bend = top
        if line.bends:
            bend = next_bend
            next_bend += 1
            canvas.across(bend, min(line.x, *line.ends), max(line.x, *line.ends))
        canvas.down(line.x, top - 1, bend)
        for edge, end in zip(line.edges, line.ends, strict=True):
            canvas.down(end, bend, bottom + (not edge.head))
    for line in channel:
        for edge, end in zip(line.edges, line.ends, strict=True):
            _draw_ends(canvas, edge, (line.x, top), (end, bottom))


def _draw_ends(
    canvas: Canvas, edge: ChartEdge, begin: tuple[int, int], end: tuple[int, int]
) -> None:
    """The arrows of an edge, and its label above its end."""
    if edge.head:
        canvas.put(*end, "▼")
    if edge.back:
        canvas.put(*begin, "▲")
    if edge.label:
        canvas.put(end[0] - (cell_len(edge.label) - 1) // 2, end[1] - 1, edge.label)


def _without_cycles(n_nodes: int, edges: Sequence[ChartEdge]) -> list[ChartEdge]:
    """The edges, those that close a cycle turned round."""
    out: dict[int, list[int]] = {n: [] for n in range(n_nodes)}
    for k, edge in enumerate(edges):
        out[edge.first].append(k)
    turned: set[int] = set()
    state = [0] * n_nodes  # 0: not seen, 1: on the path, 2: done
    for start in range(n_nodes):
        path: list[tuple[int, int]] = []
        if not state[start]:
            state[start] = 1
            path = [(start, 0)]
        while path:
            n, at = path.pop()
            if at == len(out[n]):
                state[n] = 2
                continue
            path.append((n, at + 1))
            last = edges[out[n][at]].last
            if state[last] == 1:
                turned.add(out[n][at])
            elif not state[last]:
                state[last] = 1
                path.append((last, 0))
    down = list(edges)
    for k in turned:
        edge = edges[k]
        down[k] = ChartEdge(edge.last, edge.first, edge.label, edge.back, edge.head)
    return down


def _set_ranks(nodes: Sequence[ChartNode], edges: Sequence[ChartEdge]) -> None:
    """Set each node's storey: the longest path to it."""
    for _ in nodes:
        moved = False
        for edge in edges:
            min_rank = nodes[edge.first].rank + 1
            if nodes[edge.last].rank < min_rank:
                nodes[edge.last].rank = min_rank
                moved = True
        if not moved:
            return
