"""A trainer that learns nothing: each version of its weights is random. Known to the driver by name only."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raycrew.tensor_transport import RouteStore, WeightDirectory, WeightPublisher, WeightUpdate


class RandomTrainer:
    """Publishes other weights each time.

    Args:
        config: The model's configuration.
        directory: Where its versions are found.
    """

    def __init__(self, config: Mapping[str, Any], directory: WeightDirectory) -> None:
        self.config, self.seed = config, 0
        self.store = RouteStore()
        self.publisher = WeightPublisher(self.store, directory=directory)

    def join_route(self, told: Any) -> Any:
        """Send versions over the way that a `WeightRoute` has chosen for all."""
        return self.store.join(told)

    def publish_weights(self) -> WeightUpdate:
        """The next version."""
        self.seed += 1
        torch.manual_seed(self.seed)
        config = AutoConfig.for_model(**self.config)
        return self.publisher.publish(AutoModelForCausalLM.from_config(config).state_dict())
