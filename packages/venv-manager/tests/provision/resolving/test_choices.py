"""What is kept of versions that were chosen, without a place that they come from."""

from raycrew.venv_manager._spec import read_lock
from raycrew.venv_manager.provision._resolving.choices import Choice

LOCK = """
[[packages]]
name = "Demo_One"
version = "1.0"
wheels = [{ url = "https://one/demo.whl", hashes = { sha256 = "a" } }, { url = "https://one/b.whl", hashes = { sha256 = "b" } }]

[[packages]]
name = "bare"
version = "2"

[[packages]]
name = "from-git"
vcs = { type = "git", url = "https://one/repo", commit-id = "c0ffee" }

[[packages]]
name = "twice"
version = "1"
marker = "python_version < '3.12'"

[[packages]]
name = "twice"
version = "2"
marker = "python_version >= '3.12'"
"""  # noqa: E501 - a lock has such lines


def chosen(text):
    return Choice.of(read_lock(text), {"own": "./own"}, ["ray", "numpy"])


def test_packages_are_names_versions_and_hashes_wherever_they_lie():
    found = chosen(LOCK)
    assert list(found.packages) == ["bare", "demo-one", "from-git", "twice"]
    assert found.packages["bare"] == "2 without hashes"
    assert found.packages["twice"] == "1 without hashes, 2 without hashes"
    version, hashes = found.packages["demo-one"].split()
    assert version == "1.0" and len(hashes) >= 15
    assert len(found.packages["from-git"].split()) == 1, "it has no version, and its commit for a hash"
    assert chosen(LOCK.replace("https://one", "https://two")).packages == found.packages
    for before, after in (('"1.0"', '"1.1"'), ('"b"', '"c"'), ("c0ffee", "c0ffed")):
        assert chosen(LOCK.replace(before, after)).packages != found.packages
    assert (found.sources, found.carried) == ({"own": "./own"}, ("numpy", "ray"))


def test_a_choice_keeps_the_entries_of_its_lock_and_no_password():
    found = chosen(LOCK.replace("https://one/repo", "https://me:hidden@one/repo"))
    assert sorted(one.name for one in found.entries()) == ["bare", "demo-one", "from-git", "twice", "twice"]
    assert "hidden" not in found.lock
