"""Records of a journal as bytes: whatever happens to them, what is read is what was written."""

from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups.rollouts.samples._storage.records import DamagedError, encode, records

HEADS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=3)
WRITTEN = st.lists(st.tuples(HEADS, st.lists(st.binary(max_size=5), max_size=3)), min_size=1, max_size=4)
FRAME_BYTES = 12  # the length and its checksum: what is behind a changed one can't be told


def read(data, *, is_last):
    """What is read until the end or the damage, and where that is."""
    found = []
    try:
        found.extend((one.head, bytes(data[one.rows_at : one.end])) for one in records(data, is_last=is_last))
    except DamagedError as damaged:
        return found, damaged.offset
    return found, None


def on_disk(written):
    """The bytes of records, what is to be read of each, and where each begins."""
    whole = [encode(head, rows)[0] for head, rows in written]
    begins = [sum(map(len, whole[:i])) for i in range(len(whole))]
    return b"".join(whole), [(head, b"".join(rows)) for head, rows in written], begins


@given(WRITTEN, st.booleans(), st.integers(0, 40))
def test_what_was_written_is_read_and_zeros_behind_the_last_are_nothing(written, is_last, zeros):
    data, told, _ = on_disk(written)
    tail = zeros if is_last else 0
    assert read(data + bytes(tail), is_last=is_last) == (told, None)
    for (head, rows), (_, joined) in zip(written, told, strict=True):
        record, rows_at = encode(head, rows)
        assert record[rows_at:] == joined


@given(WRITTEN, st.data())
def test_what_is_cut_short_is_left_out_at_the_end_and_damage_anywhere_else(written, data):
    whole, told, begins = on_disk(written)
    size = data.draw(st.integers(0, len(whole) - 1))
    n = sum(end <= size for end in [*begins[1:], len(whole)])
    assert read(whole[:size], is_last=True) == (told[:n], None)
    assert read(whole[:size], is_last=False) == (told[:n], None if size == begins[n] else begins[n])


@given(WRITTEN, st.data())
def test_a_changed_byte_is_never_read_as_what_was_written(written, data):
    whole, told, begins = on_disk(written)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    n = max(i for i, begin in enumerate(begins) if begin <= at)
    assert read(changed, is_last=False) == (told[:n], begins[n])
    may_be_cut = n == len(begins) - 1 and at - begins[n] >= FRAME_BYTES
    assert read(changed, is_last=True) == (told[:n], None if may_be_cut else begins[n])


def test_records_are_written_as_earlier_versions_did():
    """A queue in a folder may be opened by a later one."""
    written = b'\x0e\x00\x00\x00\x00\x00\x00\x00[\xcd\xa8p\x14!\x81\xe6\x07\x00\x00\x00{"a":1}xyz'
    assert encode({"a": 1}, [b"x", b"yz"]) == (written, 27)
