"""Values as bytes that any process can read, also without Ray."""

import functools
import io
from typing import Any

from raycrew.tensor_transport._ray.compat import ray_module


class _HasRayError(Exception):
    """A value has a part that only Ray itself can hand on."""


def dumps_plain(value: Any) -> bytes | None:
    """A value as bytes for `pickle.loads`; None where it has parts, as an ObjectRef, that only Ray hands on.

    What of a program others can't import is written down as a whole, as Ray does.
    """
    file = io.BytesIO()
    try:
        _pickler()(file, protocol=5).dump(value)
    except _HasRayError:
        return None
    return file.getvalue()


@functools.cache
def _pickler() -> Any:
    class Plain(ray_module().cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if str(type(obj).__module__).partition(".")[0] == "ray":
                raise _HasRayError
            return super().reducer_override(obj)

    return Plain
