"""Open a checkpoint's files for reading. Every reader comes through here.

A checkpoint may come from the network. A pipe in a file's place never ends to wait, a device never ends to give, and a
sparse file of a few bytes on the disk reads as terabytes of zeros.
"""

import errno
import os
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG

MAX_DOCUMENT_BYTES = 256 * 2**20
"""Of JSON, and of a pickle's own bytes without its tensors. A manifest of a terabyte has 10 MB, an index of a hundred
thousand tensors as much, a list of twenty million numbers in state.json 180 MB."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or what links lead to if that is one, for reading; large reads go past the buffer.

    Raises:
        OSError: it can't be opened, or is a directory, a pipe, a device or a socket.
    """
    require_regular(path)
    return open(path, "rb")


def require_regular(path: Path) -> os.stat_result:
    """Look at a file before a library opens it by its name.

    Returns:
        The ``os.stat`` of the file that links lead to.
    Raises:
        OSError: it is missing, or is a directory, a pipe, a device or a socket.
    """
    found = os.stat(path)
    if not S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return found


def read_document(path: Path) -> bytes:
    """Read a whole file of JSON or of pickled records.

    Raises:
        OSError: as `open_regular`; or it is longer than `MAX_DOCUMENT_BYTES`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_DOCUMENT_BYTES:
            raise OSError(errno.EFBIG, f"it has {size} bytes, at most {MAX_DOCUMENT_BYTES} are read", str(path))
        return file.read(size)
