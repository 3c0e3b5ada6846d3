"""What a process that is forked from one that uses Ray does to it: nothing."""

import os
import subprocess
import sys
import tempfile
import textwrap

import pytest

pytestmark = pytest.mark.hostile

SCRIPT = """
    import gc, os, ray, sys
    from raycrew.cluster_core import ClusterError, RayVirtualCluster, init_ray
    from raycrew.cluster_core.testing._nodes import _one_start_at_a_time

    with _one_start_at_a_time():
        ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Actor:
        def echo(self, value):
            return value

        def count(self):
            for number in range(3):
                yield number

    def in_a_child(act, *arguments):
        child = os.fork()
        if child == 0:
            code = 3
            try:
                code = act(*arguments) or 0
            except (RuntimeError, ClusterError) as error:
                code = 4 if "was forked from one that uses Ray" in str(error) else 5
            finally:
                gc.collect()
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def forget(held):
        held.clear()

    def end_with_an_error(_):
        try:
            raise ValueError("of the child")
        except ValueError:
            sys.excepthook(*sys.exc_info())

    def know(_):
        context = ray.get_runtime_context()
        return 0 if (context.get_job_id(), context.get_node_id()) == known else 6

    def exit_code(code):
        child = os.fork()
        if child == 0:
            sys.exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def fork_again(held):
        return in_a_child(forget, held)

    context = ray.get_runtime_context()
    known = context.get_job_id(), context.get_node_id()
    cluster = RayVirtualCluster([1], use_gpus=False)
    for act, code in (
        (forget, 0),
        (fork_again, 0),
        (end_with_an_error, 0),
        (know, 0),
        (lambda held: ray.get(held[0]) and 0, 4),
        (lambda held: ray.put(1) and 0, 4),
        (lambda held: held[2].echo.remote(1) and 0, 4),
        (lambda held: ray.nodes() and 0, 4),
        (lambda held: ray.shutdown(), 4),
        (lambda held: RayVirtualCluster([1], use_gpus=False) and 0, 4),
        (lambda held: cluster.claim(None, "a child") and 0, 4),
        (lambda held: init_ray() and 0, 4),
        (lambda held: init_ray("local") and 0, 4),
    ):
        actor = Actor.remote()
        reference, generator = actor.echo.remote(2), actor.count.options(num_returns="streaming").remote()
        held = [ray.put(b"x" * 200_000), reference, actor, generator]
        assert ray.get(reference) == 2
        assert in_a_child(act, held) == code, act
        assert len(ray.get(held[0])) == 200_000
        assert [ray.get(one) for one in generator] == [0, 1, 2]
        del actor, reference, generator
        held.clear()
        another = Actor.remote()
        assert ray.get(another.echo.remote(ray.put(3)), timeout=60) == 3
    assert [exit_code(code) for code in (0, 7)] == [0, 7]
    assert ray.get(Actor.remote().echo.remote(4), timeout=60) == 4
    cluster.shutdown()
    print("end", flush=True)
"""


def test_a_forked_child_forgets_uses_and_ends_nothing_of_its_parents_ray():
    with tempfile.TemporaryDirectory(prefix="rf", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT)],
            capture_output=True, text=True, timeout=280, env=os.environ | {"RAY_TMPDIR": folder},
        )  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
        assert done.stderr.count("ValueError: of the child") == 1
