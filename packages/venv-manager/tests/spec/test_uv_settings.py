"""What settings of uv say of the builds of packages."""

import tomllib

import pytest

from raycrew.venv_manager import EnvironmentSpec
from raycrew.venv_manager._spec import extra_requirements, with_absolute_paths
from raycrew.venv_manager._spec.uv_settings import settings

pytestmark = pytest.mark.smoke


def test_what_builds_require_more_is_found_from_anywhere(tmp_path):
    told = {
        "sources": {"tool": {"path": "tools/tool"}},
        "extra-build-dependencies": {
            "inner": ["tool", "other==1", {"requirement": "tool", "match-runtime": False}]
        },
    }
    found = with_absolute_paths(told, tmp_path)
    tool = f"tool@ {(tmp_path / 'tools/tool').as_uri()}"
    listed = found["extra-build-dependencies"]["inner"]
    assert [one.replace("tool @", "tool@") for one in listed[:2]] == [tool, "other==1"]
    assert listed[2]["match-runtime"] is False and listed[2]["requirement"].replace(" @", "@") == tool
    assert extra_requirements(found, "Inner") == [listed[0], "other==1", listed[2]["requirement"]]
    assert extra_requirements(found, "outer") == []
    assert told["extra-build-dependencies"]["inner"][0] == "tool", "what was told stays as it was"


def test_a_wheelhouse_is_in_place_of_all_indexes():
    told = {"index": [{"url": "https://i/simple"}], "extra-index-url": ["https://j"], "resolution": "lowest"}
    spec = EnvironmentSpec.requirements(["demo"])
    places = {"mine": "https://me:secret@k/simple"}
    found = tomllib.loads(settings(told, spec, places))
    mine = {"name": "mine", "url": "https://k/simple", "explicit": True}
    assert found == told | {"index": [*told["index"], mine]}
    found = tomllib.loads(settings(told, spec.replace(wheelhouse="/wheels"), places))
    assert found == {"no-index": True, "resolution": "lowest"}


def test_what_the_build_of_another_package_requires_is_its_own():
    told = {"extra-build-dependencies": {name: [f"for-{name}"] for name in ("alpha", "my_own", "zeta")}}
    assert extra_requirements(told, "My.Own") == ["for-my_own"]
