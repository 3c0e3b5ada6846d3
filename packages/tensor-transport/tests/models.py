"""A model to load weights into, and weights for it."""

import torch


class Model:
    """Loads into a dictionary, as a generator would."""

    def __init__(self):
        self.tensors = {}

    def load(self, tensors):
        for name, tensor in tensors:
            self.tensors[name] = tensor.clone()


def weights(seed=0, layers=4):
    g = torch.Generator().manual_seed(seed)
    found = {f"layer.{i}.weight": torch.randn(8, 16, generator=g) for i in range(layers)}
    found["scale"] = torch.tensor(2.5 + seed, dtype=torch.bfloat16)
    found["empty"] = torch.empty(0, 3)
    found["ids"] = torch.arange(7)
    found["mask"] = torch.tensor([True, False, True])
    return found


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert left[name].shape == right[name].shape, name
        assert torch.equal(left[name], right[name]), name
