"""The worker's side of an endpoint: a server in a thread, if there is to be one."""

from typing import TYPE_CHECKING

from generation.errors import GenerationError, RefusedError
from generation.life import EngineLife
from generation.openai.app import OpenAiApp
from generation.openai.options import EndpointOptions
from generation.options import EngineOptions
from raycrew.worker_groups.services import Endpoint

if TYPE_CHECKING:
    from generation.openai.tokenizer import Tokenizer
    from raycrew.worker_groups.services import AppServer


class Hosted:
    """The endpoint of a worker, if it is to have one; it is begun once there is an engine.

    Args:
        engine: What the engine is to be made of.
        options: What the endpoint is to be; None for none.

    Raises:
        RefusedError: There is no tokenizer.
    """

    def __init__(self, engine: EngineOptions, options: EndpointOptions | None) -> None:
        self._options = options
        self._server: AppServer | None = None
        self._text = None if options is None else _tokenizer(engine, options)

    def begin(self, life: EngineLife) -> None:
        """Answer with whatever engine there is at the moment.

        Raises:
            ServiceError: The address can't be had.
        """
        if self._text is not None and self._options is not None:
            self._server = _served(life, self._text, self._options)

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers.

        Raises:
            GenerationError: Nowhere.
        """
        if self._server is None:
            raise GenerationError("this generator has no endpoint")
        return self._server.endpoint

    def check_adapter(self, name: str) -> None:
        """Refuse an adapter that clients could not ask for.

        Raises:
            RefusedError: They call the model itself so.
        """
        if self._options is not None and name == self._options.model_name:
            raise RefusedError(f"adapter {name!r}: the endpoint calls the model itself so (model_name)")

    def close(self) -> None:
        """Answer no more; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()


def _tokenizer(engine: EngineOptions, options: EndpointOptions) -> "Tokenizer":
    from generation.openai.tokenizer import Tokenizer  # here, as only a worker with an endpoint needs it

    folder = options.tokenizer or (engine.model if isinstance(engine.model, str) else None)
    if folder is None:
        raise RefusedError("an endpoint needs a tokenizer: say which folder has one, as the model is in none")
    return Tokenizer(folder, options.chat_template)


def _served(life: EngineLife, text: "Tokenizer", options: EndpointOptions) -> "AppServer":
    from raycrew.worker_groups.services import AppServer  # needs the extra `services`

    return AppServer(
        OpenAiApp(life, text, options),
        token=options.token,
        host=options.host,
        max_connections=options.max_connections,
        idle_timeout_s=options.idle_timeout_s,
    )
