"""Draws each package's wings and what uses what, from the import contracts and the imports themselves.

`python docs/draw_wings.py` writes `docs/assets/wings-<package>.svg`; with `--check` it fails where one is
stale. It needs import-linter (which brings grimp) and the packages' sources on `PYTHONPATH`.
"""

import configparser
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "docs" / "assets"
PACKAGES = ("cluster-core", "worker-groups", "tensor-transport", "venv-manager")

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 212, 84, 18, 46, 16
LINE, CHARACTERS = 13, 32


@dataclass(frozen=True)
class Box:
    """One wing or room, with its place in the drawing (left upper corner, in pixels)."""

    name: str
    sentence: str
    is_wing: bool
    x: float
    y: float


def layers_of(contracts: configparser.ConfigParser, package: str) -> list[list[str]]:
    """The package's layers as its contract lists them, highest first."""
    text = contracts[f"importlinter:contract:layers-{package}"]["layers"]
    return [re.findall(r"\w+", line) for line in text.strip().splitlines()]


def first_sentence(source: Path, name: str) -> str:
    """The first line of a wing's or room's docstring."""
    path = source / name / "__init__.py" if (source / name).is_dir() else source / f"{name}.py"
    return path.read_text().split('"""')[1].strip().splitlines()[0].replace("`", "")


def uses(graph: grimp.ImportGraph, root: str, names: Iterable[str]) -> dict[str, set[str]]:
    """What each wing or room imports from, by name."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for module in graph.modules - {root}:
        user = module.removeprefix(f"{root}.").split(".")[0]
        for imported in graph.find_modules_directly_imported_by(module):
            used = imported.removeprefix(f"{root}.").split(".")[0]
            if imported != root and used != user:
                found[user].add(used)
    return found


def direct(edges: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """The arrows that do not follow from others (the transitive reduction)."""

    def reach(start: str) -> set[str]:
        return {start}.union(*(reach(each) for each in edges[start]))

    for user in sorted(edges):
        for used in sorted(edges[user]):
            if not any(used in reach(other) for other in edges[user] - {used}):
                yield user, used


def place(layers: Sequence[Sequence[str]], source: Path) -> dict[str, Box]:
    """Each name in its row, rows centred."""
    widest = max(len(layer) for layer in layers)
    boxes = {}
    for row, layer in enumerate(layers):
        left = MARGIN + (widest - len(layer)) * (WIDTH + GAP_X) / 2
        for column, name in enumerate(layer):
            x, y = left + column * (WIDTH + GAP_X), MARGIN + row * (HEIGHT + GAP_Y)
            boxes[name] = Box(name, first_sentence(source, name), (source / name).is_dir(), x, y)
    return boxes


def draw_box(box: Box) -> Iterator[str]:
    """A rectangle with a name and a sentence."""
    fill, edge = ("#e8ecf9", "#4a5fb4") if box.is_wing else ("#ffffff", "#8a8f9c")
    size = f'width="{WIDTH}" height="{HEIGHT}" rx="6"'
    yield f'<rect x="{box.x:g}" y="{box.y:g}" {size} fill="{fill}" stroke="{edge}"/>'
    name = box.name + ("/" if box.is_wing else "")
    yield text(box, 20, name, 'font-weight="bold" font-size="13"')
    for number, line in enumerate(textwrap.wrap(box.sentence, CHARACTERS, max_lines=4, placeholder=" …")):
        yield text(box, 36 + number * LINE, line, 'font-size="11" fill="#3c404a"')


def text(box: Box, down: float, content: str, style: str) -> str:
    """One line inside a box, `down` pixels below its upper edge."""
    return f'<text x="{box.x + 10:g}" y="{box.y + down:g}" {style}>{escape(content)}</text>'


def draw_arrow(user: Box, used: Box) -> str:
    """A line from the bottom of the user to the top of what it uses."""
    x1, y1 = user.x + WIDTH / 2, user.y + HEIGHT
    x2, y2 = used.x + WIDTH / 2, used.y
    bend = max(GAP_Y / 2, (y2 - y1) / 2)
    path = f"M {x1:g} {y1:g} C {x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2 - 5:g}"
    return f'<path d="{path}" fill="none" stroke="#8a8f9c" marker-end="url(#tip)"/>'


def drawing(package: str, contracts: configparser.ConfigParser) -> str:
    """One package as SVG."""
    module = package.replace("-", "_")
    source = ROOT / "packages" / package / "src" / "raycrew" / module
    layers = layers_of(contracts, package)
    boxes = place(layers, source)
    graph = grimp.build_graph(f"raycrew.{module}", cache_dir=None)
    arrows = direct(uses(graph, f"raycrew.{module}", boxes))
    width = max(box.x for box in boxes.values()) + WIDTH + MARGIN
    height = max(box.y for box in boxes.values()) + HEIGHT + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
            ' font-family="Helvetica, Arial, sans-serif">',
            f"<title>The wings of raycrew.{module}</title>",
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="5" refY="4" orient="auto">'
            '<path d="M 0 0 L 8 4 L 0 8 z" fill="#8a8f9c"/></marker></defs>',
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
            *(draw_arrow(boxes[user], boxes[used]) for user, used in arrows),
            *(line for box in boxes.values() for line in draw_box(box)),
            "</svg>",
            "",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Write the drawings, or check them."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    stale = []
    for package in PACKAGES:
        path, new = ASSETS / f"wings-{package}.svg", drawing(package, contracts)
        if "--check" not in arguments:
            path.write_text(new)
        elif not path.exists() or path.read_text() != new:
            stale.append(str(path.relative_to(ROOT)))
    if stale:
        sys.stderr.write(
            f"not current: {', '.join(stale)}; run python docs/draw_wings.py (nox -s imports -- --draw)\n"
        )
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
