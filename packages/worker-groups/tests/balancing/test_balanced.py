"""What may have a balancer, and is to have a name."""

import pytest

from raycrew.worker_groups.balancing import Balanced


class Nameless(Balanced):
    _balancer = None

    def _open(self):
        """It is."""


class Crew(Nameless):
    name = "policy"


def test_what_has_no_balancer_says_whose_it_would_be():
    with pytest.raises(ValueError, match="'policy' was made without enable_load_balancing=True"):
        Crew().balancer  # noqa: B018


def test_what_has_no_name_can_not_be_made():
    with pytest.raises(TypeError, match="name"):
        Nameless()


def test_a_balancer_that_was_asked_for_is_given():
    crew = Crew()
    crew._balancer = balancer = object()
    assert crew.balancer is balancer
