"""What a service may be asked to be, and which commands come of that."""

import pytest
from service_values import TOKEN, options

from raycrew.worker_groups.services._options import check_token, made_token


def test_an_application_is_named_by_a_path_and_a_command_is_words():
    assert options().is_app
    assert options().shown == "package.app:create"
    command = options(server=("serve", "--port", "{port}"))
    assert not command.is_app
    assert command.shown == "serve"
    assert options(server="a.b:made.of.parts").is_app


def test_placeholders_are_filled_in_and_other_braces_stay():
    words = [
        "serve",
        "{port}",
        "{port1}",
        "{host}:{port0}",
        "{address}",
        "{rank}",
        '{"a": {"b": 1}}',
        "{{port}}",
    ]
    filled = options(server=words, ports=2).words("0.0.0.0", "10.0.0.7", (5, 6), 3)
    assert filled == ["serve", "5", "6", "0.0.0.0:5", "10.0.0.7", "3", '{"a": {"b": 1}}', "{{port}}"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"server": "package.app"}, "package.app:create"),
        ({"server": "vllm serve --port {port}"}, "sequence of words"),
        ({"server": ["serve"]}, "{port}"),
        ({"server": ["{port}"]}, "does not say which port"),
        ({"server": ["serve", "{port}", "{port1}"]}, "there are {host}"),
        ({"server": ["serve", "{port}", "{token}"]}, "no secret belongs"),
        ({"server": ["serve", "{port}", "a\0b"]}, "null character"),
        ({"ports": 0}, "ports is 0"),
        ({"replicas": 0}, "replicas is 0"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"max_connections": 0}, "max_connections is 0"),
        ({"ready_timeout_s": 0}, "ready_timeout_s is 0"),
        ({"silent_s": float("nan")}, "silent_s is nan"),
        ({"probe_interval_s": float("inf")}, "probe_interval_s is inf"),
        ({"ready_is_open": True, "ready": None}, "ready_is_open"),
        ({"ready_is_open": True, "server": ["serve", "{port}"]}, "ready_is_open"),
        ({"grace_s": -1}, "grace_s is -1"),
        ({"ready": "health"}, "path such as"),
        ({"ready": "/a\r\nX: y"}, "path such as"),
        ({"ready": "/a b"}, "path such as"),
        ({"ready": "/a#b"}, "path such as"),
        ({"ready": "/ä"}, "path such as"),
        ({"ready": "/a\x7f"}, "path such as"),
        ({"token_variable": "A B"}, "name of a variable"),
        ({"token_variable": ""}, "name of a variable"),
    ],
)
def test_what_can_not_be_meant_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        options(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"server": 7},
        {"server": []},
        {"server": ["serve", ""]},
        {"server": ["serve", 7]},
        {"ports": 1.0},
        {"replicas": True},
        {"ready": 7},
        {"ready_is_open": "yes"},
        {"host": 7},
        {"name": None},
        {"environment": None},
        {"cwd": 7},
        {"token_variable": 7},
        {"silent_s": "1"},
    ],
)
def test_what_is_of_a_wrong_kind_is_refused(changed):
    with pytest.raises(TypeError):
        options(**changed)


def test_a_token_gets_to_whoever_has_to_check_it():
    check_token(TOKEN, options())
    check_token(None, options())
    command = {"server": ("serve", "{port}")}
    check_token(None, options(**command))
    check_token(TOKEN, options(**command, token_variable="API_KEY"))
    with pytest.raises(ValueError, match="token_variable="):
        check_token(TOKEN, options(**command))
    with pytest.raises(ValueError, match="token=None"):
        check_token(None, options(**command, token_variable="API_KEY"))


@pytest.mark.parametrize(
    "token", ["short", "a" * 15, "with spaces in it, too many", "schlüssel-schlüssel", "a" * 16 + "\n"]
)
def test_a_token_that_is_none_is_refused_and_not_shown(token):
    with pytest.raises(ValueError, match="token") as caught:
        made_token(token)
    assert token not in str(caught.value)
    with pytest.raises(TypeError, match="int"):
        made_token(7)


def test_a_token_is_made_up_for_each_who_asks():
    assert made_token("auto") != made_token("auto")
    assert made_token(None) is None
    for length in (16, 17, 100):
        assert made_token("a" * length) == "a" * length


def test_the_smallest_options_are_good():
    least = {"ready_timeout_s": 1e-3, "probe_interval_s": 1e-3, "silent_s": 1e-3, "grace_s": 0}
    assert options(**least, max_restarts=0, ready=None, cwd="/tmp").folder == "/tmp"
    assert options().folder is None
