"""Workers that are members of a process group over two worker groups."""

import os

import torch

from raycrew.tensor_transport import TransportError
from raycrew.tensor_transport.process_groups import join_group


class Member:
    def __init__(self):
        torch.set_num_threads(1)
        self.group = None
        self.weights = {"a": torch.zeros(1 << 20), "b": torch.zeros(3, dtype=torch.bfloat16)}

    def join_group(self, invitation):
        if self.group is not None:
            self.group.close()
        self.group = join_group(invitation, timeout_s=60)
        return self.group.rank, self.group.generation

    def train(self, value):
        for tensor in self.weights.values():
            tensor.fill_(value)

    def send(self, manifest):
        self.group.send(list(self.weights.values()), manifest=manifest, timeout_s=60).wait()

    def receive(self, manifest):
        try:
            self.group.receive(list(self.weights.values()), manifest=manifest, timeout_s=60).wait()
        except TransportError as error:
            return type(error).__name__, getattr(error, "members", ())
        return self.held()

    def held(self):
        return [sorted(set(tensor.float().tolist())) for tensor in self.weights.values()]

    def die(self):
        os.kill(os.getpid(), 9)
