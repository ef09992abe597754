"""Helpers of a run are forks, too: of a process that the run forks first of all, which has imported what they need."""

import os
import signal
import socket
import subprocess
import threading
import time

from tests import warm_server
from tests.warm_python import WarmPython

_INIT = 1


class ForkedServer(WarmPython):
    """Forks this process's helpers; their ids are in ``pids``."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self._lock, self._control, self._server = threading.Lock(), control, None
        self.pid, self.pids = pid, list[int]()

    def fork(self, *request: object) -> int:
        self.pids.append(super().fork(*request))
        return self.pids[-1]


def fork_server() -> ForkedServer | None:
    """Fork a process that forks helpers, and have ``subprocess`` ask it; None in a helper, once that has ended."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    main, pid = os.getpid(), os.fork()
    if pid:
        its.close()
        server = ForkedServer(mine, pid)
        subprocess.Popen = server._popen()
        return server
    mine.close()
    os.setsid()  # signals to the run's group are not for it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request, files = warm_server.wait_for_request(its)
    its.close()
    while os.getppid() not in (main, _INIT):  # adopted in a moment; a helper looks whose child it is
        time.sleep(0.001)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warm_server.take_over(request, files)
    warm_server.run(request["args"][1:])
    return None
