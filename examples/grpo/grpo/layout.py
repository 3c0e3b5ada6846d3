"""Which of the two groups has which devices."""

from dataclasses import dataclass

CPU_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """How many workers there are, and what they share.

    Attributes:
        policy: Ranks of the policy, one on each of its bundles.
        generators: Replicas of the generator, likewise.
        has_gpus: Whether each bundle holds a GPU.
        is_shared: Whether both groups are on the same bundles.
        takes_turns: Whether the one sleeps while the other is at work.
    """

    policy: int
    generators: int
    has_gpus: bool
    is_shared: bool
    takes_turns: bool

    @classmethod
    def of(cls, gpus: int) -> "Layout":
        """Two CPU workers of each; one GPU for both in turns; or of several GPUs half for each.

        Examples:
            >>> Layout.of(1).takes_turns
            True
            >>> Layout.of(3).policy, Layout.of(3).generators
            (1, 2)
        """
        if gpus == 0:
            return cls(CPU_WORKERS, CPU_WORKERS, has_gpus=False, is_shared=True, takes_turns=False)
        if gpus == 1:
            return cls(1, 1, has_gpus=True, is_shared=True, takes_turns=True)
        return cls(gpus // 2, gpus - gpus // 2, has_gpus=True, is_shared=False, takes_turns=False)

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return 0 if not self.has_gpus else self.policy if self.is_shared else self.processes

    @property
    def processes(self) -> int:
        """Workers of both."""
        return self.policy + self.generators

    def __str__(self) -> str:
        if not self.has_gpus:
            return "CPU"
        return "1 GPU in turns" if self.takes_turns else f"{self.policy} + {self.generators} GPU(s)"
