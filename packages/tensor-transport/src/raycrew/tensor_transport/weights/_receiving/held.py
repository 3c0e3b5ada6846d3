"""What a receiver holds: one value, so that other threads never see half of a change."""

from dataclasses import dataclass

from raycrew.tensor_transport.errors import StaleWeightsError


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

    @property
    def is_whole(self) -> bool:
        """Whether the weights are those of a version."""
        return self.version is not None and self.intact

    def check(self, required: int | None) -> int:
        """The version, for who makes something with these weights.

        Raises:
            StaleWeightsError: They are of no version, of one below the required, or a mixture.
        """
        if self.version is None and self.intact:
            why = "this receiver was made, or made again, and holds no version yet: pull(), or update it"
        elif self.version is None or not self.intact:
            why = self.standing()
        elif required is not None and self.version < required:
            why = f"the receiver holds version {self.version}, and version {required} is required: pull()"
        else:
            return self.version
        raise StaleWeightsError(why, version=required or 0, current_version=self.version, intact=self.intact)

    def standing(self) -> str:
        """The same in words."""
        held = "no version" if self.version is None else f"version {self.version}"
        if self.intact:
            return f"the receiver still holds and reports {held}"
        return (
            f"the receiver still reports {held}, but its weights are a mixture: version {self.loading} is "
            "being loaded, is not decided, or failed; apply an update again where it failed"
        )
