"""Versions that no lock file decides are chosen once, and again when that is asked for."""

import dataclasses
import json
import os
from functools import partial

import pytest

from raycrew.venv_manager import EnvironmentSpec, Store, collect, ensure
from raycrew.venv_manager.__main__ import main
from raycrew.venv_manager._spec import locked_versions
from raycrew.venv_manager.provision import prepare
from raycrew.venv_manager.provision._nodes.on_nodes import install_recipe
from raycrew.venv_manager.testing import LocalIndex

pytestmark = pytest.mark.hostile

SPEC = EnvironmentSpec.requirements(["moving"], carry=False)


@pytest.fixture
def moving(tmp_path, uv_cache):
    """An index with `moving` 1.0, and a store that knows only that."""
    index = LocalIndex(tmp_path / "moving")
    index.add("moving", "1.0")
    return index, Store(tmp_path / "store", environ=index.environ(tmp_path / "cache"))


def test_versions_stay_until_an_upgrade_also_without_a_network(moving):
    index, store = moving
    first = ensure(SPEC, store=store)
    index.add("moving", "2.0")
    assert ensure(SPEC, store=store) == first
    store.remove_folder(first.path)
    away = Store(store.root, environ={**store.environ, "UV_OFFLINE": "1"})
    assert ensure(SPEC, store=away).stamp["packages"] == {"moving": "1.0"}
    second = ensure(SPEC, store=store, upgrade=True)
    assert second.stamp["packages"] == {"moving": "2.0"}
    assert second.key != first.key
    assert ensure(SPEC, store=store) == second
    assert {e.key for e in store.environments()} == {first.key, second.key}


def test_what_an_upgrade_superseded_is_shown_and_offered_to_gc(moving, monkeypatch, capsys):
    index, store = moving
    first = ensure(SPEC, store=store)
    os.utime(store.root / "locks" / f"{first.key}.used", (1e9, 1e9))
    index.add("moving", "2.0")
    second = ensure(SPEC, store=store, upgrade=True)
    for key in (first.key, second.key):
        store.locks(key).release()
    assert main(["list", "--json", "--store", str(store.root)]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[first.key]["note"] == f"superseded by {second.key[:8]}"
    assert rows[first.key]["last_used"] == "2001-09-09T01:46:40+00:00"
    assert rows[second.key]["note"] is None
    (offer,) = collect(store)
    assert (offer.name, offer.removed) == (first.key, False)
    assert f"superseded by {second.key[:8]}" in offer.reason
    (gone,) = collect(store, older_than_days=7)
    assert (gone.name, gone.removed) == (first.key, True)
    assert ensure(SPEC, store=store) == second


def test_versions_that_nobody_asks_for_go_by_age(moving):
    _, store = moving
    ensure(SPEC, store=store)
    (choice,) = (store.root / "choices").iterdir()
    os.utime(choice, (1e9, 1e9))
    ensure(SPEC, store=store)  # asked for: it is young again
    assert not [row for row in collect(store, older_than_days=7) if row.name == choice.stem]
    os.utime(choice, (1e9, 1e9))
    assert [row.name for row in collect(store, older_than_days=7, dry_run=True)] == [choice.stem]
    assert choice.exists()
    collect(store, older_than_days=7)
    assert not choice.exists()


def test_an_upgrade_that_changes_nothing_builds_nothing(moving):
    _, store = moving
    first = ensure(SPEC, store=store)
    assert ensure(SPEC, store=store, upgrade=True) == first


def test_a_node_whose_environment_has_another_drivers_versions_gets_this_ones(moving, tmp_path, monkeypatch):
    index, store = moving
    monkeypatch.setattr("os.environ", dict(store.environ))
    node = partial(Store, tmp_path / "node")
    install_recipe(prepare(SPEC, store).to_bytes(), node)
    index.add("moving", "2.0")
    other = prepare(SPEC, Store(tmp_path / "other", environ=store.environ))
    answer = install_recipe(other.to_bytes(), node)
    assert node().look(other.key).stamp["packages"] == {"moving": "2.0"}
    assert answer["seconds"]
    assert install_recipe(other.to_bytes(), node)["seconds"] == {}


def test_the_command_upgrades(moving, monkeypatch, capsys, tmp_path):
    index, store = moving
    monkeypatch.setattr("os.environ", dict(store.environ))
    (tmp_path / "all.txt").write_text("moving\n")
    words = ["ensure", str(tmp_path / "all.txt"), "--store", str(store.root)]
    monkeypatch.setattr(
        "raycrew.venv_manager._command_line.commands.ensure",
        lambda spec, **options: ensure(dataclasses.replace(spec, carry=False), **options),
    )
    assert main(words) == 0
    index.add("moving", "2.0")
    assert main([*words, "--upgrade"]) == 0
    assert [e.stamp["packages"] for e in store.environments()] == [{"moving": "2.0"}, {"moving": "1.0"}]


@pytest.mark.smoke
def test_a_lock_comes_to_names_versions_and_hashes_wherever_its_files_lie():
    def lock(url, digest="a", version="1"):
        return (
            f'[[packages]]\nname = "Demo"\nversion = "{version}"\n'
            f'wheels = [{{ url = "{url}", hashes = {{ sha256 = "{digest}" }} }}]\n'
            '[[packages]]\nname = "own"\nversion = "0"\n'
            'wheels = [{ path = "x", hashes = { sha256 = "o" } }]\n'
        )

    assert locked_versions(lock("https://h/x.whl")) == [("demo", "1", ("a",)), ("own", "0", ())]
    assert locked_versions(lock("https://h/x.whl")) == locked_versions(lock("file:///m/x.whl"))
    assert locked_versions(lock("u")) != locked_versions(lock("u", digest="b"))
    assert locked_versions(lock("u")) != locked_versions(lock("u", version="2"))
    assert locked_versions('[[packages]]\nname = "g"\nvcs = { commit-id = "c" }\n') == [("g", None, ("c",))]
