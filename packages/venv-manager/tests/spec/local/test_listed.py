"""Lines of requirements files: which name folders and files of this machine, and how."""

from pathlib import Path

import pytest

from raycrew.venv_manager._spec.local.listed import (
    absolute_requirement,
    local_requirement,
    named_requirement,
    required_name,
    requirement_files,
    requirement_lines,
)

pytestmark = [pytest.mark.smoke, pytest.mark.hostile]
BASE = Path("/base")
LOCAL = [
    ("./lib", "/base/lib", "/base/lib"),
    ("libs/lib", "/base/libs/lib", "/base/libs/lib"),
    (".", "/base", "/base"),
    ("../sib[x, y]", "/sib", "/sib[x, y]"),
    ("-e ./lib", "/base/lib", "/base/lib"),
    ("--editable=./lib[x]", "/base/lib", "/base/lib[x]"),
    ("-e file:///a%20b/lib", "/a b/lib", "file:///a%20b/lib"),
    ("lib @ ./lib", "/base/lib", "lib @ file:///base/lib"),
    (
        "lib[x]@file:///m/lib ; python_version > '3'",
        "/m/lib",
        'lib[x] @ file:///m/lib ; python_version > "3"',
    ),
    ("/abs/lib ; sys_platform == 'linux'", "/abs/lib", "/abs/lib ; sys_platform == 'linux'"),
    ("./lib --config-settings a=b/c", "/base/lib", "/base/lib --config-settings a=b/c"),
    ("lib-1-py3-none-any.whl", "/base/lib-1-py3-none-any.whl", "/base/lib-1-py3-none-any.whl"),
    ("wheels/lib-1.tar.gz[x]", "/base/wheels/lib-1.tar.gz", "/base/wheels/lib-1.tar.gz[x]"),
]
ELSEWHERE = [
    "demo", "demo[x,y]>=1,<2 ; python_version > '3'", "demo @ https://h/a/demo-1.whl", "git+https://h/r@v1",
    "demo @ git+ssh://git@h/r", "--index-url https://h/simple", "--find-links ./wheels", "-f wheels/more",
    "-r more/all.txt", "-c ./pins.txt", "--hash=sha256:a/b", "demo==1 --hash=sha256:a",
]  # fmt: skip


@pytest.mark.parametrize(("line", "path", "absolute"), LOCAL)
def test_a_folder_or_file_is_found_however_it_is_written(line, path, absolute):
    assert local_requirement(line, BASE) == Path(path)
    assert absolute_requirement(line, BASE) == absolute
    named = named_requirement(line, BASE, {Path(path): "own"})
    assert " @ own" in named
    assert path not in named
    assert local_requirement(absolute, Path("/other")) == Path(path)


@pytest.mark.parametrize("line", ELSEWHERE)
def test_what_comes_from_elsewhere_stays_as_it_is(line):
    assert local_requirement(line, BASE) is None
    assert absolute_requirement(line, BASE) == line
    assert named_requirement(line, BASE, {}) == line


def test_statements_without_comments_and_with_variables(tmp_path):
    file = tmp_path / "all.txt"
    file.write_text(
        "# first\ndemo \\\n  >=1  # why\n\nhttps://${USER_NAME}@h/x#egg=demo\n${unset} ${UNSET}\n"
    )
    assert requirement_lines(file, {"USER_NAME": "me", "unset": "no"}) == [
        "demo    >=1", "https://me@h/x#egg=demo", "${unset} ${UNSET}",
    ]  # fmt: skip


def test_included_files_in_turn_each_once_and_constraints_apart(tmp_path):
    (tmp_path / "with space").mkdir()
    (tmp_path / "all.txt").write_text('-r "with space/one.txt"\n-c pins.txt\n-r https://h/more.txt\n')
    (tmp_path / "with space" / "one.txt").write_text(
        f"--requirement=../all.txt\n-r {tmp_path.as_uri()}/two.txt\n"
    )
    (tmp_path / "two.txt").write_text("demo\n")
    (tmp_path / "pins.txt").write_text("demo<2\n")
    names = ["all.txt", "one.txt", "pins.txt", "two.txt"]
    assert [path.name for path in requirement_files(tmp_path / "all.txt", {})] == names
    without = requirement_files(tmp_path / "all.txt", {}, constraints=False)
    assert [path.name for path in without] == ["all.txt", "one.txt", "two.txt"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('-r "with space.txt"', "with space.txt"),
        ("-r 'more.txt'", "more.txt"),
        ("--requirement=it's.txt", "it's.txt"),
        ("-c pins.txt", "pins.txt"),
        ("-r aXa", "aXa"),
    ],
)
def test_an_included_file_is_found_as_it_is_quoted(tmp_path, line, name):
    (tmp_path / name).write_text("demo\n")
    (tmp_path / "all.txt").write_text(line + "\n")
    assert requirement_files(tmp_path / "all.txt", {}) == [tmp_path / "all.txt", tmp_path / name]
    without = requirement_files(tmp_path / "all.txt", {}, constraints=False)
    assert len(without) == (1 if line.startswith("-c") else 2)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Some_Thing[x]>=1 ; python_version > '3'  # why", "some-thing"),
        ("some.thing @ https://h/a.whl", "some-thing"),
        ("./some-thing", None),
        ("-r all.txt", None),
    ],
)
def test_what_a_line_asks_for_is_named_as_indexes_name_it(line, name):
    assert required_name(line) == name
