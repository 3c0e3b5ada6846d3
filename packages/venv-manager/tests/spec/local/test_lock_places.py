"""Lock files count by names, versions and hashes, wherever their files lie."""

import pytest

from raycrew.venv_manager import EnvironmentSpec, identify
from raycrew.venv_manager._spec.local.fingerprints import without_places
from raycrew.venv_manager.testing import write_project

pytestmark = pytest.mark.smoke
ENVIRON = {"PIP_CONFIG_FILE": "/dev/null", "HOME": "/nonexistent"}

UV_LOCK = """\
version = 1
revision = {revision}
requires-python = ">=3.11"

[[package]]
name = "demo"
version = "{version}"
source = {{ registry = "{index}" }}
dependencies = [
    {{ name = "lib", marker = "sys_platform == 'linux'" }},
]
sdist = {{ url = "{index}/demo-1.tar.gz", hash = "sha256:{digest}", size = {size}, upload-time = "{time}" }}
wheels = [
    {{ url = "{index}/demo-1-py3-none-any.whl", hash = "sha256:b", size = {size} }},
]

[[package]]
name = "lib"
version = "0"
source = {{ directory = "{folder}" }}

[[package]]
name = "own"
version = "0"
source = {{ git = "{index}?rev=main#{commit}" }}

[package.metadata]
requires-dist = [{{ name = "lib", directory = "{folder}" }}]
"""
PYLOCK = """\
lock-version = "1.0"
created-by = "uv"

[[packages]]
name = "demo"
version = "{version}"
index = "{index}"
wheels = [
    {{ upload-time = {time}, url = "{index}/demo-1-py3-none-any.whl", size = {size}, h = "{digest}" }},
]

[[packages]]
name = "lib"
directory = {{ path = "{folder}", editable = true }}

[[packages]]
name = "own"
vcs = {{ type = "git", url = "{index}/r", commit-id = "{commit}" }}
"""
HERE = {
    "version": "1", "index": "https://a/simple", "digest": "a", "folder": "../lib", "commit": "c0ffee",
    "revision": 3, "size": 10, "time": "2026-01-01T00:00:00Z",
}  # fmt: skip
ELSEWHERE = {
    "index": "/wheels", "folder": "/other/place", "revision": 5, "size": 11, "time": "2026-01-02T00:00:00.5Z",
}  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("lock", [UV_LOCK, PYLOCK], ids=["uv.lock", "pylock.toml"])
def test_places_and_moments_do_not_count_but_all_else_does(lock):
    here = without_places(lock.format(**HERE))
    for name, value in ELSEWHERE.items():
        assert without_places(lock.format(**HERE | {name: value})) == here, name
    for name, value in {"version": "2", "digest": "z", "commit": "deed"}.items():
        assert without_places(lock.format(**HERE | {name: value})) != here, name
    for left in ("https", "../lib", "2026", "/simple"):
        assert left not in here
    assert "demo-1-py3-none-any.whl" in here
    assert "sys_platform == 'linux'" in here or lock is PYLOCK


@pytest.mark.hostile
def test_a_project_locked_from_another_index_is_the_same_request(tmp_path):
    project = write_project(tmp_path / "p", dependencies=["demo"])
    spec = EnvironmentSpec.project(project, locked=True, carry=False)
    found = []
    for facts in (HERE, HERE | ELSEWHERE, HERE | {"digest": "z"}):
        (project / "uv.lock").write_text(UV_LOCK.format(**facts))
        found.append(identify(spec, ENVIRON)["files"]["lock"])
    assert found[0] == found[1] != found[2]


def test_what_a_project_file_tells_uv_counts_and_nothing_else(tmp_path):
    """Comments, other tools' tables and where a local source lies are not what an environment is made of."""
    more = '[tool.uv.sources]\nlib = { path = "../lib" }\n[tool.other]\nlines = 1\n'
    project = write_project(tmp_path / "p", dependencies=["lib"], more=more)
    for name in ("lib", "moved"):
        write_project(tmp_path / name, name="lib")
    spec, file = EnvironmentSpec.project(project), project / "pyproject.toml"

    def counted():
        return identify(spec, ENVIRON)["files"]["project"]

    before, text = counted(), file.read_text()
    file.write_text("# a comment\n" + text.replace("lines = 1", "lines = 2").replace("../lib", "../moved"))
    assert counted() == before
    for old, new in (
        ('["lib"]', '["lib", "demo"]'),
        ("{ path", "{ editable = true, path"),
        (">=3.11", ">=3.10"),
    ):
        file.write_text(text.replace(old, new))
        assert counted() != before, new


def test_of_a_script_its_metadata_counts(tmp_path):
    script = tmp_path / "job.py"
    found = []
    for dependency, body in (("demo", "1"), ("demo", "2"), ("leaf", "2")):
        script.write_text(f'# /// script\n# dependencies = ["{dependency}"]\n# ///\nprint({body})\n')
        found.append(identify(EnvironmentSpec.script(script), ENVIRON))
    assert found[0] == found[1] != found[2]
