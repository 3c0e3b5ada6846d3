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
    ],
)
def test_specs_of_a_wrong_kind_are_refused(wrong):
    with pytest.raises(TypeError):
        SchedulingSpec(**wrong)


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


def test_a_job_can_be_sent_and_is_the_same():
    job = Job("actor", 2, [SchedulingSpec(env_vars={"A": "1"}, cmd=["nice"])], SchedulingStrategy("separate"))
    assert pickle.loads(pickle.dumps(job)) == job
