import pytest

from raycrew.worker_groups import ResultJoinError
from raycrew.worker_groups._worker.declared.declaration import Function
from raycrew.worker_groups._worker.declared.joining import Join


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


def test_each_way_of_joining_without_padding():
    assert joined([[1], [2, 3]], "list") == [[1], [2, 3]]
    assert joined([[1], [2, 3]], "first") == [1]
    assert joined([[1], [2, 3]], "concat") == [1, 2, 3]
    assert joined([2, 4], "sum") == 6
    assert joined([2, 4], "mean") == 3
    assert joined([None, None], "list") == [None, None]


def test_results_of_no_rows_but_padding_do_not_count_among_rows():
    assert joined([[1, 2], [9, 9]], "concat", rows=2, kept=(2, 0)) == [1, 2]
    assert joined([[1, 2], [9, 9]], "list", rows=2, kept=(2, 0)) == [[1, 2], []]
    with pytest.raises(ResultJoinError, match=r"1 rows are too many or too few; .* of rank 0 .* 2 rows"):
        joined([[1], [3, 4]], "concat", rows=2, kept=(2, 1))
    with pytest.raises(ResultJoinError, match=r"3 rows are too many or too few; .* of rank 1 .* 2 rows"):
        joined([[1, 2], [3, 4, 5]], "concat", rows=2, kept=(2, 1))


def test_some_that_return_none_are_named():
    with pytest.raises(ResultJoinError, match=r"ranks \[1\] returned None, and the others did not"):
        joined([[1], None], "concat")
    with pytest.raises(ResultJoinError, match=r"\(ranks \[0, 1\]\) can't be joined by 'sum'"):
        joined([1, "x"], "sum")


def test_a_function_that_raises_is_named_and_one_that_is_not_there_says_why():
    def divide(results):
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as raised:
        joined([1, 2], Function(divide, "divide"))
    assert raised.value.__notes__ == ["(raised by divide, which joins the results of Policy.score)"]
