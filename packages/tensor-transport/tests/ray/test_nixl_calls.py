"""What Ray is asked for where bytes go by NIXL, which needs not be installed: calls that this Ray knows."""

import contextlib
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._ray import objects
from raycrew.tensor_transport.errors import DamagedBytesError
from raycrew.tensor_transport.transports import NixlTransport, Region

ray = pytest.importorskip("ray")
rdt = pytest.importorskip("ray.experimental.rdt")


class Ref:
    """Stands for an object that stays where it is."""

    def __init__(self, value):
        self.value, self.target = value, None

    def hex(self):
        return str(id(self))


class FakeNixl:
    """Answers in Ray's place, as NIXL would move bytes; what it is asked has to fit Ray's own functions."""

    def __init__(self, monkeypatch):
        self.asked = []
        fake = {
            (ray, "put"): lambda value, **_: Ref(value),
            (ray, "get"): lambda ref, **_: self.move(ref),
            (rdt, "set_target_for_ref"): lambda ref, target: setattr(ref, "target", target),
            (rdt, "register_nixl_memory_pool"): lambda *_: None,
        }
        for (module, name), answer in fake.items():
            monkeypatch.setattr(
                module, name, self.noted(name, inspect.signature(getattr(module, name)), answer)
            )
        monkeypatch.setattr(objects, "is_beside", lambda: False)
        session = SimpleNamespace(while_connected=contextlib.nullcontext)
        monkeypatch.setattr(objects, "current_session", lambda: session)
        monkeypatch.setattr(NixlTransport, "available", lambda _: None)

    def noted(self, name, signature, answer):
        def call(*args, **options):
            self.asked.append((name, signature.bind(*args, **options).arguments))
            return answer(*args, **options)

        return call

    def move(self, ref):
        if ref.target is None:
            return [value.clone() for value in ref.value]
        for value, target in zip(ref.value, ref.target, strict=True):
            target.copy_(value)
        return ref.target

    def options_of(self, name):
        return [arguments for asked, arguments in self.asked if asked == name]


@pytest.fixture
def nixl(monkeypatch):
    assert _ray.moves_by_nixl()
    return FakeNixl(monkeypatch)


def test_what_is_offered_stays_and_is_moved_into_the_buffer_itself_unless_there_is_a_deadline(nixl):
    source, into = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    with NixlTransport() as transport:
        offer = transport.offer(source, folded=True)
        (put,) = nixl.options_of("put")
        assert put["_tensor_transport"] == "nixl" and put["value"][0].data_ptr() == source.data_ptr()
        transport.pull([offer.whole], [into]).wait(60)
        (target,) = nixl.options_of("set_target_for_ref")
        assert target["ref"] is offer.key and target["target"][0].data_ptr() == into.data_ptr()
        assert torch.equal(into, source)

        late = transport.offer(source)
        into.zero_()
        transport.pull([late.whole], [into], timeout_s=60).wait()
        part = np.zeros(16, np.uint8)
        transport.pull([Region(late, 8, 16)], [part]).wait(60)
        assert torch.equal(into, source) and part.view(np.int64).tolist() == [1, 2]
        assert len(nixl.options_of("set_target_for_ref")) == 1, "what was given up may still be written"
        assert nixl.options_of("get")[1]["timeout"] == pytest.approx(60, abs=60)

        source[3] = 0
        with pytest.raises(DamagedBytesError):
            transport.pull([offer.whole], [into]).wait(60)


def test_memory_is_registered_once_for_what_is_received(nixl):
    with NixlTransport(pool_bytes=1 << 20):
        (pool,) = nixl.options_of("register_nixl_memory_pool")
        assert list(pool.values()) == [1 << 20, torch.device("cpu")]
    NixlTransport().close()
    assert len(nixl.options_of("register_nixl_memory_pool")) == 1
