"""What an endpoint is to be: checked in the driver, before a worker starts."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """The endpoint of each replica.

    Attributes:
        model_name: What clients call the model; a loaded adapter goes by its own name.
        tokenizer: Folder of the tokenizer; None for the model's folder.
        chat_template: How messages become a prompt, in Jinja; None for what the tokenizer brings.
        token: What clients have to know, as for `AppServer`.
        host: Address to listen on, as there.
        max_connections: Connections at once; more are answered with 503.
        idle_timeout_s: How long a request may pause, and an answer that its client does not take: then its
            samples are aborted.
        max_body_bytes: How long a request's body may be.
        max_samples: How many samples one request may ask for: its prompts times `n`.

    Raises:
        ValueError: There is no name, or a limit below 1.
    """

    model_name: str = "model"
    tokenizer: str | None = None
    chat_template: str | None = None
    token: str | None = field(default="auto", repr=False)
    host: str | None = None
    max_connections: int = 1024
    idle_timeout_s: float = 60.0
    max_body_bytes: int = 4 << 20
    max_samples: int = 1024

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError("model_name is empty: clients have to call the model something")
        for name in ("max_connections", "max_body_bytes", "max_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")
