import asyncio
import threading
from concurrent.futures import Future

import pytest
from declared_workers import Array, Batch, Dealt, Decorated, Handle, Overriding, Policy

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import (
    LoadBalancer,
    NamedSharding,
    ResultJoinError,
    WorkerFailureError,
    fan_out,
    fan_out_as_completed,
)
from raycrew.worker_groups._calls.encoding import Packer
from raycrew.worker_groups._worker.declared.splitting import split_rows
from raycrew.worker_groups.rollouts._engine import check_prompts
from raycrew.worker_groups.testing import InProcessFuture, InProcessGroup

GRID = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])


@pytest.fixture(scope="module")
def group():
    with InProcessGroup(FakeCluster([4]), Policy, sharding_annotations=GRID) as made:
        yield made


@pytest.mark.smoke
def test_a_declared_method_is_split_sent_and_joined(group):
    future = group.call(Policy.train, Batch("abcd", note="kept"))
    assert future.called_workers == [0, 1, 2, 3]
    assert future.return_from_workers == [0, 2]
    assert future.get_results() == future.get() == Batch("abcd", note="kept")
    assert dict(future.as_completed()) == {0: Batch("ab", "kept"), 2: Batch("cd", "kept")}
    assert group.get_all_worker_results(future) == Batch("abcd", "kept")
    assert group.call("train", [1, 2, 3, 4]).get_results() == [1, 2, 3, 4]
    assert group.call("train", batch=[1, 2], timeout=60).get_results() == [1, 2]
    assert group.on(timeout=60).call(Policy.train, [1, 2]).get_results() == [1, 2]


def test_it_is_awaited_as_one_value(group):
    async def awaited():
        slow = asyncio.create_task(group.call(Policy.train, Batch("abcd")))
        return await group.call(Policy.slowly, [1, 2]), await slow

    assert asyncio.run(awaited()) == ([(0, [1]), (2, [2])], Batch("abcd"))


def test_named_arguments_are_split_and_others_go_to_all(group):
    both = group.call(Policy.update, [1, 2], mask=["a", "b"], lr=0.5)
    assert both.get_results() == [(0, [1], ["a"], 0.5), (2, [2], ["b"], 0.5)]
    assert group.call(Policy.update, [1, 2], None, lr=[5, 6]).get_results() == [
        (0, [1], None, [5, 6]),
        (2, [2], None, [5, 6]),
    ]
    assert group.call(Policy.several, [1, 2], [3, 4], lr=1).get_results() == [
        (([1], [3]), {"lr": 1}),
        (([2], [4]), {"lr": 1}),
    ]
    assert group.call(Policy.where).get_results() == [0, 2]


def test_replicas_share_their_part_and_one_of_them_answers(group):
    seen = group.run_all_workers_single_data("take", object())
    assert len({id(value) for value in seen.get_results()}) == 1
    assert group.call(Policy.last_stage, [1, 2]).get_results() == [1, 3]


def test_classes_that_ray_decorates_say_it_too():
    with InProcessGroup(
        FakeCluster([2]), Decorated, sharding_annotations=NamedSharding([0, 1], ["dp"])
    ) as group:
        for method in ("echo", Decorated.echo):
            assert group.call(method, [1, 2]).get_results() == [1, 2]
        assert group.call("save", "x").get_results() == "x"
        assert group.call("load", "y").get_results() == "y"


def test_results_come_in_the_order_of_the_axis():
    turned = NamedSharding([[3, 1], [2, 0]], ["dp", "tp"])
    with InProcessGroup(FakeCluster([4]), Policy, sharding_annotations=turned) as group:
        assert group.call(Policy.train, [1, 2, 3, 4]).get_results() == [1, 2, 3, 4]
        assert group.call(Policy.update, [1, 2]).get_results() == [(3, [1], None, 1.0), (2, [2], None, 1.0)]


def test_other_ways_to_collect(group):
    assert group.call(Policy.metrics, [1, 2, 3, 4]).get_results() == {"loss": 5.0, "rows": 2.0}
    assert group.call(Policy.count, [1, 2, 3, 4]).get_results() == 4
    assert group.call(Policy.text, [1, 2, 3, 4]).get_results() == "x" * 7


def test_same_arguments_one_rank_and_one_item_each(group):
    step = group.call(Policy.step, 2.0, scale=3)
    assert (step.called_workers, step.get_results()) == ([0, 1, 2, 3], (0, 6.0))
    assert group.call(Policy.ranks).get_results() == [0, 1, 2, 3]
    save = group.call(Policy.save, "there")
    assert (save.called_workers, save.get_results()) == ([0], (0, "there"))
    assert group.call(Policy.seed, [5, 6, 7, 8]).get_results() == [(0, 5), (1, 6), (2, 7), (3, 8)]
    assert group.call(Policy.seed_with, [1, 2, 3, 4], 10).get_results() == [11, 12, 13, 14]
    for wrong in ([1, 2], [1] * 5, []):
        with pytest.raises(ValueError, match=f"{len(wrong)} items for 4 ranks"):
            group.call(Policy.seed, wrong)
        with pytest.raises(ValueError, match=r"items for 4 ranks to call$"):
            group.call(Policy.seed, wrong)
    with pytest.raises(TypeError, match="not int"):
        group.call(Policy.seed, 3)


@pytest.mark.hostile
@pytest.mark.parametrize("rows", range(1, 8))
def test_rows_that_do_not_divide_are_padded_and_trimmed(group, rows):
    batch = list(range(rows))
    assert group.call(Policy.score, batch).get_results() == [10 * row for row in batch]
    each = group.call(Policy.score_each, batch)
    assert [row for part in each.get_results() for row in part] == [10 * row for row in batch]
    assert sum(len(part) for _, part in each.as_completed()) == rows
    assert sum(len(part) for part in each.get_results(return_exceptions=True)) == rows
    assert group.call(Policy.just_do, batch).get_results() is None
    assert (
        group.call(Policy.take, group.call(Policy.score, batch)).get_results()
        == [[10 * row for row in batch]] * 4
    )


@pytest.mark.hostile
def test_what_does_not_divide_is_refused_before_anything_is_sent(group):
    with pytest.raises(
        ValueError, match=r"Policy.train: 3 rows of batch don't divide among the 2 .*'dp'; pad=True"
    ):
        group.call(Policy.train, [1, 2, 3])
    with pytest.raises(ValueError, match="leave 1 out or add 1: rows added by pad=True would be counted"):
        group.call(Policy.count, [1, 2, 3])
    with pytest.raises(ValueError, match="1 rows of batch"):
        group.call(Policy.train, Batch("a"))
    for empty in ([], Batch(""), {"ids": []}):
        with pytest.raises(ValueError, match=r"Policy.train: batch has no rows"):
            group.call(Policy.train, empty)
    with pytest.raises(ValueError, match="rows has no rows"):
        group.call(Policy.score, [])
    with pytest.raises(ValueError, match="different numbers of rows: ids has 2, mask has 4"):
        group.call(Policy.update, [1, 2], [1, 2, 3, 4])
    with pytest.raises(TypeError, match=r"Policy.update: mask has no rows.*it is int"):
        group.call(Policy.update, [1, 2], 5)
    with pytest.raises(TypeError, match="nothing to split: batch is None"):
        group.call(Policy.train, None)
    with pytest.raises(TypeError, match=r"missing a required argument: 'batch'"):
        group.call(Policy.train)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lr'"):
        group.call(Policy.train, [1, 2], lr=1)
    with pytest.raises(TypeError, match=r"batch of Policy.train is split here, and is a future"):
        group.call(Policy.train, group.call(Policy.plain, 1))


@pytest.mark.hostile
def test_what_was_split_before_goes_as_it_is(group):
    assert group.call(Policy.train, Dealt([1], [2, 3])).get_results() == [1, 2, 3]
    assert group.call(Policy.update, Dealt([1], [2]), Dealt([3], [4])).get_results()[1][:3] == (2, [2], [4])
    with pytest.raises(ValueError, match="ids is split into shards already, and can't be split beside mask"):
        group.call(Policy.update, Dealt([1], [2]), [3, 4])
    with pytest.raises(ValueError, match="and can't be padded"):
        group.call(Policy.score, Dealt([1], [2]))
    with pytest.raises(ValueError, match="batch was split into 1 shards, and 2 are needed"):
        group.call(Policy.train, Dealt([1]))


@pytest.mark.hostile
def test_a_list_of_shards_is_not_taken_for_rows(group):
    for shards in (Batch("abcd").shard(2), {"a": Batch("abcd").shard(2)}, (Batch("ab").shard(2),)):
        with pytest.raises(TypeError, match=r"Policy.train: batch.* is a list of shards, not of rows"):
            group.call(Policy.train, shards)
    sharded = group.call_sharded(Policy.train, Batch("abcd").shard(2), in_sharded_axes=["dp"])
    assert sharded.get_results() == [Batch("ab"), Batch("cd")]


@pytest.mark.hostile
def test_a_handle_of_an_array_has_rows_though_it_has_a_shard(group):
    value = group.call(Policy.train, Handle([1, 2, 3, 4])).get_results()
    assert value == Array([1, 2, 3, 4])
    with pytest.raises(TypeError, match="a sequence or shardable, not Handle"):
        group.call(Policy.seed, Handle([1, 2, 3, 4]))


@pytest.mark.hostile
@pytest.mark.parametrize("options", [{"output_is_replicated": ["tp"]}, {}], ids=["some", "all"])
def test_a_future_is_passed_on_as_what_its_results_are(group, options):
    axes = {"in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"]}
    future = group.run_all_workers_sharded_data("rank", [1, 2], **axes, **options)
    sent = Packer(None).pack([future])[0]
    assert [ref.result() for ref in sent.refs] == future.get_results()
    leaders = group.run_all_workers_single_data("rank", 1, run_rank_0_only_axes=["tp"])
    assert [ref.result() for ref in Packer(None).pack([leaders])[0].refs] == leaders.get_results() == [0, 2]


@pytest.mark.hostile
def test_a_joined_future_is_not_dealt_out_as_the_parts_of_its_result(group):
    scored = group.call(Policy.score, [1, 2, 3])
    told = r"is the future of Policy.score, .*: give what its get_results\(\) gives"
    for options in ({}, {"only_on": "tied_leader"}):
        with pytest.raises(TypeError, match=f"argument 0 {told}"):
            group.run_all_workers_multiple_data("take", scored, **options)
    with pytest.raises(TypeError, match=f"argument 'value' {told}"):
        group.run_all_workers_sharded_data("take", value=scored, in_sharded_axes=["tp"])
    balancer = LoadBalancer(group)
    for spread in (balancer.map, balancer.as_completed):
        with pytest.raises(TypeError, match=f"items {told}"):
            list(spread("take", scored))
    for ran in (fan_out, fan_out_as_completed):
        with pytest.raises(TypeError, match=f"items {told}"):
            list(ran(str, scored))
    with pytest.raises(TypeError, match=f"prompts {told}"):
        check_prompts(scored, None)
    each = group.run_all_workers_multiple_data("take", [*scored.get_results(), 40])
    assert each.get_results() == [10, 20, 30, 40]
    again = group.run_all_workers_multiple_data("take", each)
    assert again.get_results() == [10, 20, 30, 40], "what is not joined is one item for each rank"


class QuickFuture(InProcessFuture):
    async def _quick(self):
        return self._gathered(None)


def test_results_are_joined_beside_the_event_loop_when_they_are_awaited():
    ended, threads = Future(), []
    ended.set_result(1)

    def join(results):
        threads.append(threading.get_ident())
        return sum(results)

    made = QuickFuture([ended] * 1, join=join)
    assert asyncio.run(_awaited(made)) == 1
    assert threads
    assert threads != [threading.get_ident()]


@pytest.mark.hostile
def test_a_group_without_the_axis_says_which_it_has():
    with InProcessGroup(FakeCluster([2]), Policy) as bare:
        with pytest.raises(
            ValueError, match=r"Policy.train is @sharded\('dp'\), and the group has no named axes"
        ):
            bare.call(Policy.train, [1, 2])
        assert bare.call(Policy.step, 1.0).get_results() == (0, 1.0)
    other = NamedSharding([[0, 1]], ["pp", "ep"])
    with (
        InProcessGroup(FakeCluster([2]), Policy, sharding_annotations=other) as group,
        pytest.raises(ValueError, match="the group has no axis 'dp'; it has 'pp', 'ep'"),
    ):
        group.call(Policy.train, [1, 2])
    lone = NamedSharding([0, 1], ["dp"])
    with (
        InProcessGroup(FakeCluster([2]), Policy, sharding_annotations=lone) as group,
        pytest.raises(ValueError, match="the group has no axis 'tp'; it has 'dp'"),
    ):
        group.call(Policy.last_stage, [1, 2])


@pytest.mark.hostile
def test_results_that_can_not_be_joined_are_not_lost(group):
    for method, message, values in (
        (Policy.odd_none, r"odd_none .* can't be joined by 'concat': ranks \[0\] returned", [[1, 2], None]),
        (Policy.odd_kind, "different kinds: list and Batch", [[1, 2], Batch([3, 4])]),
        (Policy.loss, "the result has no rows.*it is float.*with pad=True", [3.0, 7.0]),
        (
            Policy.more_rows,
            "4 rows are too many or too few; with pad=True the result of rank 0",
            [[1, 2, 1, 2], [3, 4, 3, 4]],
        ),
    ):
        future = group.call(method, [1, 2, 3, 4])
        if method is Policy.odd_none:
            assert future.return_from_workers == [0, 2]
            message = message.replace(r"\[0\]", r"\[2\]")
        with pytest.raises(ResultJoinError, match=message):
            future.get_results()
        with pytest.raises(ResultJoinError, match=message):
            asyncio.run(_awaited(future))
        assert future.get_results(return_exceptions=True) == values
        assert dict(future.as_completed()) == dict(zip([0, 2], values, strict=True))
    assert group.call(Policy.grow, [1, 2, 3, 4]).get_results() == [1, 2, *[3, 4] * 3]
    with pytest.raises(RuntimeError, match="2 are too many") as raised:
        group.call(Policy.refused, [1, 2]).get_results()
    assert "joins the results of Policy.refused" in raised.value.__notes__[0]


async def _awaited(future):
    return await future


def test_ranks_and_long_names_ignore_the_declaration(group):
    assert group.on(ranks=[1, 3]).call(Policy.train, [1, 2, 3]).get_results() == [[1, 2, 3]] * 2
    assert group.on(leaders=True).call(Policy.count, "abc").get_results() == [3] * 4
    assert group.run_all_workers_single_data("train", 5).get_results() == [5] * 4
    assert group.run_all_workers_multiple_data("train", [1, 2, 3, 4]).get_results() == [1, 2, 3, 4]
    sharded = group.run_all_workers_sharded_data("train", [1, 2], in_sharded_axes=["dp"])
    assert sharded.get_results() == [1, 2]
    assert group.call_sharded(Policy.train, [1, 2], in_sharded_axes=["dp"]).get_results() == [1, 2]
    assert group.run_rank_zero("train", 7).get_results() == [7]
    assert group.run_single_worker_single_data("save", 2, "x").get_results() == [(2, "x")]


def test_balancers_give_items_to_one_worker_each_whatever_is_declared():
    with InProcessGroup(
        FakeCluster([2]),
        Policy,
        sharding_annotations=NamedSharding([0, 1], ["dp"]),
        enable_load_balancing=True,
    ) as group:
        assert list(group.balancer.map("train", [[1, 2, 3], [4]])) == [[1, 2, 3], [4]]
        assert group.balancer.call("train", 5).get_results() == [5]


@pytest.mark.hostile
def test_a_function_that_promises_something_else_than_the_class_is_refused():
    class Stub:
        def train(self, batch):
            """What a driver writes that can't import the class."""

    with InProcessGroup(
        FakeCluster([2]), Overriding, sharding_annotations=NamedSharding([0, 1], ["dp"])
    ) as group:
        assert group.call(Policy.train, Batch("abcd")).get_results() == Batch("ac")
        assert group.call(Overriding.train, Batch("abcd")).get_results() == Batch("ac")
        with pytest.raises(
            TypeError, match=r"Stub.train is not declared, and .*Overriding.train is @sharded"
        ):
            group.call(Stub.train, Batch("abcd"))
        with pytest.raises(TypeError, match=r"Policy.score is @sharded\('dp'\), and .*score is @rank_zero"):
            group.call(Policy.score, [1, 2])


@pytest.mark.hostile
def test_a_rank_that_fails_is_told_and_errors_stand_in_its_place(group):
    future = group.call(Policy.text, ["a", 2, 3, 4])
    with pytest.raises(WorkerFailureError, match=r"rank [01]"):  # both have those rows
        future.get_results()
    failed, fine = future.get_results(return_exceptions=True)
    assert isinstance(failed, WorkerFailureError)
    assert fine == "x" * 7


def test_who_splits_without_a_word_of_it_is_told_that_rows_can_be_padded():
    with pytest.raises(ValueError, match="pad=True on the method adds the first rows again"):
        split_rows({"x": [1, 2, 3]}, 2, pad=False, called="Policy.train", axis="dp")


def test_shares_that_are_all_padding_keep_no_row():
    split = split_rows({"x": ["a", "b"]}, 4, pad=True, called="Policy.train", axis="dp")
    assert [part["x"] for part in split.parts] == [["a"], ["b"], ["a"], ["b"]]
    assert (split.rows, split.kept) == (1, (1, 1, 0, 0))
    uneven = split_rows({"x": list("abcde")}, 4, pad=True, called="Policy.train", axis="dp")
    assert (uneven.rows, uneven.kept) == (2, (2, 2, 1, 0))
