"""Calls of any kind, for tests of what is made of them."""

from hypothesis import strategies as st

from raycrew.worker_groups._health.timeline.records import Call, Part

SECONDS = st.floats(0, 1000, allow_nan=False).map(lambda s: round(s, 6))


@st.composite
def parts(draw, ranks=4):
    rank = draw(st.integers(0, ranks - 1))
    if draw(st.booleans()) and draw(st.booleans()):
        return Part(rank)
    # Ends before beginnings, too: clocks of several nodes are not told apart exactly.
    return Part(rank, draw(SECONDS), draw(SECONDS), draw(st.sampled_from([0.0, 0.5])))


@st.composite
def any_calls(draw):
    several = draw(st.lists(parts(), min_size=1, max_size=4, unique_by=lambda part: part.rank))
    return Call(
        draw(st.sampled_from(["policy", "generator"])),
        draw(st.sampled_from(["train", "generate", "</script><b>"])),
        draw(st.none() | SECONDS),
        tuple(several),
        draw(st.none() | SECONDS),
        draw(st.none() | st.booleans()),
        draw(st.sampled_from(["", "balancer"])),
    )
