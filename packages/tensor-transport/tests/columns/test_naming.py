"""What errors say of names: not too many of them, and the one that was meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport._columns.naming import listed_columns, name_columns, refuse_unknown


@given(st.lists(st.text("abc", min_size=1, max_size=6), unique=True, max_size=20))
def test_no_name_is_left_out_without_being_counted(names):
    named, _, rest = name_columns(names).partition(" and ")
    shown = named.split(", ") if named else []
    assert shown == sorted(names)[: len(shown)] and len(shown) <= 8
    assert not rest.startswith(("0", "-"))
    assert len(names) == len(shown) + (int(rest.removesuffix(" more")) if rest else 0)


@pytest.mark.parametrize("refuse", [refuse_unknown, lambda given, known, _: listed_columns(given, known)])
def test_the_near_miss_of_an_unknown_name_is_named(refuse):
    known = ["tokens", "token", "mask"]
    refuse(["mask", "tokens"], known, "pad_value_dict")
    with pytest.raises((KeyError, ValueError), match=r"toknes.*mask, token, tokens; did you mean 'tokens'\?"):
        refuse(["mask", "toknes"], known, "pad_value_dict")
    with pytest.raises((KeyError, ValueError)) as caught:
        refuse(["zzz"], known, "pad_value_dict")
    assert "did you mean" not in str(caught.value)


def test_columns_are_listed_once_each_and_in_the_order_in_which_they_are_named():
    assert listed_columns(["b", "a", "b"], {"a", "b"}) == ["b", "a"]
    with pytest.raises(TypeError, match="by a list, not by the one string 'ab'"):
        listed_columns("ab", {"a", "b"})
