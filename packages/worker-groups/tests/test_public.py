import subprocess
import sys

import pytest

import raycrew.worker_groups


@pytest.mark.smoke
def test_the_public_names_are_sorted_and_there():
    names = raycrew.worker_groups.__all__
    capitals = sorted(name for name in names if name[0].isupper())
    assert names == capitals + sorted(name for name in names if name[0].islower())
    assert all(hasattr(raycrew.worker_groups, name) for name in names)


def test_every_public_name_is_described():
    assert not [n for n in raycrew.worker_groups.__all__ if not getattr(raycrew.worker_groups, n).__doc__]


def loaded_by(statement):
    """The wings of this package that a statement imports into a fresh process."""
    code = (
        f"import sys; {statement}; print(*(n for n in sys.modules if n.startswith('raycrew.worker_groups.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[2] for name in done.stdout.split()}


def test_processes_that_run_items_import_their_own_wing_alone():
    loaded = loaded_by("import raycrew.worker_groups._fan_out.processes.server")
    assert loaded == {"_fan_out", "errors", "protocols"}


def test_public_modules_are_attributes_without_an_import_of_their_own():
    public = {"balancing", "errors", "protocols", "rollouts", "sharding"}
    assert (
        loaded_by(f"import raycrew.worker_groups as w; [getattr(w, n) for n in {sorted(public)}]") >= public
    )
