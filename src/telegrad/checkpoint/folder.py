"""The folder that checkpoints are in, and saving one into it atomically.

::

    run/
      step-000010/             a checkpoint: the manifest, and what the owners wrote
      step-000020/
      HISTORY                  their names in the order they were saved; the last one is the latest
      .lock                    held by the process that saves
      .saving-8c1f…/           a save under way, or one that was interrupted
      .history-5d02…           the next HISTORY, not yet in its place

1. Take the lock, which the kernel releases when its holder dies.  If another process has it, raise an error.
2. Remove what interrupted saves left.  Every save has the lock from before its folder is made until it is renamed or
   removed, so no other save uses the folders that are found while the lock is held.
3. Let the owners write into a new ``.saving-…`` folder; then the manifest; sync all.
4. Rename the folder: from now on it is a whole checkpoint, under a name that was free.
5. Replace ``HISTORY`` by a rename: from now on it is the latest.
6. Remove old ones.  They are renamed first, so that a half-removed one is never found under its name.

After a crash before 5, the latest checkpoint is the previous one; after a later crash, only files to remove are left.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from telegrad._text import printable
from telegrad.checkpoint.files import Directory, create, finish, open_file, read_file
from telegrad.checkpoint.manifest import MANIFEST
from telegrad.errors import CheckpointError, UsageError

log = logging.getLogger("telegrad.checkpoint")

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")  # the second number: this step was saved before
_HISTORY, _LOCK = "HISTORY", ".lock"
_SAVING, _REMOVING, _NEW_HISTORY = ".saving-", ".removing-", ".history-"  # each with random digits after it


def steps(path: str | os.PathLike[str]) -> list[int]:
    """Lists the steps of the checkpoints in a folder, in the order in which they were saved.

    Args:
        path (path): The folder. It need not exist.

    Returns:
        A list of ints; the last one is that of the latest checkpoint.

    Example::

        >>> from telegrad import checkpoint
        >>> for step in (10, 30, 20):
        ...     number = checkpoint.save("run", {"model": torch.nn.Linear(2, 1)}, step=step)
        >>> checkpoint.steps("run"), checkpoint.latest("run")
        ([10, 30, 20], 20)
    """
    return Folder(path).steps()


def latest(path: str | os.PathLike[str]) -> int | None:
    """Returns the step of the checkpoint that was saved last, whatever its number.

    Args:
        path (path): The folder. It need not exist.

    Returns:
        The step, or None if there is no checkpoint.
    """
    found = steps(path)
    return found[-1] if found else None


class Folder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Made absolute here, on the driver: other workers have their own home and working directory.
        self.path = Path(os.path.abspath(os.path.expanduser(path)))
        self._directory = Directory(str(self.path), may_be_link=True)

    # --- listing --------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        return list(dict.fromkeys(_step(name) for name in reversed(self._names())))[::-1]

    def find(self, step: int | None) -> Directory:
        """The checkpoint of that step, or the latest one; this folder, if it is one itself."""
        if (self.path / MANIFEST).exists():
            if step is not None:
                raise UsageError(f"{self.path} is one checkpoint, not a folder of them: leave out step={step}")
            return self._directory
        names = self._names()
        if not names:
            raise UsageError(f"there is no checkpoint in {self.path}")
        chosen = [name for name in names if step is None or _step(name) == step]
        if not chosen:
            raise UsageError(f"there is no step {step} in {self.path}: it has {', '.join(map(str, self.steps()))}")
        return Directory(str(self.path / chosen[-1]))

    def _names(self) -> list[str]:
        """All checkpoints, the latest last.

        One that is not in HISTORY was copied here, or its save was interrupted before step 5.  It is listed, but it is
        not the latest.
        """
        try:
            entries = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        there = [name for name in entries if _NAME.fullmatch(name) and (self.path / name / MANIFEST).exists()]
        known = self._history()
        return [*sorted(set(there) - set(known), key=_numbers), *[name for name in known if name in there]]

    def _history(self) -> list[str]:
        try:
            with self._directory.opened() as directory:
                text = read_file(_HISTORY, directory).decode(errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}", [f"{_HISTORY}: {error}"]) from error
        return list(dict.fromkeys(text.split()))

    # --- saving -----------------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[Directory]:
        """Inside, no other process saves here; gives a new directory, which is removed unless it was committed."""
        if (self.path / MANIFEST).exists():
            raise UsageError(f"{self.path} is a checkpoint itself: save into the folder that it is in")
        self.path.mkdir(parents=True, exist_ok=True)
        with self._locked():
            for entry in os.listdir(self.path):
                if entry.startswith((_SAVING, _REMOVING, _NEW_HISTORY)):
                    with suppress(OSError):  # an owner may still write; then next time
                        _delete(self.path / entry)
            temporary = self.path / f"{_SAVING}{secrets.token_hex(8)}"
            temporary.mkdir()
            try:
                yield Directory(str(temporary))
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def commit(self, temporary: Directory, step: int, keep: int | None) -> None:
        """Makes a directory with all files in it the latest checkpoint."""
        before = self._names()
        name, again = f"step-{step:06d}", 1
        while os.path.lexists(self.path / name):
            again += 1
            name = f"step-{step:06d}.{again}"
        temporary.sync()
        os.rename(temporary.path, self.path / name)
        self._directory.sync()
        history = [each for each in self._history() if each in before]
        self._write_history([*history, name])
        for old in before:
            if _step(old) == step or (keep is not None and old in [*history, name][:-keep]):
                self._remove(old)

    def next_step(self) -> int:
        return max(self.steps(), default=-1) + 1

    def _write_history(self, names: list[str]) -> None:
        new = f"{_NEW_HISTORY}{secrets.token_hex(8)}"
        with self._directory.opened() as directory:
            with create(new, directory) as file:
                file.write("".join(f"{name}\n" for name in names).encode())
                finish(file)
            os.rename(new, _HISTORY, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)

    def _remove(self, name: str) -> None:
        grave = self.path / f"{_REMOVING}{secrets.token_hex(8)}"
        try:
            os.rename(self.path / name, grave)
            _delete(grave)
        except OSError as error:  # the new one is saved in any case
            reason = str(error)  # as text: a handler may keep it, and with it all frames of the program
            log.warning("could not remove the old checkpoint %s: %s", self.path / name, reason)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._directory.opened() as directory:
                descriptor = open_file(_LOCK, directory, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise CheckpointError(f"cannot save into {self.path}", [f"{_LOCK}: {error}"]) from error
        try:
            if os.fstat(descriptor).st_nlink != 1:  # the write below would change another file too
                raise CheckpointError(f"cannot save into {self.path}", [f"{_LOCK} is hard-linked elsewhere: remove it"])
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = printable(os.read(descriptor, 1000).decode(errors="replace")) or "another process"
                raise UsageError(f"{holder} is saving into {self.path} just now: one at a time") from None
            except OSError as error:
                raise UsageError(f"cannot lock {self.path} ({error}): save where the file system has locks") from error
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} of host {socket.gethostname()}".encode())
            try:
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        finally:
            os.close(descriptor)


def _delete(path: Path) -> None:
    """A directory with all that is in it, or a file, or a link, but not what it refers to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _numbers(name: str) -> tuple[int, int]:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


def _step(name: str) -> int:
    return _numbers(name)[0]
