"""What lies in an environment: how it came there, and what is its own."""

import base64
import hashlib
import os

import pytest

from raycrew.venv_manager._store.building import inventory


def environment(root, package):
    """One with three files of a package, each put there by a function, and some that say nothing of that."""
    site = root / "lib/python3.11/site-packages"
    (site / "demo/__pycache__").mkdir(parents=True)
    (site / "demo-1.dist-info").mkdir()
    (site / "demo-1.dist-info/METADATA").write_text("Name: demo\n")
    (site / "demo/__pycache__/a.pyc").write_bytes(b"1234")
    (root / "bin").mkdir()
    (root / "bin/python").symlink_to("/usr/bin/python3")
    (root.parent / "cache").mkdir()
    for name in ("a.py", "b.py", "c.py"):
        kept = root.parent / "cache" / name
        kept.write_text(name * 10)
        package(kept, site / "demo" / name)
    return root


@pytest.mark.parametrize(
    ("mode", "put"),
    [
        ("hardlink", lambda kept, at: os.link(kept, at)),
        ("symlink", lambda kept, at: at.symlink_to(kept)),
        ("copy", lambda kept, at: at.write_bytes(kept.read_bytes())),
    ],
)
def test_how_files_came_there_and_what_is_their_own(tmp_path, mode, put):
    root = environment(tmp_path / "env", put)
    found = inventory.take(root)
    assert found.link_mode == mode and found.packages == {"demo": "1"}
    folder = "lib/python3.11/site-packages"
    modules = {f"{folder}/demo/{name}" for name in ("a.py", "b.py", "c.py")}
    assert found.files.keys() == modules | {f"{folder}/demo-1.dist-info/METADATA", "bin/python"}
    for name, (size, changed_ns) in found.files.items():
        stat = os.lstat(root / name)
        assert (size, changed_ns) == (stat.st_size, stat.st_mtime_ns)
    assert found.size_bytes == sum(size for size, _ in found.files.values()) + 4, "bytecode is a size only"
    shared = sum(found.files[name][0] for name in modules) if mode == "hardlink" else 0
    assert found.own_bytes == found.size_bytes - shared


@pytest.mark.parametrize("most", range(3))
@pytest.mark.parametrize("some", range(3))
def test_the_most_frequent_way_is_told(tmp_path, most, some):
    site, kept = tmp_path / "env/lib/python3.11/site-packages/demo", tmp_path / "kept"
    site.mkdir(parents=True)
    kept.write_text("x")
    ways = [
        ("copy", lambda at: at.write_text("x")),
        ("hardlink", lambda at: os.link(kept, at)),
        ("symlink", lambda at: at.symlink_to(kept)),
    ]
    for number, which in enumerate([most] * 3 + [some] * 2):
        ways[which][1](site / f"{number}.py")
    assert inventory.take(tmp_path / "env").link_mode == ways[most][0]


def test_what_is_no_package_does_not_say_how_packages_came_there(tmp_path):
    root = environment(tmp_path / "env", lambda kept, at: os.link(kept, at))
    (root / "share").mkdir()
    (root / "lib/python3.11/site-packages/demo-1.dist-info/licenses").mkdir()
    for folder in ("share", "lib/python3.11/site-packages/demo-1.dist-info/licenses"):
        for name in "abcdef":
            (root / folder / name).write_text("copied, as it was made here")
    assert inventory.take(root).link_mode == "hardlink"


def test_each_file_that_differs_from_its_packages_record_is_named(tmp_path):
    site = "lib/python3.11/site-packages"
    for package in ("one", "two"):
        folder = tmp_path / site / f"{package}-1.dist-info"
        folder.mkdir(parents=True)
        text = b"x = 1\n"
        (tmp_path / site / f"{package}.py").write_bytes(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        listed = [
            f"{package}.py,sha256={digest},6",
            f"{package}-gone.py,sha256=x,6",
            f"{folder.name}/RECORD,,",
        ]
        (folder / "METADATA").write_text(f"Name: {package}\n")
        (folder / "RECORD").write_text("\n".join(listed))
    assert inventory.altered(tmp_path, inventory.take(tmp_path)) == []
    for package in ("two", "one"):
        (tmp_path / site / f"{package}.py").write_bytes(b"x = 2\n")
    assert inventory.altered(tmp_path, inventory.take(tmp_path)) == [f"{site}/one.py", f"{site}/two.py"]


def test_most_of_them_decide(tmp_path):
    ways = iter([os.link, os.link, lambda kept, at: at.symlink_to(kept)])
    assert (
        inventory.take(environment(tmp_path / "env", lambda *pair: next(ways)(*pair))).link_mode == "hardlink"
    )


def test_what_is_absent_is_named_with_what_is_there():
    there = {"demo": "1", "more": "2"}
    assert inventory.absent(there, {"demo": "1"}) == []
    assert inventory.absent(there, {"other": "3", "more": "1"}) == [
        "more 1 (2 is there)",
        "other 3 (absent)",
    ]
