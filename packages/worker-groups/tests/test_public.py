import pytest

import raycrew.worker_groups


@pytest.mark.smoke
def test_the_public_names_are_sorted_and_there():
    names = raycrew.worker_groups.__all__
    capitals = sorted(name for name in names if name[0].isupper())
    assert names == capitals + sorted(name for name in names if name[0].islower())
    assert all(hasattr(raycrew.worker_groups, name) for name in names)


def test_every_public_name_is_described():
    assert not [n for n in raycrew.worker_groups.__all__ if not getattr(raycrew.worker_groups, n).__doc__]
