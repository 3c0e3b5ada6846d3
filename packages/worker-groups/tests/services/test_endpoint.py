"""Where a server answers: what is an address, and what is not."""

import pytest

from raycrew.worker_groups.services import Endpoint


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000),
        ("http://node-7.local", "node-7.local", 80),
        ("http://[fe80::1%eth0]:8000", "fe80::1%eth0", 8000),
    ],
)
def test_an_endpoint_has_a_host_and_a_port(url, host, port):
    endpoint = Endpoint(url)
    assert (endpoint.host, endpoint.port, str(endpoint)) == (host, port, url)


@pytest.mark.parametrize(
    "url",
    [
        *("", "h:1", "https://h:1", "http://", "http://h:0", "http://h:65536", "http://h:1/", "http://h:1/a"),
        *("http://h:1?", "http://h:1?a", "http://h:1#a", "http://u@h:1", "http://h\n:1", "http://h o:1"),
        *("http://[::1", "http://a\\b:1", "http://h:", "http://h:1\r\nX: y"),
    ],
)
def test_what_is_no_url_of_a_server_is_refused(url):
    with pytest.raises(ValueError, match="http://host:port"):
        Endpoint(url)


@pytest.mark.parametrize("token", ["a b", "a\r\nX: y", "schlüssel", ""])
def test_a_token_that_no_header_can_have_is_refused_and_not_shown(token):
    with pytest.raises(ValueError, match="printable") as caught:
        Endpoint("http://h:1", token)
    assert not token or token not in str(caught.value)
