import raycrew.tensor_transport as package


def test_public_names_are_sorted_and_resolve():
    assert list(package.__all__) == sorted(package.__all__)
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
