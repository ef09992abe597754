"""The channel between the two threads: order, limits, and ends from either side."""

import threading
import time

import pytest

from everygpu.errors import FeedTimeoutError
from everygpu.feed.channel import Channel, ChannelClosed


@pytest.fixture
def here():
    """A producer that is alive."""
    return threading.current_thread()


def test_items_come_in_order(here):
    channel = Channel(3)
    for item in range(3):
        channel.wait_for_room()
        channel.put(item)
    assert [channel.get(here) for _ in range(3)] == [0, 1, 2]


def test_a_full_channel_waits_for_the_consumer(here):
    channel = Channel(1)
    channel.put(1)
    start = time.monotonic()
    threading.Timer(0.05, channel.get, [here]).start()
    channel.wait_for_room()
    assert time.monotonic() - start > 0.03


def test_an_empty_channel_waits_for_the_producer(here):
    channel = Channel(1)
    threading.Timer(0.05, channel.put, [7]).start()
    assert channel.get(here) == 7


def test_a_timeout(here):
    start = time.monotonic()
    with pytest.raises(FeedTimeoutError):
        Channel(1).get(here, 0.05)
    assert time.monotonic() - start > 0.04


class EmptyError(KeyError):
    def __len__(self):
        return 0


@pytest.mark.parametrize("error", [None, KeyError("x"), EmptyError()])
def test_the_end_comes_after_the_items(here, error):
    channel = Channel(2)
    channel.put(1)
    channel.finish(error)
    assert channel.get(here) == 1
    with pytest.raises(StopIteration if error is None else KeyError):
        channel.get(here)
    with pytest.raises(StopIteration):
        channel.get(here)


def test_closing_lets_the_producer_go(here):
    channel = Channel(1)
    channel.put(1)
    threading.Timer(0.05, channel.close).start()
    with pytest.raises(ChannelClosed):
        channel.wait_for_room()
    assert channel.is_closed
    with pytest.raises(StopIteration):
        channel.get(here)


def test_a_producer_that_is_gone_is_not_waited_for():
    gone = threading.Thread(target=int)
    gone.start()
    gone.join()
    with pytest.raises(StopIteration):
        Channel(1).get(gone)
