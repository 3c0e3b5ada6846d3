"""What clients are told of what fails, in OpenAI's form."""

from typing import Any

from generation.errors import (
    AsleepError,
    EngineFailedError,
    PromptError,
    RefusedError,
    SamplingError,
)
from raycrew.tensor_transport import TransportError


class ApiError(Exception):
    """A request that is not answered as it asks.

    Attributes:
        status: Of the answer.
        kind: OpenAI's type of error.
        param: The field that it is about.
        code: OpenAI's name of it.
        is_not_run: Whether another replica may as well be asked, as nothing was done for it here.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        *,
        is_not_run: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.is_not_run = is_not_run

    @property
    def body(self) -> dict[str, Any]:
        """What its client is told."""
        told = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A request with a field that can't be meant."""
    return ApiError(400, message, param=param, code=code)


def no_model(name: str) -> ApiError:
    """There is no model of a name."""
    return ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")


def no_engine(error: EngineFailedError) -> ApiError:
    """The engine had failed before the request came: a proxy asks another replica then."""
    return ApiError(503, str(error), "unavailable_error", code="engine_failed", is_not_run=True)


def told_of(error: Exception) -> ApiError:
    """What a client is told of an error of a generator; of what nobody expects, no more than its type."""
    match error:
        case ApiError():
            return error
        case SamplingError():
            return wrong(None, str(error))
        case PromptError():
            return wrong("prompt", str(error))
        case RefusedError():
            return wrong(None, str(error))
        case AsleepError():
            return ApiError(503, str(error), "unavailable_error", code="asleep")
        case TransportError():  # no version yet, a mixture, or an update that left one
            return ApiError(503, str(error), "unavailable_error", code="no_weights")
        case EngineFailedError():
            return ApiError(500, str(error), "server_error", code="engine_failed")
    return ApiError(500, f"the generator has failed: {type(error).__name__}", "server_error")
