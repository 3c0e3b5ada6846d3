"""A trainer and what it publishes into; a test may have others."""

import pytest
from doubles import await_no_fetching
from streaming import Trainer

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory


@pytest.fixture
def store():
    return InProcessByteStore()


@pytest.fixture
def directory():
    """One that waits for a silent receiver for as long as this test takes."""
    with WeightDirectory.local(lease_s=3600.0, keep=2) as directory:
        yield directory
    await_no_fetching()


@pytest.fixture
def trainer(store, directory):
    return Trainer(store, directory)
