"""No space left: at each of our own writes, and for real uv on a disk that is too small."""

import os
import re
import subprocess
import sys

import pytest
from builds import SPEC, child_environment, whole_fake

from raycrew.venv_manager import Store, ensure

pytestmark = pytest.mark.hostile

FULL = """
import errno, os, sys
last, made = int(sys.argv[1]), 0
def hook(event, arguments):
    global made
    writes = event in ("os.mkdir", "os.symlink") or (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    )
    if armed and writes and arguments[0] != os.devnull:
        made += 1
        if last and made >= last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
from raycrew.venv_manager import EnvironmentSpec, ensure
from raycrew.venv_manager.provision import prepare
from raycrew.venv_manager import Store
import concurrent.futures.thread
spec = EnvironmentSpec.requirements(["fake"], carry=False)
armed = False
sys.addaudithook(hook)
armed = True
prepare(spec, Store()) if len(sys.argv) > 2 else ensure(spec)
armed = False
print(made)
"""


@pytest.mark.parametrize(
    ("action", "every"),
    [
        pytest.param([], 6, id="ensure"),
        pytest.param(["prepare"], 4, id="prepare"),
        pytest.param([], 2, id="ensure, at many writes", marks=pytest.mark.long),
        pytest.param(["prepare"], 1, id="prepare, at each write", marks=pytest.mark.long),
    ],
)
def test_full_at_any_write_publishes_nothing_and_says_so(tmp_path, fake_uv, action, every):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environ = {**os.environ, **fake_uv.environ, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(root, last):
        return subprocess.run(
            [sys.executable, "-c", FULL, str(last), *action], env={**environ, "RAYCREW_VENV_DIR": str(root)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    writes = int(run(tmp_path / "whole", 0).stdout)
    assert writes > (4 if action else 12)
    refused = 0
    tried = range(1, writes + 1, every)
    for last in tried:
        store = Store(tmp_path / f"full-{last}", environ=environ)
        done = run(store.root, last)
        if done.returncode:  # some of what is written only tells others how far a build is
            refused += 1
            error = done.stderr.splitlines()[-1]
            assert re.search(r"no space is left for .*raycrew-env gc|for temporary files: .*TMPDIR", error)
            assert not list(store.root.glob("????????????????????????"))
        else:
            assert all(whole_fake(built.path) for built in store.environments())
        assert not list(scratch.iterdir())
    assert refused > len(tried) // (4 if action else 2)
    assert whole_fake(ensure(SPEC, store=store).path)


IN_A_MOUNT = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
BUILD = """
from raycrew.venv_manager import DiskFullError, EnvironmentSpec, Store, ensure
store = Store()
try:
    ensure(EnvironmentSpec.requirements(["large"], carry=False))
except DiskFullError as error:
    print(error)
    print("tail:", error.tail)
print("left:", *store.environments(), *store.root.glob("????????????????????????"))
ensure(EnvironmentSpec.requirements(["demo"], carry=False))
"""


def test_real_uv_on_a_disk_that_is_too_small(tmp_path, index, store):
    index.add("large", "1.0", files={"large/__init__.py": "", "large/data.bin": os.urandom(2_000_000)})
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", IN_A_MOUNT, str(disk)]
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    environ = child_environment(store) | {"RAYCREW_VENV_DIR": str(disk)}
    done = subprocess.run(
        [*mounted, sys.executable, "-c", BUILD], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no space is left; `raycrew-env gc`" in done.stdout
    assert "os error 28" in done.stdout.partition("tail:")[2]
    assert done.stdout.endswith("left:\n")
