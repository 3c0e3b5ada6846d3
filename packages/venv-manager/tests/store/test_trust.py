"""Nothing is handed out, run or built where others than trusted users could have planted it."""

import os
import pwd
import shutil
from types import SimpleNamespace

import pytest
from users import OTHER, as_user, give, open_folder

from raycrew.venv_manager import (
    EnvironmentSpec,
    SpecError,
    Store,
    UntrustedStoreError,
    collect,
    create_local_venv_on_each_node,
    ensure,
)
from raycrew.venv_manager.__main__ import main
from raycrew.venv_manager._store import trust
from raycrew.venv_manager._store.trust import Trust
from raycrew.venv_manager.testing import ThreadNodes

pytestmark = pytest.mark.hostile
__all__ = ["open_folder"]
SPEC = EnvironmentSpec.requirements(["fake"], carry=False)


@pytest.fixture
def store(open_folder, fake_uv):
    return Store(open_folder / "store", environ=dict(os.environ) | fake_uv.environ)


def planted_in(entry):
    """What an attacker puts in the place of an interpreter."""
    python = entry / "venv" / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\ntouch planted\n")
    python.chmod(0o755)


@pytest.mark.root
def test_a_store_of_another_user_is_refused_and_nothing_of_it_runs(store, open_folder, fake_uv):
    built = ensure(SPEC, store=store)
    planted_in(built.path)
    give(store.root, OTHER)
    calls = len(fake_uv.calls())
    for use in (
        lambda: ensure(SPEC, store=store),
        lambda: ensure(SPEC, store=store, force_rebuild=True),
        lambda: store.python(built.key),
        lambda: store.look(built.key),
        lambda: store.recipe(built.key),
        store.environments,
        lambda: collect(store, max_bytes=0),
    ):
        with pytest.raises(UntrustedStoreError, match=f"RAYCREW_VENV_TRUSTED_OWNERS={OTHER}"):
            use()
    assert len(fake_uv.calls()) == calls
    assert (store.root / built.key).exists()
    trusting = {**store.environ, "RAYCREW_VENV_TRUSTED_OWNERS": f"nobody, {OTHER}"}
    assert Store(store.root, environ=trusting).python(built.key) == built.python
    assert Store(store.root, environ=store.environ, trusted_owners=[str(OTHER)]).look(built.key) == built


@pytest.mark.root
@pytest.mark.parametrize(
    "part", ["", "{key}", "{key}/venv", "{key}/venv/bin", "{key}/stamp.json", "{key}/venv/bin/python",
             "{key}/venv/pyvenv.cfg", "{key}/venv/lib/python*/site-packages", "locks"]
)  # fmt: skip
def test_each_part_that_belongs_to_another_is_noticed(store, part):
    built = ensure(SPEC, store=store)
    (path,) = [store.root] if not part else store.root.glob(part.format(key=built.key))
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(UntrustedStoreError, match=f"{path} belongs to {OTHER}"):
        ensure(SPEC, store=store)


@pytest.mark.parametrize(
    "part", ["", "{key}", "{key}/venv/bin", "{key}/venv/lib", "locks", "{key}/stamp.json"]
)
@pytest.mark.parametrize(("mode", "who"), [(0o757, "everybody"), (0o777, "everybody"), (0o775, "the group")])
def test_each_part_that_others_may_write_is_noticed(store, part, mode, who):
    built = ensure(SPEC, store=store)
    path = store.root / part.format(key=built.key)
    group = os.getgid() + 4321 if os.geteuid() == 0 else os.getgid()
    if os.geteuid() == 0:
        os.chown(path, 0, group)
    elif who == "the group":
        pytest.skip("only root can give a folder to a group")
    path.chmod(mode)
    with pytest.raises(UntrustedStoreError, match=f"{who}.* may write {path}, .*chmod [go]-w"):
        ensure(SPEC, store=store)
    trusting = Store(store.root, environ=store.environ, trusted_owners=[f"@{group}"])
    if who == "the group":
        assert trusting.get(built.key) == built
    else:
        with pytest.raises(UntrustedStoreError):
            trusting.get(built.key)


def test_a_parent_that_everybody_may_write_is_refused_before_anything_is_built(open_folder, fake_uv):
    (open_folder / "shared").mkdir()
    (open_folder / "shared").chmod(0o777)
    environ = dict(os.environ) | fake_uv.environ
    store = Store(open_folder / "shared" / "mine" / "store", environ=environ)
    with pytest.raises(UntrustedStoreError, match=r"everybody may write .*/shared,"):
        ensure(SPEC, store=store)
    assert list((open_folder / "shared").iterdir()) == []
    (open_folder / "shared").chmod(0o1777)  # as /tmp: only owners replace what is theirs
    assert ensure(SPEC, store=store).python.exists()


@pytest.mark.parametrize("part", ["{key}", "{key}/venv", "{key}/venv/bin", "locks"])
def test_within_a_store_others_may_not_even_add_files(store, part):
    """A folder like `/tmp` is fine above a store; within, what is added would be run or found."""
    built = ensure(SPEC, store=store)
    path = store.root / part.format(key=built.key)
    path.chmod(0o1777)
    with pytest.raises(UntrustedStoreError, match=f"everybody may write {path},"):
        ensure(SPEC, store=store)


@pytest.mark.root
def test_in_a_folder_for_everybody_what_others_put_there_before_is_refused(open_folder, fake_uv):
    environ = dict(os.environ) | fake_uv.environ
    store = Store(open_folder / "all", environ=environ)
    store.root.mkdir()
    store.root.chmod(0o1777)
    built = ensure(SPEC, store=store)
    planted = store.root / "recipes"
    os.chown(planted, OTHER, OTHER)
    with pytest.raises(UntrustedStoreError, match=f"{planted} belongs to"):
        store.recipe(built.key)
    shutil.rmtree(built.path)
    with pytest.raises(UntrustedStoreError, match=f"{planted} belongs to"):
        ensure(SPEC, store=store)


@pytest.mark.root
def test_links_are_looked_at_themselves_and_where_they_lead(store, open_folder):
    built = ensure(SPEC, store=store)
    link = open_folder / "link"
    link.symlink_to(store.root)
    linked = Store(link, environ=store.environ)
    assert linked.python(built.key) is not None
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(UntrustedStoreError, match=f"{link} belongs to {OTHER}"):
        linked.python(built.key)
    elsewhere = open_folder / "elsewhere"
    built.path.rename(elsewhere)
    built.path.symlink_to(elsewhere)
    assert store.python(built.key) is not None
    os.chown(elsewhere, OTHER, OTHER)
    with pytest.raises(UntrustedStoreError, match=f"{elsewhere} belongs to {OTHER}"):
        store.python(built.key)


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("part", ["locks", "{key}/venv/lib"])
def test_where_a_link_within_a_store_leads_others_may_not_write(store, open_folder, part, is_relative):
    built = ensure(SPEC, store=store)
    path, elsewhere = store.root / part.format(key=built.key), open_folder / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(os.path.relpath(elsewhere, path.parent) if is_relative else elsewhere)
    assert store.python(built.key) == built.python
    elsewhere.chmod(0o777)
    with pytest.raises(UntrustedStoreError, match=f"everybody may write {elsewhere},"):
        store.python(built.key)


def test_the_python_that_an_environment_was_made_from_may_lie_anywhere(store, open_folder):
    built, shared = ensure(SPEC, store=store), open_folder / "shared"
    shared.mkdir()
    (shared / "python").symlink_to(built.python.readlink())
    built.python.unlink()
    built.python.symlink_to(shared / "python")
    shared.chmod(0o777)
    assert store.python(built.key) == built.python


@pytest.mark.root
def test_one_entry_of_another_does_not_hide_the_rest_and_gc_leaves_it(store, caplog):
    mine, planted = (
        ensure(EnvironmentSpec.requirements([n], carry=False), store=store) for n in ("mine", "planted")
    )
    give(planted.path, OTHER)
    assert [e.key for e in store.environments()] == [mine.key]
    assert f"{planted.key} is left out" in caplog.text
    collect(store)
    assert planted.path.exists()


@pytest.mark.root
def test_another_user_uses_what_root_or_a_trusted_owner_built(store):
    built = ensure(SPEC, store=store)
    built.python.unlink()
    built.python.symlink_to("/bin/sh")  # which everybody can reach
    code = "from raycrew.venv_manager import Store; print(Store(sys.argv[1]).python(sys.argv[2]))"
    use = (code, store.environ, store.root, built.key)
    assert as_user(OTHER, *use).strip() == str(built.python)
    give(store.root, OTHER + 1)
    with pytest.raises(RuntimeError, match="UntrustedStoreError"):
        as_user(OTHER, *use)
    trusting = store.environ | {"RAYCREW_VENV_TRUSTED_OWNERS": str(OTHER + 1)}
    assert as_user(OTHER, code, trusting, store.root, built.key).strip() == str(built.python)


def test_what_is_built_with_an_open_umask_may_be_written_by_nobody_else(store):
    before = os.umask(0)
    try:
        built = ensure(SPEC, store=store)
        assert ensure(SPEC, store=store) == built
    finally:
        os.umask(before)
    paths = [p for p in (store.root, *built.path.rglob("*")) if not p.is_symlink()]
    installed = [p for p in paths if "venv" in p.parts or p.is_dir()]
    assert [p for p in installed if p.stat().st_mode & 0o022] == []


def test_trusted_owners_that_nobody_knows(store, monkeypatch, capsys):
    for name in ("no-such-user", "@no-such-group"):
        with pytest.raises(SpecError, match=f"{name} is to be trusted"):
            Store(store.root, trusted_owners=[name])
    mine = pwd.getpwuid(os.geteuid())
    assert Trust.of([mine.pw_name, "", " @0 "], {}) == Trust(frozenset({0, mine.pw_uid}), frozenset({0}))
    monkeypatch.setenv("RAYCREW_VENV_TRUSTED_OWNERS", "no-such-user")
    assert main(["list", "--store", str(store.root)]) == 2
    assert "no-such-user" in capsys.readouterr().err


@pytest.mark.root
def test_owners_that_the_driver_trusts_are_trusted_on_the_nodes(store):
    built = ensure(SPEC, store=store)
    give(store.root, OTHER)
    trusting = Store(store.root, environ=store.environ, trusted_owners=[str(OTHER)])
    python = create_local_venv_on_each_node(SPEC, "x", ThreadNodes(), store=trusting)
    assert python == str(built.python)
    by_variable = Store(store.root, environ=store.environ | {"RAYCREW_VENV_TRUSTED_OWNERS": f" {OTHER}, 0"})
    assert by_variable.trusted_owners == ("0", str(OTHER))
    assert create_local_venv_on_each_node(SPEC, "x", ThreadNodes(), store=by_variable) == python


@pytest.mark.root
def test_the_commands_say_whom_to_trust(store, capsys):
    ensure(SPEC, store=store)
    os.chown(store.root, OTHER, OTHER)
    for words in (["list"], ["gc"], ["verify"], ["doctor"]):
        assert main([*words, "--store", str(store.root)]) == 1
        captured = capsys.readouterr()
        assert f"RAYCREW_VENV_TRUSTED_OWNERS={OTHER}" in captured.out + captured.err


@pytest.mark.parametrize(
    ("gid", "name", "members", "own"),
    [
        (1000, "ada", [], True),
        (1000, "ada", ["ada"], True),
        (1000, "ada", ["ada", "bob"], False),  # another may write what the group may
        (1000, "staff", [], False),  # others may have it as theirs
        (1001, "ada", [], False),
        (999, "ada", [], False),
        (1000, "a", [], False),
    ],
)
def test_a_group_counts_as_a_users_own_only_if_nobody_else_is_in_it(monkeypatch, gid, name, members, own):
    me = SimpleNamespace(pw_gid=1000, pw_name="ada")
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda _: me)
    monkeypatch.setattr(trust.grp, "getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_mem=members))
    assert trust._is_own(gid) is own


def test_links_that_lead_in_a_circle_are_followed_to_no_end(open_folder):
    one, other = open_folder / "one", open_folder / "other"
    one.symlink_to(other)
    other.symlink_to("one")
    mine = Trust(frozenset({0, os.geteuid()}))
    mine.check_one(one, open_folder)
    mine.check_root(one / "store")
