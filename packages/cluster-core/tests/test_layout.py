"""Drawings: everybody is shown once, on the right bundle, at any width."""

import io
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass

import pytest
from rich.cells import cell_len
from rich.console import Console

from raycrew.cluster_core import Bundle, Placement
from raycrew.cluster_core.layout import grid, print_grid, svg

pytestmark = pytest.mark.smoke


@dataclass
class Group:
    name: str
    placements: list[Placement]


def bundles_of(*counts, gpus=True, learnt=True):
    pairs = [(node, device) for node, count in enumerate(counts) for device in range(count)]
    resources = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}
    return [
        Bundle(i, node, f"{node:08d}ffff", f"10.0.0.{node}", resources, device if gpus and learnt else None)
        for i, (node, device) in enumerate(pairs)
    ]


def drawn(bundles, groups=(), width=100, **options):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(grid(bundles, groups, **options))
    return console.file.getvalue()


def table_cells(text):
    """Cells of all tables as (title, lines)."""
    cells, titles, lines = [], [], []
    for line in text.splitlines():
        if line.startswith("┌"):
            titles, lines = [], []
        elif line.startswith("│"):
            parts = [part.strip() for part in line.strip("│").split("│")]
            if titles:
                lines.append(parts)
            else:
                titles = parts
        elif line.startswith("└"):
            columns = zip(*lines, strict=True)
            cells += [
                (title, [one for one in column if one]) for title, column in zip(titles, columns, strict=True)
            ]
    return cells


POLICY = Group("policy", [Placement(rank, rank) for rank in range(6)])


@pytest.mark.parametrize("width", [200, 100, 60, 40, 24])
def test_heterogeneous_nodes_at_any_width(width):
    text = drawn(bundles_of(4, 0, 2), [POLICY], width)
    assert table_cells(text) == [
        ("#0 GPU 0", ["policy 0"]), ("#1 GPU 1", ["policy 1"]), ("#2 GPU 2", ["policy 2"]),
        ("#3 GPU 3", ["policy 3"]), ("#4 GPU 0", ["policy 4"]), ("#5 GPU 1", ["policy 5"]),
    ]  # fmt: skip
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert [line.split(" (")[0] for line in text.splitlines() if line.startswith("node ")] == [
        "node 0",
        "node 2",
    ]
    assert "policy: 6 ranks" in text


def test_a_very_narrow_terminal_shortens_and_stays_inside():
    text = drawn(bundles_of(2), [Group("a-rather-long-name", [Placement(0, 0)])], 12)
    assert all(cell_len(line) <= 12 for line in text.splitlines())
    assert "a-rath" in text


def test_long_names_are_shortened_rather_than_ranks():
    tied = Group("a-rather-long-name-of-a-group", [Placement(r, r, 0.5, tied_group=0) for r in range(2)])
    lines = [line for _, lines in table_cells(drawn(bundles_of(2), [tied])) for line in lines]
    assert lines == ["a-rather-long… 0 t0* 50%", "a-rather-long-… 1 t0 50%"]
    assert "a-rathe… 0 t0* 50%" in svg(bundles_of(2), [tied])


def test_colocated_and_fractional_workers_and_free_bundles():
    text = drawn(
        bundles_of(3),
        [Group("actor", [Placement(0, 0, 0.5), Placement(1, 1)]), Group("critic", [Placement(0, 0, 0.25)])],
    )
    assert table_cells(text) == [
        ("#0 GPU 0", ["actor 0 50%", "critic 0 25%"]), ("#1 GPU 1", ["actor 1"]), ("#2 GPU 2", ["free"]),
    ]  # fmt: skip


def test_tied_groups_name_their_leader():
    tied = Group("gen", [Placement(r, r, tied_group=r // 2) for r in range(4)])
    text = drawn(bundles_of(2, 2), [tied])
    assert [lines for _, lines in table_cells(text)] == [
        ["gen 0 t0*"],
        ["gen 1 t0"],
        ["gen 2 t1*"],
        ["gen 3 t1"],
    ]
    assert "* leads it" in text


def test_a_worker_on_several_bundles_counts_once():
    text = drawn(bundles_of(2), [Group("tp", [Placement(0, 0), Placement(0, 1)])])
    assert [lines for _, lines in table_cells(text)] == [["tp 0"], ["tp 0"]]
    assert "tp: 1 rank\n" in text


def test_cpu_bundles_and_devices_not_yet_known():
    assert [title for title, _ in table_cells(drawn(bundles_of(2, gpus=False)))] == ["#0", "#1"]
    unknown = bundles_of(2, learnt=False)
    assert [title for title, _ in table_cells(drawn(unknown))] == ["#0 GPU", "#1 GPU"]
    assert [title for title, _ in table_cells(drawn(unknown, devices={0: 5}))] == ["#0 GPU 5", "#1 GPU"]


def test_a_logical_node_over_two_physical_ones_shows_both():
    bundles = [Bundle(i, 0, f"node{i // 2}0000", "10.0.0.1", {"CPU": 1.0}) for i in range(4)]
    assert re.findall(r"^node 0 \(10.0.0.1 node(\d)", drawn(bundles), re.M) == ["0", "1"]


def test_names_with_markup_are_shown_as_they_are():
    text = drawn(bundles_of(1), [Group("[red]x[/]", [Placement(0, 0)])])
    assert "[red]x[/] 0" in text


def test_an_unknown_bundle_is_refused():
    with pytest.raises(ValueError, match="policy rank 2 sits on bundle 2"):
        grid(bundles_of(2), [POLICY])


def test_printing(capsys):
    print_grid(bundles_of(1), [Group("policy", [Placement(0, 0)])], title="cluster train")
    out = capsys.readouterr().out
    assert out.startswith("cluster train\n") and "policy 0" in out


def test_svg_is_well_formed_and_shows_everybody():
    groups = [
        Group("a<b&c", [Placement(r, r, 0.5) for r in range(10)]),
        Group("critic", [Placement(r, r, 0.25, tied_group=0) for r in range(2)]),
    ]
    image = svg(bundles_of(10, 1), groups, title="train")
    root = ET.fromstring(image)
    names = {"s": "http://www.w3.org/2000/svg"}
    shown = [one.text for one in root.findall(".//s:rect/s:title", names)]
    assert sorted(shown) == sorted(
        [f"a<b&c {r} 50%" for r in range(10)] + ["critic 0 t0* 25%", "critic 1 t0 25%"]
    )
    strips = [
        float(r.get("width"))
        for r in root.findall(".//s:rect", names)
        if r.find("s:title", names) is not None
    ]
    assert sorted(set(strips)) == [31.0, 62.0]
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in root.findall(".//s:rect", names)[1:]:
        assert float(rect.get("x")) + float(rect.get("width")) <= width
        assert float(rect.get("y")) + float(rect.get("height")) <= height
    assert [t.text for t in root.findall(".//s:text", names)].count("free") == 1


@pytest.mark.parametrize(
    ("name", "shown"),
    [("critic", "critic 11 busy 279.1 MB"), ("reference-policy", "referen… 11 busy 279.1 MB")],
)
def test_ranks_and_states_are_whole_in_an_svg_and_long_names_shortened(name, shown):
    root = ET.fromstring(svg(bundles_of(2), [Group(name, [Placement(11, 0, state="busy 279.1 MB")])]))
    texts = [one for one in root.iter() if one.tag.endswith("text")]
    assert shown in [one.text for one in texts]
    (strip,) = (one for one in root.iter() if one.find("{*}title") is not None)
    assert float(strip.get("width")) >= 6.6 * len(shown), "an advance of monospace at 11 px, as drawn"
