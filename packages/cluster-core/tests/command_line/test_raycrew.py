"""`raycrew`, the command that the packages share."""

import importlib.metadata
import json
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

import pytest
import ray
from distributions import add_distribution

import raycrew.cluster_core
from raycrew.cluster_core import ClusterAuthenticationError, ClusterUnreachableError, NoClusterError, doctor
from raycrew.cluster_core.__main__ import main
from raycrew.cluster_core._command_line.subcommands import brought

pytestmark = pytest.mark.smoke

COMMAND = '''
def main(arguments, prog):
    """Show gadgets.

    Not in the list of commands.
    """
    print(prog, arguments)
    return 7
'''


@pytest.fixture
def gadgets(tmp_path, monkeypatch):
    """A package with one subcommand that works and one that doesn't."""
    add_distribution(
        tmp_path,
        "gadgets",
        COMMAND,
        "[raycrew.commands]\ngadgets = gadgets:main\nplan = gadgets:main\nwrecks = gadgets:lost\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    brought.cache_clear()
    yield
    brought.cache_clear()


def test_the_command_is_installed_by_this_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"raycrew": "raycrew.cluster_core.__main__:main"}
    assert raycrew.cluster_core.__version__ == version("raycrew-cluster-core") == project["version"]


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == raycrew.cluster_core.__version__


@pytest.mark.hostile
def test_what_is_not_installed_has_no_version_and_all_commands(monkeypatch, capsys):
    def lacks(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(raycrew.cluster_core, "_version", lacks)
    assert main(["plan", "--nodes", "1x8", "--request", "1x8"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 2 and "raycrew-cluster-core" in capsys.readouterr().err


def test_other_packages_bring_subcommands(gadgets, capsys):
    assert main(["gadgets", "-x", "--json"]) == 7
    assert capsys.readouterr().out == "raycrew gadgets ['-x', '--json']\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "gadgets Show gadgets wrecks the subcommand 'wrecks' of gadgets can't be loaded" in shown
    assert "Exit codes: 0 fine" in shown
    assert main(["wrecks"]) == 2
    assert "'wrecks' of gadgets can't be loaded: AttributeError" in capsys.readouterr().err
    assert main(["plan", "--nodes", "1x8", "--request", "1x8"]) == 0, "its own are nobody else's"


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["plan", "--nodes", "8y", "--request", "1"], "UsageError", "argument --nodes: '8y' is neither"),
        (["plan"], "UsageError", "raycrew plan: the following arguments are required: --request"),
        (["unheard-of"], "UsageError", "invalid choice: 'unheard-of'"),
        (["plan", "--request", "0", "--nodes", "1x8"], "ValueError", "no bundle at all"),
        (["status", "--address", "127.0.0.1:1"], "ClusterUnreachableError", "127.0.0.1:1"),
        (["grid", "--address", "/tmp"], "ValueError", "/tmp"),
    ],
)
def test_errors_are_json_where_answers_are(arguments, kind, said, capsys):
    ray.shutdown()  # A command is a process of its own; this one may be connected by a test before.
    try:
        code = main([*arguments, "--json"])
    except SystemExit as end:
        code = end.code
    told = capsys.readouterr()
    error = json.loads(told.out)["error"]
    assert (code, told.err, error["type"]) == (2, "", kind) and said in error["message"]


@pytest.mark.hostile
def test_errors_are_whole_lines_through_a_pipe():
    address = f"{'long-name.' * 22}invalid:1"
    for arguments in (["status", "--address", address], ["status", "--address", address, "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "raycrew.cluster_core", *arguments],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert any(address in line for line in (done.stdout + done.stderr).splitlines())


@pytest.mark.parametrize(
    ("error", "advice", "not_said"),
    [
        (ClusterAuthenticationError("refused", "h:1"), "RAY_AUTH_TOKEN_PATH", "ray start"),
        (ClusterUnreachableError("silent", "h:1"), "Compare the address", "--head"),
        (NoClusterError("none"), "ray start --head", "TOKEN"),
        (NoClusterError("several", running=("h:1", "h:2")), "--address h:2", "ray start"),
    ],
)
def test_advice_fits_the_error(error, advice, not_said, monkeypatch, capsys):
    def refuse(_):
        raise error

    monkeypatch.setattr(doctor, "init_ray", refuse)
    finding = doctor.examine("h:1")[-1]
    assert advice in finding.advice and not_said not in finding.advice and finding.state == "bad"
    monkeypatch.setattr("raycrew.cluster_core._command_line.parsing.prepare_visit", refuse)
    assert main(["status"]) == 2
    said = capsys.readouterr().err
    assert advice in said and not_said not in said


@pytest.mark.parametrize(("options", "is_told"), [([], True), (["--local"], False)])
def test_the_doctor_looks_at_a_machine_with_several_clusters(options, is_told, monkeypatch, capsys):
    def visit(address):
        raise NoClusterError("several", running=("h:1", "h:2"))

    monkeypatch.setattr("raycrew.cluster_core._command_line.commands.prepare_visit", visit)
    code = main(["doctor", *options, "--json"])
    findings = {found["check"]: found for found in json.loads(capsys.readouterr().out)}
    assert len(findings) > 3
    assert ("connection" in findings) == is_told
    if is_told:
        assert code == 1 and "--address h:2" in findings["connection"]["advice"]


def test_a_drawing_needs_no_style_sheet():
    from raycrew.cluster_core import Bundle, Placement
    from raycrew.cluster_core.layout import svg

    class Group:
        name = "policy"
        placements = (Placement(0, 0, 0.5), Placement(1, 1))

    bundles = [Bundle(i, 0, "n", "10.0.0.1", {"GPU": 1.0}) for i in range(3)]
    image = ET.fromstring(svg(bundles, [Group()], title="t"))
    for one in image.iter():
        assert one.tag.rpartition("}")[2] in ("svg", "rect", "text", "title")
        assert not {"class", "style", "opacity", "paint-order"} & one.attrib.keys()
    texts = [one for one in image.iter() if one.tag.endswith("text")]
    assert {one.get("fill", image.get("fill")) for one in texts} == {"#24292f", "#6e7781"}, "dark on light"
