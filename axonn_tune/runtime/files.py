"""Binary files and folders that are either whole or not there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from axonn_tune.errors import EnvironmentProblem, UsageError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file open for writing that takes its name only when the block ends well; else nothing is left of it.

    UsageError if the folder is missing or the path is a folder; EnvironmentProblem if the disk is full
    or writing is not permitted.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: it is a folder")
    if not target.parent.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: there is no folder {str(target.parent)!r}")
    temporary = target.parent / f".axonn-tune-{os.getpid()}-{os.urandom(4).hex()}.tmp"
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        # Reading errors of the block name the file read; those of the file written name ours, or none.
        if error.filename in (None, str(temporary)):
            raise EnvironmentProblem(f"cannot write {str(path)!r}: {error.strerror or error}") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_full(error: BaseException) -> bool:
    """Whether a full disk, a quota or a file-size limit is behind an error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
