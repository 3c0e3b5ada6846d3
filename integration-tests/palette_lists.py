"""As `palette_workers`, with batches of plain lists: their environments hold little."""

import palette

Batch = dict[str, list]


class Painter:
    """Makes batches, and reads those of a painter of another kind."""

    def version(self) -> str:
        return palette.VERSION

    def paint(self, rows: int) -> Batch:
        return {"canvas": [float(n) for n in range(rows * 4)], "signature": [palette.VERSION] * rows}

    def read(self, batch: Batch) -> tuple[str, float, list[str]]:
        return palette.VERSION, sum(batch["canvas"]), batch["signature"]


class Restorer(Painter):
    """The same, in another environment."""
