"""Whether a file can be run counts as what it holds does, and comes through."""

import subprocess
import zipfile

import pytest
from local_sources import BACKEND, write_package

from raycrew.venv_manager import EnvironmentSpec, ensure, identify

pytestmark = pytest.mark.hostile
# Ships a script with its mode, as build backends do.
SHIPS = BACKEND.replace(
    'wheel.writestr(info + "RECORD", "")',
    'wheel.write("tool.sh", "inner_data/tool.sh"); wheel.writestr(info + "RECORD", "")',
)


@pytest.mark.parametrize("checkout", [False, True])
def test_a_script_that_becomes_executable_makes_another_environment(store, tmp_path, checkout):
    folder = write_package(tmp_path / "inner", 1, backend=SHIPS)
    tool = folder / "tool.sh"
    tool.write_text("#!/bin/sh\necho ran\n")
    tool.chmod(0o644)
    if checkout:
        subprocess.run(["git", "init", "-q", folder], check=True)
        subprocess.run(["git", "-C", folder, "add", "."], check=True)
    spec = EnvironmentSpec.requirements([f"inner @ {folder.as_uri()}"], carry=False)
    plain, said = ensure(spec, store=store), identify(spec, store.environ)
    tool.chmod(0o755)
    assert identify(spec, store.environ) != said
    runs = ensure(spec, store=store)
    assert runs.key != plain.key
    (installed,) = runs.path.glob("venv/lib/*/site-packages/inner_data/tool.sh")
    assert subprocess.check_output([installed], text=True) == "ran\n"


def test_a_wheelhouse_counts_what_can_be_run(store, tmp_path):
    keys = set()
    for mode in (0o644, 0o755):
        with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
            info = zipfile.ZipInfo("a/tool")
            info.external_attr = mode << 16
            wheel.writestr(info, "#!/bin/sh\n")
        spec = EnvironmentSpec.requirements(["a"], carry=False, wheelhouse=str(tmp_path))
        keys.add(str(identify(spec, store.environ)["wheelhouse"]))
    assert len(keys) == 2
