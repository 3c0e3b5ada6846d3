"""Which cluster `raycrew run` asks for: arguments, files and the environment, and who has the last word."""

import json

import pytest

from raycrew.cluster_core._command_line.running.wishes import AROUND, Wish, read_order
from raycrew.cluster_core._connection import Target

pytestmark = pytest.mark.smoke

INSIDE = {"RAY_ADDRESS": "around:1", AROUND: "around:1"}
FILE, ENV = "cluster: {ray_head_node_address: file:1, num_cpus: 1}", "ray_head_node_address: env:1"
LINE = ["ray_head_node_address=line:1"]


@pytest.fixture
def wish(tmp_path, monkeypatch):
    """Reads a wish in a folder with the files that a test names."""
    monkeypatch.chdir(tmp_path)

    def read(arguments=(), environ=None, **files):
        for name, content in files.items():
            (tmp_path / f"{name}.yaml").write_text(content)
        return read_order([*arguments, "--", "true"], environ or {}).wish

    return read


# Arguments, environment, files; and what is said of the address, from the last word to the first.
SAID = {
    "an option": (
        ["--config", "run.yaml", *LINE, "--address", "opt:1"],
        INSIDE,
        "opt:1",
        "--address names it",
    ),
    "an override": (
        ["--config", "run.yaml", *LINE],
        INSIDE,
        "line:1",
        "ray_head_node_address on the command",
    ),
    "a run around": (["--config", "run.yaml"], INSIDE, "around:1", "the raycrew run around this one"),
    "env.yaml": (
        ["--config", "run.yaml"],
        {"RAY_ADDRESS": "e:1"},
        "env:1",
        "ray_head_node_address in env.yaml",
    ),
    "another file in its place": (
        ["--config", "run.yaml", "--env-file", "other.yaml"],
        {"RAY_ADDRESS": "e:1"},
        "file:1",
        "ray_head_node_address in run.yaml",
    ),
    "somebody left a run's mark": ([], {"RAY_ADDRESS": "e:1", AROUND: "around:1"}, "env:1", "in env.yaml"),
}


@pytest.mark.parametrize("case", SAID)
def test_who_has_the_last_word(case, wish):
    arguments, environ, address, said_by = SAID[case]
    found = wish(arguments, environ, run=FILE, env=ENV, other="policy_key: hush")
    assert found.address == address and said_by in found.said_by


def test_the_environment_is_left_to_whoever_looks_for_the_cluster(wish):
    assert wish([], {"RAY_ADDRESS": "e:1"}) == Wish()
    assert wish(["ray_head_node_address=null"], env=ENV) == Wish()


def test_options_and_values_in_any_order(wish):
    found = wish(["num_cpus=1", "--num-gpus", "1", "resources.disk=2"])
    assert found.start == {"num_cpus": 1, "num_gpus": 1, "resources": {"disk": 2.0}}


def test_an_env_yaml_of_another_kind_is_told_with_the_way_around_it(wish):
    for content in ("kind: Pod\n---\nkind: Service\n", "key: !Ref it", "- a list"):
        with pytest.raises(ValueError, match=r"^env\.yaml .*; --env-file /dev/null reads none$"):
            wish(env=content)
    assert wish(["--env-file", "/dev/null"], env="- a list") == Wish()


def test_files_and_arguments_say_what_a_fresh_cluster_has(wish):
    arguments = ["--config", "a.yaml", "--config", "b.yaml", "resources.disk=3", "--num-gpus", "0"]
    files = {
        "a": "num_cpus: 1\nnum_gpus: 4\nresources: {disk: 1, tape: 2}\ngpus_per_node: 2",
        "b": "num_cpus: 2",
    }
    found = wish([*arguments, "--timeout", "3"], **files)
    assert found.start == {"num_cpus": 2, "num_gpus": 0, "resources": {"disk": 3.0, "tape": 2.0}}
    assert found.insisted == ("resources", "num_gpus") and found.timeout_s == 3
    again = Wish(**json.loads(json.dumps(found.as_json())))
    assert (again.start, tuple(again.insisted)) == (found.start, found.insisted)


def test_what_is_said_of_a_start_to_a_cluster_that_runs(wish):
    fresh, named, found = Target(None, "w"), Target("h:1", "w"), Target("h:1", "w", is_found=True)
    by_file = wish(["--config", "run.yaml"], run="num_cpus: 1")
    by_line = wish(["--num-cpus", "2"])
    assert by_file.options_for(fresh) == ({"address": "local", "num_cpus": 1}, "")
    assert by_line.options_for(fresh) == ({"address": "local", "num_cpus": 2}, "")
    note = "; num_cpus say nothing to a running cluster"
    for wanted, target in ((by_file, named), (by_file, found), (by_line, found)):
        assert wanted.options_for(target) == ({"address": "h:1"}, note)
    with pytest.raises(ValueError, match="num_cpus can't be given for a running cluster, and h:1 is"):
        by_line.options_for(named)
    assert Wish().options_for(named) == ({"address": "h:1"}, "")


def test_the_first_two_dashes_end_the_options(wish):
    order = read_order(["--grace", "2", "--", "sh", "-c", "x", "--", "--address", "h:1"], {})
    assert order.command == ("sh", "-c", "x", "--", "--address", "h:1")
    assert (order.grace_s, order.wish) == (2.0, Wish())


@pytest.mark.hostile
def test_a_secret_in_a_wrong_place_is_not_told(wish):
    with pytest.raises(TypeError, match=r"secrets is .*, not dict") as caught:
        wish(env="cluster: {secrets: {HF_TOKEN: hush}}")
    assert "hush" not in str(caught.value)
