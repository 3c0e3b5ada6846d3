"""A generator whose engine only adds: what the driver's side does can be seen without a model."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "generation"))

from generation.engine import EngineLoad, LoadingEngine, Piece
from generation.prompts import Limits
from generation.worker import GenerationWorker
from raycrew.tensor_transport import WeightPublisher
from raycrew.worker_groups import current_worker

MODEL = {"model_type": "echo"}
VOCABULARY = 97


class EchoEngine(LoadingEngine):
    """The next token is the last one and the weight; the log-probability is the weight."""

    limits = Limits(VOCABULARY, 1000)
    weights: ClassVar = {"add": torch.zeros(1, device="meta")}

    loads_to_fail = 0
    failure = None  # of the next steps
    ends = aborts = True

    def __init__(self):
        self.add_up, self.requests = 0, deque()

    def add(self, request):
        self.requests.append((request, [*request.prompt]))

    def step(self):
        time.sleep(0.002)
        if self.failure is not None:
            raise self.failure
        pieces = [self._next(request, tokens) for request, tokens in self.requests]
        self.abort([piece.request_id for piece in pieces if piece.finish_reason])
        return pieces

    def _next(self, request, tokens):
        tokens.append((tokens[-1] + self.add_up + (request.seed or 0)) % VOCABULARY)
        is_last = len(tokens) == len(request.prompt) + request.max_tokens
        return Piece(request.id, tokens[-1:], [float(self.add_up)], "length" if is_last else None)

    def abort(self, request_ids):
        if not self.aborts:
            raise RuntimeError("the engine does not answer")
        gone = set(request_ids)
        self.requests = deque(pair for pair in self.requests if pair[0].id not in gone)

    def load_weights(self, weights):
        ((_, tensor),) = weights
        if self.loads_to_fail:
            self.loads_to_fail -= 1
            raise RuntimeError("the engine has no room")
        self.add_up = int(tensor)

    def forget_computed(self):
        pass

    def reset_prefix_cache(self):
        pass

    def load(self):
        return EngineLoad(len(self.requests), 0, 0.0)

    def close(self):
        if not self.ends:
            raise RuntimeError("a process of its does not end")

    def explain(self):
        return "an engine that adds"


class EchoWorker(GenerationWorker):
    def create_engine(self, seed):
        return EchoEngine()


class AdaptedEngine(EchoEngine):
    """With an adapter, the next token is told by what lies in its folder now, as if it were read anew."""

    def __init__(self):
        super().__init__()
        self.adapters = {}

    def add(self, request):
        if request.adapter is not None:
            self.check_adapter(request.adapter)
        super().add(request)

    def load_adapter(self, name, path):
        self.adapters[name] = Path(path)

    def unload_adapter(self, name):
        self.check_adapter(name)
        del self.adapters[name]

    def _next(self, request, tokens):
        found = super()._next(request, tokens)
        if request.adapter is not None:
            tokens[-1] = found.tokens[0] = int(self.adapters[request.adapter].read_text())
        return found


class AdaptedWorker(GenerationWorker):
    def create_engine(self, seed):
        return AdaptedEngine()


class FallingEngine(EchoEngine):
    """Takes the process of rank 1 along when that is to load a version after which a file is called."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def load_weights(self, weights):
        ((name, tensor),) = weights
        mark = self.folder / str(int(tensor))
        if current_worker().rank == 1 and mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        super().load_weights([(name, tensor)])


class FallingWorker(GenerationWorker):
    def create_engine(self, seed):
        return FallingEngine(self.options.more["folder"])


class HostEngine(EchoEngine):
    """Has a process of its own, and is lost with it."""

    def __init__(self):
        super().__init__()
        self.process = subprocess.Popen(["sleep", "600"])

    def watch(self, lost):
        def wait():
            lost(f"its process has ended with {self.process.wait()}")

        threading.Thread(target=wait, daemon=True).start()


class HostWorker(GenerationWorker):
    def create_engine(self, seed):
        return HostEngine()


class EchoTrainer:
    def __init__(self, directory, store=None):
        self.publisher, self.version = WeightPublisher(directory=directory, store=store), 0
        self.store = store

    def join_route(self, told):
        return self.store.join(told)

    def publish_weights(self):
        self.version += 1
        return self.publisher.publish({"add": torch.tensor([float(self.version)])})
