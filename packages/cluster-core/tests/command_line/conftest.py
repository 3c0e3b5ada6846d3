import signal

import pytest


@pytest.fixture(autouse=True)
def heeded():
    """Signals count that whoever runs the tests ignores, as nohup does and a shell for its jobs."""
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in (one for one in numbers if before[one] is signal.SIG_IGN):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
