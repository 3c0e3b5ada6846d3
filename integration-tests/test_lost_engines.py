"""An engine that loses a process of its own: its worker ends, too, and is replaced as any that was killed."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("transformers")

from generation_conformance import LONG
from generation_echo import MODEL, EchoTrainer
from generation_stage import PROMPTS, batch_of, group_stage, rows_of

from generation import EngineOptions
from generation.vllm_processes import EngineProcesses


class Executor:
    """Of processes that sleep, and answer as a test says; the rest as vLLM has it."""

    def __init__(self, processes):
        self.workers = [SimpleNamespace(proc=process) for process in processes]
        self.is_failed, self.answer, self.asked = False, lambda: "done", []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, unique_reply_rank=None):
        self.asked.append((method, timeout, args))
        return self.answer()

    def register_failure_callback(self, callback):
        self.fail = callback


@pytest.fixture
def executor():
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for process in processes:
        process.start()
    yield Executor(processes)
    for process in processes:
        process.kill()
        process.join()


@contextmanager
def watched(executor):
    """A list of what is told of processes that are lost; they are all ended in the end."""
    told = []
    EngineProcesses(executor, 5.0).watch(told.append)
    yield told
    assert len(told) == 1
    for worker in executor.workers:
        worker.proc.join(60)
        assert worker.proc.exitcode == -signal.SIGKILL
    assert executor.is_failed, "nothing they may have left to say is heard"


def fails_with(error):
    def answer():
        raise error

    return answer


def test_processes_that_do_not_answer_in_time_are_lost_and_ended(executor):
    with watched(executor) as told:
        os.kill(executor.workers[0].proc.pid, signal.SIGSTOP)
        executor.answer = fails_with(TimeoutError("no answer to start_weight_update"))
        with pytest.raises(TimeoutError):
            executor.collective_rpc("start_weight_update")
        assert told == [
            "the engine's processes have not answered within 5 s (no answer to start_weight_update)"
        ]


def test_whatever_fails_as_a_process_has_died_tells_of_that_first(executor):
    with watched(executor) as told:
        executor.answer = fails_with(RuntimeError("connection closed by peer"))
        executor.workers[1].proc.kill()
        with pytest.raises(RuntimeError, match="by peer"):
            executor.collective_rpc("execute_model")
        assert "has ended by itself (connection closed by peer)" in told[0]


def test_one_that_dies_while_nobody_asks_is_noticed(executor):
    with watched(executor) as told:
        executor.fail()
        assert "has ended by itself" in told[0]


def test_one_that_fails_while_others_answer_has_the_engine_lost(executor):
    """Their answers would be taken for those to the next question."""
    with watched(executor) as told:
        executor.answer = fails_with(RuntimeError("no such adapter"))
        with pytest.raises(RuntimeError, match="no such adapter"):
            executor.collective_rpc("add_lora", None, (1,))
        assert told == ["one of the engine's processes failed where all were to answer (no such adapter)"]


def test_an_error_of_the_one_that_is_to_answer_is_an_error_and_all_have_a_deadline(executor):
    told = []
    EngineProcesses(executor, 5.0).watch(told.append)
    executor.answer = fails_with(RuntimeError("no memory is left"))
    with pytest.raises(RuntimeError, match="no memory is left"):
        executor.collective_rpc("execute_model", timeout=300, args=(1,), unique_reply_rank=0)
    executor.answer = lambda: "done"
    assert executor.collective_rpc("check_health", timeout=1.0) == "done"
    assert executor.collective_rpc("sleep", None, (2,)) == "done"
    assert executor.asked == [("execute_model", 5.0, (1,)), ("check_health", 1.0, ()), ("sleep", 5.0, (2,))]
    assert not told
    assert not executor.is_failed


def test_a_deadline_is_above_0():
    with pytest.raises(ValueError, match="answer_timeout_s must be above 0"):
        EngineOptions(MODEL, answer_timeout_s=0)


@pytest.mark.hostile
def test_a_generator_whose_engine_loses_a_process_is_replaced_and_nothing_is_there_twice(local_ray):
    with group_stage("generation_echo.HostWorker", 2, MODEL, EchoTrainer, name_prefix="hosts") as stage:
        pids = stage.generators.call("pid")
        (process,) = psutil.Process(pids[0]).children()

        def kill():
            stage.wait_for_tokens(8)
            process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        parts = list(stage.generators.stream(batch_of(PROMPTS * 3), LONG))
        killer.join()
        rows = [row for part in parts for row in rows_of(part)]
        assert sorted(row[0] for row in rows) == list(range(len(PROMPTS) * 3))
        assert {version for row in rows for version in row[4]} == {stage.version}
        first, second = stage.generators.call("pid")
        assert (first == pids[0], second == pids[1]) == (False, True)
        assert [found.weight_version for found in stage.generators.metrics()] == [stage.version] * 2
