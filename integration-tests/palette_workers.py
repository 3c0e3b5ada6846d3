"""Workers of kinds that need different versions of the package `palette`; the driver has none of it."""

import palette
import torch

from raycrew.tensor_transport import BatchedDataDict


class Painter:
    """Makes batches, and reads those of a painter of another kind."""

    def version(self) -> str:
        return palette.VERSION

    def paint(self, rows: int) -> BatchedDataDict:
        return BatchedDataDict(
            {
                "canvas": torch.arange(rows * 4, dtype=torch.float32).reshape(rows, 4).to(torch.bfloat16),
                "signature": [palette.VERSION] * rows,
            }
        )

    def read(self, batch: BatchedDataDict) -> tuple[str, float, list[str]]:
        return palette.VERSION, batch["canvas"].float().sum().item(), list(batch["signature"])


class Restorer(Painter):
    """The same, in another environment."""
