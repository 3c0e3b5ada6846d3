"""What workers are given: arguments, variables and launchers, for all of them or for each rank."""

import pytest

from raycrew.cluster_core import Bundle, RayConnection
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import RayWorkerBuilder, RayWorkerGroup
from raycrew.worker_groups._start.arguments import check_launchers, forwarded_now, launcher_of
from raycrew.worker_groups._worker import Configured, merge_options
from raycrew.worker_groups.sharding._ranks import plan_seats
from raycrew.worker_groups.testing import InProcessGroup


class Namesake:
    """Has parameters with the names of a group's options."""

    def __init__(self, transport="", worker="", timeout=0.0, init=None):
        self.own = transport, worker, timeout, init

    def get_own(self):
        return self.own


class TakesAll:
    def __init__(self, rank=None, **kwargs):
        self.own = rank, kwargs

    def get_own(self):
        return self.own


def own(worker, n=1, **options):
    with InProcessGroup(FakeCluster([n]), worker, **options) as group:
        return group.call("get_own").get_results()


@pytest.mark.parametrize("group_class", [InProcessGroup, RayWorkerGroup])
@pytest.mark.parametrize(("given", "said"), [([8], "of type list"), (FakeCluster, "the class FakeCluster")])
def test_what_is_no_cluster_is_refused(group_class, given, said):
    with pytest.raises(TypeError, match=f"placed on a cluster, .* not on {said}; the cluster is the first"):
        group_class(given, Told)


def test_a_workers_arguments_may_have_the_names_of_options():
    named = {"transport": "tcp", "worker": "w", "timeout": 1.5, "init": 3}
    expected = [("tcp", "w", 1.5, 3)]
    assert own(Namesake, init=named) == expected
    assert own(RayWorkerBuilder(Namesake, **named)) == expected
    assert own(RayWorkerBuilder(Namesake, "tcp", init=3), init={"worker": "w"}, timeout=1.5) == expected


@pytest.mark.parametrize(
    ("builder", "options", "said"),
    [
        (RayWorkerBuilder(Namesake, timeout=1), {"timeout": 2}, "RayWorkerBuilder and the group's"),
        (RayWorkerBuilder(Namesake), {"init": {"timeout": 1}, "timeout": 2}, "init and the group's"),
        (RayWorkerBuilder(Namesake, timeout=1), {"init": {"timeout": 1}}, "RayWorkerBuilder and init"),
    ],
)
def test_an_argument_is_given_once(builder, options, said):
    with pytest.raises(TypeError, match=f"'timeout' of __init__ is given twice: {said}"):
        own(builder, **options)


@pytest.mark.hostile
@pytest.mark.parametrize("group_class", [RayWorkerGroup, InProcessGroup])
def test_a_misspelt_option_is_no_argument_of_a_worker_that_takes_all(group_class, request):
    cluster = FakeCluster([1])
    if group_class is RayWorkerGroup:
        request.getfixturevalue("local_ray")
    with pytest.raises(TypeError, match=r"did you mean 'env_vars', .* by 'env_var'\?.*init=dict\(…\)"):
        group_class(cluster, TakesAll, env_var={"A": "1"})
    assert cluster.holders() == {}


def test_it_is_where_it_was_meant_so():
    assert own(TakesAll, init={"env_var": 1}, colour="red") == [(None, {"env_var": 1, "colour": "red"})]


def test_each_rank_gets_arguments_of_its_own():
    asked = []

    def of(rank):
        asked.append(rank)
        return {"rank": rank.rank}

    assert own(TakesAll, 2, init=of, common=1) == [(0, {"common": 1}), (1, {"common": 1})]
    assert [(rank.world_size, rank.local_rank) for rank in asked] == [(2, 0), (2, 1)]


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("init", "error", "said"),
    [
        (lambda rank: {"misspelt": 1}, TypeError, "misspelt"),
        (lambda rank: [rank], TypeError, "init of rank 0 is to be a mapping"),
        (lambda rank: {1: 1}, TypeError, "init of rank 0 is to be a mapping"),
        (lambda rank: rank.nothing, AttributeError, "nothing"),
        (3, TypeError, "init is a mapping by name, or a function of the rank"),
    ],
)
def test_what_is_wrong_with_them_is_told_before_a_worker_begins(init, error, said):
    cluster = FakeCluster([2])
    with pytest.raises(error, match=said):
        InProcessGroup(cluster, Namesake, init=init)
    assert cluster.holders() == {}


@pytest.mark.hostile
@pytest.mark.parametrize("wrong", [["hush"], {1: "hush"}, "hush"], ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize("give", ["init", "init of a rank", "secrets"])
def test_what_is_said_of_wrong_ones_tells_no_values(give, wrong):
    option, _, of_a_rank = give.partition(" of ")
    given = [(name, "hush") for name in "ab"] if option == "secrets" else wrong
    with pytest.raises(TypeError, match=option) as refused:
        InProcessGroup(FakeCluster([1]), TakesAll, **{option: (lambda rank: given) if of_a_rank else given})
    assert "hush" not in str(refused.value)
    assert f"of type {type(given[0] if option == 'secrets' else given).__name__}" in str(refused.value)


class Told:
    """Notes what its class was asked."""

    @staticmethod
    def configure_worker(bundle_indices):
        return {}, {}, {"told": bundle_indices}

    def __init__(self, told):
        self.own = told

    def get_own(self):
        return self.own


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, [(0, [0]), (0, [1]), (1, [0])]),
        ({"workers_per_node": 1}, [(0, [0]), (1, [0])]),
        ({"workers_per_node": [2, 0]}, [(0, [0]), (0, [1])]),
        ({"bundle_indices_list": [(1, [0]), (0, [1, 0])]}, [(1, [0]), (0, [1, 0]), None]),
        ({"bundle_indices_list": [[2], [0, 1]]}, [(0, [2]), (0, [0, 1]), None]),
    ],
)
def test_bundle_indices_are_told_in_every_layout(layout, expected):
    with InProcessGroup(FakeCluster([2, 0, 1]), Told, **layout) as group:
        assert group.call("get_own").get_results() == expected
        assert [entry["bundle_indices"] for entry in group.worker_metadata] == expected


def test_a_bundle_that_gets_another_place_by_its_device_is_told_of_by_that():
    bundles = [Bundle(i, 0, "node", "10.0.0.1", {"GPU": 1.0}) for i in range(2)]
    assert [seat.tied_bundles for seat in plan_seats(bundles).seats] == [(0, [0]), (0, [1])]


def merged(**named):
    return merge_options({}, named.pop("caller", {}), named.pop("configured", Configured()), {}, **named)


def test_whose_variables_win():
    order = [
        ({"forwarded": {"A": "forwarded"}}, "forwarded"),
        ({"env_vars": {"A": "caller"}}, "caller"),
        ({"configured": Configured(env_vars={"A": "class"})}, "class"),
    ]
    given = {}
    for more, expected in order:
        given |= more
        assert merged(**given).env_vars == {"A": expected}
    own_process = {"runtime_env": {"env_vars": {"A": "runtime_env"}}}
    found = merged(caller=own_process, forwarded={"A": "forwarded", "B": "2"})
    assert (found.env_vars, found.actor["runtime_env"]["env_vars"]) == ({"B": "2"}, {"A": "runtime_env"})


def test_a_launcher_stands_before_the_interpreter():
    env = merged(py_executable="/env/bin/python", launcher=["nsys", "profile", "-o", "a b"])
    assert env.actor["runtime_env"] == {"py_executable": "nsys profile -o 'a b' /env/bin/python"}
    own_python = {"runtime_env": {"py_executable": "python -X dev"}}
    assert merged(caller=own_python, launcher=["numactl"]).actor["runtime_env"] == {
        "py_executable": "numactl python -X dev"
    }
    assert "runtime_env" not in merged().actor


def test_the_first_pattern_that_fits_counts():
    launchers = {"policy-0-0": "nsys profile -o 'a b'", "policy-*": ["numactl"]}
    assert launcher_of(launchers, "policy-0-0") == ("nsys", "profile", "-o", "a b")
    assert launcher_of(launchers, "policy-1-0") == ("numactl",)
    assert launcher_of(launchers, "critic-0-0") == launcher_of(None, "policy-0-0") == ()


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("launchers", "error", "said"),
    [
        ({"policy-9-*": ["nsys"]}, ValueError, "no worker's name is like 'policy-9-"),
        ({"*": []}, TypeError, "a command or the list of its words"),
        ({"*": ""}, TypeError, "a command or the list of its words"),
        ({"*": [1]}, TypeError, "a command or the list of its words"),
        (["nsys"], TypeError, "commands by pattern"),
    ],
)
def test_launchers_are_checked(launchers, error, said):
    with pytest.raises(error, match=said):
        InProcessGroup(FakeCluster([1]), TakesAll, launchers=launchers)
    check_launchers({"a-*": ["nsys"]}, ["a-0"])


def test_without_a_connection_nothing_is_forwarded(monkeypatch):
    monkeypatch.setattr(RayConnection, "of_process", None)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert forwarded_now() == {}
