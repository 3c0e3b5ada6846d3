"""What of a request goes on to a server, whose it is, and which server gets it."""

import pytest

from raycrew.worker_groups.services import Endpoint
from raycrew.worker_groups.services._forwarding.choosing import DOWN_S, Choosing
from raycrew.worker_groups.services._forwarding.headers import (
    content_length,
    has_two_lengths,
    is_idempotent,
    is_web_socket,
    says_not_run,
    to_client,
    to_server,
)
from raycrew.worker_groups.services._forwarding.keys import Key
from raycrew.worker_groups.services._forwarding.limits import Limits

CLIENT = [
    (b"host", b"proxy"),
    (b"authorization", b"Bearer of-the-proxy"),
    (b"connection", b"keep-alive, X-Own"),
    (b"x-own", b"1"),
    (b"te", b"trailers"),
    (b"transfer-encoding", b"chunked"),
    (b"upgrade", b"websocket"),
    (b"expect", b"100-continue"),
    (b"content-length", b"7"),
    (b"accept", b"*/*"),
]


def test_headers_of_one_connection_stay_there_and_a_token_goes_to_whom_it_is_for():
    own = {"Authorization": "Bearer of-the-server"}
    sent = to_server(CLIENT, "server:1", own, 7, is_authorized_here=True)
    assert sent == [
        (b"host", b"server:1"),
        (b"accept", b"*/*"),
        (b"Authorization", b"Bearer of-the-server"),
        (b"content-length", b"7"),
        (b"connection", b"close"),
    ]
    assert b"authorization" not in dict(to_server(CLIENT, "server:1", {}, 7, is_authorized_here=True))
    open_one = dict(to_server(CLIENT, "server:1", {}, None, is_authorized_here=False))
    assert open_one[b"authorization"] == b"Bearer of-the-proxy"
    assert open_one[b"transfer-encoding"] == b"chunked"
    assert b"content-length" not in open_one


@pytest.mark.parametrize(
    ("value", "known"),
    [
        (b"http://server:1/a/?b", b"/a/?b"),
        (b"http://server:1", b"/"),
        (b"http://server:1?b", b"/?b"),
        (b"http://server:10/a", b"http://server:10/a"),
        (b"http://server:1@elsewhere/", b"http://server:1@elsewhere/"),
        (b"/a", b"/a"),
    ],
)
def test_a_place_on_the_server_is_one_on_the_proxy(value, known):
    assert to_client([(b"Location", value)], "server:1") == [(b"Location", known)]


def test_chunks_count_more_than_a_length():
    answer = [(b"content-length", b"3"), (b"transfer-encoding", b"chunked")]
    assert to_client(answer, "server:1") == []


def test_headers_of_an_answer_go_back():
    answer = [
        (b"content-length", b"3"),
        (b"keep-alive", b"5"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
    ]
    assert to_client(answer, "server:1") == [answer[0], *answer[2:]]
    assert content_length(answer) == 3
    assert content_length([]) is None
    others = [(b"accept", b"*/*"), (b"x-own", b"1")]
    assert content_length([*others, (b"Content-Length", b"3")]) == 3
    assert content_length(others) is None


def test_only_what_the_connection_names_stays_there():
    answer = [(b"content-length", b"3"), (b"accept", b"set-cookie"), (b"set-cookie", b"a=1")]
    answer.append((b"vary", b"set-cookie"))
    assert to_client(answer, "server:1") == answer


@pytest.mark.parametrize(
    ("method", "headers", "may"),
    [
        ("GET", [], True),
        ("HEAD", [], True),
        ("PUT", [], True),
        ("DELETE", [], True),
        ("OPTIONS", [], True),
        ("POST", [], False),
        ("PATCH", [], False),
        ("POST", [(b"Idempotency-Key", b"7")], True),
        ("POST", [(b"accept", b"7"), (b"x-key", b"7")], False),
    ],
)
def test_which_requests_may_be_sent_twice(method, headers, may):
    assert is_idempotent(method, headers) is may


def test_keys_are_in_headers_cookies_and_json():
    headers = [(b"X-Session", b"s1"), (b"cookie", b"a=1; sid=s2")]
    assert Key.parsed("header:x-session").of(headers, b"") == "s1"
    assert Key.parsed("header:X-Session").of(headers, b"") == "s1"
    assert Key.parsed("header:other").of(headers, b"") is None
    assert Key.parsed("cookie:sid").of(headers, b"") == "s2"
    assert Key.parsed("cookie:other").of(headers, b"") is None
    assert Key.parsed("cookie:sid").of([(b"cookie", b'"; sid')], b"") is None
    odd = (b'prefs={"x":1}; sid=s3', b"a[b]=1; sid=s3", b"a=\xe9;sid=s3", b'sid="s3"', b"sid = s3 ; sid=s4")
    for cookies in odd:
        assert Key.parsed("cookie:sid").of([(b"cookie", cookies)], b"") == "s3"
    assert Key.parsed("cookie:sid").of([(b"cookie", b"a=1"), (b"Cookie", b"sid=s3")], b"") == "s3"
    assert Key.parsed("cookie:SID").of([(b"cookie", b"sid=s3; SID=s4")], b"") == "s4"
    assert Key.parsed("json:User").of([], b'{"user": "small", "User": "large"}') == "large"
    nested = Key.parsed("json:user.id")
    assert nested.is_in_body
    assert nested.of([], b'{"user": {"id": 7}}') == "7"
    without = (b"", b"no json", b"[1]", b'{"user": 1}', b'{"user": {"id": true}}', b'{"user": {"id": ""}}')
    for body in (*without, b"[" * 10**5):
        assert nested.of([], body) is None


@pytest.mark.parametrize("text", ["", "x-session", "header:", "body:a", "header:a\nb"])
def test_a_key_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="a key is"):
        Key.parsed(text)
    with pytest.raises(TypeError):
        Key.parsed(7)


def three():
    return [Endpoint(f"http://127.0.0.1:{8000 + rank}", rank=rank) for rank in range(3)]


def test_the_server_with_the_fewest_requests_is_chosen():
    choosing = Choosing(three, "least_outstanding")
    first = choosing.choose(None)
    with choosing.counted(first):
        second = choosing.choose(None)
        with choosing.counted(second):
            third = choosing.choose(None)
            assert len({first.rank, second.rank, third.rank}) == 3
    assert not choosing.needs_key


def test_a_key_stays_with_its_server_while_that_is_there_and_comes_back():
    servers, now = three(), [0.0]
    choosing = Choosing(lambda: servers, "consistent_hash", lambda: now[0])
    of_key = {key: choosing.choose(key).rank for key in map(str, range(40))}
    assert set(of_key.values()) == {0, 1, 2}
    assert {key: choosing.choose(key).rank for key in of_key} == of_key
    moved = Endpoint("http://127.0.0.1:9000", rank=1)
    servers[1] = moved
    assert {key: choosing.choose(key).rank for key in of_key} == of_key, "a port is no name"
    choosing.note_down(moved)
    without = {key: choosing.choose(key).rank for key in of_key}
    assert set(without.values()) == {0, 2}
    assert all(without[key] == rank for key, rank in of_key.items() if rank != 1)
    now[0] += 2 * DOWN_S
    assert {key: choosing.choose(key).rank for key in of_key} == of_key
    choosing.note_down(moved)
    assert {choosing.choose(key).rank for key in of_key} == {0, 2}
    now[0] += DOWN_S
    assert {key: choosing.choose(key).rank for key in of_key} == of_key
    assert choosing.choose(None) is not None, "without a key, by load"


def test_sessions_stay_when_a_server_without_a_rank_of_its_own_leaves():
    alike = [Endpoint(f"http://127.0.0.1:{port}") for port in range(8000, 8005)]
    choosing = Choosing(lambda: alike, "consistent_hash")
    before = {key: choosing.choose(key) for key in map(str, range(100))}
    gone = alike.pop(1)
    assert all(choosing.choose(key) == one for key, one in before.items() if one != gone)


def test_there_may_be_no_server_or_several_of_one_rank():
    assert Choosing(list, "round_robin").choose(None) is None
    alike = [Endpoint(f"http://127.0.0.1:{port}") for port in (1, 2)]
    choosing = Choosing(lambda: alike, "round_robin")
    assert {choosing.choose(None).port for _ in range(4)} == {1, 2}
    last = Choosing(lambda: alike, lambda loads, key: loads[-1].rank)
    assert len({last.choose(None) for _ in range(4)}) == 1, "a function is asked without a key, too"
    with pytest.raises(ValueError, match="no resource use"):
        Choosing(list, "least_loaded")


LEAST = {"timeout_s": 1e-3, "patience_s": 0, "resends": 0, "body_bytes": 0, "held_bytes": 0}


def test_limits_are_numbers_that_are_large_enough():
    Limits(**LEAST)
    Limits(**{**LEAST, "timeout_s": None})
    for name in LEAST:
        with pytest.raises(ValueError, match=name):
            Limits(**{**LEAST, name: -1})
        with pytest.raises(TypeError, match=name):
            Limits(**{**LEAST, name: "1"})
    with pytest.raises(ValueError, match="timeout_s"):
        Limits(**{**LEAST, "timeout_s": 0})
    for name in ("resends", "body_bytes", "held_bytes"):
        with pytest.raises(TypeError, match=name):
            Limits(**{**LEAST, name: 1.5})


def test_only_who_says_so_has_not_run_a_request():
    said = [(b"X-Raycrew-Outcome", b"surely-not-run")]
    assert says_not_run(503, said)
    for other in (b"unknown", b"has-run"):
        assert not says_not_run(503, [(b"x-raycrew-outcome", other)])
    assert not says_not_run(503, [])
    assert not says_not_run(502, said) and not says_not_run(504, said)


def test_what_is_no_plain_request_is_known_by_its_headers():
    assert is_web_socket([(b"accept", b"*/*"), (b"Upgrade", b"h2c, WebSocket")])
    assert not is_web_socket([(b"accept", b"websocket")])
    assert not is_web_socket([(b"upgrade", b"h2c"), (b"x-upgrade", b"websocket")])
    both = [(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked")]
    assert has_two_lengths(both) and has_two_lengths([*both, (b"accept", b"*/*")])
    assert not has_two_lengths(both[:1]) and not has_two_lengths(both[1:])


def test_a_request_that_has_ended_counts_no_longer():
    servers = [Endpoint(f"http://a:{port}", rank=port) for port in (1, 2)]
    choosing = Choosing(lambda: servers, "least_outstanding")
    with choosing.counted(servers[0]), choosing.counted(servers[0]):
        with choosing.counted(servers[1]), choosing.counted(servers[1]), choosing.counted(servers[1]):
            assert choosing.choose(None) == servers[0]
        assert choosing.choose(None) == servers[1]
    with choosing.counted(servers[1]):
        assert choosing.choose(None) == servers[0]
