"""Routes whose bytes are on devices: what is chosen for all, and updates over each, on the CPU, too."""

import pytest
import streaming
import torch
from models import assert_same, weights
from streaming import TIMEOUT_S, sync

from raycrew.tensor_transport import RouteStore, WeightDirectory, WeightRoute, WeightUpdateError
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.tensor_transport.transports import CudaIpcTransport, MemberFacts, Owner
from raycrew.tensor_transport.weights._routing import Place
from raycrew.tensor_transport.weights._syncing.session import members_of

VERSIONS = {"raycrew-tensor-transport": "1", "torch": "2", "nccl": "2.29"}


class Member:
    """Says of itself what it is told to, and joins nothing."""

    def __init__(self, number, machine, gpus):
        owner = Owner(machine, "ns", number, number)
        self.facts = MemberFacts(owner, machine, 0, machine, 1 << 30, "c", gpus, VERSIONS)
        self.told = None

    def join_route(self, told):
        self.told = told or self.told
        return Place(self.facts, "" if told is None else told.key)


@pytest.mark.parametrize(
    ("places", "asked", "chosen", "kept_in"),
    [
        ([("m0", "0"), ("m0", "10"), ("m0", "2")], "auto", "nccl", "object_store"),
        ([("m0", "0"), ("m1", "1"), ("m2", "2")], "auto", "nccl", "object_store"),
        ([("m0", "01"), ("m0", "01"), ("m0", "10")], "auto", "cuda_ipc", "cuda_ipc"),
        ([("m0", "0"), ("m0", "0"), ("m0", "1")], "auto", "shared_memory", "shared_memory"),
        ([("m0", "0"), ("m0", ""), ("m0", "1")], "auto", "shared_memory", "shared_memory"),
        ([("m0", "0"), ("m1", "1"), ("m1", "2")], ["gloo", "nccl"], "gloo", "object_store"),
    ],
)
def test_one_transport_is_chosen_for_bytes_on_devices_from_what_all_see(places, asked, chosen, kept_in):
    workers = [Member(i, machine, tuple(gpus)) for i, (machine, gpus) in enumerate(places)]
    trainer, generators = (members_of([LocalPeers(each)], None) for each in (workers[:1], workers[1:]))
    with WeightRoute(asked, device="cuda", timeout_s=TIMEOUT_S) as route:
        key = route.connect(trainer, generators, TIMEOUT_S)
        told = [worker.told for worker in workers]
        assert {each.key for each in told} == {key}
        found = {(each.transport, each.kept_in, each.device) for each in told}
        assert found == {(chosen, kept_in, "cuda")}
        invited = {invitation.backend for each in told for invitation in each.invitations}
        assert invited == ({chosen} & {"nccl", "gloo"})
        assert {each.explanation for each in told} == {route.explain()}
        assert route.explain().startswith("broadcast of cuda bytes, 3 members")


@pytest.mark.parametrize(
    ("transport", "device", "match"),
    [
        (
            "nccl",
            "cpu",
            "must be 'auto', or of shared_memory, gloo, .* for device='cpu'; got 'nccl'",
        ),
        ("cuda_ipc", "cpu", "for device='cpu'"),
        (["nccl", "nixl"], "cuda", "or of nccl, cuda_ipc, shared_memory, .* for device='cuda'"),
        ("auto", "tpu", "device must be of cpu, cuda; got 'tpu'"),
    ],
)
def test_devices_and_what_does_not_go_with_them_are_refused_at_once(transport, device, match):
    with pytest.raises(ValueError, match=match):
        WeightRoute(transport, device=device)


class Trainer(streaming.Trainer):
    def __init__(self, directory, device, stores):
        self.store, self.device = RouteStore(stores), device
        super().__init__(self.store, directory)

    def join_route(self, told):
        return joined(self, told)

    def mine(self):
        return {name: tensor.to(self.device) for name, tensor in weights(self.seed).items()}


class Generator(streaming.Generator):
    def __init__(self, directory, device, stores):
        self.store, self.device, self.found = RouteStore(stores), device, set()
        super().__init__(self.store, directory, rollback="shadow")
        self.fails = False

    def join_route(self, told):
        return joined(self, told)

    def load(self, tensors):
        for i, (name, tensor) in enumerate(tensors):
            if self.fails and i == 3:
                self.fails = False
                raise RuntimeError("no room")
            self.found.add(tensor.device)
            self.model.load([(name, tensor)])

    def holds(self, seed):
        assert_same({name: t.cpu() for name, t in self.model.tensors.items()}, weights(seed))


def joined(worker, told):
    """As in a process of its own, whose current device is its own one."""
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
    return worker.store.join(told)


def devices(kind, own):
    """One for the trainer and one for the generator."""
    if kind == "cpu":
        return [torch.device("cpu")] * 2
    if own and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return [torch.device("cuda", i * own) for i in range(2)]


@pytest.mark.parametrize(
    ("transport", "device"),
    [
        ("gloo", "cpu"),
        ("shared_memory", "cpu"),
        pytest.param("nccl", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda_ipc", "cuda", marks=pytest.mark.gpu),
        pytest.param("shared_memory", "cuda", marks=pytest.mark.gpu),
        pytest.param("gloo", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("prepare", ["prepare_weights", None])
def test_updates_arrive_on_the_device_of_the_route_and_roll_back_there(transport, device, prepare):
    first, second = devices(device, transport == "nccl")
    with (
        CudaIpcTransport() as ipc,  # No process opens its own memory as another one's.
        WeightDirectory.local(keep=2) as directory,
        WeightRoute(transport, device=device, timeout_s=TIMEOUT_S) as route,
    ):
        stores = {"cuda_ipc": ipc}
        trainer, generator = Trainer(directory, first, stores), Generator(directory, second, stores)
        late = Generator(directory, torch.device("cpu"), stores)

        def update(seed):
            trainer.seed = seed
            options = {"route": route, "prepare": prepare, "publish": "publish_mapping"}
            return sync([trainer], [generator], directory, **options)

        assert update(1).version == 1
        assert route.choice.name == transport
        generator.holds(1)
        generator.fails = True
        with pytest.raises(WeightUpdateError, match="no room"):
            update(2)
        generator.holds(1)
        assert generator.receiver.intact and generator.receiver.version == 1
        assert update(3).version > 1
        generator.holds(3)
        assert generator.found == {second}
        late.receiver.pull(timeout_s=TIMEOUT_S)
        late.holds(3)
        for each in (trainer, generator, late):
            each.store.close()
