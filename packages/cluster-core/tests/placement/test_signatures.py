"""A method that takes what a constructor takes."""

import inspect

import pytest

from raycrew.cluster_core._placement.signatures import with_arguments_of

pytestmark = pytest.mark.smoke


class Made:
    def __init__(self, counts: list[int], *, name: str = "made") -> None:
        raise AssertionError("nothing is made")

    @with_arguments_of(__init__)
    def plan(self, counts: list[int], name: str) -> str:
        """What it would be."""
        return f"{self}: {name} of {counts}"


def test_all_arguments_are_handed_on_by_name_with_their_defaults():
    assert Made.plan("it", [2]) == "it: made of [2]"
    assert Made.plan("it", counts=[1, 2], name="other") == "it: other of [1, 2]"
    with pytest.raises(TypeError, match="counts"):
        Made.plan("it")
    with pytest.raises(TypeError, match="nmae"):
        Made.plan("it", [2], nmae="other")


def test_an_editor_shows_the_constructors_arguments_and_the_methods_result():
    shown = inspect.signature(Made.plan)
    assert [*shown.parameters] == ["self", "counts", "name"] and shown.parameters["name"].default == "made"
    assert shown.return_annotation is str and Made.plan.__doc__ == "What it would be."
