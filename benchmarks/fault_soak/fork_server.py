"""A process that is forked early and forks others later, which have imported what this one had by then.

The driver's forks runs: starting Python would take seconds.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from tests import warm_server
from tests.warm_python import WarmPython

_INIT = 1


class ForkServer(WarmPython):
    """Forks on request; its forks are children of this process."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self._lock, self._control, self._server = threading.Lock(), control, None
        self.pid = pid

    def close(self) -> None:
        self._control.close()
        os.waitpid(self.pid, 0)


def start_server(prepare: Callable[[], object] = lambda: None) -> ForkServer | None:
    """Fork a server, which prepares itself; return None in its forks, once they have run what they were asked for."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent, pid = os.getpid(), os.fork()
    if pid:
        its.close()
        return ForkServer(mine, pid)
    mine.close()
    os.setsid()  # signals to the parent's group are not for it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()
    request, files = warm_server.wait_for_request(its)
    its.close()
    while os.getppid() not in (parent, _INIT):  # adopted in a moment
        time.sleep(0.001)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warm_server.take_over(request, files)
    warm_server.run(request["args"][1:])
    return None
