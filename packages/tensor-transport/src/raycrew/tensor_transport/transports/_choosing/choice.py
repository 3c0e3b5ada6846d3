"""Which transport a group uses: decided once, purely, from what all of its members say."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from raycrew.tensor_transport.errors import NoTransportError
from raycrew.tensor_transport.transports._choosing.facts import MemberFacts

Purpose = Literal["pull", "broadcast"]
Device = Literal["cpu", "cuda"]
Preference: TypeAlias = str | Sequence[str]
Members: TypeAlias = Sequence[MemberFacts]
Rule: TypeAlias = Callable[[Members], str | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A transport that was considered.

    Attributes:
        name: The transport.
        reason: Why it can't be used by these members; None where it can.
    """

    name: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided for a whole group.

    Attributes:
        name: The transport.
        purpose: What for.
        device: Where the bytes are.
        candidates: All that were considered, the preferred ones first.
        members: How many members there are.
        machines: On how many machines.
        digest: The same wherever the same was decided from the same facts: members compare it.
    """

    name: str
    purpose: Purpose
    device: Device
    candidates: tuple[Candidate, ...]
    members: int
    machines: int
    digest: str

    def explain(self) -> str:
        """One line for the choice, and one for each candidate with its reason."""
        head = (
            f"{self.purpose} of {self.device} bytes, {_count(self.members, 'member')} on "
            f"{_count(self.machines, 'machine')}: {self.name}"
        )
        return "\n".join([head, *_lines(self.candidates, self.name)])


def choose_transport(
    members: Members,
    purpose: Purpose = "pull",
    preference: Preference = "auto",
    *,
    device: Device = "cpu",
    size_bytes: int = 0,
) -> Choice:
    """Choose for a whole group from the facts of all members, in rank order; the same on each of them.

    Args:
        members: `member_facts()` of each member.
        purpose: "pull": members take regions of each other's bytes. "broadcast": all take the same bytes;
            where a store that all of them read is faster than a collective, that is chosen.
        preference: "auto" for the fastest that all can use, or the names to choose from, in order.
        device: Where the bytes are on both sides.
        size_bytes: What one member keeps for others at a time, where that is known.

    Raises:
        ValueError: No members, or a name that is no transport's for this purpose.
        NoTransportError: No candidate can be used by all members; with the reason for each.
    """
    if not members:
        raise ValueError("there are no members to choose a transport for")
    names = _considered(purpose, device, preference)
    candidates = tuple(Candidate(name, _why_not(name, members, size_bytes)) for name in names)
    usable = [candidate.name for candidate in candidates if candidate.reason is None]
    if not usable:
        raise NoTransportError(
            f"no transport for {purpose} of {device} bytes can be used by all {len(members)} members:\n"
            + "\n".join(_lines(candidates, None)),
            reasons={candidate.name: candidate.reason or "" for candidate in candidates},
        )
    machines = len({member.machine for member in members})
    digest = _digest(members, purpose, device, names, size_bytes)
    return Choice(usable[0], purpose, device, candidates, len(members), machines, digest)


def _considered(purpose: Purpose, device: Device, preference: Preference) -> tuple[str, ...]:
    known = {**dict.fromkeys(_AUTO[purpose, device]), **dict.fromkeys(_OPTIONS)}
    if preference == "auto":
        return _AUTO[purpose, device]
    names = (preference,) if isinstance(preference, str) else tuple(preference)
    if not names or (unknown := [name for name in names if name not in known]):
        raise ValueError(
            f"{unknown if names else 'nothing'} to choose from for {purpose} of {device} bytes; "
            f"there are {', '.join(known)}"
        )
    return names


def _why_not(name: str, members: Members, size_bytes: int) -> str | None:
    for rank, member in enumerate(members):
        if name in member.unavailable:
            return f"member {rank} ({member.host}, process {member.owner.pid}): {member.unavailable[name]}"
    reasons = (rule(members) for rule in _RULES[name])
    found = next((reason for reason in reasons if reason is not None), None)
    if found is None and name == "shared_memory":
        found = _no_room(members, size_bytes)
    return found


def _all_same(what: str, value: Callable[[MemberFacts], object]) -> Rule:
    """A rule that all members have the same of something, and have it."""

    def rule(members: Members) -> str | None:
        first = value(members[0])
        for rank, member in enumerate(members):
            found = value(member)
            if found != first:
                return f"members 0 and {rank} differ in {what}: {first or 'none'} and {found or 'none'}"
        return None

    return rule


def _no_room(members: Members, size_bytes: int) -> str | None:
    rank = min(range(len(members)), key=lambda i: members[i].shm_free_bytes)
    free = members[rank].shm_free_bytes
    return (
        f"member {rank} has {free} bytes of shared memory left, {size_bytes} are needed" * (free < size_bytes)
        or None
    )


def _gpu_each(members: Members) -> str | None:
    owners: dict[str, int] = {}
    for rank, member in enumerate(members):
        if not member.gpus:
            return f"member {rank} ({member.host}) has no CUDA device"
        first = owners.setdefault(member.gpus[0], rank)
        if first != rank:
            return f"members {first} and {rank} share the device {member.gpus[0]}"
    return None


def _gpus_seen(members: Members) -> str | None:
    """Each member's device has to be among those that all others see."""
    owners = {member.gpus[0]: rank for rank, member in enumerate(members) if member.gpus}
    for rank, member in enumerate(members):
        for device, owner in owners.items():
            if device not in member.gpus:
                return f"member {rank} ({member.host}) does not see the device {device} of member {owner}"
    return None if owners else "no member has a CUDA device"


def _cluster(members: Members) -> str | None:
    return None if members[0].cluster else "member 0 is not connected to a Ray cluster"


_MACHINE = _all_same("machine", lambda member: member.machine)
_USER = _all_same("user", lambda member: member.uid)
_PIDS = _all_same("the numbering of processes (container)", lambda member: member.owner.pid_namespace)
_SHM = _all_same("shared memory (container)", lambda member: member.shm)
_RAY = _all_same("Ray cluster", lambda member: member.cluster)


def _same_version(package: str) -> Rule:
    return _all_same(f"the version of {package}", lambda member: member.versions.get(package, ""))


_OURS = _same_version("raycrew-tensor-transport")
_RULES: dict[str, tuple[Rule, ...]] = {
    "shared_memory": (_MACHINE, _SHM, _USER, _OURS),
    "process_vm": (_MACHINE, _PIDS, _USER, _OURS),
    "cuda_ipc": (_MACHINE, _PIDS, _USER, _same_version("torch"), _OURS, _gpus_seen),
    "object_store": (_cluster, _RAY),
    "tcp": (_OURS,),
    "nixl": (_cluster, _RAY, _same_version("nixl")),
    "gloo": (_same_version("torch"),),
    "nccl": (_gpu_each, _same_version("nccl")),
}
_OPTIONS = ("nixl",)
_AUTO: dict[tuple[Purpose, Device], tuple[str, ...]] = {
    ("pull", "cpu"): ("shared_memory", "process_vm", "object_store", "tcp"),
    ("pull", "cuda"): ("cuda_ipc", "shared_memory", "process_vm", "object_store", "tcp"),
    ("broadcast", "cpu"): ("shared_memory", "gloo", "object_store", "tcp"),
    ("broadcast", "cuda"): ("nccl", "cuda_ipc", "shared_memory", "gloo", "object_store", "tcp"),
}


def _digest(members: Members, purpose: Purpose, device: Device, names: Sequence[str], size_bytes: int) -> str:
    facts = []
    for m in members:
        where = (m.owner, m.host, m.uid, m.shm, m.shm_free_bytes, m.cluster, m.gpus)
        facts.append((where, sorted(m.versions.items()), sorted(m.unavailable.items())))
    asked = (purpose, device, tuple(names), size_bytes)
    return hashlib.sha256(repr((asked, facts)).encode()).hexdigest()[:16]


def _lines(candidates: Sequence[Candidate], chosen: str | None) -> list[str]:
    width = max(len(candidate.name) for candidate in candidates)
    return [
        f"  {candidate.name:<{width}}  "
        + (candidate.reason or ("chosen" if candidate.name == chosen else "could be used"))
        for candidate in candidates
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
