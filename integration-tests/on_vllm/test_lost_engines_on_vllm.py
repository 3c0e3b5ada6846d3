"""An engine of vLLM that loses one of its processes is replaced, as any generator that was killed."""

import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

from generation_conformance import LONG, TOLERANCE, assert_plain  # noqa: E402
from generation_stage import PROMPTS, Trainer, batch_of, group_stage, rows_of  # noqa: E402

from raycrew.cluster_core.testing import connected  # noqa: E402
from raycrew.tensor_transport import WeightUpdateError  # noqa: E402
from raycrew.worker_groups import WorkerFailureError  # noqa: E402


class Striking(Trainer):
    """Does something to an engine's process when it has published, which the engine loads then."""

    strike = None

    def publish_weights(self):
        update = super().publish_weights()
        if self.strike is not None:
            strike, self.strike = self.strike, None
            strike()
        return update


@pytest.fixture(scope="module")
def stage(local_ray_session):
    options = {"tensor_parallel": 2, "answer_timeout_s": 20.0}
    with (
        connected(local_ray_session),
        group_stage("vllm", 2, trainer=Striking, options=options, max_restarts=5, name_prefix="lost") as made,
    ):
        yield made


def own_processes(pid):
    """The engine's, by rank."""
    found = {" ".join(one.cmdline()): one for one in psutil.Process(pid).children()}
    return [one for name, one in sorted(found.items()) if "Worker" in name]


def strike(stage, rank, how=signal.SIGKILL):
    """A function that sends a signal to an engine's process; and one that sees that all are replaced."""
    pid = stage.call("pid")
    processes = own_processes(pid)
    assert len(processes) == 2

    def check():
        assert not psutil.wait_procs(processes, timeout=60)[1], "nothing is left of the one before"
        assert stage.call("pid") != pid
        assert stage.check(tolerance=TOLERANCE).version == stage.version

    return lambda: processes[rank].send_signal(how), check


def check_rows(stage, rows):
    """Each prompt's sample is there once, and as the weights have it."""
    assert sorted(row[:2] for row in rows) == [(prompt, 0) for prompt in range(len(PROMPTS))]
    for row in rows:
        assert set(row[4]) == {stage.version}
        assert_plain(stage, PROMPTS, row)


@pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_samples_under_way_are_made_by_who_takes_its_place(stage, rank, how):
    act, check = strike(stage, rank, how)

    def once_at_work():
        stage.wait_for_tokens(8)
        act()

    thread = threading.Thread(target=once_at_work)
    thread.start()
    parts = list(stage.generators.stream(batch_of(), LONG))
    thread.join()
    check_rows(stage, [row for part in parts for row in rows_of(part)])
    check()


def test_one_that_loses_a_process_while_it_idles_is_replaced_before_the_next_samples(stage):
    act, check = strike(stage, 0)
    act()
    check_rows(stage, rows_of(stage.generators.generate(batch_of(), {"max_tokens": 4})))
    check()


@pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_an_update_fails_and_the_next_one_reaches_who_takes_its_place(stage, rank, how):
    stage.model.strike, check = strike(stage, rank, how)
    with pytest.raises((WorkerFailureError, WeightUpdateError)):
        stage.sync()
    stage.sync()
    check()
