"""What is read of files that a worker has left."""

import os

import pytest

from raycrew.worker_groups._on_nodes import read_tail
from raycrew.worker_groups._on_nodes.leavings import output_of, record_of
from raycrew.worker_groups._on_nodes.process_table import own_process


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
