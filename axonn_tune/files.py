"""Atomic writing of files and folders."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, UsageError

_SCHEMA = re.compile(rb'^[{ ]{0,3}"?schema"?: ?"?axonn-tune/([a-z-]+)/', re.MULTILINE)
_OWN = re.compile(rb'Written by axonn-tune|axonn-tune regress|"(const|schema)": "axonn-tune/|"axonn_tune": "|AXNTOKEN')
"""What a document of this tool, and what any other file that it writes, has in its first or last 64 KiB."""
_SEEN_BYTES = 1 << 16
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file open for writing that replaces the old one only if the block succeeds.

    UsageError if the folder is missing or the path is a folder; EnvironmentProblem if the disk is full
    or writing is not permitted. A device or pipe (`/dev/stdout`) is written to directly.
    """
    target = Path(os.path.realpath(path))
    temporary = None
    try:
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and stat.S_ISDIR(mode):
            raise UsageError(f"cannot write {str(path)!r}: it is a folder")
        if mode is not None and not stat.S_ISREG(mode):
            with target.open("wb") as device:
                yield device
            return
        # A name of its own, short, so that a target with the longest allowed name still works.
        temporary = target.parent / f".axonn-tune-{os.getpid()}-{os.urandom(4).hex()}.tmp"
        with _new_file(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        # Reading errors of the block name the file read; those of the file written name ours, or none.
        if error.filename in (None, str(temporary), str(target)):
            raise _explained(path, error) from error
        raise
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text_atomically(path: str | Path, text: str) -> None:
    """Replace a file by `text` in one step, with errors as of `replacing`."""
    with replacing(path) as file:
        # Half a character has no bytes: its number is written.
        file.write(text.encode(errors="backslashreplace"))


def require_own(path: str | Path, *, kind: str = "", read_by: Path | None = None) -> None:
    """UsageError for a file that this tool has not written, or as another kind of document than is to replace it.

    Nothing is refused where there is no file, an empty one, or a device. kind: machine, launch and so on; "" for what
    is no document. read_by: a script of this tool that names the file, which is known by that then.
    """
    target = Path(path)
    seen = _seen(target)
    document = _SCHEMA.search(seen)
    if not seen or (document[1].decode() == kind if document else not kind and _OWN.search(seen)):
        return
    script = b"" if read_by is None else _seen(read_by)
    # What a script comes with it looks for, also where no argument names it.
    if _OWN.search(script) and f"[[ -f $folder/{shlex.quote(target.name)} ]]".encode() in script:
        return
    what = f"is a {document[1].decode()} document" if document else "was not written by axonn-tune"
    raise UsageError(f"{str(path)!r} {what}: name another file, or replace it with --force")


def _seen(path: Path) -> bytes:
    """Beginning and end of a regular file; nothing of anything else."""
    if not path.is_file():
        return b""
    with open_regular(path) as file:
        beginning = file.read(_SEEN_BYTES)
        file.seek(max(len(beginning), path.stat().st_size - _SEEN_BYTES))
        return beginning + file.read(_SEEN_BYTES)


def read_regular(path: Path, *, limit_bytes: int) -> bytes:
    """A file's content; UsageError for what is no regular file, or holds more than the limit. OSError as of open."""
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise UsageError(f"{str(path)!r} has more than the {limit_bytes >> 20} MiB that such a file may have")
    return content


def open_regular(path: Path) -> BinaryIO:
    """A file open for reading; UsageError for what is no regular file. OSError as of open."""
    # A pipe without a writer would block, and so would files of the kernel, which are regular by name only.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) or os.path.realpath(path).startswith(("/proc/", "/sys/")):
        os.close(descriptor)
        raise UsageError(f"{str(path)!r} is a {'folder' if stat.S_ISDIR(mode) else 'device or a pipe'}, not a file")
    return os.fdopen(descriptor, "rb")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_full(error: BaseException) -> bool:
    """Whether an error is due to a full disk, a quota or a file-size limit."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _new_file(path: Path, mode: int | None) -> BinaryIO:
    """A file that must not exist yet, with the permissions of the one it is to replace."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    if mode is not None:
        os.fchmod(descriptor, stat.S_IMODE(mode))
    return os.fdopen(descriptor, "w+b")


def _explained(path: str | Path, error: OSError) -> AxonnTuneError:
    words = error.strerror or str(error)
    if error.errno in _FULL:
        return EnvironmentProblem(f"cannot write {str(path)!r}: {words}; what was there before is unchanged")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return UsageError(f"cannot write {str(path)!r}: there is no folder {str(Path(path).parent)!r}")
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"cannot write {str(path)!r}: the name is too long")
    return EnvironmentProblem(f"cannot write {str(path)!r}: {words}")
