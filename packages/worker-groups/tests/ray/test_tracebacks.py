"""Tracebacks of workers, without what Ray leaves of the lines that it takes out."""

import pytest

from raycrew.worker_groups._ray.raised import without_stray_marks

pytestmark = pytest.mark.smoke

AS_RAY_SAYS = """ray::Policy.step() (pid=7, ip=10.0.0.1)
           ^^^^^^^^^^^^^^^^^^^^
           ~~~~~~~~~^^^^^^^^^^^
  File "/srv/shell.py", line 312, in forward
    return bound(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^
  File "/srv/policy.py", line 6, in step
    return self.g(x) + {"a": 1}["b"]
                       ~~~~~~~~^^^^^
  + Exception Group Traceback (most recent call last):
  |   File "/srv/policy.py", line 9, in inner
  |     raise errors
  |     ^^^^^^^^^^^^
KeyError: 'b'
^^^ is how the message goes on"""


@pytest.mark.hostile
def test_marks_stay_under_the_lines_that_they_mark():
    lines = AS_RAY_SAYS.splitlines()
    assert without_stray_marks(AS_RAY_SAYS).splitlines() == [lines[0], *lines[3:]]
    assert without_stray_marks("") == ""
    assert without_stray_marks('  File "a.py", line 1, in f\n    ~x\n    ^^').count("^") == 2
