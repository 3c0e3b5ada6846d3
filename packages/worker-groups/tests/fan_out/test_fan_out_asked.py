"""Which of the calls that asked for the pool ahead are given up with another one."""

from raycrew.worker_groups._fan_out.warm_pool.asked import Ahead, Asked


def test_only_what_prepares_a_call_is_given_up_with_it():
    asked, calls = Asked(), [Ahead(str(keys), keys, []) for keys in (("f", None), ("f", "i"), ("g", "i"))]
    for call in calls:
        asked.note(call)
    assert asked.take(("h", None)) == asked.take(("f", "j")) == []
    assert asked.take(("h", "i")) == calls[1:]
    assert asked.take(("f", None)) == calls[:1]
    assert asked.take(("f", None)) == asked.take(("h", "i")) == []


def test_the_last_ones_are_remembered():
    asked, calls = Asked(), [Ahead(str(n), (str(n), "i"), []) for n in range(65)]
    for call in calls:
        asked.note(call)
    assert asked.take(("f", "i")) == calls[1:]
