import os

import pytest

from raycrew.venv_manager import Store
from raycrew.venv_manager.testing import FakeUv, LocalIndex


@pytest.fixture(scope="session")
def index(tmp_path_factory):
    """A small index: demo 1.0 and 2.0, base (needs leaf), leaf."""
    index = LocalIndex(tmp_path_factory.mktemp("index"))
    index.add("demo", "1.0")
    index.add("demo", "2.0")
    index.add("leaf", "1.0")
    index.add("leaf", "1.1")
    index.add("base", "1.0", requires=["leaf>=1"], extras={"more": ["demo==1.0"]})
    return index


@pytest.fixture(scope="session")
def uv_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("uv-cache")


@pytest.fixture
def environ(index, uv_cache):
    """An environment in which real uv knows only the small index."""
    return index.environ(uv_cache)


@pytest.fixture
def store(tmp_path, environ):
    """A store of real environments."""
    return Store(tmp_path / "store", environ=environ)


@pytest.fixture
def fake_uv(tmp_path):
    return FakeUv(tmp_path / "fake-uv")


@pytest.fixture
def fake_store(tmp_path, fake_uv):
    """A store whose environments are made by the fake uv."""
    return Store(tmp_path / "store", environ=dict(os.environ) | fake_uv.environ)
