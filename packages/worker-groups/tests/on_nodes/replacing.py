"""Names that a class's methods read, replaced for a test."""


def replace(monkeypatch, method, **values):
    """Where the method reads them, which need not be its module.

    Once Ray has looked up a watch by its name, the classes that the watch was sent by value have methods
    of that copy, with globals of their own.
    """
    for name, value in values.items():
        monkeypatch.setitem(method.__globals__, name, value)
