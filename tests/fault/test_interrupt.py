"One handler of Ctrl-C: it raises once, though launchers pass the signal on, and keeps it where all ranks have to end together"
import os, signal, time

import pytest
from fastdist.fault.interrupt import Interrupts, handler_kept, is_default


@pytest.fixture(autouse=True)
def default():
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


def press(): os.kill(os.getpid(), signal.SIGINT)


def test_raises_once():
    i = Interrupts()
    i.take()
    with pytest.raises(KeyboardInterrupt): press()
    press()  # the launcher's
    i.last -= 3
    with pytest.raises(KeyboardInterrupt): press()


def test_is_held():
    i = Interrupts()
    with pytest.raises(KeyboardInterrupt):  # at the end
        with i.hold():
            press()
            assert i.held
            press()
            i.last -= 3
            with pytest.raises(KeyboardInterrupt): press()
            assert i.held
    assert not i.held and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    i.take()
    press()  # the launcher's, after the context
    assert signal.getsignal(signal.SIGINT) == i.handle


def test_is_the_cause_of_what_fails():
    "Loader processes that Ctrl-C has ended, say"
    i = Interrupts()
    with pytest.raises(KeyboardInterrupt) as e:
        with i.hold():
            press()
            raise ValueError('a loader process has ended')
    assert isinstance(e.value.__cause__, ValueError)


def test_the_users_own_handler_stays():
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    i = Interrupts()
    i.take()
    with i.hold():
        press()
        assert not i.held
    assert seen == [1] and not is_default(signal.getsignal(signal.SIGINT))


def test_handler_kept():
    with handler_kept():
        Interrupts().take()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
