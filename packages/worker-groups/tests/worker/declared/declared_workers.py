"""Workers whose methods say how they are called; and a batch, as other packages have them."""

import os
from pathlib import Path

import ray

from raycrew.worker_groups import current_worker, per_rank, rank_zero, replicated, sharded


class Batch:
    """Rows, and what belongs to all of them."""

    def __init__(self, rows, note=""):
        self.rows, self.note = list(rows), note

    @property
    def size(self):
        return len(self.rows)

    def slice(self, start, end):
        return Batch(self.rows[start:end], self.note)

    def shard(self, n):
        size = len(self.rows) // n
        return [self.slice(i * size, (i + 1) * size) for i in range(n)]

    def pad_to_divisor(self, divisor):
        added = -self.size % divisor
        return Batch([self.rows[i % self.size] for i in range(self.size + added)], self.note), added

    @classmethod
    def concat(cls, parts):
        return cls([row for part in parts for row in part.rows], parts[0].note)

    def __eq__(self, other):
        return isinstance(other, Batch) and (self.rows, self.note) == (other.rows, other.note)

    __hash__ = None


class Array:
    """As libraries of arrays have them: this module is the library."""

    dtype = "int"

    def __init__(self, values):
        self.values = values

    @property
    def shape(self):
        return (len(self.values),) if isinstance(self.values, list) else ()

    def __len__(self):
        return len(self.values)

    def __getitem__(self, rows):
        return Array(self.values[rows])

    def __add__(self, other):
        return Array([a + b for a, b in zip(self.values, other.values, strict=True)])

    def __truediv__(self, n):
        return Array([value / n for value in self.values])

    def __eq__(self, other):
        return isinstance(other, Array) and self.values == other.values

    __hash__ = None


def concat(arrays):
    return Array([value for array in arrays for value in array.values])


class Handle(Array):
    """A handle of an array that lies elsewhere: its `shard` says where."""

    @property
    def shard(self):
        raise ValueError("there are several")

    @classmethod
    def concat(cls, parts):
        return concat(parts)

    def __getitem__(self, rows):
        return Handle(self.values[rows])


class Dealt:
    """What was split before, and has no rows of its own."""

    def __init__(self, *shards):
        self.shards = list(shards)

    def shard(self, n):
        return self.shards[:n]

    @classmethod
    def concat(cls, parts):
        return parts


def longest(results):
    return max(results, key=len)


def refusing(results):
    raise RuntimeError(f"{len(results)} are too many")


class Policy:
    @sharded("dp")
    def train(self, batch):
        return batch

    @sharded("dp", pad=True)
    def score(self, rows):
        return [row * 10 for row in rows]

    @sharded("dp", pad=True, collect="list")
    def score_each(self, rows):
        return [row * 10 for row in rows]

    @sharded("dp", split=["ids", "mask"], collect="list")
    def update(self, ids, mask=None, *, lr=1.0):
        return current_worker().rank, ids, mask, lr

    @sharded("dp", split="more", collect="list")
    def several(self, *more, **rest):
        return more, rest

    @sharded("dp", pad=True)
    def loss(self, rows):
        return float(sum(rows))

    @sharded("dp", pad=True)
    def more_rows(self, rows):
        return [*rows, *rows]

    @sharded("dp", pad=True)
    def just_do(self, rows):
        pass

    @sharded("dp")
    def grow(self, rows):
        """Results of unequal lengths."""
        return rows * (1 + current_worker().rank)

    @sharded("dp")
    def odd_none(self, rows):
        return None if current_worker().rank else rows

    @sharded("dp")
    def odd_kind(self, rows):
        return Batch(rows) if current_worker().rank else rows

    @sharded("dp", collect="mean")
    def metrics(self, rows):
        return {"loss": float(sum(rows)), "rows": len(rows)}

    @sharded("dp", collect="sum")
    def count(self, rows):
        return len(rows)

    @sharded("dp", collect=longest)
    def text(self, rows):
        return "x" * sum(rows)

    @sharded("dp", collect=refusing)
    def refused(self, rows):
        return rows

    @sharded("dp", collect="list", results_at={"tp": -1})
    def last_stage(self, rows):
        return current_worker().rank

    @sharded("dp", collect="list", split=())
    def where(self):
        return current_worker().rank

    @sharded("dp", collect="list")
    async def slowly(self, rows):
        return current_worker().rank, rows

    @replicated
    def step(self, lr, *, scale=1):
        return current_worker().rank, lr * scale

    @replicated(collect="list")
    def ranks(self):
        return current_worker().rank

    @rank_zero
    def save(self, path):
        return current_worker().rank, path

    @per_rank
    def seed(self, number):
        return current_worker().rank, number

    @per_rank(split="number")
    def seed_with(self, number, salt):
        return number + salt

    def plain(self, value):
        return value

    def take(self, value):
        return value

    def rank(self, value):
        return current_worker().rank


class Stoic:
    """Methods that take their time, or end their process."""

    @sharded("dp", split="rows")
    def die_once(self, rows, marker):
        if current_worker().rank == 1 and not Path(marker).exists():
            Path(marker).touch()
            os._exit(7)
        return [(current_worker().generation, row) for row in rows]

    @sharded("dp", split="rows", collect="list", pad=True)
    def fail_on(self, rows, rank):
        if current_worker().rank == rank:
            raise ValueError("told to")
        return rows


@ray.remote(num_cpus=0)
class Decorated:
    @sharded("dp")
    def echo(self, rows):
        return rows

    @ray.method(num_returns=1)
    @rank_zero
    def save(self, path):
        return path

    @rank_zero
    @ray.method(num_returns=1)
    def load(self, path):
        return path


class Overriding(Policy):
    def train(self, batch):
        return batch.slice(0, 1)

    @rank_zero
    def score(self, rows):
        return rows
