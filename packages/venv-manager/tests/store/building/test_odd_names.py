"""Names with dots, and versions that are written in several ways, are the same packages."""

import pytest

from raycrew.venv_manager import EnvironmentSpec, Store, ensure, verify
from raycrew.venv_manager._store.building import probing
from raycrew.venv_manager.testing import LocalIndex

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("zope.interface", "5.0"),
        ("Odd.Yaml", "1.0"),
        ("demo", "1.0+cpu.1"),
        ("demo", "1!2.0"),
        ("a--b", "1"),
    ],
)
def test_an_environment_of_it_is_built(tmp_path, name, version):
    index = LocalIndex(tmp_path)
    index.add(name, version)
    store = Store(tmp_path / "store", environ=index.environ(tmp_path / "cache"))
    built = ensure(EnvironmentSpec.requirements([f"{name}=={version}"], carry=False), store=store)
    assert list(built.stamp["packages"].values()) == [version]
    assert verify(store, built).ok


@pytest.mark.parametrize(("has", "wanted"), [("1.0", "1.0.0"), ("1.0.0", "1"), ("1.0RC1", "1.0rc1")])
def test_versions_fit_however_they_are_written(has, wanted):
    found = probing.Probe("python", (3, 12, 0), {"ray": has, "raycrew-x": has}, {}, 0.1)
    probing.check(found, probing.Expectation(None, wanted, {"raycrew-x": wanted}))
