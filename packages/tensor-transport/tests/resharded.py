"""Layouts acted out with numpy: what ranks hold of whole arrays, moved element by element."""

import numpy as np
from numpy.lib.stride_tricks import as_strided


def at(memory, region):
    """A region of a 1-D array, as an array."""
    strides = [s * memory.itemsize for s in region.strides]
    if not region.size:
        return memory[:0].reshape(region.shape)
    return as_strided(memory[region.offset :], region.shape, strides)


def memories(layout, fill=-1):
    """rank -> parameter -> its memory, 1-D, with nothing in it yet."""
    found = {}
    for name, tensor in layout.tensors.items():
        names = tensor.parameters or (name,)
        for share in tensor.shares:
            held = found.setdefault(share.rank, {})
            held.setdefault(names[share.parameter], np.full(share.memory.size, fill, np.int64))
    return found


def held_of(layout, whole):
    """What each rank holds of whole arrays."""
    found = memories(layout)
    for name, tensor in layout.tensors.items():
        names = tensor.parameters or (name,)
        for share in tensor.shares:
            for block in share.blocks:
                part = whole[name][tuple(map(slice, block.start, np.add(block.start, block.region.shape)))]
                at(found[share.rank][names[share.parameter]], block.region)[...] = part
    return found


def whole_of(layout, held):
    """Whole arrays, from what ranks hold; -1 where nobody holds anything."""
    found = {}
    for name, tensor in layout.tensors.items():
        found[name] = np.full(tensor.shape, -1, np.int64)
        names = tensor.parameters or (name,)
        for share in tensor.shares:
            for block in share.blocks:
                part = at(held[share.rank][names[share.parameter]], block.region)
                found[name][tuple(map(slice, block.start, np.add(block.start, block.region.shape)))] = part
    return found


def act_out(plan, source, target):
    """What the targets hold after the plan, from nothing; and how often each element was written."""
    found, written = memories(target), memories(target, 0)
    for move in plan.moves():
        values = at(source[move.source_rank][move.source_parameter], move.source)
        at(found[move.target_rank][move.target_parameter], move.target)[...] = values
        at(written[move.target_rank][move.target_parameter], move.target)[...] += 1
    return found, written


def numbered(shapes):
    """Whole arrays in which each element is a number of its own."""
    found, first = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        found[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return found
