"""Shared memory in the hands of forked children, other users, and readers that keep what they read."""

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import stat
from pathlib import Path

import pytest
import torch

from raycrew.tensor_transport import RTensor, ShardRegistry, StaleHandleError, TransportError
from raycrew.tensor_transport._bytes.shared.arena_files import Arena, Header
from raycrew.tensor_transport._bytes.shared.mappings import map_for_reading
from raycrew.tensor_transport.backends.shared_memory import SharedMemoryBackend

pytestmark = pytest.mark.hostile
MIB = 1 << 18  # elements of float32


@pytest.fixture
def backend():
    found = SharedMemoryBackend(arena_bytes=8 << 20)
    yield found
    found.close()


@pytest.fixture
def everybodys(tmp_path):
    """A directory that all users may write to, as /dev/shm."""
    tmp_path.chmod(0o1777)
    return tmp_path


def read(backend, *shards):
    return ShardRegistry(backend).fetch([RTensor(shard) for shard in shards])


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_descriptors(backend):
    """Those of shared memory alone: others of this process, as those of a Ray, come and go."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder which is listed here
            links.append(str(path.readlink()))
    return sum(link.startswith(f"{backend._arenas.folder}/") for link in links)


@contextlib.contextmanager
def no_descriptor_left():
    gc.collect()  # else one that another test has left may become free meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 8, hard))
    with contextlib.ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.enter_context(Path(os.devnull).open())
        yield


def in_fork(work):
    """What `work()` gives in a forked child, which ends right after it."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # The threads of torch's own pool are not there.
            theirs.send(work())
        except BaseException as error:  # noqa: BLE001 - it is raised in the parent
            theirs.send(error)
        finally:
            os._exit(0)
    theirs.close()
    found = ours.recv() if ours.poll(60) else TimeoutError("the child does not answer")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if isinstance(found, BaseException):
        raise found
    return found


def test_a_forked_child_and_its_parent_put_side_by_side(backend):
    (before,) = backend.put([torch.full((MIB,), 1.0)])
    theirs = in_fork(lambda: backend.put([torch.full((MIB,), 2.0), torch.full((5,), 3.0)]))
    mine = backend.put([torch.full((MIB,), 4.0), torch.full((5,), 5.0)])
    got = read(backend, before, *theirs, *mine)
    assert [tensor.unique().tolist() for tensor in got] == [[1.0], [2.0], [3.0], [4.0], [5.0]]
    backend.release([before, *theirs, *mine])
    assert backend.stats().shards == 0


def test_a_forked_child_reads_writes_and_closes_for_itself(backend):
    (shard,) = backend.put([torch.arange(MIB)])
    (mine,) = read(backend, shard)

    def work():
        (whole,) = read(backend, shard)
        mine.fill_(-1)
        whole.fill_(-2)
        stats = backend.stats()
        backend.close()
        return stats.shards, int(read_anew[0].sum())

    read_anew = read(backend, shard)
    want = torch.arange(MIB)
    assert in_fork(work) == (1, int(want.sum()))
    assert torch.equal(mine, want) and torch.equal(read(backend, shard)[0], want)


def test_what_a_dead_child_put_is_released_with_its_file(backend):
    theirs = in_fork(lambda: backend.put([torch.zeros(10)]))
    backend.release(theirs)
    assert backend.stats().reserved_bytes == 0


class Numbers(torch.utils.data.Dataset):
    """Puts each item, and gives its handle."""

    def __init__(self, backend):
        self.registry = ShardRegistry(backend)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return self.registry.put([torch.full((MIB // 4,), float(i))])[0]


def test_data_loader_workers_put_into_arenas_of_their_own(backend):
    data = Numbers(backend)
    mine = data.registry.put([torch.full((MIB // 4,), 100.0)])
    loader = torch.utils.data.DataLoader(data, num_workers=2, batch_size=None, multiprocessing_context="fork")
    handles = []
    for handle in loader:
        handles.append(handle)
        mine += data.registry.put([torch.full((MIB // 4,), 100.0 + len(handles))])
    assert [int(t[0]) for t in data.registry.fetch(handles)] == list(range(12))
    assert [int(t[-1]) for t in data.registry.fetch(mine)] == [100 + i for i in range(13)]


def test_results_that_are_kept_cost_few_descriptors():
    gc.collect()  # else one that another test has left may become free meanwhile
    backend = SharedMemoryBackend(arena_bytes=64 << 20)
    before = shared_descriptors(backend)
    shards = backend.put([torch.full((MIB * 8,), float(i)) for i in range(8)])
    kept = [read(backend, *shards) for _ in range(10)]
    kept += [read(backend, shard) for shard in shards for _ in range(3)]
    assert shared_descriptors(backend) - before == 2, "of the owner and its arena: results have none"
    for results in kept[:10]:
        assert [float(t[7]) for t in results] == list(range(8))
    kept[0][0].fill_(-1)
    assert float(kept[1][0][0]) == 0.0 == float(read(backend, shards[0])[0][0])
    backend.close()


def test_small_results_that_are_kept_hold_no_arena():
    backend = SharedMemoryBackend(arena_bytes=16 << 20, max_bytes=64 << 20)
    kept = []
    for i in range(12):
        shards = backend.put([torch.full((MIB,), float(i)), torch.zeros(MIB * 14)])
        kept += read(backend, shards[0])
        backend.release(shards)
    assert [float(t[0]) for t in kept] == list(range(12))
    assert backend.stats().leases == 0 and backend.stats().reserved_bytes <= 32 << 20
    backend.close()


def test_without_descriptors_the_error_is_named(backend):
    (shard,) = backend.put([torch.ones(MIB * 2)])
    with no_descriptor_left():
        for work in (lambda: read(backend, shard), backend.stats, lambda: backend.put([torch.ones(MIB * 9)])):
            with pytest.raises(TransportError, match="Too many open files") as caught:
                work()
            assert not isinstance(caught.value, StaleHandleError)
    assert torch.equal(read(backend, shard)[0], torch.ones(MIB * 2))


def test_a_release_that_comes_late_spares_the_next_generation(backend, monkeypatch):
    """As if the arena were used anew between a second release's look at the generation and its note."""
    (first,) = backend.put([torch.zeros(MIB * 7)])
    backend.release([first])
    backend._arenas._current = None
    (second,) = backend.put([torch.ones(MIB * 7)])
    assert second.locator[0] == first.locator[0]
    with monkeypatch.context() as late:
        late.setattr(Header, "generation", property(lambda header: first.locator[1]))
        backend.release([first])
    assert float(read(backend, second)[0][0]) == 1.0
    backend.release([second])
    backend.release([first])
    assert backend.stats().shards == 0, "nor does a late one bring back what was released since"


def test_a_planted_session_harms_nobody(everybodys):
    backend = SharedMemoryBackend(directory=everybodys)
    (shard,) = backend.put([torch.ones(5)])
    for folder in (everybodys, backend._arenas.folder):
        for name in (
            "raycrew-*.session",
            "raycrew-a*.session",
            "raycrew-[0-9a-f].session",
            "raycrew-..session",
        ):
            (folder / name).touch()
            os.chown(folder / name, 65534, 65534) if folder == everybodys and os.geteuid() == 0 else None
    (backend._arenas.folder / "raycrew-linked.session").symlink_to(everybodys / "raycrew-*.session")
    SharedMemoryBackend(directory=everybodys).close()
    assert torch.equal(read(backend, shard)[0], torch.ones(5))
    assert len(list(everybodys.glob("raycrew-*.session"))) == 4, "what others own is left alone"
    backend.close()


def planted_link(folder, elsewhere):
    folder.symlink_to(elsewhere)


def planted_open(folder, _):
    folder.mkdir()
    folder.chmod(0o777)


def planted_of_another(folder, _):
    folder.mkdir(0o700)
    os.chown(folder, 65534, 65534)


@pytest.mark.parametrize(
    "plant", [planted_link, planted_open, pytest.param(planted_of_another, marks=pytest.mark.root)]
)
def test_a_planted_folder_is_refused(everybodys, tmp_path_factory, plant):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    elsewhere.chmod(0o700)
    plant(everybodys / f"raycrew-{os.geteuid()}", elsewhere)
    with pytest.raises(TransportError, match=r"is not a folder of user .* alone"):
        SharedMemoryBackend(directory=everybodys).put([torch.ones(3)])
    assert not list(elsewhere.iterdir())


def test_a_directory_in_which_others_move_files_is_refused(everybodys):
    everybodys.chmod(0o777)
    with pytest.raises(TransportError, match="others may move files in"):
        SharedMemoryBackend(directory=everybodys)


def test_the_folder_is_for_its_user_alone(everybodys):
    backend = SharedMemoryBackend(directory=everybodys)
    backend.put([torch.ones(3)])
    (folder,) = everybodys.iterdir()
    found = folder.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o700)
    backend.close()


def test_a_file_of_another_user_and_a_link_are_not_used(backend):
    (shard,) = backend.put([torch.ones(5)])
    arena = backend._arenas.folder / f"raycrew-{shard.locator[0]}"
    moved = arena.with_name("raycrew-moved")
    arena.rename(moved)
    arena.symlink_to(moved)
    for use in (lambda: read(backend, shard), lambda: backend.release([shard])):
        with pytest.raises(TransportError):
            use()
    arena.unlink()
    moved.rename(arena)
    if os.geteuid() == 0:
        os.chown(arena, 65534, 65534)
        for use in (lambda: read(backend, shard), lambda: backend.release([shard])):
            with pytest.raises(TransportError, match="is of user 65534"):
                use()
        os.chown(arena, 0, 0)
    backend.release([shard])


@pytest.mark.parametrize("name", ["../../etc/passwd", "x/../../y", "", "a-b", 7, "a-b-c/../d"])
def test_a_handle_names_no_file_elsewhere(backend, name):
    (shard,) = backend.put([torch.ones(5)])
    object.__setattr__(shard, "locator", (name, *shard.locator[1:]))
    with pytest.raises(StaleHandleError, match="is no name of an arena"):
        read(backend, shard)
    with pytest.raises(StaleHandleError, match="is no name of an arena"):
        backend.release([shard])


def test_an_arena_that_somebody_cut_is_an_error_and_no_signal(backend):
    (shard,) = backend.put([torch.ones(MIB * 2)])
    kept = read(backend, shard)

    def work():
        os.truncate(backend._arenas.path(shard.locator[0]), 0)
        with pytest.raises(StaleHandleError):
            read(backend, shard)
        return len(kept)

    assert in_fork(work) == 1


def test_nobody_cuts_memory_without_a_name():
    arena = Arena(None, 4096)
    with pytest.raises(PermissionError):
        os.truncate(arena.path, 4096)
    arena.close()


def test_a_descriptor_that_is_another_file_by_now_holds_nothing():
    """Of a process that is gone the number may be another's, and its descriptors what that has open."""
    with contextlib.ExitStack() as stack:
        memory = os.memfd_create("raycrew", os.MFD_CLOEXEC)
        for fd in (memory, *os.pipe()):
            stack.callback(os.close, fd)
            assert map_for_reading(Path(f"/proc/{os.getpid()}/fd/{fd}")) is None
        os.ftruncate(memory, 1 << 20)
        assert map_for_reading(Path(f"/proc/{os.getpid()}/fd/{memory}")) is not None
        if os.geteuid() == 0:
            os.fchown(memory, 65534, 65534)
            assert map_for_reading(Path(f"/proc/{os.getpid()}/fd/{memory}")) is None
