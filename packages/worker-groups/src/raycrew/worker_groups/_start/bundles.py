"""Whether the bundles of a group that starts are still there."""

import logging
import time
from collections.abc import Callable

from ray.exceptions import GetTimeoutError

from raycrew.cluster_core import Claim

logger = logging.getLogger(__name__)

_LOOK_S = 2.0


class BundleLook:
    """Called now and then while workers start: a worker on a bundle that is gone would be waited for in vain.

    Args:
        claim: The bundles.
        go_on: Called each time before.
    """

    def __init__(self, claim: Claim, go_on: Callable[[], object]) -> None:
        self._claim, self._go_on = claim, go_on
        self._next = time.monotonic() + _LOOK_S

    def __call__(self) -> None:
        """Look again if it is time to.

        Raises:
            ClusterError: Bundles are gone.
        """
        self._go_on()
        if time.monotonic() >= self._next:
            self.look()
            self._next = time.monotonic() + _LOOK_S

    def look(self) -> None:
        """Look at once.

        Raises:
            ClusterError: Bundles are gone.
        """
        try:
            self._claim.check()
        except GetTimeoutError as error:
            logger.warning("whether all bundles are there is not known at the moment: %s", error)
