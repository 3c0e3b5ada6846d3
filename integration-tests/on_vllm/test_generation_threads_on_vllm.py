"""Weights of a vLLM that are packed ahead, changed and given up in several threads: none waits for ever."""

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(300)]

from generation_conformance import TOLERANCE, assert_plain  # noqa: E402
from generation_stage import PROMPTS, TIMEOUT_S, batch_of, local_stage, rows_of  # noqa: E402

from generation import AsleepError  # noqa: E402
from generation.vllm_worker import VllmWorker  # noqa: E402
from raycrew.tensor_transport import TransportClosedError, WeightUpdateError  # noqa: E402


def test_while_samples_are_made_and_the_generator_sleeps_now_and_then():
    with local_stage(VllmWorker) as stage, ThreadPoolExecutor(5) as threads:
        life = stage.worker._life

        def generate():
            for row in rows_of(stage.generate(batch_of(), {"max_tokens": 24, "ignore_eos": True})):
                if len(set(row[4])) == 1:
                    assert_plain(stage, PROMPTS, row)

        def prepare():
            version = stage.model.publish_weights().version
            stage.call("prepare_weights", version)
            stage.call("apply_weights", version)

        def pull():
            life.update(lambda receiver: receiver.pull(missing_ok=True), "keep")

        def sleep():
            stage.call("sleep", "abort")
            stage.call("wake")

        def refused(what):
            with contextlib.suppress(AsleepError, WeightUpdateError, TransportClosedError):
                what()

        for turn in range(8):
            tasks = (generate, prepare, pull, *[sleep] * (turn % 4 == 2))
            for one in [threads.submit(refused, task) for task in tasks]:
                one.result(TIMEOUT_S)
        stage.sync()
        stage.check(tolerance=TOLERANCE)


def test_a_receiver_is_closed_while_its_update_waits_for_the_engine():
    with local_stage(VllmWorker) as stage:
        awake, may_go_on = stage.worker._life.awake, threading.Event()
        version = stage.model.publish_weights().version
        stage.call("prepare_weights", version)
        busy = awake.loop.call(may_go_on.wait, TIMEOUT_S)
        applying = threading.Thread(target=awake.receiver.apply, args=(version,), daemon=True)
        closing = threading.Thread(target=awake.receiver.close, daemon=True)
        applying.start()
        until = time.monotonic() + TIMEOUT_S
        while awake.loop._commands.empty():
            assert time.monotonic() < until
        closing.start()
        closing.join(0.5)  # it may come to where it waits
        may_go_on.set()
        assert busy.result(TIMEOUT_S)
        for thread in (applying, closing):
            thread.join(TIMEOUT_S / 4)
            assert not thread.is_alive(), "neither waits for the other"
        assert awake.receiver.version == version
