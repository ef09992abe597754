"""Messages between two processes, over a socket."""

import contextlib
import pickle
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<Q")
_MOST_AT_ONCE = 2**16


class Connection:
    """Sends and receives objects, one after another.

    Ctrl-C may leave a message half sent or half read. What follows would be taken for the rest of it, so the connection
    is of no use from then on, and the other process is told to end.

    Args:
        end: One end of a pair of sockets.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self.is_broken = False
        """Whether the other process has ended, or a message was interrupted."""

    def send(self, message: Any) -> None:
        """Send an object of plain values and of this package's classes.

        Raises:
            EOFError: the other process has ended.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._whole():
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for the next object.

        Raises:
            EOFError: the other process has ended.
        """
        with self._whole():
            self._fill(_LENGTH.size)
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            self._fill(end)
            data = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
        return pickle.loads(data)

    def has_message(self, timeout_s: float) -> bool:
        """Tell whether there is something to receive, or the other process has ended; wait for it for a time."""
        if self._socket.fileno() < 0 or self._received:
            return True
        poll = select.poll()  # ``select.select`` takes no file descriptor over 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def give_up(self) -> None:
        """Send and receive no more."""
        self.is_broken = True

    def hang_up(self) -> None:
        """Tell the other process that there are no more messages to it."""
        self._shut(socket.SHUT_WR)

    def cut(self) -> None:
        """Let whatever waits for a message have what has come already, and then an ``EOFError``."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self.is_broken = True
        self._socket.close()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Send or receive all of a message, or break off for good."""
        if self.is_broken:
            raise EOFError("the connection was given up")
        try:
            yield
        except (OSError, EOFError) as error:
            self.is_broken = True
            raise EOFError("the other process has ended") from error
        except BaseException:
            self.is_broken = True
            self.hang_up()
            raise

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(how)

    def _fill(self, length: int) -> None:
        """Read until there are so many bytes: one call reads a short message as a whole, or several."""
        while len(self._received) < length:
            part = self._socket.recv(_MOST_AT_ONCE)
            if not part:
                raise EOFError("the other process has ended")
            self._received += part


@contextlib.contextmanager
def connected() -> Iterator[tuple[Connection, socket.socket]]:
    """Make a connection and its other end, which is closed here afterwards: a process that is started within has it."""
    mine, its = socket.socketpair()
    with its:
        try:
            yield Connection(mine), its
        except BaseException:
            mine.close()
            raise
