"""The one error that the example itself raises."""


class ExampleError(Exception):
    """The run cannot go on; the message says why in one line."""
