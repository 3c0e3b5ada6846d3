"""What generators report of an update counts once each, and for that version alone."""

import pytest

from raycrew.tensor_transport import WeightUpdateError
from raycrew.tensor_transport.weights import WeightReceipt
from raycrew.tensor_transport.weights._syncing.report import checked_receipts


def receipts(*versions):
    return [WeightReceipt(version, 0, 0.0, 0.0) for version in versions]


def test_receipts_of_one_version_are_the_results():
    assert checked_receipts(dict(enumerate(receipts(5, 5))), 5, "apply") == tuple(receipts(5, 5))


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("versions", "told"), [((5, 4), "{1: 4}"), ((6, 5), "{0: 6}"), ((4, 6), "{0: 4, 1: 6}")]
)
def test_an_earlier_or_a_later_version_is_told_with_its_rank(versions, told):
    with pytest.raises(WeightUpdateError, match=f"other versions than 5: {told}"):
        checked_receipts(dict(enumerate(receipts(*versions))), 5, "apply")


@pytest.mark.hostile
def test_generators_are_told_by_their_own_numbers_where_they_are_not_all():
    with pytest.raises(WeightUpdateError, match=r"other versions than 5: \{7: 4\}"):
        checked_receipts(dict(zip([2, 7], receipts(5, 4), strict=True)), 5, "apply")


@pytest.mark.hostile
@pytest.mark.parametrize("results", [[], [None], [*receipts(5), 5], [None, *receipts(5)]])
def test_a_generator_without_a_receipt_is_told(results):
    with pytest.raises(WeightUpdateError, match=r"apply\(\) has to return .* on every generator; got \["):
        checked_receipts(dict(enumerate(results)), 5, "apply")
