from dataclasses import replace

import pytest
from workers import Worker

from raycrew.worker_groups import GroupResizedError, NamedSharding, UnknownMethodError
from raycrew.worker_groups._calls.methods.dispatch import dispatch_multiple, dispatch_sharded, dispatch_single
from raycrew.worker_groups._calls.methods.items import split_per_rank
from raycrew.worker_groups._calls.methods.shape import Dispatch, GroupShape
from raycrew.worker_groups._worker.worker_class import describe_class

INFO = describe_class(Worker, {})
PLAIN = GroupShape(INFO, 4, [[0], [1], [2], [3]])
TIED = GroupShape(INFO, 4, [[0, 1], [2, 3]])
GRID = GroupShape(INFO, 4, [[0], [1], [2], [3]], NamedSharding([[0, 1], [2, 3]], ["dp", "tp"]))


def got(dispatch):
    return {send.rank: (*send.args, *send.kwargs.values()) for send in dispatch.sends}


class Batch:
    """Can be split, but is no sequence."""

    def __init__(self, rows):
        self.rows = rows

    def shard(self, n):
        size = len(self.rows) // n
        return [self.rows[i * size : (i + 1) * size] for i in range(n)]

    @classmethod
    def concat(cls, parts):
        return cls([row for part in parts for row in part])


@pytest.mark.smoke
def test_single_data():
    dispatch = dispatch_single(PLAIN, "add", (1,), {"y": 2})
    assert got(dispatch) == dict.fromkeys(range(4), (1, 2))
    assert dispatch.return_from == (0, 1, 2, 3)
    assert len({id(send.args) for send in dispatch.sends}) == 1


def test_what_is_the_same_for_all_leaves_out_who_is_absent_and_nothing_else_does():
    shape = replace(PLAIN, absent=frozenset({1, 2}))
    single = dispatch_single(shape, "add", (1,), {})
    assert (tuple(got(single)), single.return_from) == ((0, 3), (0, 3))
    named = dispatch_single(shape, "add", (1,), {}, ranks=[1])
    assert (tuple(got(named)), named.return_from) == ((1,), (1,))
    assert tuple(got(dispatch_multiple(shape, "add", [[1, 2, 3, 4]], {}))) == (0, 1, 2, 3)
    axes = NamedSharding([0, 1, 2, 3], ["dp"])
    split = dispatch_sharded(replace(shape, sharding=axes), "add", [[1, 2, 3, 4]], {}, in_sharded_axes=["dp"])
    assert tuple(got(split)) == (0, 1, 2, 3)
    assert tuple(got(dispatch_single(replace(PLAIN, absent=frozenset(range(4))), "add", (1,), {}))) == (
        0,
        1,
        2,
        3,
    )


def test_a_call_is_not_sent_to_others_than_it_was_made_for():
    whole, one = dispatch_single(PLAIN, "add", (1,), {}), dispatch_single(PLAIN, "add", (1,), {}, ranks=[3])
    part = dispatch_single(PLAIN, "add", (1,), {}, ranks=[0, 1])
    mixed = dispatch_single(PLAIN, "add", (1,), {}, ranks=[0, 3, 1])
    for dispatch in (whole, one, part, mixed):
        dispatch.check_size(4, "policy")
    for dispatch, size, ranks in (
        (whole, 3, "4 of 4 ranks"),
        (whole, 5, "4 of 4 ranks"),
        (one, 3, "rank 3"),
        (one, 2, "rank 3"),
        (part, 1, "2 of 4 ranks"),
        (mixed, 3, "3 of 4 ranks"),
    ):
        with pytest.raises(
            GroupResizedError, match=rf"{size} workers? by now; a call of add for {ranks} was"
        ):
            dispatch.check_size(size, "policy")
    one.check_size(5, "policy")
    part.check_size(2, "policy")
    with pytest.raises(GroupResizedError, match=r"nothing was sent: call again$"):
        one.check_size(3, "policy")
    with pytest.raises(
        GroupResizedError, match="for rank 3 was made before, and may have run; it is not sent"
    ):
        replace(one, is_again=True).check_size(3, "policy")
    alone = Dispatch(whole.method, whole.sends, whole.return_from)
    alone.check_size(3, "policy")
    assert not alone.respect_tied_workers


@pytest.mark.parametrize(
    ("only_on", "called", "returning"),
    [
        ("all", (0, 1, 2, 3), (0, 1, 2, 3)),
        ("tied_leader", (0, 2), (0, 2)),
        ("all_tied_workers", (0, 1, 2, 3), (0, 2)),
    ],
)
def test_tied_groups(only_on, called, returning):
    single = dispatch_single(TIED, "add", (1,), {}, only_on=only_on)
    assert (tuple(got(single)), single.return_from) == (called, returning)
    items = ["a", "b", "c", "d"] if only_on == "all" else ["a", "b"]
    multiple = dispatch_multiple(TIED, "add", [items], {}, only_on=only_on)
    per_rank = items if only_on == "all" else ["a", "a", "b", "b"]
    assert got(multiple) == {rank: (per_rank[rank],) for rank in called}
    assert multiple.return_from == returning


def test_rank_zero_of_some_axes():
    assert list(got(dispatch_single(GRID, "add", (1,), {}, run_rank_0_only_axes=["tp"]))) == [0, 2]
    multiple = dispatch_multiple(GRID, "add", [["a", "b"]], {}, run_rank_0_only_axes=["tp"])
    assert got(multiple) == {0: ("a",), 2: ("b",)}


def test_items_must_be_as_many_as_ranks():
    for items in (["a"] * 3, ["a"] * 5, []):
        with pytest.raises(ValueError, match=f"{len(items)} items for 4 ranks to call"):
            dispatch_multiple(PLAIN, "add", [items], {})
    with pytest.raises(ValueError, match=r"different numbers of items: \[3, 4\]"):
        dispatch_multiple(PLAIN, "add", [["a"] * 4], {"y": ["b"] * 3})
    partial = dispatch_multiple(PLAIN, "add", [["a"] * 3], {}, allow_partial=True)
    assert (list(got(partial)), partial.return_from) == ([0, 1, 2], (0, 1, 2))
    with pytest.raises(ValueError, match="5 items for 4 ranks"):
        dispatch_multiple(PLAIN, "add", [["a"] * 5], {}, allow_partial=True)


def test_what_can_be_split_is_split():
    assert got(dispatch_multiple(PLAIN, "add", [Batch("aabbccdd")], {}))[2] == ("cc",)
    assert got(dispatch_sharded(GRID, "add", [Batch("aabb")], {}, in_sharded_axes=["dp"]))[2] == ("bb",)
    with pytest.raises(TypeError, match="a sequence or shardable, not int"):
        dispatch_multiple(PLAIN, "add", [4], {})
    with pytest.raises(TypeError, match="not str"):
        dispatch_multiple(PLAIN, "add", ["abcd"], {})
    with pytest.raises(ValueError, match="run_all_workers_single_data"):
        dispatch_multiple(PLAIN, "pid", [], {})


def test_common_keyword_arguments():
    dispatch = dispatch_multiple(PLAIN, "add", [[1, 2, 3, 4]], {"y": [5, 6, 7, 8]}, common_kwargs={"z": 9})
    assert got(dispatch)[1] == (2, 6, 9)
    with pytest.raises(ValueError, match=r"\['y'\] are given both"):
        dispatch_multiple(PLAIN, "add", [[1] * 4], {"y": [5] * 4}, common_kwargs={"y": 9})


def test_two_sharded_axes_nest():
    dispatch = dispatch_sharded(GRID, "add", [[["a", "b"], ["c", "d"]]], {}, in_sharded_axes=["dp", "tp"])
    assert got(dispatch) == {0: ("a",), 1: ("b",), 2: ("c",), 3: ("d",)}
    turned = dispatch_sharded(GRID, "add", [[["a", "b"], ["c", "d"]]], {}, in_sharded_axes=["tp", "dp"])
    assert got(turned) == {0: ("a",), 1: ("c",), 2: ("b",), 3: ("d",)}


def test_replicas_get_the_same_object():
    shards = [object(), object()]
    dispatch = dispatch_sharded(GRID, "add", [shards], {}, in_sharded_axes=["dp"], replicate_on_axes=["tp"])
    assert got(dispatch) == {0: (shards[0],), 1: (shards[0],), 2: (shards[1],), 3: (shards[1],)}
    assert dispatch.return_from == (0, 1, 2, 3)


def test_free_axes_are_called_on_coordinate_zero_only():
    arguments = {"in_sharded_axes": ["dp"], "common_kwargs": {"z": 1}}
    dispatch = dispatch_sharded(GRID, "add", [["a", "b"]], {"y": [3, 4]}, **arguments)
    assert got(dispatch) == {0: ("a", 3, 1), 2: ("b", 4, 1)}
    dummies = dispatch_sharded(
        GRID, "add", [["a", "b"]], {"y": [3, 4]}, **arguments, make_dummy_calls_to_free_axes=True
    )
    assert got(dummies) == {0: ("a", 3, 1), 1: (None, None, 1), 2: ("b", 4, 1), 3: (None, None, 1)}
    assert dummies.return_from == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_sharded_axes": ["ep"]}, "no axis 'ep'"),
        ({"in_sharded_axes": ["dp"], "replicate_on_axes": ["dp"]}, "both sharded and replicated"),
        ({"in_sharded_axes": ["dp", "dp"]}, "twice"),
        ({"in_sharded_axes": ["dp"], "output_is_replicated": ["xp"]}, "no axis 'xp'"),
    ],
)
def test_axes_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        dispatch_sharded(GRID, "add", [["a", "b"]], {}, **arguments)


def test_lengths_of_axes_are_exact():
    with pytest.raises(ValueError, match="on axis 'dp' has 3 items, the axis has size 2"):
        dispatch_sharded(GRID, "add", [["a"] * 3], {}, in_sharded_axes=["dp"])
    with pytest.raises(ValueError, match="on axis 'tp' has 1 items"):
        dispatch_sharded(GRID, "add", [[["a"], ["b"]]], {}, in_sharded_axes=["dp", "tp"])
    with pytest.raises(ValueError, match="needs a group with sharding_annotations"):
        dispatch_sharded(PLAIN, "add", [["a"]], {}, in_sharded_axes=["dp"])
    with pytest.raises(TypeError, match=r"as in \['dp'\]"):
        dispatch_sharded(GRID, "add", [["a", "b"]], {}, in_sharded_axes="dp")
    partial = dispatch_sharded(GRID, "add", [["a"]], {}, in_sharded_axes=["dp"], allow_partial=True)
    assert got(partial) == {0: ("a",)}
    with pytest.raises(ValueError, match="items at different coordinates"):
        dispatch_sharded(GRID, "add", [["a", "b"]], {"y": ["c"]}, in_sharded_axes=["dp"], allow_partial=True)


def test_methods_and_signatures_are_checked():
    with pytest.raises(UnknownMethodError, match="no method 'ad'"):
        dispatch_single(PLAIN, "ad", (), {})
    with pytest.raises(TypeError, match=r"Worker\.add\(x, y=None, \*, z=None\): too many positional"):
        dispatch_single(PLAIN, "add", (1, 2, 3), {})
    with pytest.raises(TypeError, match="unexpected keyword argument 'w'"):
        dispatch_multiple(PLAIN, "add", [[1] * 4], {"w": [1] * 4})
    for ranks, message in (([], "no ranks"), ([4], "outside 0 to 3"), ([1, 1], "repeated"), ([True], "True")):
        with pytest.raises(ValueError, match=message):
            dispatch_single(PLAIN, "add", (1,), {}, ranks=ranks)
    with pytest.raises(ValueError, match="only_on is one of all, tied_leader, all_tied_workers"):
        dispatch_single(PLAIN, "add", (1,), {}, only_on="leader")


def test_ranks_are_named_from_zero_to_the_last():
    assert PLAIN.check_ranks([0, 3]) == (0, 3)
    for wrong, said in (
        (-1, "outside"), (4, "outside"), (True, "no integer from"), (1.0, "no integer from"),
        ("1", "no integer from"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"is {said} 0 to 3"):
            PLAIN.check_ranks([wrong])


def test_ranks_may_be_named_by_other_integers_than_pythons_own():
    np = pytest.importorskip("numpy")
    for named in (np.array([3, 0]), [np.int64(3), np.uint8(0)]):
        ranks = PLAIN.check_ranks(named)
        assert (ranks, {type(rank) for rank in ranks}) == ((3, 0), {int})
    with pytest.raises(ValueError, match="rank 4 is outside 0 to 3"):
        PLAIN.check_ranks([np.int64(4)])


def test_signatures_that_were_checked_are_remembered_up_to_a_bound():
    shape = GroupShape(INFO, 4, [[0], [1], [2], [3]])
    dispatch_single(shape, "add", (1,), {"y": 2})
    assert len(shape.known_calls) == 1


def test_no_arguments_at_all_are_no_arguments_of_different_lengths():
    with pytest.raises(ValueError, match="no argument has items"):
        dispatch_multiple(PLAIN, "add", [], {})


def test_a_rank_without_its_item_does_not_end_the_others():
    sharded = dispatch_sharded(
        GRID, "add", [["a", "b"]], {}, in_sharded_axes=["dp"], make_dummy_calls_to_free_axes=False
    )
    assert got(sharded) == {0: ("a",), 2: ("b",)}


def test_one_item_of_several_is_part_of_them():
    partial = dispatch_multiple(PLAIN, "add", [["a"]], {}, allow_partial=True)
    assert (got(partial), partial.return_from) == ({0: ("a",)}, (0,))
    with pytest.raises(ValueError, match="0 items for 4 ranks"):
        dispatch_multiple(PLAIN, "add", [[]], {}, allow_partial=True)
    nested = dispatch_sharded(
        GRID, "add", [[["a"], ["b", "c"]]], {}, in_sharded_axes=["dp", "tp"], allow_partial=True
    )
    assert got(nested) == {0: ("a",), 2: ("b",), 3: ("c",)}
    for wrong in ([["a"] * 3], [[]]):
        with pytest.raises(ValueError, match="the axis has size 2"):
            dispatch_sharded(GRID, "add", wrong, {}, in_sharded_axes=["dp"], allow_partial=True)


def test_fewer_items_are_told_how_to_be_allowed_and_others_are_not():
    for items, told in ((["a"], True), (["a"] * 3, True), ([], False), (["a"] * 5, False)):
        with pytest.raises(ValueError, match="items for 4 ranks") as raised:
            dispatch_multiple(PLAIN, "add", [items], {})
        assert ("allow_partial=True" in str(raised.value)) == told
    with pytest.raises(ValueError, match="items for 4 ranks") as raised:
        split_per_rank({"x": ["a"]}, 4)
    assert "allow_partial" not in str(raised.value)


def test_a_sharded_call_without_arguments_calls_each_coordinate_once():
    calls = dispatch_sharded(GRID, "pid", [], {}, in_sharded_axes=["dp"])
    assert (got(calls), calls.return_from) == ({0: (), 2: ()}, (0, 2))


def test_copies_of_a_result_return_from_the_first_of_them():
    calls = dispatch_sharded(
        GRID,
        "add",
        [["a", "b"]],
        {},
        in_sharded_axes=["dp"],
        replicate_on_axes=["tp"],
        output_is_replicated=["tp"],
    )
    assert (sorted(got(calls)), calls.return_from) == ([0, 1, 2, 3], (0, 2))


def test_axes_of_which_only_the_first_is_called_need_a_group_that_has_them():
    with pytest.raises(ValueError, match=r"run_rank_0_only_axes=\['tp'\] needs a group"):
        dispatch_single(PLAIN, "add", (1,), {}, run_rank_0_only_axes=["tp"])
    both = dispatch_single(GRID, "add", (1,), {}, run_rank_0_only_axes=["tp", "dp"])
    assert list(got(both)) == [0]
    tied = GroupShape(INFO, 4, [[0, 1], [2, 3]], NamedSharding([[0, 1], [2, 3]], ["dp", "tp"]))
    leaders = dispatch_single(tied, "add", (1,), {}, only_on="tied_leader", run_rank_0_only_axes=["dp"])
    assert (list(got(leaders)), leaders.respect_tied_workers) == ([0], True)


def test_what_does_not_fit_the_signature_is_refused_of_a_whole_sharded_call():
    shape = GroupShape(INFO, 4, [[0], [1], [2], [3]], GRID.sharding)
    with pytest.raises(TypeError, match="unexpected keyword argument 'w'"):
        dispatch_sharded(shape, "add", [["a", "b"]], {"w": ["c", "d"]}, in_sharded_axes=["dp"])
    assert not shape.known_calls


def test_every_partial_call_is_checked_and_every_item_too():
    with pytest.raises(TypeError, match="unexpected keyword argument 'w'"):
        dispatch_sharded(GRID, "add", [["a"]], {"w": ["b"]}, in_sharded_axes=["dp"], allow_partial=True)
    with pytest.raises(ValueError, match=r"argument 0\[1\] on axis 'tp' has 1 items"):
        dispatch_sharded(GRID, "add", [[["a", "b"], ["c"]]], {}, in_sharded_axes=["dp", "tp"])
