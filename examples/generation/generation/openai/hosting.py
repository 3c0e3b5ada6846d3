"""The worker's side of an endpoint: a server in a thread, if there is to be one."""

from typing import TYPE_CHECKING

from generation.errors import GenerationError, RefusedError
from generation.life import EngineLife
from generation.openai.options import EndpointOptions
from generation.options import EngineOptions
from raycrew.worker_groups.services import Endpoint

if TYPE_CHECKING:
    from raycrew.worker_groups.services import AppServer


class Hosted:
    """The endpoint of a worker, which answers with whatever engine there is at the moment.

    Args:
        life: The worker's engine; None where it has none.
        engine: What that is made of.
        options: What the endpoint is to be; None for none.

    Raises:
        RefusedError: There is no tokenizer.
        ServiceError: The address can't be had.
    """

    def __init__(
        self, life: EngineLife | None, engine: EngineOptions, options: EndpointOptions | None
    ) -> None:
        self._server = None if life is None or options is None else _serve(life, engine, options)

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers.

        Raises:
            GenerationError: Nowhere.
        """
        if self._server is None:
            raise GenerationError("this generator has no endpoint")
        return self._server.endpoint

    def close(self) -> None:
        """Answer no more; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()


def _serve(life: EngineLife, engine: EngineOptions, options: EndpointOptions) -> "AppServer":
    from generation.openai.app import OpenAiApp  # here, as a worker without an endpoint needs none of these
    from generation.openai.tokenizer import Tokenizer
    from raycrew.worker_groups.services import AppServer

    folder = options.tokenizer or (engine.model if isinstance(engine.model, str) else None)
    if folder is None:
        raise RefusedError("an endpoint needs a tokenizer: say which folder has one, as the model is in none")
    return AppServer(
        OpenAiApp(life, Tokenizer(folder, options.chat_template), options),
        token=options.token,
        host=options.host,
        max_connections=options.max_connections,
        idle_timeout_s=options.idle_timeout_s,
    )
