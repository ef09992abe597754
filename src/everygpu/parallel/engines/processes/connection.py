"""Messages between two processes, over a socket."""

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")
_MOST_AT_ONCE = 2**20


class Connection:
    """Sends and receives objects, one after another.

    Args:
        end: One end of a pair of sockets.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Any) -> None:
        """Send an object of plain values and of this package's classes.

        Raises:
            EOFError: the other process has ended.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise EOFError("the other process has ended") from error

    def receive(self) -> Any:
        """Wait for the next object.

        Raises:
            EOFError: the other process has ended.
        """
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        return pickle.loads(self._receive(length))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor, for ``select``."""
        return self._socket.fileno()

    def _receive(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                part = self._socket.recv(min(length - len(data), _MOST_AT_ONCE))
            except ConnectionError as error:
                raise EOFError("the other process has ended") from error
            if not part:
                raise EOFError("the other process has ended")
            data += part
        return bytes(data)
