"""An engine of vLLM in a process of its own, whose weights come over a route; imported only where vLLM is."""

from vllm_engines import start

from raycrew.tensor_transport import RouteStore
from raycrew.tensor_transport.integrations.vllm import VllmWeights


class Engine:
    """A worker with an engine."""

    def __init__(self, kind, directory):
        self.store = RouteStore()
        self.weights = VllmWeights(
            start(kind, gpu_memory_utilization=0.3), store=self.store, directory=directory
        )

    def join_route(self, told):
        return self.store.join(told)

    def prepare_weights(self, version):
        return self.weights.prepare_weights(version)

    def apply_weights(self, version):
        return self.weights.apply_weights(version)

    def check(self, references, tolerance):
        return self.weights.check(references, tolerance=tolerance)

    def explain_route(self):
        return self.store.explain()
