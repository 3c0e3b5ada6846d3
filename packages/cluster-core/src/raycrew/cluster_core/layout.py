"""Drawings of a cluster: which worker sits on which bundle of which node, in a terminal and as SVG."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from rich.box import SQUARE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from raycrew.cluster_core._planning import Bundle, Placement
from raycrew.cluster_core.protocols import Occupant

_ACCELERATORS = ("GPU", "NPU", "TPU", "HPU", "neuron_cores", "RBLN", "FURIOSA", "TTNPU", "MBLT")
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_FILLS = ("#4e79a7", "#b07aa1", "#59a14f", "#d9a441", "#2f8f8b", "#e15759", "#8c6d4f", "#6a6fb5")
_LONGEST_LABEL = 24
_FREE = "free"


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker in a drawing.

    Attributes:
        occupant: Position of its occupant among those drawn; decides the colour.
        name: Name of the occupant.
        rank: Its rank.
        share: Part of the bundle that it has, 1 for all of it.
        tied_group: Its tied group, or None.
        leads: Whether it has the lowest rank of its tied group.
        state: What it is up to, where that is told.
    """

    occupant: int
    name: str
    rank: int
    share: float = 1.0
    tied_group: int | None = None
    leads: bool = False
    state: str = ""

    @property
    def label(self) -> str:
        """What is written into the cell: name and rank, and what else there is to tell."""
        return self.name + self._position

    @property
    def _position(self) -> str:
        tied = "" if self.tied_group is None else f" t{self.tied_group}{'*' if self.leads else ''}"
        share = f" {self.share:.0%}" if 0 < self.share < 1 else ""
        return f" {self.rank}{tied}{share}{self.state and ' '}{self.state}"

    def fitted(self, width: int) -> str:
        """The label, with a shorter name where it has more characters than `width`."""
        room = width - len(self._position) - 1
        if len(self.label) <= width or room < 1:
            return self.label
        return f"{self.name[:room]}…{self._position}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One bundle in a drawing, with all who sit on it."""

    title: str
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node in a drawing."""

    title: str
    cells: tuple[Cell, ...]


def rows(
    bundles: Sequence[Bundle], occupants: Iterable[Occupant] = (), devices: Mapping[int, int] | None = None
) -> list[NodeRow]:
    """Sort occupants into bundles and bundles into nodes; what both drawings are made from.

    A logical node that reaches over several physical nodes gets a row for each.

    Args:
        bundles: The cluster's bundles.
        occupants: Who sits on them.
        devices: Device index by bundle index, where the bundles don't say.

    Raises:
        ValueError: An occupant sits on a bundle that the cluster does not have.
    """
    seats = _seats(occupants, {bundle.index for bundle in bundles})
    ordered = sorted(bundles, key=lambda bundle: (bundle.node_index, bundle.node_id, bundle.index))
    grouped = groupby(ordered, key=lambda bundle: (bundle.node_index, bundle.node_id, bundle.node_address))
    drawn = []
    for (index, node_id, address), members in grouped:
        cells = tuple(Cell(_title(one, devices), tuple(seats.get(one.index, ()))) for one in members)
        where = " ".join(part for part in (address, node_id[:8]) if part)
        drawn.append(NodeRow(f"node {index}" + (f" ({where})" if where else ""), cells))
    return drawn


def _seats(occupants: Iterable[Occupant], known: set[int]) -> dict[int, list[Seat]]:
    seats: dict[int, list[Seat]] = {}
    for position, occupant in enumerate(occupants):
        leaders = _leaders(occupant.placements)
        for one in sorted(occupant.placements, key=lambda placement: placement.rank):
            if one.bundle_index not in known:
                raise ValueError(
                    f"{occupant.name} rank {one.rank} sits on bundle {one.bundle_index}: no such bundle"
                )
            leads = one.tied_group is not None and leaders[one.tied_group] == one.rank
            seat = Seat(position, occupant.name, one.rank, one.share, one.tied_group, leads, one.state)
            seats.setdefault(one.bundle_index, []).append(seat)
    return seats


def _leaders(placements: Iterable[Placement]) -> dict[int, int]:
    leaders: dict[int, int] = {}
    for one in placements:
        if one.tied_group is not None:
            leaders[one.tied_group] = min(one.rank, leaders.get(one.tied_group, one.rank))
    return leaders


def _title(bundle: Bundle, devices: Mapping[int, int] | None) -> str:
    held = next((name for name in _ACCELERATORS if bundle.resources.get(name, 0) > 0), None)
    device = bundle.device_index if bundle.device_index is not None else (devices or {}).get(bundle.index)
    if device is not None:
        return f"#{bundle.index} {held or 'device'} {device}"
    return f"#{bundle.index} {held}" if held else f"#{bundle.index}"


@dataclass(frozen=True, slots=True)
class ClusterGrid:
    """A rich renderable: one table per node, wrapped to the width of the terminal."""

    nodes: tuple[NodeRow, ...]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [cell for node in self.nodes for cell in node.cells]
        labels = [text for cell in cells for text in (cell.title, *(seat.label for seat in cell.seats))]
        limit = max(min(_LONGEST_LABEL, options.max_width - 4), 1)
        width = min(max([len(text) for text in labels] + [len(_FREE)]), limit)
        columns = max((options.max_width - 1) // (width + 3), 1)
        if columns < max((len(node.cells) for node in self.nodes), default=1):
            columns = 1 << (columns.bit_length() - 1)  # 8 devices wrap as 4 and 4 rather than as 5 and 3.
        if self.title:
            yield Text(self.title, style="bold", overflow="ellipsis", no_wrap=True)
        for node in self.nodes:
            yield Text(node.title, style="bold", overflow="ellipsis", no_wrap=True)
            for start in range(0, len(node.cells), columns):
                yield _table(node.cells[start : start + columns], width)
        yield from _legend(cells)


def _table(cells: Sequence[Cell], width: int) -> Table:
    table = Table(box=SQUARE, pad_edge=True)
    for cell in cells:
        table.add_column(Text(cell.title), width=width, no_wrap=True, overflow="ellipsis")
    for line in range(max(len(cell.seats) for cell in cells) or 1):
        table.add_row(*(_line(cell, line, width) for cell in cells))
    return table


def _line(cell: Cell, line: int, width: int) -> Text:
    if line < len(cell.seats):
        seat = cell.seats[line]
        return Text(seat.fitted(width), style=_STYLES[seat.occupant % len(_STYLES)])
    return Text(_FREE if not cell.seats and line == 0 else "", style="dim")


def _legend(cells: Iterable[Cell]) -> Iterable[Text]:
    seats = [seat for cell in cells for seat in cell.seats]
    ranks: dict[tuple[int, str], set[int]] = {}
    for seat in seats:
        ranks.setdefault((seat.occupant, seat.name), set()).add(seat.rank)
    for (position, name), members in sorted(ranks.items()):
        count = f"{len(members)} rank{'s' if len(members) > 1 else ''}"
        yield Text.assemble(("■ ", _STYLES[position % len(_STYLES)]), f"{name}: {count}")
    if any(seat.tied_group is not None for seat in seats):
        yield Text("tN: tied group N, * leads it", style="dim")


def grid(
    bundles: Sequence[Bundle],
    occupants: Iterable[Occupant] = (),
    *,
    devices: Mapping[int, int] | None = None,
    title: str = "",
) -> ClusterGrid:
    """Draw bundles and who sits on them, for `rich.print` or a `Console`; it fits any width.

    Args:
        bundles: The cluster's bundles.
        occupants: Worker groups, or whatever else fits `Occupant`.
        devices: Device index by bundle index, where the bundles don't say.
        title: Line above the drawing.

    Raises:
        ValueError: An occupant sits on a bundle that the cluster does not have.
    """
    return ClusterGrid(tuple(rows(bundles, occupants, devices)), title)


def print_grid(
    bundles: Sequence[Bundle],
    occupants: Iterable[Occupant] = (),
    *,
    devices: Mapping[int, int] | None = None,
    title: str = "",
    console: Console | None = None,
) -> None:
    """Print what `grid` draws, by default to standard output."""
    (console or Console()).print(grid(bundles, occupants, devices=devices, title=title))


_STRIP_H, _HEAD_H, _GAP, _MARGIN, _PER_LINE = 20, 18, 8, 12, 8
_CHAR_W, _LEAST_CHARS, _NAME_CHARS = 6.8, 18, 8


def svg(
    bundles: Sequence[Bundle],
    occupants: Iterable[Occupant] = (),
    *,
    devices: Mapping[int, int] | None = None,
    title: str = "",
) -> str:
    """Draw the same as one self-contained SVG image; the width of a strip is the worker's share.

    Raises:
        ValueError: An occupant sits on a bundle that the cluster does not have.
    """
    parts: list[str] = []
    y = _MARGIN
    if title:
        parts.append(_text(_MARGIN, y + 14, title, "title"))
        y += 26
    nodes = rows(bundles, occupants, devices)
    chars = _strip_chars(cell for node in nodes for cell in node.cells)
    cell_w = round(chars * _CHAR_W) + 10
    for node in nodes:
        parts.append(_text(_MARGIN, y + 12, node.title, "node"))
        y += 18
        for start in range(0, len(node.cells), _PER_LINE):
            line = node.cells[start : start + _PER_LINE]
            height = _HEAD_H + _STRIP_H * max(max(len(cell.seats) for cell in line), 1) + 6
            for column, cell in enumerate(line):
                parts += _svg_cell(_MARGIN + column * (cell_w + _GAP), y, (cell_w, height), cell, chars)
            y += height + _GAP
    columns = max([min(len(node.cells), _PER_LINE) for node in nodes] + [3])
    width = 2 * _MARGIN + columns * (cell_w + _GAP) - _GAP
    # Attributes alone: many renderers know neither style sheets nor outlines below a text.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + _MARGIN}" '
        f'viewBox="0 0 {width} {y + _MARGIN}" role="img" font-family="monospace" font-size="11" '
        f'fill="#24292f"><rect width="{width}" height="{y + _MARGIN}" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


_LOOKS = {
    "title": ' font-size="14" font-weight="bold"',
    "node": ' font-weight="bold"',
    "free": ' fill="#6e7781"',
    "": "",
}


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    shown = text if len(text) <= 120 else f"{text[:119]}…"
    return f'<text x="{x:g}" y="{y:g}"{_LOOKS[kind]}>{escape(shown)}</text>'


def _paler(colour: str, white: float) -> str:
    """A colour with so much white in it, on which dark text can be read."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _strip_chars(cells: Iterable[Cell]) -> int:
    """For how many characters each strip has room: ranks and states are whole, long names are shortened."""
    needed = [len(seat.label) - max(len(seat.name) - _NAME_CHARS, 0) for cell in cells for seat in cell.seats]
    return max([_LEAST_CHARS, *needed])


def _svg_cell(x: int, y: int, size: tuple[int, int], cell: Cell, chars: int) -> list[str]:
    width, height = size
    inner = width - 8
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="#f6f8fa" stroke="#d0d7de"/>',
        _text(x + 6, y + 13, cell.title),
    ]
    for line, seat in enumerate(cell.seats):
        top = y + _HEAD_H + line * _STRIP_H
        share = seat.share if 0 < seat.share < 1 else 1.0
        colour = _FILLS[seat.occupant % len(_FILLS)]
        label = seat.fitted(chars)
        parts += [
            f'<rect x="{x + 4}" y="{top}" width="{inner}" height="{_STRIP_H - 3}" rx="3" '
            f'fill="{_paler(colour, 0.8)}"/>',
            f'<rect x="{x + 4}" y="{top}" width="{inner * share:g}" height="{_STRIP_H - 3}" rx="3" '
            f'fill="{_paler(colour, 0.45)}">'
            f"<title>{escape(seat.label)}</title></rect>",
            _text(x + 8, top + 12, label),
        ]
    if not cell.seats:
        parts.append(_text(x + 8, y + _HEAD_H + 12, _FREE, "free"))
    return parts
