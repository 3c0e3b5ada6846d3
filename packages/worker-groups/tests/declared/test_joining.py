import pytest

from raycrew.worker_groups import ResultJoinError
from raycrew.worker_groups._declared.declaration import Function
from raycrew.worker_groups._declared.joining import Join


class Boxed:
    """What a transport makes of a value."""

    def __init__(self, value):
        self.value = value


class Boxing:
    def encode(self, value):
        return Boxed(value)

    def decode(self, value):
        if isinstance(value, Boxed) and value.value == "lost":
            raise OSError("it is gone")
        return value.value if isinstance(value, Boxed) else value


def joined(results, collect, **options):
    return Join("Policy.score", (0, 1), collect, transport=Boxing(), **options)(results)


@pytest.mark.hostile
def test_functions_get_decoded_results_wherever_they_run():
    longest = Function(lambda results: max(results, key=len), "longest")
    assert joined([Boxed([1]), Boxed([2, 3])], longest) == joined([[1], [2, 3]], longest) == [2, 3]
    with pytest.raises(ResultJoinError, match="OSError: it is gone"):
        joined([Boxed("lost")] * 2, longest)


@pytest.mark.hostile
def test_padding_is_dropped_of_encoded_results():
    padded = {"rows": 2, "kept": (2, 1)}
    assert joined([Boxed([1, 2]), Boxed([3, 1])], "concat", **padded) == [1, 2, 3]
    assert joined([Boxed([1, 2]), Boxed([3, 1])], "list", **padded) == [[1, 2], [3]]
    with pytest.raises(ResultJoinError, match="it is gone; with pad=True the result of rank 0"):
        joined([Boxed("lost")] * 2, "concat", **padded)
