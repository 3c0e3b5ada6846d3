"""A timeline of a group in this process: what users do with it."""

import errno
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S, eventually

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import Timeline, timeline
from raycrew.worker_groups._health.observers import observed
from raycrew.worker_groups._health.timeline import recording, shared
from raycrew.worker_groups._health.timeline.records import LATER, NOTHING
from raycrew.worker_groups.testing import InProcessGroup


class Adder:
    def add(self, a, b=1):
        return a + b

    def fail(self):
        raise ValueError("s3cret-argument")

    def count(self, n):
        yield from range(n)


@pytest.fixture
def group():
    with InProcessGroup(FakeCluster([2]), Adder, name_prefix="adders", enable_load_balancing=True) as made:
        yield made


def events(trace, **wanted):
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [e for e in found if all(e.get(key, e["args"].get(key)) == value for key, value in wanted.items())]


def test_a_run_is_written_as_a_trace_and_a_page(group, tmp_path):
    trace, html = tmp_path / "run.json", tmp_path / "run.html"
    with timeline(trace, html=html) as run:
        assert "recording" in repr(run)
        group.call("add", "s3cret-argument", "x").get_results()
        list(group.balancer.map("add", range(3)))
        list(group.call("count", 2).as_completed())
        failing = group.call("fail")
        failing.wait(PATIENCE_S)  # for both ranks, not for the first failure alone
        with pytest.raises(Exception, match="s3cret"):
            failing.get_results()
        with run.span("think"):
            pass
        assert run.statistics().calls >= 4
    run.close()
    assert "closed" in repr(run)
    found = json.loads(trace.read_text())
    assert found["otherData"]["dropped"] == run.dropped == 0
    assert len(events(found, name="add", kind="running")) == 2 + 3
    assert [e["args"] for e in events(found, name="add", kind="call", **{"for": "balancer"})] == [
        {"kind": "call", "ranks": 1, "outcome": "ok", "for": "balancer"}
    ] * 3
    (failed,) = events(found, name="fail", kind="call")
    assert failed["args"]["outcome"] == "failed"
    assert len(events(found, name="count", kind="running")) == 2
    assert len(events(found, name="think", kind="step")) == 1
    assert not events(found, kind="untold")
    statistics = run.statistics()
    assert (statistics.calls, statistics.untold) == (6, 0)
    assert [(shares.group, shares.ranks) for shares in statistics.groups] == [("adders", 2)]
    assert {slowest.method for slowest in statistics.slowest} == {"add", "fail", "count"}
    assert not any("s3cret" in path.read_text() for path in (trace, html))
    assert sorted(tmp_path.iterdir()) == [html, trace]


def test_nothing_is_observed_before_and_after(group):
    assert observed.by is None
    with timeline() as run, timeline() as other:
        group.call("add", 1).get_results()
    assert observed.by is None
    group.call("add", 1).get_results()
    assert run.statistics().calls == other.statistics().calls == 1


def test_starts_are_drawn():
    with timeline() as run, InProcessGroup(FakeCluster([2]), Adder, name_prefix="adders"):
        pass
    found = events(run.trace(), kind="start")
    assert [event["name"] for event in found].count("init") == 2
    (whole,) = events(run.trace(), name="start")
    assert all(whole["ts"] <= e["ts"] and e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 1 for e in found)


def test_reports_of_others_are_drawn():
    with timeline() as run:
        phases = [SimpleNamespace(rank="trainer 0", phase="gather", start_s=0.5, end_s=1.0)]
        run.add(SimpleNamespace(started_at=1e9, total_s=2.0, spans=phases))
        with pytest.raises(TypeError, match="int has no started_at, total_s, spans"):
            run.add(3)
    (whole,), (gather,) = events(run.trace(), kind="whole"), events(run.trace(), kind="gather")
    assert (gather["ts"] - whole["ts"], gather["dur"], whole["dur"]) == pytest.approx(
        (0.5e6, 0.5e6, 2e6), abs=1
    )


@pytest.mark.hostile
def test_a_report_is_drawn_when_it_was_though_the_clock_was_set_since_the_timeline_began(monkeypatch):
    true = time.time
    with timeline() as run, run.span("sync"):
        monkeypatch.setattr(time, "time", lambda: true() + 3600.0)
        began = time.time()
        run.add(SimpleNamespace(started_at=began, total_s=0.0, spans=[]))
    (sync,), (whole,) = events(run.trace(), name="sync"), events(run.trace(), kind="whole")
    assert sync["ts"] <= whole["ts"] + 1 and whole["ts"] <= sync["ts"] + sync["dur"] + 1


def test_too_many_spans_are_counted_and_said(group, tmp_path):
    with timeline(html=tmp_path / "run.html", max_spans=1) as run:
        group.call("add", 1).get_results()
    assert run.dropped == 1
    assert '"dropped":1' in (tmp_path / "run.html").read_text()


def test_what_cannot_be_written_is_told_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        timeline(tmp_path / "absent" / "run.json")
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to(pipe)
    specials = ((pipe, "a pipe"), (link, "a pipe"), (tmp_path, "a folder"), ("/dev/full", "a device"))
    for special, kind in specials:
        with pytest.raises(ValueError, match=f"html is '{special}', which is {kind}: name a file"):
            timeline(html=special)
    with pytest.raises(ValueError, match=f"trace and html are both {tmp_path / 'run'}"):
        timeline(tmp_path / "run", html=f"{tmp_path}/./run")
    assert set(tmp_path.iterdir()) == {pipe, link}
    with pytest.raises(OSError, match=r"can't be written.*/proc/run\.json"):
        timeline("/proc/run.json")
    with pytest.raises(ValueError, match="it is -1"):
        timeline(max_spans=-1)
    assert observed.by is None
    run = timeline()
    assert isinstance(run, Timeline)
    run.close()


@pytest.mark.hostile
def test_a_close_that_is_interrupted_has_written_what_is_known_and_records_no_more(
    group, tmp_path, monkeypatch
):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    run = timeline(trace := tmp_path / "run.json")
    group.call("add", 1).get_results()
    recorder = observed.by
    monkeypatch.setattr(recorder.nodes, "ask", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.close()
    monkeypatch.undo()
    assert observed.by is None
    assert recorder._ending.is_set()
    assert len(events(json.loads(trace.read_text()), name="add", kind="running")) == 2
    run.close()
    assert len(run._kept) == 1


@pytest.mark.hostile
def test_files_that_were_not_written_are_written_by_the_next_close(group, tmp_path, monkeypatch):
    run = timeline(trace := tmp_path / "run.json")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(json, "dumps", lambda *_args, **_options: (_ for _ in ()).throw(KeyboardInterrupt()))
        run.close()
    assert not trace.exists()
    run.close()
    assert trace.exists()


@pytest.mark.hostile
def test_a_handler_of_a_signal_may_close_a_timeline_that_is_being_written(group, tmp_path, monkeypatch):
    run = timeline(trace := tmp_path / "run.json")
    group.call("add", 1).get_results()
    write = Path.write_text

    def write_and_be_interrupted(path, text, **options):
        write(path, text, **options)
        monkeypatch.undo()
        run.close()  # as a handler does

    monkeypatch.setattr(Path, "write_text", write_and_be_interrupted)
    run.close()
    assert len(events(json.loads(trace.read_text()), name="add", kind="running")) == 2
    assert list(tmp_path.iterdir()) == [trace]


def code_of(child):
    """Of a forked process, which is ended where it does not end."""
    ended = []
    try:
        eventually(lambda: ended.append(os.waitpid(child, os.WNOHANG)) or ended[-1][0], "the child ends")
    finally:
        if not (ended and ended[-1][0]):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return ended[-1][1]


@pytest.mark.hostile
def test_an_interrupt_while_a_timeline_begins_leaves_nobody_who_listens(monkeypatch):
    def pressed(thread):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", pressed)
        with pytest.raises(KeyboardInterrupt):
            timeline(open_telemetry=False)
    assert observed.by is None
    with timeline(open_telemetry=False) as run, run.span("next"):
        pass
    assert len(events(run.trace(), name="next")) == 1


@pytest.mark.hostile
def test_a_timeline_that_an_interrupt_gives_to_nobody_wants_no_calls(monkeypatch):
    """It comes as the `with` block begins, when the timeline is there already."""
    made = []

    class Seen(recording.Kept):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    def pressed(frame, *_):
        if frame.f_code is Timeline.__enter__.__code__:
            raise KeyboardInterrupt

    monkeypatch.setattr(recording, "Kept", Seen)
    try:
        sys.setprofile(pressed)
        with timeline(open_telemetry=False):
            raise AssertionError("it is there")
    except KeyboardInterrupt:
        assert [kept.wants for kept in made] == [LATER], "what failed can still be looked at"
    finally:
        sys.setprofile(None)
    gc.collect()
    assert [kept.wants for kept in made] == [NOTHING]
    with timeline(open_telemetry=False) as run, run.span("next"):
        assert [kept.wants for kept in made] == [NOTHING, LATER]
    assert len(events(run.trace(), name="next")) == 1
    observed.by.leave(made[0])


@pytest.mark.hostile
def test_a_process_that_is_forked_while_a_timeline_ends_records_its_own():
    held, free = threading.Event(), threading.Event()

    def end_for_long():
        with shared._lock.here:
            held.set()
            free.wait(PATIENCE_S)

    ending = threading.Thread(target=end_for_long, daemon=True)
    ending.start()
    assert held.wait(PATIENCE_S)
    if not (child := os.fork()):
        recorded = []
        try:
            with timeline(open_telemetry=False) as run, run.span("mine"):
                pass
            recorded += events(run.trace(), name="mine")
        finally:
            os._exit(len(recorded) != 1)
    try:
        assert code_of(child) == 0, "it has recorded nothing"
    finally:
        free.set()
        ending.join()


@pytest.mark.hostile
def test_a_forked_process_waits_for_no_lock_of_its_parents_timeline_and_writes_nothing(tmp_path):
    path, held, free = tmp_path / "run.json", threading.Event(), threading.Event()

    def look_for_long(recorder):
        with recorder._lock, recorder._counting:
            held.set()
            free.wait(PATIENCE_S)

    with timeline(path) as run:
        looking = threading.Thread(target=look_for_long, args=(run._subscription._recorder,), daemon=True)
        looking.start()
        assert held.wait(PATIENCE_S)
        if not (child := os.fork()):
            noted = observed.by is not None
            run.trace()
            run.close()
            os._exit(noted)
        free.set()
        looking.join()
        assert code_of(child) == 0, "it is told of nothing"
        assert not path.exists()
        assert observed.by is not None
    assert path.exists()


@pytest.mark.hostile
def test_a_disk_that_is_full_leaves_what_was_there_before_and_the_next_close_writes(
    group, tmp_path, monkeypatch
):
    trace, html = tmp_path / "run.json", tmp_path / "run.html"
    trace.write_text("before")
    write = Path.write_text

    def full(path, text, **options):
        write(path, text[:10], **options)
        if "run.json" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, text, **options)

    run = timeline(trace, html=html)
    group.call("add", 1).get_results()
    with monkeypatch.context() as patched, pytest.raises(OSError, match=f"No space left.*{trace}"):
        patched.setattr(Path, "write_text", full)
        run.close()
    assert trace.read_text() == "before" and "add" in html.read_text()
    assert sorted(tmp_path.iterdir()) == [html, trace]
    run.close()
    assert len(events(json.loads(trace.read_text()), name="add", kind="running")) == 2


def test_a_file_that_is_replaced_keeps_its_permissions_and_others_have_those_of_the_umask(group, tmp_path):
    (trace := tmp_path / "run.json").touch(0o600)
    umask = os.umask(0o027)
    try:
        with timeline(trace, html=(html := tmp_path / "run.html")):
            group.call("add", 1).get_results()
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o777 for path in (trace, html)] == [0o600, 0o640]
    assert json.loads(trace.read_text()) and sorted(tmp_path.iterdir()) == [html, trace]


def test_a_file_that_cannot_be_written_in_the_end_is_named_and_the_other_is_written(group, tmp_path):
    (folder := tmp_path / "folder").mkdir()
    (link := tmp_path / "run.html").symlink_to(html := tmp_path / "linked.html")
    with pytest.raises(FileNotFoundError, match=f"can't be written.*{folder / 'run.json'}'"):  # noqa: SIM117
        with timeline(folder / "run.json", html=link):
            group.call("add", 1).get_results()
            folder.rmdir()
    assert link.is_symlink() and "add" in html.read_text()
    assert sorted(tmp_path.iterdir()) == [html, link]
