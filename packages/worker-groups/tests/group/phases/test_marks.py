from raycrew.worker_groups import HighWater, PhaseReport, PhaseUse, ResourceUsage
from raycrew.worker_groups._group.phases.occupancy import Occupancy


def usage(host=None, device=None):
    return ResourceUsage(private_bytes=host, device_bytes=device)


def test_the_highest_of_each_is_kept():
    mark = HighWater.of(usage(5, None)).or_more(HighWater.of(usage(3, 7)))
    assert mark == HighWater(5, 7)
    assert mark.or_more(HighWater()) == mark == HighWater().or_more(mark)
    assert HighWater.of() == HighWater.of(usage()) == HighWater(None, None)
    assert HighWater.of(usage(1, 2), usage(), usage(3, 4)) == HighWater(4, 6)
    assert str(HighWater()) == "not seen"
    with_engine = ResourceUsage(private_bytes=1, started_bytes=5)
    assert HighWater.of(with_engine, usage(3)) == HighWater(9), "an engine's processes count"
    assert HighWater.of(usage(0, 0)) == HighWater(0, 0)


def test_a_phase_knows_each_rank_at_its_highest_and_all_at_the_same_moment():
    use = PhaseUse().begun().gone_on(0.5).begun().gone_on(1.0)
    use = use.seen({"train": {0: usage(10), 1: usage(20)}, "generate": {0: usage(1)}})
    use = use.seen({"train": {0: usage(15), 1: usage(5)}, "generate": {0: usage(2)}})
    assert (use.times, use.seconds) == (2, 1.5)
    assert use.together == HighWater(31), "not 37: these were never there at the same time"
    assert use.ranks == {"train": {0: HighWater(15), 1: HighWater(20)}, "generate": {0: HighWater(2)}}


def test_a_report_tells_phases_and_marks():
    use = PhaseUse().begun().gone_on(1.25)
    use = use.seen(
        {"train": {0: usage(10_000_000), 1: usage(20_000_000, 3_000_000)}, "generate": {0: usage()}}
    )
    occupancy = Occupancy.of(["train", "generate"]).taken_by("train").joined("train")
    report = PhaseReport.of(occupancy, {"train": use})
    assert report.states == {"train": "awake", "generate": "absent"}
    assert str(report).splitlines() == [
        "train is awake, generate is absent",
        "train: once, 1.25 s; together at most 30.0 MB, 3.0 MB on devices",
        "  train: rank 0 10.0 MB; rank 1 20.0 MB, 3.0 MB on devices",
    ]
    told = PhaseUse(2, 0.5).seen({"train": {0: usage(), 1: usage(None, 1_000_000)}}).lines("to train")
    assert told == [
        "to train: 2 times, 0.50 s; together at most 1.0 MB on devices",
        "  train: rank 1 1.0 MB on devices",
    ]
    assert PhaseUse(1).lines("train") == ["train: once, 0.00 s; memory not seen"]
