"""Opening the files of a checkpoint without following symbolic links.

The user chooses the folder, and may reach it through links.  Links inside of it are never followed: if other users may
write to the folder, a link that one of them put there would redirect what telegrad writes or reads to any file of this
user.  So each file is opened relative to a descriptor of its directory, a new file must not exist yet, and its mode is
what the umask of the process that writes it allows.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple


class Directory(NamedTuple):
    """The directory of one checkpoint."""

    path: str
    may_be_link: bool = False  # True: the user named this directory itself, not the folder that it is in

    def open(self) -> int:
        """A descriptor of it; the caller closes it."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            return os.open(self.path, flags if self.may_be_link else flags | os.O_NOFOLLOW)
        except NotADirectoryError:  # Linux raises it, and not ELOOP, for a link with O_DIRECTORY and O_NOFOLLOW
            if os.path.islink(self.path):
                raise _link(self.path) from None
            raise

    @contextmanager
    def opened(self) -> Iterator[int]:
        descriptor = self.open()
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Returns when the names of its files are on the disk."""
        with self.opened() as descriptor:
            os.fsync(descriptor)


def create(name: str, directory: int) -> BinaryIO:
    """A new file, for writing and reading."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(name, flags, 0o666, dir_fd=directory), "w+b")


def open_file(name: str, directory: int, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; with ``O_CREAT`` among the flags, one that may be new."""
    try:
        # O_NONBLOCK: to open a named pipe would wait for the process at its other end.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o666, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link(name) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return descriptor


def read_file(name: str, directory: int) -> bytes:
    with open(open_file(name, directory), "rb") as file:
        return file.read()


def finish(file: BinaryIO) -> None:
    """Returns when what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _link(path: str) -> OSError:
    return OSError(errno.ELOOP, "a symbolic link, which is not followed inside a checkpoint folder", path)
