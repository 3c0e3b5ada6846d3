"""Secret variables that a spec declares reach a build, and no key, file or screen."""

import json
import traceback

import pytest
from local_sources import BACKEND, value, write_package

from raycrew.venv_manager import CredentialsError, EnvironmentSpec, SpecError, Store, ensure, identify, parse
from raycrew.venv_manager.__main__ import main
from raycrew.venv_manager._spec import is_credential
from raycrew.venv_manager._store.building import Recipe
from raycrew.venv_manager.provision import prepare

pytestmark = pytest.mark.hostile
READS = """
    import os
    return f"VALUE = {len(os.environ['HF_TOKEN'] + os.environ['MIRROR'])}\\n"
"""


def spec_of(folder, token="hush-hush"):
    backend = BACKEND[: BACKEND.index("    return pathlib.Path(")] + READS
    write_package(folder, 0, backend=backend)
    told = {"HF_TOKEN": token, "MIRROR": "https://me:whispered@h/x", "LEVEL": "3"}
    return EnvironmentSpec.requirements([f"{folder.name} @ {folder.as_uri()}"], environment=told, carry=False)


def test_a_secret_reaches_a_build_and_no_file(store, tmp_path, capsys):
    spec = spec_of(tmp_path / "inner")
    built = ensure(spec, store=store)
    assert value(built, "inner") == len("hush-hush" + "https://me:whispered@h/x")
    main(["list", "--json", "--store", str(store.root)])
    main(["list", "--store", str(store.root)])
    shown = [str(spec), repr(spec), json.dumps(spec.to_dict()), capsys.readouterr().out]
    shown.append(json.dumps(identify(spec, store.environ)))
    shown += [repr(Recipe.from_bytes(file.read_bytes())) for file in store.root.glob("recipes/*")]
    shown += [p.read_text(errors="replace") for p in store.root.rglob("*") if p.is_file()]
    for text in shown:
        assert "hush-hush" not in text
        assert "whispered" not in text
    assert ["LEVEL", "3"] in built.stamp["spec"]["environment"]


def test_another_secret_is_the_same_environment(store, tmp_path):
    folder = tmp_path / "inner"
    one, other = (identify(spec_of(folder, token), store.environ) for token in ("a", "b"))
    assert one == other


def test_a_machine_without_the_secret_is_refused_by_its_name(store, tmp_path):
    recipe = Recipe.from_bytes(prepare(spec_of(tmp_path / "inner"), store).to_bytes())
    there = Store(tmp_path / "there", environ=store.environ)
    with pytest.raises(CredentialsError, match="built with HF_TOKEN, and this machine does not have it"):
        there.install(recipe.key, lambda: recipe)
    has = Store(tmp_path / "there", environ={**store.environ, "HF_TOKEN": "own"})
    assert has.install(recipe.key, lambda: recipe).stamp["packages"] == {"inner": "0"}


PLACE = "https://bob:hunter2@idx/simple"
TWICE = f'[a."{PLACE}"]\n[a."{PLACE}"]\n'
FAULTY = {
    "pip.conf": (f"index-url = {PLACE}\n", "MissingSectionHeaderError at line 1;"),
    "broken/pip.conf": (f"[global]\n= {PLACE}\n", "ParsingError at line 2;"),
    "uv/uv.toml": (TWICE, "TOMLDecodeError at line 2"),
    "pyproject.toml": (TWICE, "TOMLDecodeError at line 2"),
    "pylock.toml": (TWICE, "TOMLDecodeError at line 2"),
    "job.py": (f"# /// script\n# a = '{PLACE}\n# ///\n", "TOMLDecodeError at "),
    "all.txt": (f"--index-url {PLACE} \udcff\n", "UnicodeDecodeError at byte 43"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_file_that_cannot_be_read_is_not_quoted(tmp_path, name):
    text, fault = FAULTY[name]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, errors="surrogateescape")
    given = {"pyproject.toml": tmp_path, "pylock.toml": file, "job.py": file, "all.txt": file}.get(name)
    environ = {"PIP_CONFIG_FILE": str(file) if name.endswith(".conf") else "/dev/null"}
    with pytest.raises(SpecError, match=f"read: {fault}") as caught:
        spec = parse(given) if given else EnvironmentSpec.requirements(["demo"])
        identify(spec.replace(carry=False), environ | {"XDG_CONFIG_HOME": str(tmp_path)})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


SECRET = [
    "HF_TOKEN", "GITHUBTOKEN", "X_TOKENS", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "WANDB_API_KEY",
    "APIKEY", "TOKEN", "TOKENS", "REFRESH_TOKENS", "ADMIN_TOKENS", "MAX_TOKEN",
    "NPM_TOKEN", "DB_PASSWORD", "db_password", "GH_PAT", "UV_INDEX_A_PASSWORD",
]  # fmt: skip
OPEN = [
    "TOKENIZERS_PARALLELISM", "UV_KEYRING_PROVIDER", "CACHE_KEY", "CFLAGS", "PATH", "MAX_JOBS", "COMPAT",
    "UV_CACHE_DIR", "MAX_TOKENS", "max_new_tokens", "VLLM_MAX_NUM_BATCHED_TOKENS", "NUM_TOKENS", "N_TOKENS",
    "PAD_TOKEN", "TOKENIZER_EOS_TOKEN", "MASK_TOKEN", "SPECIAL_TOKENS", "SETUPTOOLS_SCM_PRETEND_VERSION",
]  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "secret"), [(n, n in SECRET) for n in (*SECRET, *OPEN)])
def test_a_name_says_that_a_variable_is_secret(name, secret):
    assert is_credential(name) is secret
