"""What a generator refuses, and why."""


class GenerationError(Exception):
    """Something about generation failed; base of all errors here."""


class PromptError(GenerationError, ValueError):
    """Prompts that no engine can take; the message names the row."""


class SamplingError(GenerationError, ValueError):
    """Sampling options that mean nothing, or are misspelt."""


class RefusedError(GenerationError):
    """An engine, or the machine that it runs on, can't do what was asked for."""


class AsleepError(GenerationError):
    """The generator sleeps: it has no engine until it is woken."""


class EngineFailedError(GenerationError):
    """The engine raised while it generated; `wake` makes a new one."""
