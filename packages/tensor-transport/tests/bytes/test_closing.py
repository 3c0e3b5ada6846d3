"""What a `with` block closes at its end."""

import pytest

from raycrew.tensor_transport._bytes import Closing


class Door(Closing):
    closed = 0

    def close(self):
        self.closed += 1


def test_a_block_gives_the_thing_itself_and_closes_it_once():
    with Door() as door:
        assert isinstance(door, Door) and not door.closed
    assert door.closed == 1


def test_a_block_that_fails_closes_it_and_tells_of_its_failure():
    door = Door()
    with pytest.raises(KeyError), door:
        raise KeyError("x")
    assert door.closed == 1
