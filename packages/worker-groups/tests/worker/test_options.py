import shlex
import sys

import pytest

from raycrew.worker_groups._worker.options import (
    Configured,
    check_env_vars,
    merge_options,
    pick_secrets,
    read_configured,
)

PLACED = {"num_cpus": 4.0, "num_gpus": 1.0, "resources": {}, "scheduling_strategy": "bundle"}


def merged(own=None, caller=None, configured=None, **rest):
    return merge_options(own or {}, caller or {}, configured or Configured(), PLACED, **rest)


@pytest.mark.smoke
def test_the_later_has_the_last_word():
    own = {"max_concurrency": 1, "num_cpus": 99, "memory": 1, "scheduling_strategy": "SPREAD"}
    options = merged(own, {"max_concurrency": 2, "num_cpus": 3}, Configured({"num_cpus": 2}))
    assert options.actor == {**PLACED, "max_concurrency": 2, "memory": 1, "num_cpus": 2}
    assert merged(own, {"max_concurrency": 2}).actor["num_cpus"] == 4.0
    assert options.overridden == ("num_cpus",)


def test_where_a_worker_is_belongs_to_its_group():
    asked = {"scheduling_strategy": "SPREAD", "name": "x", "lifetime": "detached", "max_restarts": 3}
    assert merged(caller=asked).actor == PLACED


def test_a_worker_may_take_less_than_its_share_but_not_more():
    assert merged(configured=Configured({"num_gpus": 0})).actor["num_gpus"] == 0
    assert merged(configured=Configured({"num_gpus": 1.0})).actor["num_gpus"] == 1.0
    placed = {"num_cpus": 0.5, "num_gpus": 0.25}
    assert merge_options({}, {}, Configured(), placed).actor == placed
    with pytest.raises(ValueError, match=r"num_gpus=2 is more than the worker's share of its bundle, 1\.0"):
        merged(configured=Configured({"num_gpus": 2}))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"num_cpus": 2}, r"num_cpus=2 .* share of its bundle, 1\.0"),
        ({"memory": 11}, "memory=11 .* share of its bundle, 10"),
        ({"resources": {"NPU": 1}}, r"NPU=1 .* share of its bundle, 0\.5"),
    ],
)
def test_whatever_a_bundle_holds_a_worker_takes_no_more_than_its_share(wanted, message):
    """Else a group would wait for what another one on the bundle has, until its start is given up."""
    placed = {"num_cpus": 1.0, "num_gpus": 0, "memory": 10, "resources": {"NPU": 0.5, "disk": 4.0}}
    for given in ((wanted, Configured()), ({}, Configured(wanted))):
        with pytest.raises(ValueError, match=message):
            merge_options({}, *given, placed)
    whole = {"num_cpus": 1.0, "memory": 10, "resources": {"NPU": 0.5}}
    assert merge_options({}, whole, Configured(), placed).actor == placed


def test_variables_go_where_they_still_count():
    env = {"COLOUR": "red", "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": "/x"}
    options = merged(
        {"runtime_env": {"pip": []}},
        configured=Configured({}, {"COLOUR": "blue"}, {}, {"env_vars": {"A": "b"}}),
        env_vars=env,
    )
    assert options.env_vars == {"COLOUR": "blue"}
    from_start = {"A": "b", "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": "/x"}
    assert options.actor["runtime_env"] == {"pip": [], "env_vars": from_start}
    assert options.overridden == ("COLOUR",)


def test_without_need_there_is_no_runtime_environment():
    assert "runtime_env" not in merged(env_vars={"COLOUR": "red"}).actor
    assert merged(py_executable="/env/bin/python").actor["runtime_env"] == {
        "py_executable": "/env/bin/python"
    }


def test_keyword_arguments_of_init():
    options = merged(configured=Configured(init_kwargs={"a": 1}), init_kwargs={"a": 0, "b": 2})
    assert (options.init_kwargs, options.overridden) == ({"a": 1, "b": 2}, ("a",))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (({}, {}), "must return"),
        ([{}, {}, {}], "must return"),
        (({}, {}, {}, {}, {}), "must return"),
        (({}, [], {}), "env_vars is a list, not a mapping"),
        (({}, {"A": 1, "B": None}, {}), "env_vars\\['B'\\] is None, which no variable can be"),
    ],
)
def test_answers_of_configure_worker_are_checked(answer, message):
    with pytest.raises(TypeError, match=message):
        read_configured(answer, "Policy")


def test_answers_of_configure_worker_may_have_gaps():
    assert read_configured(None, "Policy") == Configured()
    assert read_configured((None, {"A": 1}, None), "Policy") == Configured({}, {"A": "1"}, {})
    assert read_configured(({}, {}, {}, {"pip": []}), "Policy").runtime_env == {"pip": []}


def test_secrets_show_their_names_only():
    found = pick_secrets(("TOKEN",), {"TOKEN": "hush"})
    assert dict(found) == {"TOKEN": "hush"}
    assert "hush" not in repr(found)
    with pytest.raises(ValueError, match=r"\['OTHER'\] are not set"):
        pick_secrets(("OTHER",), {"TOKEN": "hush"})
    with pytest.raises(TypeError, match=r"as in \('TOKEN',\)"):
        pick_secrets("TOKEN", {"TOKEN": "hush"})


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("variables", "error", "said"),
    [
        ({"A=B": "1"}, ValueError, "A=B"),
        ({"": "1"}, ValueError, "''"),
        ({"A\0": "1"}, ValueError, "null"),
        ({"A": "1\0"}, ValueError, "null"),
        ({"A": "\ud800"}, ValueError, "'A'"),
        ({"A": 1}, TypeError, "strings"),
        ({1: "A"}, TypeError, "strings"),
        ([("A", "1")], TypeError, "mapping"),
    ],
)
def test_variables_that_no_process_can_have_are_refused(variables, error, said):
    with pytest.raises(error, match=said):
        check_env_vars(variables, "env_vars")
    if isinstance(variables, dict) and error is ValueError:
        with pytest.raises(error, match=said):
            merge_options({}, {}, Configured(env_vars=variables), {})
        with pytest.raises(error, match=said):
            merge_options({}, {"runtime_env": {"env_vars": variables}}, Configured(), {})


def test_a_launcher_stands_before_the_interpreter_that_the_worker_has_anyway():
    launched = merged(launcher=["numactl", "--cpunodebind", "a b"]).actor["runtime_env"]
    assert launched == {"py_executable": f"numactl --cpunodebind 'a b' {shlex.quote(sys.executable)}"}
    own = merged(launcher=["nsys", "profile"], py_executable="/env/bin/python").actor["runtime_env"]
    assert own == {"py_executable": "nsys profile /env/bin/python"}


def test_forwarded_variables_are_those_that_nobody_else_names():
    forwarded = {"A": "forwarded", "B": "forwarded", "C": "forwarded", "D": "forwarded", "LD_X": "/x"}
    options = merged(
        {"runtime_env": {"conda": "base", "pip": [], "env_vars": {"A": "of the class"}}},
        configured=Configured({}, {"B": "configured"}),
        env_vars={"C": "of the caller"},
        forwarded=forwarded,
    )
    assert options.env_vars == {"B": "configured", "C": "of the caller", "D": "forwarded"}
    from_start = {"A": "of the class", "LD_X": "/x"}
    assert options.actor["runtime_env"] == {"conda": "base", "pip": [], "env_vars": from_start}
    assert options.overridden == ()


def test_what_is_configured_as_the_caller_wanted_it_overrides_nothing():
    options = merged(caller={"num_cpus": 2}, configured=Configured({"num_cpus": 2}))
    assert (options.actor["num_cpus"], options.overridden) == (2, ())
