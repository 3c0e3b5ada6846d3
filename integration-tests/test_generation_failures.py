"""What a generation worker does when its engine fails, at an update or at a step."""

import pytest

pytest.importorskip("transformers")

from generation_echo import MODEL, EchoTrainer, EchoWorker
from generation_stage import batch_of, local_stage, rows_of

from generation import EngineFailedError, GenerationError
from raycrew.tensor_transport import StaleWeightsError, WeightUpdateError

LONG = {"max_tokens": 300}


@pytest.fixture
def stage():
    with local_stage(EchoWorker, MODEL, EchoTrainer) as made:
        yield made


def engine_of(stage):
    return stage.worker._life.awake.loop.engine


def under_way(stage):
    future = stage.begin(batch_of(), LONG)
    stage.wait_for(lambda found: found.running)
    return future


def test_a_failed_update_leaves_the_version_before_and_samples_go_on(stage):
    future = under_way(stage)
    engine_of(stage).loads_to_fail = 1
    with pytest.raises(WeightUpdateError):
        stage.sync()
    assert {version for row in rows_of(future.result(60)) for version in row[4]} == {1}
    assert stage.metrics().weight_version == 1
    stage.sync()
    (row, *_) = rows_of(stage.generate(batch_of(), {"max_tokens": 2}))
    assert set(row[4]) == {int(row[3][0])} == {stage.version}


def test_a_mixture_ends_samples_with_an_error_and_is_repaired_by_an_update(stage):
    future = under_way(stage)
    engine_of(stage).loads_to_fail = 2
    with pytest.raises(WeightUpdateError):
        stage.sync()
    with pytest.raises(WeightUpdateError):
        future.result(60)
    with pytest.raises(StaleWeightsError, match="mixture"):
        stage.generate(batch_of())
    assert stage.metrics().weight_version is None
    stage.sync()
    (row, *_) = rows_of(stage.generate(batch_of(), {"max_tokens": 2}))
    assert set(row[4]) == {int(row[3][0])} == {stage.version}


def test_an_engine_that_fails_says_so_and_is_made_anew(stage):
    future = under_way(stage)
    engine_of(stage).steps_to_fail = 1
    for result in (future.result, lambda _: stage.generate(batch_of())):
        with pytest.raises(EngineFailedError, match="no memory is left"):
            result(60)
    stage.call("sleep")
    stage.call("wake")
    assert rows_of(stage.generate(batch_of(), {"max_tokens": 1}))[0][4] == [1]


def test_an_engine_that_does_not_end_is_not_said_to_sleep():
    """Whose turn it is next would have its memory beside what is left of this one."""
    what = "a process of its does not end"
    with pytest.raises(GenerationError, match=what), local_stage(EchoWorker, MODEL, EchoTrainer) as stage:
        engine_of(stage).ends = False
        for method in ("sleep", "sleep", "wake"):
            with pytest.raises(GenerationError, match=what):
                stage.call(method)


def test_an_engine_that_does_not_answer_is_ended_all_the_same(stage):
    future = under_way(stage)
    engine_of(stage).aborts = False
    stage.call("sleep", "abort")
    with pytest.raises(EngineFailedError, match="does not answer"):
        future.result(60)
    stage.call("wake")
    assert rows_of(stage.generate(batch_of(), {"max_tokens": 1}))[0][4] == [1]


def test_samples_under_way_end_with_a_sleep(stage):
    future = under_way(stage)
    stage.call("pause")
    late = stage.begin(batch_of(), LONG)
    stage.wait_for(lambda found: found.waiting)
    stage.call("sleep", "abort")
    for each in (future, late):
        assert {row[5] for row in rows_of(each.result(60))} == {"abort"}
    stage.call("wake")
    assert stage.metrics().state == "awake", "the pause has ended with the engine"
