"""The processes of workers, and those that they have started."""

from raycrew.worker_groups._on_nodes import marks_of, read_table


def worker_processes() -> dict[int, frozenset[str]]:
    """The processes of this machine that are workers on Ray or come from workers, with the marks of those.

    Each worker has a mark, which all that it starts carries on, whatever becomes of the worker. So a process
    that shares no mark with a living worker was left behind by one that is gone. Zombies don't count, nor do
    processes that this user may not look into.

    Raises:
        OSError: The process table can't be read.

    Examples:
        >>> living = group.call("pid").get_results()
        >>> marks = worker_processes()
        >>> known = frozenset().union(*(marks[pid] for pid in living))
        >>> [pid for pid, carried in marks.items() if not carried & known]
        []
    """
    carried = {pid: marks_of(pid) for pid in read_table()}
    return {pid: marks for pid, marks in carried.items() if marks}
