"""What the errors of shards say whose bytes are not there any more."""

from raycrew.tensor_transport._bytes import lost, stale
from raycrew.tensor_transport._rows import ShardRead, TensorShardInfo


def shard(name, owner="epoch", node="n1"):
    return TensorShardInfo("fake", name, owner, node, "float32", (2,))


def test_a_lost_shard_is_named_with_its_owner_and_how_many_are_lost_with_it():
    one = lost([ShardRead(shard("a"))], "its owner died")
    assert str(one) == "shard a of owner epoch on node n1 is lost: its owner died"
    assert (one.shard_id, one.owner, one.node_id) == ("a", "epoch", "n1")
    assert "shard a of owner epoch on node n1 (and 2 more) is lost" in str(
        lost([ShardRead(shard(name)) for name in "abc"], "no answer")
    )


def test_two_that_are_lost_are_one_and_one_more():
    reads = [ShardRead(shard("a")), ShardRead(shard("b"))]
    assert "shard a of owner epoch on node n1 (and 1 more) is lost" in str(lost(reads, "no answer"))


def test_a_stale_handle_is_named_without_what_is_not_known():
    error = stale(shard("b", owner="", node=""), "it was released")
    assert str(error) == "shard b of owner none on node unknown is gone: it was released"
    assert (error.shard_id, error.owner, error.node_id) == ("b", "", "")
