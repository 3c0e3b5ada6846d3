"""What a receiver holds: one value, so that other threads never see half of a change."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """What a receiver holds.

    Attributes:
        version: The last version that was applied whole.
        publisher: Whose it is.
        intact: Whether the weights are those of `version`.
        loading: The version that is being loaded, or is not decided yet, or that was left half-way.
    """

    version: int | None = None
    publisher: str | None = None
    intact: bool = True
    loading: int | None = None

    def standing(self) -> str:
        """The same in words."""
        held = "no version" if self.version is None else f"version {self.version}"
        if self.intact:
            return f"the receiver still holds and reports {held}"
        return (
            f"the receiver still reports {held}, but its weights are a mixture: version {self.loading} is "
            "being loaded, is not decided, or failed; apply an update again where it failed"
        )
