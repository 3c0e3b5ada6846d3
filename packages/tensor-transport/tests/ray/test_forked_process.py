"""A forked process that lets go of what its parent has of Ray, or would use it."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("ray")

pytestmark = pytest.mark.hostile

SCRIPT = """
    import os, sys
    import raycrew.tensor_transport
    import ray

    ray.init(address=sys.argv[1], log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Actor:
        def echo(self, value):
            return value

    def in_a_child(act):
        child = os.fork()
        if child == 0:
            code = 3
            try:
                held.clear()
                code = act()
            except RuntimeError as error:
                code = 4 if "was forked from one that uses Ray" in str(error) else 5
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    for act, code in ((lambda: 0, 0), (lambda: ray.put(1), 4), (lambda: ray.nodes(), 4)):
        actor = Actor.remote()
        held = [ray.put(b"x" * 200_000), actor.echo.remote(2), actor]
        del actor
        assert ray.get(held[1]) == 2
        assert in_a_child(act) == code
        assert len(ray.get(held[0])) == 200_000
        held.clear()
        another = Actor.remote()
        assert ray.get(another.echo.remote(ray.put(3)), timeout=60) == 3
    print("end", flush=True)
"""


def test_nothing_of_it_reaches_its_parents_connection(ray_cluster):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), ray_cluster.address],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
