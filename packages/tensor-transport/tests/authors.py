"""Publishers and receivers as a record of versions knows them: what they say, and no bytes."""

from raycrew.tensor_transport.weights._directory.versions import Announced, Begin, Finish
from raycrew.tensor_transport.weights._update.manifest import Bucket, BucketPlan, TensorEntry

PLAN = BucketPlan(
    (TensorEntry("x", "uint8", (4,), 0, 0, 4), TensorEntry("y", "uint8", (4,), 1, 0, 4)), (4, 4)
)


class Author:
    """Publishes the two buckets of a plan, as part of a version."""

    def __init__(self, record, part=0, parts=1, name=None, scope="node"):
        self.record, self.part, self.parts = record, part, parts
        self.name = name or f"publisher {part}"
        self.scope = scope
        record.enroll(0, part, self.name, scope)
        self.tickets = 0

    def begin(self, now=0, version=None, plan=PLAN, digest=None):
        digest = digest or plan.digest
        begin = Begin(self.part, self.parts, self.name, self.scope, version, digest, plan, None)
        self.number = self.record.begin(now, begin)
        return self.number

    def put(self, now=0, count=2):
        """Whether somebody waits for more."""
        tickets = [(index, f"{self.number}/{self.part}/{index}") for index in range(count)]
        buckets = [Announced(self.part, index, Bucket(ticket, 4, 0), None) for index, ticket in tickets]
        return self.record.announce(now, self.number, self.name, *buckets)

    def finish(self, now=0):
        return self.record.finish(now, self.number, Finish(self.part, self.name, 2, None, 0.0, 0.0, ()))

    def publish(self, now=0, version=None):
        self.begin(now, version)
        self.put(now)
        self.finish(now)
        return self.number


def enter(record, number, **ballots):
    for receiver, ballot in ballots.items():
        record.offer(0, number, frozenset(), receiver, ballot)
