import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups import PhaseError
from raycrew.worker_groups._group.phases.occupancy import Occupancy

NAMES = ("train", "generate", "score")


def test_nobody_is_there_at_first():
    occupancy = Occupancy.of(NAMES)
    assert occupancy.states == dict.fromkeys(NAMES, "absent")
    assert occupancy.holder is None
    assert occupancy.in_the_way_of("train") == []
    assert not occupancy.has_to_wake("train")


def test_whoever_is_awake_is_in_the_way_until_it_sleeps():
    occupancy = Occupancy.of(NAMES).taken_by("train").joined("train")
    assert occupancy.states["train"] == "awake"
    assert occupancy.holder == "train"
    assert occupancy.in_the_way_of("train") == []
    assert not occupancy.has_to_wake("train")
    assert occupancy.in_the_way_of("generate") == ["train"]
    with pytest.raises(
        PhaseError, match=r"'generate' can't have the devices while \['train'\] may"
    ) as caught:
        occupancy.taken_by("generate")
    assert caught.value.member == "generate"
    occupancy = occupancy.falling_asleep("train")
    assert occupancy.holder is None, "what starts now takes no memory"
    assert occupancy.states["train"] == "unsure"
    with pytest.raises(PhaseError):
        occupancy.taken_by("generate")
    occupancy = occupancy.asleep("train").taken_by("generate")
    assert occupancy.holder == "generate"
    assert occupancy.has_to_wake("train")


def test_nobody_is_woken_who_has_no_turn():
    occupancy = Occupancy.of(NAMES).taken_by("train")
    for step in (occupancy.waking, occupancy.joined):
        with pytest.raises(PhaseError, match="'generate' can't be woken: 'train' has the devices"):
            step("generate")


def test_whose_wake_did_not_end_well_is_in_the_way_of_others_and_woken_again_itself():
    occupancy = Occupancy.of(NAMES).taken_by("train").joined("train").falling_asleep("train").asleep("train")
    occupancy = occupancy.taken_by("train").waking("train")
    assert occupancy.in_the_way_of("score") == ["train"]
    assert occupancy.has_to_wake("train")
    assert occupancy.holder == "train", "what starts meanwhile may wake"


def test_whose_workers_were_replaced_is_asked_again():
    occupancy = Occupancy.of(NAMES).taken_by("train").joined("train")
    assert occupancy.doubted("score") == occupancy, "it has none"
    assert occupancy.doubted("train").has_to_wake("train")
    occupancy = occupancy.falling_asleep("train").asleep("train").taken_by("score").joined("score")
    doubted = occupancy.doubted("train")
    assert doubted.in_the_way_of("score") == ["train"]
    assert doubted.falling_asleep("train").holder == "score"


def test_whoever_has_left_is_in_nobodys_way():
    occupancy = Occupancy.of(NAMES).taken_by("train").joined("train")
    assert occupancy.without("score") == occupancy
    gone = occupancy.without("train")
    assert gone == Occupancy.of(NAMES).taken_by("train"), "within its turn it may start others"
    assert gone.taken_by("score").holder == "score"


def test_all_are_put_to_sleep_in_the_order_of_their_names():
    occupancy = Occupancy({"train": "unsure", "generate": "asleep", "score": "awake", "judge": "absent"})
    assert occupancy.in_the_way_of("judge") == ["train", "score"]
    assert occupancy.in_the_way_of("score") == ["train"]


STEPS = ("falling_asleep", "asleep", "taken_by", "joined", "waking", "awake", "doubted", "without")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(NAMES))))
def test_whatever_is_asked_one_alone_takes_memory(asked):
    """In every order of steps in which sleep and wake end after they began; others are not made."""
    occupancy, going_on = Occupancy.of(NAMES), set()
    for step, name in asked:
        if step == "asleep" and ("falling_asleep", name) not in going_on:
            continue
        if step == "awake" and (("waking", name) not in going_on or occupancy.holder != name):
            continue
        before = occupancy
        try:
            occupancy = getattr(occupancy, step)(name)
        except PhaseError:
            assert occupancy is before
            continue
        going_on = {one for one in going_on if one[1] != name} | {(step, name)}
        assert sum(state == "awake" for state in occupancy.states.values()) <= 1
        if step == "taken_by":
            assert all(occupancy.states[other] in ("absent", "asleep") for other in NAMES if other != name)
