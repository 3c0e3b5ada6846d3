"""What a spec says of a project, as flags of uv, and what it may not say."""

import sys

import pytest

from raycrew.venv_manager import ConflictingExtrasError, EnvironmentSpec, ResolutionError
from raycrew.venv_manager.provision._resolving import flags
from raycrew.venv_manager.testing import write_project


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, ""),
        ({"extras": ["*"], "groups": ["*"]}, "--all-extras --all-groups"),
        ({"extras": ["a", "b"], "no_extras": ["c"]}, "--extra a --extra b --no-extra c"),
        ({"groups": ["a", "b"], "no_groups": ["c"]}, "--group a --group b --no-group c"),
        ({"groups": ["a"], "only_groups": True}, "--only-group a"),
        ({"default_groups": False, "package": "member"}, "--no-default-groups --package member"),
    ],
)
def test_extras_groups_and_member_are_flags(tmp_path, options, told):
    spec = EnvironmentSpec.project(write_project(tmp_path), **options)
    assert " ".join(flags.export_flags(spec)) == told


def test_the_interpreter_and_the_lock(tmp_path):
    spec = EnvironmentSpec.project(write_project(tmp_path))
    assert flags.python_flags(spec) == ("--python", sys.executable)
    assert flags.python_flags(spec.replace(python="3.12")) == ("--python", "3.12")
    assert flags.lock_flag(spec.replace(frozen=True)) == "--frozen"
    assert flags.lock_flag(spec.replace(locked=True)) == "--locked"


def test_names_are_chosen_as_the_project_writes_them(tmp_path):
    defined = {"Fast_Path": [], "dev": [], "docs": []}

    def chosen(*asked, refused=(), default=()):
        return flags.chosen_names("group", asked, refused, defined, default, tmp_path)

    assert chosen("fast.path") == ["Fast_Path"] and chosen("*") == list(defined)
    assert chosen("docs", default=["dev", "docs"]) == ["docs", "dev"]
    assert (
        chosen("*", refused=["FAST-path"]) == ["dev", "docs"]
        and chosen(default=["dev"], refused=["Dev"]) == []
    )
    with pytest.raises(ResolutionError, match="defines no group nope; it defines fast-path, dev, docs"):
        chosen("dev", "nope")


def test_what_a_project_declares_as_conflicting_is_refused_together(tmp_path):
    project = write_project(tmp_path, name="Some_Project")
    file = project / "pyproject.toml"
    declared = [
        [{"extra": "cpu"}, {"extra": "cu12", "package": "some-project"}],
        [{"extra": "cpu", "package": "other"}, {"extra": "docs", "package": "other"}],
        [{"group": "Old"}, {"extra": "cpu"}],
    ]

    def refuse(**chosen):
        flags.refuse_conflicts(declared, chosen, file)

    refuse(extra=["cpu", "docs"], group=["new"])
    refuse(extra=["cu12"], group=["old"])
    refuse(extra=[], group=["cpu", "cu12"])
    with pytest.raises(ConflictingExtrasError, match="extra cpu and extra cu12 as conflicting"):
        refuse(extra=["cpu", "CU12"], group=[])
    with pytest.raises(ConflictingExtrasError, match="group Old and extra cpu as conflicting"):
        refuse(extra=["cpu"], group=["old"])
