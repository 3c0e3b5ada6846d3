import sys

import pytest

from raycrew.venv_manager import IncompatibleEnvironmentError, ProbeError
from raycrew.venv_manager._store.building.probing import Expectation, Probe, check, probe

pytestmark = pytest.mark.smoke


def test_an_interpreter_says_what_it_is():
    found = probe(sys.executable, ["json", "no_such_module"])
    assert found.version == sys.version_info[:3]
    assert list(found.failed) == ["no_such_module"]
    check(probe(sys.executable, ["json"]), Expectation(python=sys.version_info[:2], imports=("json",)))


def test_interpreters_that_are_none(tmp_path):
    with pytest.raises(ProbeError, match="no interpreter"):
        probe(tmp_path / "python")
    with pytest.raises(ProbeError, match="no interpreter"):
        probe(tmp_path)
    script = tmp_path / "python"
    script.write_text("#!/no/such/thing\n")
    script.chmod(0o755)
    with pytest.raises(ProbeError, match="cannot be run"):
        probe(script)
    script.write_text("#!/bin/sh\necho broken >&2\nexit 7\n")
    with pytest.raises(ProbeError, match=r"status 7(.|\n)*broken"):
        probe(script)
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ProbeError, match=r"within 0\.2 s"):
        probe(script, timeout_s=0.2)


def test_the_callers_python_path_does_not_leak_in(tmp_path, monkeypatch):
    (tmp_path / "leaking.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "leaking" in probe(sys.executable, ["leaking"]).failed


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (Expectation(python=(3, 9)), r"it is Python 3\.12\.4, the driver is 3\.9: ask for `--python 3\.9`"),
        (Expectation(ray="2.60.0"), r"it has ray 2\.50\.0, the driver 2\.60\.0: change the pin"),
        (Expectation(versions={"raycrew-x": "2"}), r"it has raycrew-x 1, the driver 2"),
        (Expectation(versions={"raycrew-y": "2"}), r"it has raycrew-y \(none\)"),
        (Expectation(imports=("bad",)), r"`import bad` fails there: ImportError: x"),
    ],
)
def test_each_misfit_says_what_to_change(expected, message):
    found = Probe("/p", (3, 12, 4), {"ray": "2.50.0", "raycrew-x": "1"}, {"bad": "ImportError: x"}, 0.1)
    with pytest.raises(IncompatibleEnvironmentError, match=message):
        check(found, expected)


def test_an_environment_without_ray():
    with pytest.raises(IncompatibleEnvironmentError, match=r"it has no ray: add `ray==2\.60\.0`"):
        check(Probe("/p", (3, 12, 4), {}, {}, 0.1), Expectation(ray="2.60.0"))
