import asyncio
import functools
import pickle

import pytest
from declared_workers import Overriding, Policy, longest
from ray import cloudpickle

from raycrew.worker_groups import per_rank, rank_zero, replicated, sharded
from raycrew.worker_groups._worker import describe_class
from raycrew.worker_groups._worker.declared import declaration_of


def declared(cls, name):
    return describe_class(cls, {}).methods[name].declared


def test_what_is_said_on_a_method_is_described():
    train, update = declared(Policy, "train"), declared(Policy, "update")
    assert (train.kind, train.axis, train.split, train.collect) == ("sharded", "dp", ("batch",), "concat")
    assert (update.split, update.pad) == (("ids", "mask"), False)
    assert declared(Policy, "plain") is None
    assert [declared(Policy, name).pad for name in ("save", "step", "score")] == [False, False, True]
    assert str(train) == "@sharded('dp')"
    travelled = pickle.loads(pickle.dumps(declared(Policy, "text")))
    assert (travelled.promise, travelled.collect.fn) == (("sharded", "a function"), longest)
    assert Policy.train.__name__ == "train"
    assert Policy().train([1]) == [1]


def test_an_override_is_called_as_what_it_overrides_unless_it_says_otherwise():
    assert declared(Overriding, "train") == declared(Policy, "train")
    assert declared(Overriding, "score").kind == "rank_zero"
    with pytest.raises(TypeError, match=r"Other.train is @sharded.*its parameters are rows, lr"):
        describe_class(type("Other", (Policy,), {"train": lambda self, rows, lr: rows}), {})

    class Streaming(Policy):
        def train(self, batch):
            yield batch

    with pytest.raises(TypeError, match=r"Streaming.train can't be @sharded\('dp'\): a generator"):
        describe_class(Streaming, {})


@pytest.mark.hostile
def test_two_decorators_on_one_method_are_an_error_at_its_definition():
    with pytest.raises(TypeError, match=r"train is declared twice: @replicated and @sharded\('dp'\)"):

        class Twice:
            @replicated
            @sharded("dp")
            def train(self, batch):
                return batch

    @functools.wraps(Policy.train)
    def wrapped(self, batch):
        return batch

    assert declaration_of(wrapped) is not None
    with pytest.raises(TypeError, match="declared twice"):
        rank_zero(wrapped)


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda fn: sharded(fn), "takes the name of an axis"),
        (lambda fn: sharded("dp")(staticmethod(fn)), "goes below @staticmethod"),
        (lambda fn: replicated(classmethod(fn)), "goes below @classmethod"),
        (lambda fn: per_rank(split="x")(property(fn)), "goes on a method of a worker class"),
        (lambda fn: rank_zero(3), "not on 3"),
    ],
)
def test_what_is_no_method_is_refused(decorate, message):
    with pytest.raises(TypeError, match=message):
        decorate(lambda self, x: x)


@pytest.mark.hostile
def test_generators_are_refused_at_their_definition():
    def items(self, rows):
        yield from rows

    async def items_async(self, rows):
        yield rows

    for method in (items, items_async):
        for decorate in (sharded("dp"), replicated, rank_zero, per_rank):
            with pytest.raises(TypeError, match="a generator's items come one by one"):
                decorate(method)


@pytest.mark.hostile
def test_options_are_checked():
    with pytest.raises(
        ValueError, match="collected by concat, list, first, sum, mean, or a function, not 'cat'"
    ):
        sharded("dp", collect="cat")
    with pytest.raises(ValueError, match="results are taken at all coordinates of 'dp'"):
        sharded("dp", results_at={"dp": 1})


@pytest.mark.hostile
def test_which_arguments_are_split_is_said_where_there_are_several():
    def cls(decorator, method):
        return type("Worker", (), {"method": decorator(method)})

    for decorator in (sharded("dp"), per_rank):
        for method, known in (
            (lambda self, ids, mask=None: ids, "ids, mask"),
            (lambda self: None, "none"),
            (lambda self, *several: several, "several"),
        ):
            with pytest.raises(TypeError, match=f"which of its arguments.*its parameters are {known}"):
                describe_class(cls(decorator, method), {})
    with pytest.raises(TypeError, match="has no batch to split; its parameters are ids"):
        describe_class(cls(sharded("dp", split=["batch"]), lambda self, ids: ids), {})
    static = {"method": staticmethod(sharded("dp")(lambda rows: rows))}
    assert describe_class(type("Static", (), static), {}).methods["method"].declared.split == ("rows",)


@pytest.mark.hostile
def test_a_function_that_can_not_be_imported_where_it_arrives_says_so_when_it_is_needed(monkeypatch):
    pickled = pickle.dumps(declared(Policy, "text"))
    monkeypatch.delattr("declared_workers.longest")
    travelled = pickle.loads(pickled)
    assert travelled.collect.fn is None
    assert "longest" in travelled.collect.why_not
    assert pickle.loads(pickle.dumps(travelled)).collect.why_not == travelled.collect.why_not


class Base:
    def step(self, lr, *, scale=2):
        """One step."""
        return lr * scale

    async def later(self):
        return type(super()).__name__


class Child(Base):
    step = rank_zero(Base.step)
    later = rank_zero(Base.later)


@pytest.mark.hostile
def test_a_method_that_is_taken_over_is_declared_for_its_new_class_alone():
    assert declared(Base, "step") is None
    assert declaration_of(Base.step) is None
    described = describe_class(Child, {}).methods
    assert described["step"].declared.kind == described["later"].declared.kind == "rank_zero"
    assert described["later"].kind == "async"
    assert str(described["step"].signature) == str(describe_class(Base, {}).methods["step"].signature)
    assert (Child().step(3), Child.step.__doc__) == (6, "One step.")
    assert asyncio.run(Child().later()) == "super"
    assert not hasattr(Child.step, "__wrapped__")
    assert pickle.loads(pickle.dumps(Policy.train)) is Policy.train
    assert cloudpickle.loads(cloudpickle.dumps(Child.step))(Child(), 3) == 6
