"""Updates that are made ready ahead, and given up."""

from contextlib import nullcontext

import pytest
import torch

from raycrew.tensor_transport.integrations.vllm._delivery import Ahead


class Stage:
    def lend(self, weights):
        return nullcontext(())


def test_what_failed_is_raised_and_what_workers_say_of_being_told_so_is_logged(caplog):
    def tell(*told, **how):
        raise RuntimeError("no room" if told else "no more calls")

    ahead = Ahead(Stage(), tell, update=None)
    with pytest.raises(RuntimeError, match="no room"):
        ahead.add([("w", torch.ones(1))], lambda work: work())
    assert "may keep an update" in caplog.text and "no more calls" in caplog.text
    caplog.clear()
    ahead.drop(lambda work: work())
    assert not caplog.text
