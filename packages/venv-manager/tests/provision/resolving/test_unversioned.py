"""What counts of a source outside of git."""

import pytest

from raycrew.venv_manager._spec.local import files_below
from raycrew.venv_manager.provision._resolving import unversioned
from raycrew.venv_manager.provision._resolving.unversioned import Shipped


@pytest.fixture
def source(tmp_path):
    """A source that ships a package, and has a log and tools beside it."""
    for name in ("pyproject.toml", "VERSION", "src/lib/__init__.py", "logs/0.txt", "tools/lint.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_what_is_shipped_and_what_lies_beside_the_project_file_counts(source):
    shipped = Shipped.of(source, ["pyproject.toml", "src/lib/__init__.py"], {"lib/__init__.py": "0:-"})
    assert shipped.files.keys() == {"pyproject.toml", "VERSION", "src/lib/__init__.py"}
    assert shipped.aside == {"logs/", "tools/", "tools/lint.py"}
    assert Shipped.from_record(shipped.record()) == shipped
    (source / "logs" / "1.txt").touch()
    (source / "tools" / "lint.py").write_text("# edited")
    assert shipped.stays(source)
    (source / "logs" / "__init__.py").touch()
    assert not shipped.stays(source), "a new package"
    (source / "logs" / "__init__.py").unlink()
    (source / "VERSION").write_text("2")
    assert not shipped.stays(source)


@pytest.mark.hostile
def test_a_file_that_vanishes_while_it_is_read_is_a_change(source, monkeypatch):
    shipped = Shipped.of(source, ["src/lib/__init__.py"], {})

    def listed(folder):
        names = files_below(folder)
        (source / "VERSION").unlink(missing_ok=True)
        return names

    assert shipped.stays(source)
    monkeypatch.setattr(unversioned, "files_below", listed)
    assert not shipped.stays(source)
