import json
import os
import pickle
import re
import subprocess

import pytest

from raycrew.venv_manager import EnvironmentSpec, SpecError, parse
from raycrew.venv_manager._uv.process import find_uv
from raycrew.venv_manager.testing import write_project

pytestmark = pytest.mark.smoke


@pytest.fixture
def project(tmp_path):
    return write_project(tmp_path / "project", dependencies=["demo"], extras={"vllm": ["leaf"]})


def test_every_flag_of_uv_run_that_decides_what_is_installed(project, tmp_path):
    (tmp_path / "more.txt").write_text("leaf\n")
    spec = parse(
        f"uv run --locked --extra vllm --extra=dev --group test --no-group docs --package member "
        f"--directory {project} -p 3.12 --with 'demo<2' --with-requirements ../more.txt "
        "--find-links /wheels --index https://i/simple python"
    )
    assert spec == EnvironmentSpec(
        "project", str(project), packages=("demo<2",), requirement_files=(str(tmp_path / "more.txt"),),
        extras=("dev", "vllm"), groups=("test",), no_groups=("docs",), package="member", locked=True,
        python="3.12", find_links=("/wheels",), indexes=("https://i/simple",),
    )  # fmt: skip


def test_flags_before_run_short_ones_lists_and_paths(project, tmp_path):
    assert parse(f"uv -qv --directory {project} run -vv --extra a,b") == EnvironmentSpec.project(
        project, extras=["a", "b"]
    )
    words = "--with 'one[a,b]>1,<2,two' -w ./lib --with-editable more --with-editable ../other"
    assert set(parse(f"uv run --directory {project} {words}").packages) == {
        "one[a,b]>1,<2", "two", str(project / "lib"), str(project / "more"), str(tmp_path / "other"),
    }  # fmt: skip
    spec = parse(f"uv run --directory {project} --link-mode copy --cache-dir cache --compile-bytecode -n")
    assert dict(spec.environment) == {
        "UV_LINK_MODE": "copy", "UV_CACHE_DIR": str(project / "cache"), "UV_COMPILE_BYTECODE": "1",
        "UV_NO_CACHE": "1",
    }  # fmt: skip


@pytest.mark.hostile
def test_paths_with_extras_and_the_path_of_an_interpreter_start_at_the_folder(project):
    (project / "venv").mkdir()
    words = "--with './ed[x,y]' --with-editable '-e ./more[z]' --with 'own @ ./own' -p venv/bin/python"
    spec = parse(f"uv run --directory {project} {words}")
    assert spec.python == str(project / "venv" / "bin" / "python")
    assert set(spec.packages) == {
        f"{project}/ed[x,y]", f"{project}/more[z]", f"own @ {(project / 'own').as_uri()}",
    }  # fmt: skip
    assert parse(f"uv run --directory {project} -p 3.12").python == "3.12"


def test_each_flag_that_uv_has_is_understood_with_its_value_or_refused_by_name(project):
    environ = {**os.environ, "NO_COLOR": "1"}
    said = subprocess.check_output([find_uv(), "help", "run"], text=True, env=environ, stderr=subprocess.PIPE)
    flags = re.findall(r"(?m)^ {2,6}(?:(-\w), )?(--[a-z][a-z-]+)(\.\.\.| <\S+)?", said)
    understood = {"--script", "--no-project"}  # which have tests of their own
    for short, long, value in flags:
        for flag in filter(None, (short, long) if long not in understood else ()):
            words = f"{flag} {project}" if "<" in value else flag
            try:
                spec = parse(f"uv run {words} --directory {project} python")
                assert spec.path == str(project), f"{flag} took what follows for its value, or left its own"
                understood.add(long)
            except SpecError as error:
                assert str(error).startswith(f"{flag} "), flag
                assert "needs a value" not in str(error), flag
    assert {"--extra", "--with", "--link-mode", "--compile-bytecode", "--offline", "--color"} <= understood
    assert not {"--upgrade", "--env-file", "--module", "--no-sync", "--config-file"} & understood
    assert len(flags) > 60


def test_groups_alone_and_flags_that_decide_nothing(project):
    assert parse(f"uv run --directory {project} --only-group test") == EnvironmentSpec.project(
        project, groups=["test"], only_groups=True
    )
    words = "--color never --no-editable-package demo --no-progress"
    assert parse(f"uv run --directory {project} {words}") == EnvironmentSpec.project(project)


@pytest.mark.parametrize("words", ["-p 3", "-p3", "-p=3", "--python 3", "--python=3"])
def test_a_value_stands_behind_its_flag_or_follows_it(project, words):
    assert parse(f"uv run --directory {project} {words}").python == "3"


def test_order_and_repetition_of_flags_do_not_matter(project):
    one = parse(f"uv run --extra a --extra b --directory {project} --locked")
    other = parse(f"uv run --locked --directory={project} --extra=b --extra a --extra b python3")
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    "flag",
    ["--reinstall", "--upgrade", "-U", "--no-such-thing", "--active", "--env-file x", "--no-config", "-m x"],
)
def test_an_unknown_flag_is_refused_by_name(project, flag):
    with pytest.raises(SpecError, match=flag.split()[0]):
        parse(f"uv run {flag} --directory {project}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uv sync", "uv sync"),
        ("uv run --extra", "--extra needs a value"),
        ("uv run --locked --frozen --directory {project}", "exclude each other"),
        ("uv run --directory {project} pytest", "'pytest'"),
        ("uv run --directory {project}/nowhere", "does not exist"),
        ("", "empty"),
        ("/no/such/thing", "not an interpreter"),
        ("uv run --no-project", "empty"),
        ("uv run --no-project --extra x --with demo", "belong to a project"),
    ],
)
def test_what_makes_no_sense_is_refused(project, text, message):
    with pytest.raises(SpecError, match=message):
        parse(text.format(project=project))


def test_a_project_is_found_above_the_folder(project, monkeypatch):
    below = project / "src" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert parse("uv run") == EnvironmentSpec.project(project)
    assert (
        parse(project)
        == parse(str(project))
        == parse(project / "pyproject.toml")
        == EnvironmentSpec.project(project)
    )


def test_no_project_at_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"no pyproject\.toml"):
        parse("uv run")


def test_other_kinds(tmp_path):
    listed = tmp_path / "requirements.txt"
    listed.write_text("demo\n")
    assert parse(listed) == EnvironmentSpec.requirements(listed)
    assert parse("uv run --no-project --with demo --with leaf") == EnvironmentSpec.requirements(
        ["leaf", "demo"]
    )
    script = tmp_path / "job.py"
    script.write_text("# /// script\n# dependencies = ['demo']\n# ///\nprint(1)\n")
    assert parse(script) == parse(f"uv run {script}") == parse(f"uv run --script {script}")
    assert parse(script).kind == "script"
    lock = tmp_path / "pylock.train.toml"
    lock.write_text('lock-version = "1.0"\n')
    assert parse(lock).kind == "pylock"
    (tmp_path / "plain.py").write_text("print(1)\n")
    with pytest.raises(SpecError, match="no inline metadata"):
        parse(tmp_path / "plain.py")


def test_python_runs_the_named_script_only_with_metadata(project):
    (project / "plain.py").write_text("print(1)\n")
    assert parse(f"uv run --directory {project} plain.py").kind == "project"


def test_a_spec_survives_json_and_pickle_and_can_be_printed(project):
    spec = EnvironmentSpec.project(project, extras=["vllm"], environment={"B": "2", "A": "1"}, python="3.12")
    assert EnvironmentSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert str(spec).startswith(f"project {project} extras=vllm python=3.12")
    assert spec.replace(extras=("other",)) != spec


def test_nothing_is_installed_into_an_interpreter(tmp_path):
    with pytest.raises(SpecError, match="nothing is installed"):
        EnvironmentSpec("interpreter", "/usr/bin/python3", packages=("demo",))


@pytest.mark.parametrize("text", ["uv", "/opt/uv"])
def test_a_path_that_is_called_uv_is_a_path(text, tmp_path):
    with pytest.raises(SpecError, match="uv"):
        parse(text, tmp_path)
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    found = parse(str(tmp_path / "uv"))
    assert found == EnvironmentSpec.interpreter(tmp_path / "uv")


def test_a_folder_that_is_named_wholly_is_that_folder(tmp_path):
    (tmp_path / "x").mkdir()
    for written in (f"{tmp_path}/x", "./x", "x", "../" + tmp_path.name + "/x"):
        spec = parse(f"uv run --no-project --with-editable {written}", tmp_path)
        assert spec.packages == (str(tmp_path / "x"),)


def test_what_is_no_environment_is_told_so(tmp_path):
    (tmp_path / "notes").write_text("not a program")
    for path in (tmp_path / "notes", tmp_path / "absent"):
        with pytest.raises(SpecError, match=f"{path} is not an interpreter, a folder with"):
            parse(path)


@pytest.mark.parametrize("kind", ["interpreter", "pylock", "requirements", "script"])
@pytest.mark.parametrize("option", [{"extras": ["a"]}, {"groups": ["a"]}, {"package": "a"}])
def test_only_projects_have_extras_groups_and_packages(kind, option):
    with pytest.raises(SpecError, match=f"belong to a project, not to a {kind}"):
        EnvironmentSpec(kind, "/somewhere", **option)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("requirements", {"packages": ["demo"], "locked": True}, "no lock file of a requirements"),
        ("requirements", {"packages": ["demo"], "frozen": True}, "no lock file of a requirements"),
        ("interpreter", {"locked": True}, "no lock file of a interpreter"),
        ("interpreter", {"frozen": True}, "no lock file of a interpreter"),
        ("interpreter", {"packages": ["demo"]}, r"existing interpreter \(/somewhere\)"),
        ("interpreter", {"requirement_files": ["/list.txt"]}, r"existing interpreter \(/somewhere\)"),
        ("project", {"locked": True, "frozen": True}, "exclude each other"),
        ("requirements", {}, "a list of requirements is empty"),
        ("requirements", {"packages": ("", "demo")}, "a requirement is empty"),
        ("requirements", {"packages": (" ",)}, "a requirement is empty"),
    ],
)
def test_what_contradicts_itself_is_refused_where_it_is_said(kind, options, said):
    with pytest.raises(SpecError, match=said):
        EnvironmentSpec(kind, "/somewhere", **options)


@pytest.mark.parametrize("option", ["locked", "frozen"])
@pytest.mark.parametrize("kind", ["project", "script", "pylock"])
def test_what_has_a_lock_may_be_held_to_it(kind, option):
    assert getattr(EnvironmentSpec(kind, "/somewhere", **{option: True}), option)
    for listed in ({"packages": ["demo"]}, {"requirement_files": ["/list.txt"]}):
        assert EnvironmentSpec("requirements", **listed).kind == "requirements"
