"""Jobs, specs and strategies: what can not be meant is refused where it is made."""

import pickle

import pytest

from raycrew.worker_groups.scheduling import Job, SchedulingSpec, SchedulingStrategy

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cpu": -1}, "cpu=-1"),
        ({"cpu": float("nan")}, "cpu=nan"),
        ({"gpu": 1.5}, "neither a part of one nor whole"),
        ({"mem": "8 parsecs"}, "8 parsecs"),
        ({"mem": -1}, "mem=-1"),
        ({"port_count": -1}, "port_count=-1"),
        ({"port_count": 1, "port_names": ["http", "grpc"]}, "2 port_names for 1 ports"),
        ({"port_names": ["http", "http"]}, "names that differ"),
        ({"env_vars": {"A=B": "1"}}, "A=B"),
        ({"cpu": 0}, "to be placed by"),
        ({"gpu": float("inf")}, "gpu=inf"),
        ({"port_names": [""]}, "names that differ"),
    ],
)
def test_specs_out_of_range_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        SchedulingSpec(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cpu": "1"},
        {"gpu": True},
        {"mem": None},
        {"port_count": 1.0},
        {"env_vars": {"A": 1}},
        {"port_names": "a"},
        {"environment": None},
    ],
)
def test_specs_of_a_wrong_kind_are_refused(wrong):
    with pytest.raises(TypeError):
        SchedulingSpec(**wrong)


def test_a_spec_that_says_nothing_is_a_worker_on_one_cpu_with_two_ports():
    spec = SchedulingSpec()
    assert (spec.cpu, spec.gpu, spec.memory_bytes, spec.port_count) == (1, 0, 0, 2)


@pytest.mark.parametrize(
    "bounds",
    [
        {"gpu": 0.5},
        {"gpu": 3},
        {"cpu": 0, "gpu": 1},
        {"cpu": 0, "mem": 1},
        {"port_count": 0},
        {"port_count": 1, "port_names": ["http"]},
    ],
)
def test_what_can_just_be_meant_is_taken(bounds):
    SchedulingSpec(**bounds)


def test_memory_is_gibibytes_or_a_size():
    sizes = [SchedulingSpec(mem=mem).memory_bytes for mem in (0, 2, 0.5, "512MB", "1GiB")]
    assert sizes == [0, 2 << 30, 1 << 29, 512_000_000, 1 << 30]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"type": "shard"}, "is none of shared"),
        ({"type": "colocation"}, "needs the role"),
        ({"type": "shared", "target": "actor"}, "has no target"),
        ({"type": "separation", "target": "actor", "fork": True}, "fork is for colocation"),
    ],
)
def test_strategies_that_contradict_themselves_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        SchedulingStrategy(**wrong)


def test_only_who_is_colocated_shares_with_its_target():
    strategies = [("colocation", "rollout", True), ("colocation", "rollout"), ("separation", "rollout")]
    jobs = [Job("actor", 1, scheduling_strategy=SchedulingStrategy(*each)) for each in strategies]
    assert [job.scheduling_strategy.shares_with for job in jobs] == ["rollout", "rollout", ""]


@pytest.mark.parametrize("role", ["", "a/b", "a b", None])
def test_a_role_has_a_name_that_ids_can_be_made_of(role):
    with pytest.raises(ValueError, match="is no name"):
        Job(role, 1)


def test_jobs_that_can_not_be_meant_are_refused():
    with pytest.raises(ValueError, match="replicas=0"):
        Job("actor", 0)
    with pytest.raises(ValueError, match="2 tasks for 3 replicas"):
        Job("actor", 3, [SchedulingSpec()] * 2)
    with pytest.raises(ValueError, match="its own target"):
        Job("actor", 1, [SchedulingSpec()], SchedulingStrategy("colocation", "actor"))
    with pytest.raises(TypeError, match="no SchedulingSpec"):
        Job("actor", 1, [{"cpu": 1}])
    with pytest.raises(TypeError, match="is a list"):
        Job("actor", 1, SchedulingSpec())
    with pytest.raises(TypeError, match="SchedulingStrategy"):
        Job("actor", 1, scheduling_strategy="shared")


def test_one_spec_is_for_all_replicas_and_several_are_one_each():
    one, other = SchedulingSpec(cpu=2), SchedulingSpec(cpu=3)
    assert Job("actor", 2, [one]).specs == (one, one)
    assert Job("actor", 2, [one, other]).specs == (one, other)
    assert Job("actor", 2, [one]).worker_ids == ("actor/0", "actor/1")


def test_a_job_can_be_sent_and_is_the_same():
    job = Job("actor", 2, [SchedulingSpec(env_vars={"A": "1"}, cmd=["nice"])], SchedulingStrategy("separate"))
    assert pickle.loads(pickle.dumps(job)) == job
