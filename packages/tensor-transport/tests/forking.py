"""What is tried in a forked child: what ends, or spoils, a process."""

import faulthandler
import os
import sys
import traceback

LIMIT_S = 60.0
"""A child that waits for a lock for ever is ended after so long, and says where it stood."""


def in_a_child(act):
    """What `act` gives in a forked child: a truth value."""
    pid = os.fork()
    if not pid:
        try:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
            os._exit(0 if act() else 1)
        except BaseException:  # noqa: BLE001 - it is told, and ends this process alone
            traceback.print_exc()
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
