"""Ctrl-C at any moment: wherever the interpreter looks whether there was one."""

import inspect
import itertools
import sys


def press_at(nth, act, places):
    """Do something, and press Ctrl-C where that is looked for that often in files of these names.

    Returns:
        Whether all of it was done before.
    """
    left = nth

    def look(frame, event, _):
        nonlocal left
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # What is raised here would not come to its `finally`, as a Ctrl-C does.
        if event in ("call", "c_return") and any(place in frame.f_code.co_filename for place in places):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        act()
    except KeyboardInterrupt:
        return False
    finally:
        sys.setprofile(None)
    return left > 0


def press_everywhere(act, places, before=lambda: None):
    """Have something done again and again, broken off a bit later each time; numbers the tries."""
    for nth in itertools.count(1):
        before()
        is_whole = press_at(nth, act, places)
        yield nth
        if is_whole:
            return
