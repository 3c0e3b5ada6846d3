"""What of an item's failure can be had where its outcome is read; no Ray is needed."""

import pickle

import pytest

from raycrew.worker_groups._fan_out.processes.process import _pack_failure
from raycrew.worker_groups._fan_out.reports import failure_in


class Known(Exception):
    """Of a class that is there."""


class Text(Exception):
    """Comes out of its pickle as something else."""

    def __reduce__(self):
        return str, ("no exception",)


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_what_an_item_raised_comes_back_with_its_words():
    cause, name, message, trace = failure_in(_pack_failure(raised(Known("one"))))
    assert (type(cause), str(cause), name, message) == (Known, "one", "Known", "one")
    assert "in raised" in trace


@pytest.mark.hostile
def test_what_can_not_be_read_back_or_is_no_exception_is_told_in_words(monkeypatch):
    gone = _pack_failure(raised(Known("one")))
    monkeypatch.delattr(f"{__name__}.Known")
    with pytest.raises(AttributeError):
        pickle.loads(pickle.loads(gone)[0])
    for payload, known in ((gone, ("Known", "one")), (_pack_failure(raised(Text("two"))), ("Text", "two"))):
        cause, name, message, trace = failure_in(payload)
        assert (cause, name, message) == (None, *known)
        assert "in raised" in trace
