"""Whether two spellings of an address mean the same cluster."""

from ipaddress import ip_address

import pytest

from raycrew.cluster_core._connection.addresses import is_same, own_places, places_of

pytestmark = [pytest.mark.hostile, pytest.mark.smoke]

NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "me": ["127.0.1.1"],
    "me.net": ["10.0.0.1", "fd00::1"],
    "moved": ["10.0.0.1", "10.0.0.9"],
    "other.net": ["10.0.0.2"],
    "nowhere": [],
}
OWN = frozenset(map(ip_address, ["127.0.0.1", "::1", "10.0.0.1", "172.17.0.1", "fd00::1"]))


def led_to(host):
    return frozenset(map(ip_address, NAMES.get(host, [host])))


def same(address, known):
    return is_same(address, known, led_to, lambda: OWN)


@pytest.mark.parametrize(
    ("address", "known"),
    [
        ("10.0.0.1:1", "10.0.0.1:1"),
        ("localhost:1", "10.0.0.1:1"),
        ("127.0.0.1:1", "10.0.0.1:1"),
        ("127.9.9.9:1", "127.0.0.1:1"),
        ("[::1]:1", "10.0.0.1:1"),
        ("[0:0::1]:1", "[::1]:1"),
        ("0.0.0.0:1", "10.0.0.1:1"),
        ("me:1", "10.0.0.1:1"),
        ("me:1", "127.0.0.1:1"),
        ("me.net:1", "10.0.0.1:1"),
        ("172.17.0.1:1", "10.0.0.1:1"),
        ("other.net:1", "10.0.0.2:1"),
        ("10.0.0.2:1", "other.net:1"),
        ("ray://10.0.0.1:1", "ray://10.0.0.1:1"),
        ("nowhere:1", "nowhere:1"),
    ],
)
def test_the_same(address, known):
    assert same(address, known)


@pytest.mark.parametrize(
    ("address", "known"),
    [
        ("10.0.0.1:1", "10.0.0.1:2"),
        ("localhost:1", "10.0.0.2:1"),  # its node here has its head elsewhere
        ("10.0.0.2:1", "localhost:1"),
        ("10.0.0.1:1", "127.0.0.1:1"),  # where somebody else may listen
        ("me.net:1", "127.0.0.1:1"),
        ("other.net:1", "10.0.0.1:1"),
        ("moved:1", "10.0.0.1:1"),  # it may lead to another machine
        ("nowhere:1", "10.0.0.1:1"),
        ("10.0.0.1:1", "nowhere:1"),
        ("ray://10.0.0.1:1", "10.0.0.1:1"),
    ],
)
def test_another_one(address, known):
    assert not same(address, known)


def test_what_this_machine_says():
    assert places_of("127.0.0.1") == {ip_address("127.0.0.1")}
    assert places_of("::ffff:10.0.0.1") == {ip_address("10.0.0.1")}
    assert places_of("localhost") & own_places()
    assert places_of("surely.not.there.invalid") == places_of("x" * 300) == frozenset()
