import json
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import raycrew.venv_manager
from raycrew.venv_manager import SpecError
from raycrew.venv_manager.__main__ import main
from raycrew.venv_manager._command_line.commands import size_in_bytes
from raycrew.venv_manager.testing import write_project


@pytest.fixture
def command(tmp_path, fake_uv, monkeypatch, capsys):
    """Run a command with the fake uv; gives (exit code, standard output, standard error)."""
    for name, value in fake_uv.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYCREW_VENV_DIR", str(tmp_path / "store"))
    monkeypatch.setattr("raycrew.venv_manager.provision._resolving.request.luggage", EmptyLuggage)

    def run(*arguments):
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def EmptyLuggage():
    from raycrew.venv_manager._store.building.carry import Luggage

    return Luggage()


def test_ensure_list_verify_gc(command, tmp_path):
    project = write_project(tmp_path / "project", dependencies=["fake"])
    code, out, err = command("ensure", project, "--name", "worker")
    assert code == 0
    assert "fake uv pip install" in err  # progress, in lines where there is no terminal
    python = out.strip()
    code, out, _ = command("ensure", project, "--json")
    (row,) = json.loads(out)
    assert row["python"] == python
    assert row["key"] in python
    code, out, _ = command("list")
    assert (code, row["key"][:8] in out) == (0, True)
    assert json.loads(command("list", "--json")[1])[0]["label"].startswith("project")
    assert command("verify", "worker")[0] == 0
    site = subprocess.check_output([python, "-c", "import fake; print(fake.__path__[0])"], text=True).strip()
    subprocess.run(["rm", f"{site}/part1.py"], check=True)
    code, out, _ = command("verify", row["key"][:6])
    assert (code, "removed: " in out, "part1.py" in out) == (1, True, True)
    assert not json.loads(command("verify", "--json")[1])[0]["ok"]
    code, out, _ = command("gc", "--max-size", "0")
    assert (code, "in use" in out) == (0, True)
    assert json.loads(command("gc", "--json", "--dry-run")[1]) == {"removals": [], "freed_bytes": 0}


def test_requirements_without_a_file(command, tmp_path):
    code, out, _ = command("ensure", "--with", "fake", "--json")
    (row,) = json.loads(out)
    assert code == 0 and command("ensure", "--with", "fake")[1].strip() == row["python"]
    project = write_project(tmp_path / "project", dependencies=["fake"])
    both = json.loads(command("ensure", project, "--with", "more", "--json")[1])[0]["key"]
    alone = json.loads(command("ensure", project, "--json")[1])[0]["key"]
    assert len({row["key"], both, alone}) == 3
    code, out, err = command("ensure")
    assert (code, out) == (2, "") and "name a spec, or requirements with --with" in err


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (
            ["explain", "one"],
            "UsageError",
            "raycrew env explain: the following arguments are required: other",
        ),
        (["ensure", "no/such/folder"], "SpecError", "no/such/folder is not an interpreter"),
        (["gc", "--max-size", "infG"], "SpecError", "no size"),
    ],
)
def test_errors_are_json_where_answers_are(words, kind, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYCREW_VENV_DIR", str(tmp_path / "store"))
    try:
        code = main([*words, "--json"], "raycrew env")
    except SystemExit as end:
        code = end.code
    told = capsys.readouterr()
    error = json.loads(told.out)["error"]
    assert (code, told.err, error["type"]) == (2, "", kind) and said in error["message"]


def test_the_command_has_two_names_and_a_version(capsys):
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert project["scripts"]["raycrew-env"] == project["entry-points"]["raycrew.commands"]["env"]
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == raycrew.venv_manager.__version__ == project["version"]


@pytest.mark.hostile
def test_what_is_not_installed_has_no_version_and_all_commands(command, monkeypatch, capsys):
    def lacks(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("raycrew.venv_manager._command_line.parsing.version", lacks)
    assert command("list")[0] == 0
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 2 and "raycrew-venv-manager" in capsys.readouterr().err


def test_explain(command, tmp_path):
    one = write_project(tmp_path / "one", dependencies=["fake"])
    other = write_project(tmp_path / "other", dependencies=["fake", "more"])
    code, out, _ = command("explain", one, other)
    assert (code, "files.project" in out) == (1, True)
    assert command("explain", one, one) == (0, "the same environment\n", "")
    keys = [json.loads(command("ensure", p, "--json")[1])[0]["key"] for p in (one, other)]
    code, out, _ = command("explain", *keys, "--json")
    assert (code, [line.split(":")[0] for line in json.loads(out)]) == (1, ["files.project"])
    one.rename(tmp_path / "moved")
    notes = [row["note"] for row in json.loads(command("list", "--json")[1])]
    assert sum(f"no longer at {one}" in str(note) for note in notes) == 1


def test_prefetch_imports_what_registers(command, tmp_path, monkeypatch):
    from raycrew.venv_manager import ACTOR_ENVIRONMENT_REGISTRY

    (tmp_path / "registers.py").write_text(
        "from raycrew.venv_manager import EnvironmentSpec, register_actor_environment\n"
        "register_actor_environment('of_tests.Worker', EnvironmentSpec.requirements(['fake'], carry=False))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        code, out, _ = command("prefetch", "--import", "registers", "--json")
    finally:
        ACTOR_ENVIRONMENT_REGISTRY.unregister("of_tests.Worker")
    assert code == 0
    assert json.loads(out)["of_tests.Worker"].endswith("/venv/bin/python")


def test_failures_and_nonsense_have_codes_of_their_own(command, tmp_path, fake_uv):
    code, out, err = command("ensure", "uv run --upgrade")
    assert (code, out) == (2, "")
    assert "--upgrade" in err
    assert command("verify", "nothing")[0] == 2
    assert command("gc", "--max-size", "much")[0] == 2
    fake_uv.fail("pip compile", "error: No solution found")
    code, _, err = command("ensure", write_project(tmp_path / "p", dependencies=["fake"]))
    assert (code, "No solution found" in err) == (1, True)


def test_doctor_with_and_without_uv(tmp_path, environ):
    def doctor(**variables):
        done = subprocess.run(
            [sys.executable, "-m", "raycrew.venv_manager", "doctor", "--json", "--store", tmp_path / "store"],
            env=environ | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, {row["what"]: row for row in json.loads(done.stdout)}

    code, rows = doctor(UV_INDEX="https://me:secret@host/simple", UV_LINK_MODE="copy")
    assert code == 0
    assert "full size" in rows["link mode"]["found"]
    assert "faster builds" in rows["bytecode"]["found"]
    assert "files are linked" in rows["uv's cache"]["found"]
    assert rows["uv"]["ok"]
    assert rows["index 1"]["found"].startswith("https://host/simple: ")
    assert "secret" not in str(rows)
    old = tmp_path / "uv"
    old.write_text("#!/bin/sh\necho uv 0.4.1\n")
    old.chmod(0o755)
    code, rows = doctor(RAYCREW_UV=str(old))
    assert (code, rows["uv"]["ok"]) == (1, False)
    assert "older than 0.12" in rows["uv"]["found"]
    assert doctor(RAYCREW_UV="/no/such/uv")[0] == 1


def test_sizes():
    assert [size_in_bytes(text) for text in ("5", "2K", "1.5m", "3GB", "1T")] == [
        5,
        2000,
        1_500_000,
        3 * 10**9,
        10**12,
    ]
    with pytest.raises(SpecError):
        size_in_bytes("")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prefetch", "--import", "no_such_module"], "`import no_such_module` fails"),
        (["prefetch", "--max-builds", "0"], "--max-builds is 0"),
        (["gc", "--older-than", "-1"], "no number of days"),
        (["gc", "--max-size=-5"], "no size"),
        (["gc", "--max-size", "infG"], "no size"),
        (["gc", "--keep", "misspelt"], "'misspelt' names 0 environments"),
        (["ensure", "here", "--name", "../up"], "not a name for an environment"),
        (["ensure", "here", "--name", ""], "not a name for an environment"),
        (["ensure", "--with", ""], "a requirement is empty"),
        (["ensure", "here", "there", "--name", "both"], "cannot all be named"),
        (["list", "--store", __file__], "is no folder"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_done(command, words, said):
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert said in err


def test_verify_survives_an_environment_without_its_inventory(command, tmp_path):
    python = Path(command("ensure", write_project(tmp_path / "p", dependencies=["fake"]))[1].strip())
    (python.parents[2] / "inventory.json").unlink()
    code, out, _ = command("verify")
    assert (code, "cannot be compared" in out) == (1, True)


def test_doctor_names_a_store_that_cannot_be_made(command, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, _ = command("doctor", "--json", "--store", tmp_path / "file" / "store")
    (found,) = [row["found"] for row in json.loads(out) if row["what"] == "store"]
    assert (code, found) == (1, f"{tmp_path}/file/store cannot be made: {tmp_path}/file is no folder")
