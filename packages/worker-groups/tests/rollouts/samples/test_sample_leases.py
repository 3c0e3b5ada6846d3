"""Samples come back to the queue whatever becomes of those who have them or wait for them."""

import asyncio
import itertools
import os
import pickle
import sys
from contextlib import closing
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest

from raycrew.worker_groups.errors import (
    SampleQueueClosedError,
    SampleQueueError,
    SampleQueueTimeoutError,
)
from raycrew.worker_groups.rollouts import samples
from raycrew.worker_groups.rollouts.samples import SampleQueue
from raycrew.worker_groups.rollouts.samples._asking.codec import decode
from raycrew.worker_groups.rollouts.samples._asking.requests import getting, putting
from raycrew.worker_groups.rollouts.samples._keeping.keeper import Keeper
from raycrew.worker_groups.rollouts.samples._options import QueueOptions
from raycrew.worker_groups.rollouts.samples._storage import durable, journal


@pytest.fixture
def queue():
    with SampleQueue(["tokens"]) as made:
        yield made


def keeper_of(**options):
    """Of a queue of one column, with a clock that stands still."""
    clock, arguments = SimpleNamespace(now=0.0), signature(SampleQueue).bind(["tokens"], **options)
    arguments.apply_defaults()
    options = QueueOptions.among(arguments.arguments)
    made = Keeper(options, lambda: clock.now, lambda tally: None)
    made.clock, made.options = clock, options
    return made


def put(queue, *tokens, version=0, timeout_s=None):
    return queue.put({"tokens": tokens}, version=version, timeout_s=timeout_s)


def test_a_renewed_lease_that_ends_is_nothing_to_those_who_have_others():
    keeper = keeper_of()

    def get():
        wanted = getting(keeper.options, 1).arguments["wanted"]
        return wanted.lease, keeper.get(wanted).ids

    keeper.put(**putting(keeper.options, {"tokens": [1, 2]}, 0, None, partial=False).arguments)
    (dies, ids), (lives, _) = get(), get()
    keeper.renew(dies, 700.0)
    keeper.renew(lives, 1000.0)
    keeper.clock.now = 800.0
    assert keeper.done(lives, None) == 1
    assert keeper.stats().returned == 1 and get()[1] == ids


def test_who_waits_hears_of_a_lease_that_ends_while_somebody_finds_no_room():
    keeper, heard = keeper_of(max_samples=2), []
    put_into(keeper, 1, 2)
    get_from(keeper, 2)
    assert put_into(keeper, 3) is None
    keeper.listen("somebody", lambda: heard.append(keeper.stats().leased))
    assert put_into(keeper, 3) is None and heard == []
    keeper.clock.now = 1000.0
    assert put_into(keeper, 3) is None and heard[0] == 0


def test_a_coroutine_that_is_cancelled_as_its_samples_come_leaves_no_lease(queue):
    async def cancelled_at(ticks):
        """Cancel somebody who waits, so long after what he waits for has come."""

        async def wait():
            (await asyncio.wait_for(queue.get_async(1), 60)).done()

        waiting = asyncio.create_task(wait())
        for _ in range(4):
            await asyncio.sleep(0)
        put(queue, ticks)
        for _ in range(ticks):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        held = queue.stats().held
        assert held == 0 or queue.get(1, timeout_s=0).done() is None

    for ticks in range(5):
        asyncio.run(cancelled_at(ticks))
    assert (queue.stats().leased, queue.stats().held) == (0, 0)


def test_a_coroutine_that_is_cancelled_as_its_samples_come_ends(queue):
    async def main():
        waiting = asyncio.create_task(queue.get_async(1))
        await asyncio.sleep(0)
        put(queue, 1)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert queue.stats().leased == 0


@pytest.mark.hostile
@pytest.mark.parametrize("options", [{}, {"max_memory": 1, "spill": True}])
def test_a_forked_child_neither_gets_nor_overwrites_samples(options):
    with SampleQueue(["tokens"], **options) as queue:
        put(queue, "first")
        told, tells = os.pipe()
        child = os.fork()
        if not child:
            errors = []
            for use in (lambda: put(queue, "child"), lambda: queue.get(1), queue.stats):
                try:
                    errors.append(use())
                except SampleQueueClosedError as error:
                    errors.append(str(error))
            queue.close()
            os.write(tells, pickle.dumps(errors))
            os._exit(0)
        os.waitpid(child, 0)
        errors = pickle.loads(os.read(told, 10_000))
        assert len(errors) == 3 and all("forked" in error for error in errors)
        put(queue, "second")
        assert queue.get(2)["tokens"] == ["first", "second"]
        for descriptor in (told, tells):
            os.close(descriptor)


SOURCES = str(Path(samples.__file__).parent)


def interrupted_after(lines, use):
    """Use something, and raise a KeyboardInterrupt after so many lines of its source; whether that came."""
    left = itertools.count(lines, -1)

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line" and not next(left):
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        use()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def put_into(keeper, *tokens, **options):
    request = putting(keeper.options, {"tokens": tokens}, 0, **{"lengths": None, "partial": False, **options})
    return keeper.put(**request.arguments)


def get_from(keeper, n):
    """Some samples; what is not wanted any more goes back, as from a `SampleQueue`."""
    wanted = getting(keeper.options, n, at_least=1).arguments["wanted"]
    try:
        handed = keeper.get(wanted)
    except KeyboardInterrupt:
        keeper.withdraw(wanted.lease)
        raise
    return wanted.lease, handed


USES = ["get", "done", "give_back", "put", "expire"]


@pytest.mark.hostile
@pytest.mark.parametrize("what", USES)
def test_an_interrupt_between_any_two_lines_loses_no_sample(what):
    lines = 0
    while has_lost_nothing(keeper_of(), what, lines):
        lines += 1
    assert lines > 20


@pytest.mark.hostile
@pytest.mark.parametrize("what", USES)
@pytest.mark.parametrize("segment", [400, pytest.param(64_000_000, marks=pytest.mark.long)])
def test_nor_does_one_where_all_is_written_down(tmp_path, monkeypatch, what, segment):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", segment)
    monkeypatch.setattr(durable, "_SLACK_BYTES", 0)
    lines, came = 0, True
    while came:
        options = {"directory": tmp_path / str(lines), "max_memory": 1}
        with closing(keeper_of(**options)) as keeper:
            came = has_lost_nothing(keeper, what, lines)
            put_into(keeper, 7)
        with closing(keeper_of(**options)) as keeper:
            _, handed = get_from(keeper, 100)
            tokens = decode(handed.rows["tokens"])
            may_be = {"done": {1, 2}, "put": {4, 5}}.get(what, set())  # nobody was told that it was
            assert {6, 7} <= set(tokens) <= {6, 7} | may_be, lines
        lines += 1


def has_lost_nothing(keeper, what, lines):
    """Whether the interrupt came at all."""
    put_into(keeper, 1, 2, 3)
    lease, _ = get_from(keeper, 2)
    uses = {
        "get": lambda: get_from(keeper, 2),
        "done": lambda: keeper.done(lease, None),
        "give_back": lambda: keeper.give_back(lease, None),
        "put": lambda: put_into(keeper, 4, 5),
        "expire": keeper.stats,
    }
    keeper.clock.now += 1000 * (what == "expire")
    came = interrupted_after(lines, uses[what])
    keeper.clock.now += 10_000
    held = keeper.stats().held
    last, handed = get_from(keeper, 100)
    assert len(handed.ids) == held == keeper.stats().leased, lines
    assert set(decode(handed.rows["tokens"])) >= ({3} if what == "done" else {1, 2, 3}), lines
    keeper.done(last, None)
    stats = keeper.stats()
    assert (stats.held, stats.leased, stats.in_memory_bytes, stats.on_disk_bytes) == (0, 0, 0, 0), lines
    put_into(keeper, 6)
    assert len(get_from(keeper, 5)[1].ids) == 1
    return came


def test_what_was_done_is_answered_with_what_became_of_it():
    keeper = keeper_of()
    put_into(keeper, 1, 2, 3)
    (first, _), (second, _) = get_from(keeper, 1), get_from(keeper, 1)
    assert keeper.renew(first, 5.0) is True
    assert (keeper.done(first, None), keeper.give_back(second, None)) == (1, 1)
    assert (keeper.advance(3), keeper.advance(2)) == (3, 3)
    third, _ = get_from(keeper, 1)
    assert (keeper.withdraw(third), keeper.withdraw("never begun")) == (1, 0)
    assert (keeper.discard(0), keeper.end()) == (2, True)


def test_those_who_wait_hear_of_what_is_withdrawn_where_it_changes_anything():
    keeper, heard = keeper_of(max_samples=2), []
    put_into(keeper, 1, 2)
    lease, _ = get_from(keeper, 1)
    late = putting(keeper.options, {"tokens": [3]}, 0, None, partial=False)
    assert keeper.put(**late.arguments) is None
    keeper.listen("somebody", lambda: heard.append(1))
    keeper.withdraw("never begun")
    assert heard == []
    keeper.withdraw(late.ticket)
    assert heard == [1]
    keeper.withdraw(lease)
    assert heard == [1, 1]


def test_what_was_withdrawn_stays_so_however_often_others_are_refused():
    with SampleQueue(["tokens"], max_samples=1) as queue:
        keeper = queue._channel._keeper
        withdrawn = getting(keeper._options, 1)
        keeper.withdraw(withdrawn.arguments["wanted"].lease)
        put(queue, 1)
        for _ in range(200):
            with pytest.raises(SampleQueueTimeoutError):
                queue.get(1, max_staleness=0, version=1, timeout_s=0)
            with pytest.raises(SampleQueueTimeoutError):
                put(queue, 2, timeout_s=0)
            with pytest.raises(ValueError, match="more than max_samples"):
                put(queue, 3, 4)
        with pytest.raises(SampleQueueError, match="does not wait for it any more"):
            queue._channel.ask(withdrawn, 0)


def test_who_waits_looks_again_when_the_next_lease_ends():
    keeper = keeper_of(lease_s=50.0)
    put_into(keeper, 1, 2)
    assert keeper.next_end_s() == float("inf")
    get_from(keeper, 1)
    keeper.clock.now = 20.0
    get_from(keeper, 1)
    assert keeper.next_end_s() == 30.0
    keeper.clock.now = 49.9
    assert keeper.stats().returned == 0
    keeper.clock.now = 50.0
    assert keeper.next_end_s() == 0.0
    assert keeper.stats().returned == 1 and keeper.next_end_s() == 20.0
