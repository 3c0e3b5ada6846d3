"""The Python blocks of the README of the generation library, for tests that run them."""

import re
import textwrap
from contextlib import closing

from generation_echo import MODEL, EchoTrainer
from generation_stage import EXAMPLE

from generation import EngineOptions, start_generators
from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected
from raycrew.tensor_transport import WeightDirectory


def block_with(words):
    """The only block that has some words in it."""
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", (EXAMPLE / "README.md").read_text(), re.M | re.S)
    (block,) = (block for block in blocks if words in block)
    assert len(blocks) == 3, "each is run by a test"
    return textwrap.dedent(block)


def run_on_echoes(words, session, names_of, store=None):
    """Run the only block that has some words in it, with generators whose engine only adds.

    Args:
        words: What is in it.
        session: Of Ray.
        names_of: What else is there for the block, of the trainer.
        store: Where the trainer publishes.
    """

    def start(cluster, worker, options, **how):
        return start_generators(cluster, "generation_echo.EchoWorker", options, **how)

    with (
        connected(session),
        WeightDirectory.start() as directory,
        RayVirtualCluster([1], use_gpus=False) as cluster,
    ):
        trainer = EchoTrainer(directory, store)
        with closing(trainer.publisher):
            names = {"start_generators": start, "cluster": cluster, "options": EngineOptions(MODEL)}
            exec(block_with(words), names | {"directory": directory} | names_of(trainer))
