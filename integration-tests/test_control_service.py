"""Nothing asks Ray's control service past the gate of its package, where it would hang as that does."""

import ast
import contextlib
import importlib
import threading
from pathlib import Path

import pytest

from raycrew.cluster_core._ray.compat import never_connecting as of_cluster_core
from raycrew.tensor_transport._ray.compat import auto_connect

PACKAGES = Path(__file__).parent.parent / "packages"
WITH_RAY = ["cluster-core", "worker-groups", "tensor-transport"]

# What may be had of `ray` outside of the gate's wing: it asks nobody, or only what a living worker answers.
FREE = {"ObjectRef", "cancel", "cloudpickle", "exceptions", "get_runtime_context", "is_initialized", "method"}
FREE |= {"put", "util"}
# Modules of Ray of which the same holds, by their beginnings.
FREE_MODULES = ("ray.actor", "ray.exceptions", "ray.util.scheduling_strategies")
FREE_OF_GROUPS = {"PlacementGroup"}
ELSEWHERE = {
    ("_group/handles/directory.py", "remote"): "an actor class, which `start_actor` gets",
    ("_health/watches.py", "remote"): "an actor class, which `start_actor` gets",
    ("_start/startup.py", "remote"): "an actor class, which `start_actor` gets",
    ("_fan_out/warm_pool/pool.py", "remote"): "an actor class, which `start_actor` gets",
    ("rollouts/samples/_channels/remote.py", "remote"): "an actor class, which `start_actor` gets",
    ("_worker/shell.py", "get"): "in the worker: values of a call that Ray has sent there",
    ("_connection/connection.py", "shutdown"): "the end of the connection itself",
}
# Within the wing: what asks, so that it must stand in a question.
ASKING = {
    *("kill", "nodes", "get_actor", "list_named_actors", "placement_group", "placement_group_table"),
    *("remove_placement_group", "available_resources_per_node", "get_draining_nodes", "get_cluster_status"),
}


def sources(package):
    folder = PACKAGES / package / "src" / "raycrew" / package.replace("-", "_")
    found = {
        path.relative_to(folder).as_posix(): ast.parse(path.read_text()) for path in folder.rglob("*.py")
    }
    return {name: tree for name, tree in found.items() if not name.startswith("testing")}


def is_ray(node):
    """Whether an expression is the module `ray`, by its name or by what imports it when it is needed."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "ray_module"
    return isinstance(node, ast.Name) and node.id == "ray"


def of_ray(tree):
    """Names that are taken from the module `ray`, and those imported from its inside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_ray(node.value):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ray":
            names = {alias.name for alias in node.names}
            if node.module == "ray.util.placement_group":
                yield from names - FREE_OF_GROUPS
            elif node.module == "ray":
                yield from names
            elif not node.module.startswith(FREE_MODULES):
                yield node.module


@pytest.mark.hostile
@pytest.mark.parametrize("package", WITH_RAY)
def test_only_the_wing_of_questions_asks_ray(package):
    past = {
        f"{name}: {used}"
        for name, tree in sources(package).items()
        if not name.startswith("_ray/")
        for used in of_ray(tree)
        if used not in FREE and (name, used) not in ELSEWHERE
    }
    assert not past


def asks(node):
    """The name of a control service's function that a call asks, or of a task or actor that it starts."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called == "remote" and isinstance(node.func, ast.Attribute):
        on = node.func.value
        # `task.options(…).remote()` and `ray.remote(…)(fn).remote()` send code; a handle's method does not.
        return "remote" if isinstance(on, ast.Call) else ""
    bounded = any(keyword.arg == "timeout_s" for keyword in node.keywords)
    return called if called in ASKING and not bounded else ""


def outside_of_questions(node, in_question=False, questions=frozenset()):
    """What is asked where no call of `ask` is around it."""
    if isinstance(node, ast.FunctionDef):
        in_question = node.name in questions
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "ask":
            in_question = True
        elif not in_question and (found := asks(node)):
            yield f"line {node.lineno}: {found}"
    for child in ast.iter_child_nodes(node):
        yield from outside_of_questions(child, in_question, questions)


def named_questions(tree):
    """Functions that are handed to `ask`, or called in a question, by their names."""
    asked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ask"
    ]
    return frozenset(part.id for call in asked for part in ast.walk(call) if isinstance(part, ast.Name))


@pytest.mark.hostile
@pytest.mark.parametrize("package", WITH_RAY)
def test_the_wing_asks_only_in_questions(package):
    past = {
        f"{name}: {found}"
        for name, tree in sources(package).items()
        if name.startswith("_ray/") and name != "_ray/gate.py"
        for found in outside_of_questions(tree, questions=named_questions(tree))
    }
    assert not past


# What goes through Ray's connection without asking its control service, and would make Ray connect by itself.
CONNECTING = {"remote", "put", "kill", "cancel", "get", "wait", "get_actor", "get_runtime_context"}
OVER_A_SESSION = ("while_connected", "never_connecting", "ask", "over_session")
IN_ONE = {
    ("_ray/session.py", "wait"): "part of a wait over a session",
    ("_ray/waiting.py", "wait"): "part of a wait over a session",
    ("_ray/bulletin.py", "get_actor"): "part of a question",
    ("_calls/sizes.py", "put"): "who sends does it, over a session",
    ("_calls/sending.py", "put"): "who sends does it, over a session",
    ("_worker/shell.py", "get"): "in the worker: values of a call that Ray has sent there",
    (
        "rollouts/samples/_channels/remote.py",
        "remote",
    ): "what translates Ray's errors does it, over a session",
    ("_devices/probe.py", "get_runtime_context"): "in a task",
    ("_ray/compat.py", "get_runtime_context"): "in the worker: where it is, and which call it is in",
    ("_fan_out/processes/host.py", "get_runtime_context"): "in the worker",
}


def connecting(tree):
    """Calls that would connect, where nothing says over which session; names are not looked through."""
    for node in beside_sessions(tree):
        called = node.func
        if not isinstance(called, ast.Attribute):
            continue
        if called.attr in CONNECTING and is_ray(called.value) != (called.attr == "remote"):
            yield node.lineno, called.attr


def beside_sessions(node):
    if isinstance(node, ast.With) and any(
        names(item.context_expr) & {*OVER_A_SESSION} for item in node.items
    ):
        return
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "ask":
            return
        yield node
    for child in ast.iter_child_nodes(node):
        yield from beside_sessions(child)


def names(tree):
    nodes = list(ast.walk(tree))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {
        n.id for n in nodes if isinstance(n, ast.Name)
    }


@pytest.mark.hostile
@pytest.mark.parametrize("package", WITH_RAY)
def test_nothing_is_sent_but_over_a_session(package):
    past = {
        f"{name}: line {line}: {called}"
        for name, tree in sources(package).items()
        for line, called in connecting(tree)
        if (name, called) not in IN_ONE
    }
    assert not past


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("handle.method.remote()", True),
        ("with session.while_connected():\n    handle.method.remote()", False),
        ("ask(lambda: f.remote())", False),
        ("ray.remote(f)", False),
        ("ray.put(1)", True),
        ("ray_module().put(1)", True),
        ("queue.put(1)", False),
    ],
)
def test_what_may_connect_is_seen(text, seen):
    assert bool(list(connecting(ast.parse(text)))) == seen


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("ask(lambda: ray.kill(actor))", False),
        ("ray.kill(actor)", True),
        ("def f():\n    ray.kill(actor)\nask(f)", False),
        ("ray.remote(f).options(num_cpus=0).remote()", True),
        ("handle.method.remote()", False),
        ("client.get_cluster_status(timeout_s=10)", False),
    ],
)
def test_a_question_past_the_gate_is_seen(text, seen):
    tree = ast.parse(text)
    assert bool(list(outside_of_questions(tree, questions=named_questions(tree)))) == seen


@contextlib.contextmanager
def of_tensor_transport():
    switch = auto_connect()
    switch.refusals += 1
    yield
    switch.refusals -= 1


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("first", "second"),
    [(of_cluster_core, of_tensor_transport), (of_tensor_transport, of_cluster_core)],
    ids=["cluster-core first", "tensor-transport first"],
)
def test_packages_keep_ray_from_connecting_within_each_other(first, second, monkeypatch):
    hook, elsewhere = importlib.import_module("ray._private.auto_init_hook"), []
    monkeypatch.setattr(hook, "enable_auto_connect", True)
    switches = set()
    for _ in range(3):
        with first():
            with second():
                assert not hook.enable_auto_connect
                thread = threading.Thread(target=lambda: elsewhere.append(bool(hook.enable_auto_connect)))
                thread.start()
                thread.join()
            assert not hook.enable_auto_connect
        assert hook.enable_auto_connect
        with second():
            assert not hook.enable_auto_connect
        assert hook.enable_auto_connect
        switches.add(id(hook.enable_auto_connect))
    assert elsewhere == [True] * 3, "other threads, and the user, connect as before"
    assert len(switches) == 1, "no switch is put over another again and again"
