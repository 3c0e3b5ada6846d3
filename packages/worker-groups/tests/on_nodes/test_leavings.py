"""What is read of files that a worker has left, and what else is found out about one."""

import asyncio
import os
import subprocess
import sys

import pytest
from patience import eventually

from raycrew.worker_groups._on_nodes import own_process, pid_namespace, read_tail
from raycrew.worker_groups._on_nodes.leavings import output_of, record_of
from raycrew.worker_groups._on_nodes.process_table import read_entry
from raycrew.worker_groups._on_nodes.watch import Watch


def test_the_last_lines_of_each_file_without_rays_own(tmp_path):
    out, err = tmp_path / "worker.out", tmp_path / "worker.err"
    out.write_text(":job_id:0100\n:actor_name:Shell\none\n\n: two\n:task_name:step\nthree\n")
    err.write_bytes(b"\xff went wrong\n")
    paths = [str(out), str(err)]
    assert output_of(paths, 2) == (": two\nthree\n� went wrong", "")
    assert read_tail(paths, 1) == "three\n� went wrong"
    assert read_tail(paths, 5, most_bytes=6) == "three\nwrong"
    gone = str(tmp_path / "gone")
    assert output_of([gone, str(out)], 1) == ("three", f"{gone} can't be read: No such file or directory")
    assert output_of([], 1) == ("", "its output goes to no file that is known")


def test_what_a_recorder_wrote_for_a_rank_is_found_where_it_may_be(tmp_path):
    started = own_process().started
    environ = {"XDG_CACHE_HOME": str(tmp_path), "HOME": "/nowhere"}
    assert record_of(3, [], started, environ) == ("", b"", "")
    usual = tmp_path / "torch/comm_lib_trace_rank_3"
    usual.parent.mkdir()
    usual.write_bytes(b"usual")
    assert record_of(3, [], started, environ) == (str(usual), b"usual", "")
    told, named = tmp_path / "told_3", tmp_path / "named_3"
    named.write_bytes(b"named")
    environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = str(tmp_path / "named_")
    assert record_of(3, [], started, environ)[1] == b"named"
    told.write_bytes(b"told")
    assert record_of(3, [str(tmp_path / "told_")], started, environ) == (str(told), b"told", "")


@pytest.mark.hostile
def test_no_record_of_another_run_or_user_is_taken(tmp_path):
    started, prefix, path = own_process().started, str(tmp_path / "rank_"), tmp_path / "rank_0"

    def why():
        return record_of(0, [prefix], started, {})

    path.write_bytes(b"old")
    os.utime(path, (1, 1))
    assert why() == (str(path), b"", f"{path} is older than the process")
    path.unlink()
    os.mkfifo(path)
    assert why() == (str(path), b"", f"{path} is no file of this user's")
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert why()[1] == b"" and "can't be read" in why()[2]
    path.unlink()
    with path.open("wb") as large:
        large.truncate((8 << 20) + 1)
    assert why() == (str(path), b"", f"{path} has {(8 << 20) + 1} bytes, and is left where it is")


def asked(wanted, timeout_s=60.0, namespace=None):
    process = own_process()
    told = (*process, "no mark", pid_namespace() if namespace is None else namespace, 0)
    (found,) = asyncio.run(Watch().examine([told], timeout_s, [{"share_bytes": 1 << 28, **wanted}]))
    return found


def names_of_examine():
    """Where Ray has loaded a watch in this process, its functions are copies with globals of their own."""
    return Watch._examined.__globals__["examine"].__globals__


def test_a_watch_finds_out_what_is_wanted_and_no_more(tmp_path):
    log = tmp_path / "worker.out"
    log.write_text("one\ntwo\n")
    (tmp_path / "rank_7").write_bytes(b"record")
    assert asked({}).keys() == {"seen"}
    everything = {"stacks": True, "log_paths": [str(log)], "lines": 1}
    found = asked({**everything, "rank": 7, "prefixes": [f"{tmp_path}/rank_"]})
    assert found["seen"]["is_alive"]
    assert found["output"] == ("two", "")
    assert found["record"] == (str(tmp_path / "rank_7"), b"record", "")
    assert len(found["stacks"]) == 2
    elsewhere = asked(everything, namespace="another")
    assert elsewhere == {"seen": "its process id is of another namespace than its node's"}


def test_who_asks_without_marks_is_told_of_those_that_the_watch_knows(tmp_path):
    log = tmp_path / "worker.out"
    with log.open("w") as file:
        command = [sys.executable, "-c", "print('hello', flush=True); input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file) as child:
            known = tuple(read_entry(child.pid).process)
            eventually(lambda: log.read_text() == "hello\n", "it has said so")
            watch = Watch()

            async def ask():
                await watch.see([(*known, "no mark", pid_namespace(), 0)], 1.0)
                child.kill()
                child.wait()
                asked = [known, (1, 1)]
                return await watch.examine_known(asked, 60.0, [{"share_bytes": 1 << 28, "lines": 5}] * 2)

            found, nobody = asyncio.run(ask())
    assert (found["seen"]["is_alive"], found["output"], nobody) == (False, ("hello", ""), None)


def test_of_a_line_that_does_not_fit_only_the_one_that_is_all_there_is_is_cut(tmp_path):
    log = str(tmp_path / "worker.out")
    (tmp_path / "worker.out").write_text("the first line\nthe second line\nlast\n")
    why = f"only the last 12 bytes of {log} are read"
    assert output_of([log], 2, most_bytes=12) == ("last", why)
    assert output_of([log], 1, most_bytes=12) == ("last", "")
    assert output_of([log], 1, most_bytes=3) == ("st", "")


@pytest.mark.hostile
def test_no_rank_tells_more_than_its_share(tmp_path, monkeypatch):
    """Else what a thousand ranks tell would be more than their driver's memory."""
    share_bytes, log, record = 1 << 16, tmp_path / "worker.out", tmp_path / "rank_7"
    log.write_text("".join(f"line {number} is long\n" for number in range(10_000)))
    record.write_bytes(bytes(share_bytes))

    async def stacks(*_):
        return "in train\n" * 10_000, "py-spy"

    monkeypatch.setitem(names_of_examine(), "stacks_of", stacks)
    everything = {"stacks": True, "log_paths": [str(log)] * 2, "lines": 10_000, "rank": 7}
    found = asked({**everything, "prefixes": [f"{tmp_path}/rank_"], "share_bytes": share_bytes})
    (stacks, told_by), (output, why), recorded = found["stacks"], found["output"], found["record"]
    # stacks and output are written twice
    assert 2 * len(stacks) + 2 * len(output) + len(recorded[1]) < share_bytes
    assert stacks.startswith("in train\nin train\n") and told_by == "py-spy"
    assert stacks.endswith("\nall that follows is left out: these are 90000 letters")
    assert all(line.startswith("line 9") for line in output.splitlines()) and why.count("only the last") == 2
    assert recorded == (str(record), b"", f"{record} has {share_bytes} bytes, and is left where it is")


@pytest.mark.hostile
def test_a_part_that_fails_or_is_late_says_so_and_the_others_are_there(tmp_path, monkeypatch):
    async def fails(*_):
        raise RuntimeError("no stacks")

    async def hangs(*_):
        await asyncio.sleep(3600)

    (tmp_path / "rank_0").write_bytes(b"record")
    wanted = {"stacks": True, "log_paths": [], "lines": 1, "rank": 0, "prefixes": [f"{tmp_path}/rank_"]}
    monkeypatch.setitem(names_of_examine(), "stacks_of", fails)
    found = asked(wanted)
    assert found["stacks"] == ("its node's watch can't find it out: RuntimeError: no stacks", "")
    assert found["output"] == ("", "its output goes to no file that is known")
    assert found["record"][1] == b"record"
    monkeypatch.setattr(asyncio, "to_thread", hangs)
    found = asked(wanted, timeout_s=0.01)
    assert (found["output"], found["record"]) == (
        ("", "it could not be had in time"),
        ("", b"", "it could not be had in time"),
    )
