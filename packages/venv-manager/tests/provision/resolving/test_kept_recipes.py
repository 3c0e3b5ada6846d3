"""A recipe is kept for all who ask for the same; what is an asker's own is not."""

import sys

import pytest
from builds import SPEC

from raycrew.venv_manager import EnvironmentSpec, Store, create_local_venv_on_each_node
from raycrew.venv_manager.provision import prepare
from raycrew.venv_manager.testing import ThreadNodes

pytestmark = pytest.mark.hostile


def test_nodes_build_with_the_interpreter_of_who_asks_now(fake_store, fake_uv, tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", dict(fake_store.environ))
    keys = set()
    for name in ("one", "other"):
        python = tmp_path / name / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        spec = SPEC.replace(python=str(python))
        keys.add(prepare(spec, fake_store).key)
        create_local_venv_on_each_node(spec, "x", ThreadNodes(["a"]), store=fake_store)
        assert str(python) in fake_uv.calls("venv")[-1]
        (environment,) = fake_store.environments()
        fake_store.locks(environment.key).release()
        fake_store.remove_folder(environment.path)
        python.unlink()
    assert len(keys) == 1


def test_nodes_are_asked_for_the_credentials_that_who_asks_now_has(fake_store):
    environ = {k: v for k, v in fake_store.environ.items() if not k.startswith(("UV_INDEX", "UV_DEFAULT"))}

    def prepared(place):
        return prepare(SPEC, Store(fake_store.root, environ=environ | {"UV_DEFAULT_INDEX": place}))

    first = prepared("https://corp.example/simple")
    second = prepared("https://me:hidden@corp.example/simple")
    assert (first.key, first.credentials) == (second.key, {})
    (name,) = second.credentials
    assert f'"name" = "{name}"' in second.settings
    assert "hidden" in second.secrets.values()
    assert b"hidden" not in second.to_bytes()
    assert prepared("https://corp.example/simple").credentials == {}


def test_nodes_hear_of_the_folder_that_is_asked_for_now(fake_store, tmp_path):
    for name in ("one", "other"):
        file = tmp_path / name / "requirements.txt"
        file.parent.mkdir()
        file.write_text("fake\n")
        found = prepare(EnvironmentSpec.requirements(file, carry=False), fake_store)
        assert found.spec["requirement_files"] == [str(file)]
        file.unlink()
