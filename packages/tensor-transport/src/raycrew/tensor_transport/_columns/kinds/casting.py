"""Values in another dtype: fractions are rounded, everything else is held exactly or refused."""

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport.errors import BatchSchemaError


def cast_tensor(tensor: torch.Tensor, dtype: torch.dtype, key: str, *, lossy: bool = False) -> torch.Tensor:
    """A tensor in another dtype; itself if it has that one.

    Raises:
        BatchSchemaError: A value is not held: an integer, a truth value, a part of a complex number, a
            fraction that would become infinite, or an infinity, NaN, sign or zero that an 8-bit dtype lacks.
    """
    check_dtype(dtype, key)
    if tensor.dtype == dtype:
        return tensor
    if lossy or tensor.is_meta:  # Where there are no values, none is lost.
        return tensor.to(dtype)
    if tensor.is_complex() and not dtype.is_complex:
        raise _not_held(tensor.dtype, dtype, key, "there are no complex numbers in it")
    cast = tensor.to(dtype)
    if tensor.is_floating_point() or tensor.is_complex():
        if not dtype.is_floating_point and not dtype.is_complex:
            if not _same_values(tensor, cast):
                raise _not_held(tensor.dtype, dtype, key, "there are fractions, or numbers that it has not")
        elif _overflows(tensor, dtype):
            raise _not_held(tensor.dtype, dtype, key, "a number is larger than any in it")
        elif dtype.itemsize == 1 and not _same_sorts(tensor, cast):
            raise _not_held(tensor.dtype, dtype, key, "it lacks an infinity, a NaN, a sign or a zero")
    elif not _same_values(tensor, cast):
        raise _not_held(tensor.dtype, dtype, key, "an integer or truth value would become another one")
    return cast


def cast_array(
    array: npt.NDArray[np.generic], dtype: torch.dtype, key: str, *, lossy: bool = False
) -> object:
    """An array of numbers in another dtype; itself if it has that one.

    Raises:
        BatchSchemaError: It holds no numbers, numpy has no such dtype, or a value is not held.
    """
    check_dtype(dtype, key)
    if array.dtype.kind not in "biufc":
        raise BatchSchemaError(
            f"column {key!r} of {array.dtype} holds no numbers to cast", key=key, expected=dtype
        )
    try:
        target = np.dtype(str(dtype).removeprefix("torch."))
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    except TypeError as error:
        raise BatchSchemaError(
            f"column {key!r} is an array, and numpy has no {dtype}: {error}", key=key
        ) from error
    return array if array.dtype == target else cast_tensor(tensor, dtype, key, lossy=lossy).numpy()


def check_dtype(dtype: object, key: str) -> None:
    """Raise BatchSchemaError for anything but a dtype of torch."""
    if not isinstance(dtype, torch.dtype):
        raise BatchSchemaError(
            f"column {key!r} is cast to a torch.dtype, not to {dtype!r}", key=key, expected="a torch.dtype"
        )


def _same_values(tensor: torch.Tensor, cast: torch.Tensor) -> bool:
    """Whether casting back gives the very values with their signs, so that none was changed."""
    values = cast.real if cast.is_complex() and not tensor.is_complex() else cast
    same = _comparable(values.to(tensor.dtype)) == _comparable(tensor)
    if _is_integer(tensor) and _is_integer(values):
        same &= _negative(tensor) == _negative(values)
    elif _is_integer(tensor):
        same &= _among(values, tensor.dtype)
    elif _is_integer(values) and not tensor.is_complex():
        same &= _among(tensor, values.dtype)
    return bool(same.all())


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _negative(tensor: torch.Tensor) -> torch.Tensor:
    return tensor < 0 if tensor.dtype.is_signed else torch.zeros_like(tensor, dtype=torch.bool)


def _among(fractions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Which numbers an integer dtype has; casts of those out of its reach differ between processors."""
    limits, numbers = torch.iinfo(dtype), fractions.double()
    reached = (numbers >= limits.min) & (numbers < float(limits.max) + (dtype.itemsize < 8))
    return reached & (numbers == numbers.trunc())


def _same_sorts(tensor: torch.Tensor, cast: torch.Tensor) -> bool:
    """Whether infinities, NaN and zeros stay what they are, and other numbers keep their sign or become 0."""
    old, new = _comparable(tensor), _comparable(cast)
    signs = (new.sign() == old.sign().to(new.dtype)) | (new == 0) | old.isnan()
    kept = (old.isinf() == new.isinf()) & (old.isnan() == new.isnan())
    return bool((kept & signs).all())


def _overflows(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite number is larger than any of the dtype; some dtypes saturate, others have infinity."""
    if torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max:
        return False
    numbers = _comparable(tensor)
    return bool((numbers.isfinite() & (numbers.abs() > torch.finfo(dtype).max)).any())


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floating-point dtypes have no operations of their own."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def _not_held(old: torch.dtype, new: torch.dtype, key: str, why: str) -> BatchSchemaError:
    return BatchSchemaError(
        f"column {key!r} of {old} is not held by {new}: {why}; pass lossy=True to cast it all the same",
        key=key,
        expected=new,
        actual=old,
    )
