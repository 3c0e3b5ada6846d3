"""The driver's Ray and raycrew in an environment: a driver made of small wheels, real uv."""

import io
import json
import subprocess
import sys
import textwrap
import zipfile
from importlib.metadata import Distribution

import pytest

from raycrew.venv_manager import VenvError
from raycrew.venv_manager._store.building.carry import repack
from raycrew.venv_manager.testing import make_wheel, write_project

EDITABLE = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def install(site, wheel):
    name, content = wheel
    zipfile.ZipFile(io.BytesIO(content)).extractall(site)
    info = next(site.glob(f"{name.split('-')[0]}-*.dist-info"))
    with (info / "RECORD").open("a") as record:
        record.write(f"../../../bin/tool,,\n{info.name}/INSTALLER,,\n")
    (info / "INSTALLER").write_text("somebody")
    return info


@pytest.fixture
def driver(tmp_path, index):
    """A folder of packages such as a driver has: ray 2.0, and raycrew-alpha which needs leaf 1.0 or later."""
    site = tmp_path / "driver"
    site.mkdir()
    index.add("ray", "2.0")
    index.add("ray", "3.0")
    install(site, make_wheel("ray", "2.0"))
    install(site, make_wheel("leaf", "1.0"))
    files = {
        "raycrew/alpha/__init__.py": "VALUE = 1\n",
        "raycrew_alpha-0.1.dist-info/entry_points.txt": "[x]\ny = z:q\n",
    }
    install(site, make_wheel("raycrew-alpha", "0.1", requires=["ray>=1", "leaf>=1"], files=files))
    return site


def build(driver, store, spec):
    """Build in a process that has the driver's packages and none other of raycrew but this one."""
    code = f"""
        import importlib.metadata as metadata, json, sys
        sys.path.insert(0, {str(driver)!r})
        everything = metadata.distributions
        def ours(**kwargs):
            for dist in everything(**kwargs):
                name = (dist.metadata["Name"] or "").lower()
                mine = str(dist.locate_file("")).startswith({str(driver)!r})
                if mine or not name.startswith(("ray", "leaf")):
                    yield dist
        metadata.distributions = ours
        from raycrew.venv_manager import Store, ensure, parse
        from raycrew.venv_manager.errors import VenvError
        try:
            built = ensure(parse({spec!r}), store=Store({str(store.root)!r}))
        except VenvError as error:
            sys.exit(f"{{type(error).__name__}}: {{error}}")
        print(json.dumps([str(built.python), dict(built.stamp["packages"]), built.key]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=store.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def test_an_environment_brings_ray_and_raycrew_in_the_drivers_versions(driver, store, tmp_path):
    project = write_project(tmp_path / "p", dependencies=["demo==1.0"])
    python, packages, _ = build(driver, store, str(project))
    assert packages == {"demo": "1.0", "leaf": "1.0", "ray": "2.0", "raycrew-alpha": "0.1"}
    assert (
        subprocess.check_output([python, "-c", "import raycrew.alpha as a; print(a.VALUE)"], text=True)
        == "1\n"
    )


def test_a_project_that_names_ray_itself_decides(driver, store, tmp_path):
    project = write_project(tmp_path / "p", dependencies=["ray>=1"])
    assert build(driver, store, str(project))[1]["ray"] == "2.0"  # open, so the driver's is preferred
    write_project(tmp_path / "p", dependencies=["ray==3.0"])
    with pytest.raises(RuntimeError, match=r"IncompatibleEnvironmentError(.|\n)*ray 3\.0, the driver 2\.0"):
        build(driver, store, str(project))
    assert len(store.environments()) == 1


def test_a_changed_raycrew_makes_another_environment(driver, store):
    spec = "uv run --no-project --with demo"
    _, _, before = build(driver, store, spec)
    install(driver, make_wheel("raycrew-alpha", "0.1", files={"raycrew/alpha/__init__.py": "VALUE = 2\n"}))
    python, _, after = build(driver, store, spec)
    assert after != before
    assert (
        subprocess.check_output([python, "-c", "import raycrew.alpha as a; print(a.VALUE)"], text=True)
        == "2\n"
    )


def test_an_editable_raycrew_is_built_from_its_source(driver, store, tmp_path):
    source = write_project(tmp_path / "beta", name="raycrew-beta", more=EDITABLE)
    (source / "src" / "raycrew" / "beta").mkdir(parents=True)
    (source / "src" / "raycrew" / "beta" / "__init__.py").write_text("VALUE = 1\n")
    (source / "backend.py").write_text(BACKEND)
    info = install(driver, make_wheel("raycrew-beta", "0", files={"beta.pth": str(source / "src")}))
    (info / "direct_url.json").write_text(
        json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}})
    )
    spec = "uv run --no-project --with demo"
    python, packages, before = build(driver, store, spec)
    assert packages["raycrew-beta"] == "0"
    code = "import raycrew.beta as b; print(b.VALUE, b.__file__)"
    value, path = subprocess.check_output([python, "-c", code], text=True).split()
    assert value == "1"
    assert path.startswith(str(store.root))
    (source / "src" / "raycrew" / "beta" / "__init__.py").write_text("VALUE = 2\n")
    assert build(driver, store, spec)[2] != before


BACKEND = """
import pathlib, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "raycrew_beta-0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        wheel.write("src/raycrew/beta/__init__.py", "raycrew/beta/__init__.py")
        info = "raycrew_beta-0.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: raycrew-beta\\nVersion: 0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""


@pytest.mark.smoke
def test_repacking_gives_the_wheel_back(tmp_path):
    wheel = make_wheel("raycrew-alpha", "0.1+local", requires=["leaf"])
    info = install(tmp_path, wheel)
    name, content = repack(Distribution.at(info))
    assert name == wheel[0]
    before, after = (zipfile.ZipFile(io.BytesIO(c)) for c in (wheel[1], content))
    assert sorted(before.namelist()) == sorted(after.namelist())
    assert all(before.read(n) == after.read(n) for n in before.namelist() if not n.endswith("RECORD"))
    assert repack(Distribution.at(info))[1] == content
    (tmp_path / "raycrew_alpha" / "__init__.py").unlink()
    with pytest.raises(VenvError, match="damaged, reinstall"):
        repack(Distribution.at(info))
    (info / "WHEEL").unlink()
    with pytest.raises(VenvError, match="no RECORD or WHEEL"):
        repack(Distribution.at(info))
