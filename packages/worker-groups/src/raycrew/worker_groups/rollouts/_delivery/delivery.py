"""Where prompts that are done go: a file of JSON, a queue of samples, and whoever iterates."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from ray import cloudpickle

from raycrew.worker_groups.errors import SampleQueueTimeoutError
from raycrew.worker_groups.rollouts._delivery.jsonl import JsonLines, line_of
from raycrew.worker_groups.rollouts._delivery.progress import Done
from raycrew.worker_groups.rollouts._values import RolloutFailure, RolloutGroup, RolloutSample
from raycrew.worker_groups.rollouts.errors import RolloutError
from raycrew.worker_groups.rollouts.samples import SampleQueue

logger = logging.getLogger(__name__)

_TRY_S = 2.0
_TELL_AFTER = 30
"""Tries: whoever is to take samples may be who waits here."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Of one collection.

    Attributes:
        run: The collection's name.
        jsonl: The file, if there is one.
        queue: The queue, if there is one.
        is_given_up: Whether nobody wants it any more.
    """

    run: str
    jsonl: JsonLines | None
    queue: SampleQueue | None
    is_given_up: Callable[[], bool]

    def deliver(self, done: Done) -> RolloutGroup:
        """Bring it where it is to go, unless it is there.

        Raises:
            RolloutFileError: The file can't be written to.
            SampleQueueError: The queue has ended, or was closed.
            RolloutError: It can't be unpickled here.
        """
        group = group_of(done)
        if self.jsonl is not None:
            texts = [outcome.text for outcome in done.outcomes]
            self.jsonl.add(done.id, line_of(done.id, texts, group.failures))
        if self.queue is not None:
            for keys, samples in alike(self.run, group):
                self._put(self.queue, keys, samples)
        return group

    def _put(self, queue: SampleQueue, keys: Sequence[str], samples: Sequence[RolloutSample]) -> None:
        """Put samples; as often as it takes, as their keys have them put once."""
        columns = {name: [sample.columns[name] for sample in samples] for name in samples[0].columns}
        lengths = [sample.length for sample in samples if sample.length is not None] or None
        for tried in count(1):
            try:
                queue.put(columns, version=samples[0].version, lengths=lengths, keys=keys, timeout_s=_TRY_S)
            except SampleQueueTimeoutError as error:
                if self.is_given_up():
                    raise
                if tried % _TELL_AFTER == 0:
                    logger.warning("rollouts wait for %g s to go to their queue: %s", tried * _TRY_S, error)
            else:
                return


def group_of(done: Done) -> RolloutGroup:
    """A prompt's rollouts as a user sees them.

    Raises:
        RolloutError: They can't be unpickled here.
    """
    failures = {
        i: RolloutFailure(outcome.kind, outcome.message, done.attempts[i])
        for i, outcome in enumerate(done.outcomes)
        if outcome.kind is not None and outcome.kind != "stuck"
    }
    try:
        prompt = cloudpickle.loads(done.prompt)
        samples = [None if o.kind else cloudpickle.loads(o.data) for o in done.outcomes]
    except Exception as error:  # whatever the values' own methods raise
        raise RolloutError(f"the rollouts of prompt {done.id!r} can't be unpickled here: {error}") from error
    return RolloutGroup(done.id, prompt, tuple(samples), failures)


def alike(run: str, group: RolloutGroup) -> list[tuple[list[str], list[RolloutSample]]]:
    """The samples of a group with their keys, those together that one `put` takes: of one version, say."""
    found: dict[tuple[object, ...], tuple[list[str], list[RolloutSample]]] = {}
    for i, sample in enumerate(group.samples):
        if i not in group.failures:
            kind = (sample.version, *sorted(sample.columns), sample.length is None)
            keys, samples = found.setdefault(kind, ([], []))
            keys.append(f"{run}/{group.id}/{i}")
            samples.append(sample)
    return list(found.values())
