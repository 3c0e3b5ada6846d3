"""A trainer without a model for a generator that only adds, with memory that it gives up."""

import os
from pathlib import Path

import torch

from raycrew.tensor_transport import WeightPublisher

SIZE = 64 << 20


class EchoLearner:
    """Learns how often it has learnt, and keeps that in a file while it sleeps."""

    def __init__(self, config, directory, folder, asleep=False):
        self.publisher, self.file = WeightPublisher(directory=directory), Path(folder) / "learnt"
        self.moments, self.learnt = None, 0
        if not asleep:
            self.onload()

    def pid(self):
        return os.getpid()

    def learn(self, prompts, samples):
        if self.moments is None:
            raise RuntimeError("it sleeps")
        self.learnt += 1
        return float(self.learnt)

    def learn_and_publish(self, prompts, samples):
        reward = self.learn(prompts, samples)
        self.publish_weights()
        return reward

    def publish_weights(self):
        return self.publisher.publish({"add": torch.tensor([float(self.learnt)])}).version

    def offload(self):
        self.file.write_text(str(self.learnt))
        self.moments = None

    def onload(self):
        if self.moments is None:
            self.moments = b"x" * SIZE
            self.learnt = int(self.file.read_text()) if self.file.exists() else 0
