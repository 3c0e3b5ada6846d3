"""The table of roles: who asks for one that comes or goes meanwhile, without workers."""

import threading
from types import SimpleNamespace

import pytest

from raycrew.worker_groups.scheduling import Job, WorkerNotFoundError
from raycrew.worker_groups.scheduling._roles import Role, Roles

ACTOR = Job("actor", 1)


def taken_in(roles, job=ACTOR):
    role = Role(job, ())
    with roles.creating(job) as take_in:
        take_in(role)
    return role


def test_who_waits_for_a_role_to_be_deleted_does_not_delete_the_next_one_of_its_name():
    waits, told = threading.Event(), []

    class Told(Roles):
        def await_role(self, name, deadline):
            if threading.current_thread() is waiting:
                waits.set()
            return super().await_role(name, deadline)

    def delete():
        try:
            with roles.deleting("actor", None):
                told.append("deleted")
        except WorkerNotFoundError as error:
            told.append(str(error.args[0]))

    roles, waiting = Told(), threading.Thread(target=delete)
    taken_in(roles)
    with roles._changed:
        with roles.deleting("actor", None):
            waiting.start()
            while not waits.is_set():
                roles._changed.wait(0.05)
        second = taken_in(roles)
    waiting.join()
    assert "created anew" in told[0]
    assert roles.await_role("actor", None) is second


def test_an_unknown_id_is_told_of_while_roles_come():
    roles, threads = Roles(), []

    class Coming:
        """A job during whose reading another role comes."""

        role, scheduling_strategy = "slow", SimpleNamespace(target="", shares_with="")

        @property
        def worker_ids(self):
            threads.append(threading.Thread(target=taken_in, args=(roles,)))
            threads[0].start()
            threads[0].join(0.2)
            return ["slow/0"]

    taken_in(roles, Coming())
    with pytest.raises(WorkerNotFoundError, match="slow/0"):
        roles.seat("other/0")
    threads[0].join()
    assert roles.names() == ["actor", "slow"]
