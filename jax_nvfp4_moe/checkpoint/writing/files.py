"""Write files and folders that are either complete or absent, also after an error."""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator

from jax_nvfp4_moe.checkpoint.errors import printable

PARTIAL = ".partial"
_STAGE = f".jax-nvfp4-moe{PARTIAL}"
LOCK = ".jax-nvfp4-moe.lock"
_COPIED = 1 << 20  # bytes that are copied at once
_FULL = (errno.ENOSPC, errno.EDQUOT)

_LOG = logging.getLogger("jax_nvfp4_moe")


def write_file(path: pathlib.Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Write one file, which gets its name only when it is complete.

    Args:
      path: the file to write. An existing file is replaced.
      blocks: the bytes of the file. Memory holds one block at a time.

    Raises:
      OSError: the file cannot be written. The message names the file, its device, and the free
        space on it. After any error, no incomplete file remains.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with _naming_device(path):
            stream = partial.open("wb", buffering=0)
        with stream:
            for block in blocks:
                with _naming_device(path):
                    _write_all(stream, block)
            with _naming_device(path):
                stream.close()  # a network file system may report a full disk only now
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def copy_file(source: pathlib.Path, path: pathlib.Path) -> None:
    """Copy one file; raises the errors of `write_file`."""
    with source.open("rb") as stream:
        write_file(path, iter(lambda: stream.read(_COPIED), b""))


def is_free(folder: pathlib.Path) -> bool:
    """Return whether `staged_folder` may write to `folder`.

    It may if the folder does not exist, or contains nothing but what a killed process left behind.
    """
    if not os.path.lexists(folder):
        return True
    return folder.is_dir() and all(path.name in (_STAGE, LOCK) for path in folder.iterdir())


@contextlib.contextmanager
def sole_writer(folder: pathlib.Path) -> Iterator[None]:
    """Hold an existing folder, so that no other process and no other thread writes to it.

    The system releases the lock when its process ends, however it ends.

    Raises:
      ValueError: somebody else holds the folder.
    """
    path = folder / LOCK
    with path.open("wb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A writer that has just ended may have deleted the file between the two calls above.
            held = path.exists() and os.path.samestat(path.stat(), os.fstat(stream.fileno()))
        except BlockingIOError:
            held = False
        except OSError as error:  # some network file systems have no locks
            _LOG.warning(
                "%s cannot be locked (%s): make sure that no other process writes to it",
                printable(folder),
                error.strerror,
            )
            held = True
        if not held:
            raise ValueError(
                f"another process is writing to {printable(folder)}: wait until it has ended, or "
                "choose another folder"
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def claimed_folder(folder: pathlib.Path) -> Iterator[None]:
    """Make a folder if it is missing, and hold it as `sole_writer` does.

    After an error, a folder that was missing is missing again, unless something is in it.

    Raises:
      ValueError: somebody else holds the folder.
    """
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with sole_writer(folder):
            yield
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):  # it was never created, or others write to it
                folder.rmdir()
        raise


@contextlib.contextmanager
def staged_folder(folder: pathlib.Path, last: str) -> Iterator[pathlib.Path]:
    """Yield a folder for new files, and move them to `folder` if the block ends without an error.

    The yielded folder lies inside `folder`. Both are then on the same device, and a move is a
    rename. After an error, `folder` is as it was before: empty or missing.

    Args:
      folder: the destination. It is created if it is missing.
      last: the name of the file that moves last. Readers take its presence as a sign that all files
        are there.

    Raises:
      ValueError: the folder is not empty, or another process is writing to it.
    """
    with claimed_folder(folder):
        if not is_free(folder):
            raise ValueError(
                "destination: expected a folder that is empty or does not exist, got "
                f"{printable(folder)}"
            )
        with _moved_at_the_end(folder, last) as stage:
            yield stage


@contextlib.contextmanager
def _moved_at_the_end(folder, last) -> Iterator[pathlib.Path]:
    """Yield a folder inside `folder`, and move its files up when the block ends."""
    stage = folder / _STAGE
    moved: list[pathlib.Path] = []
    try:
        shutil.rmtree(stage, ignore_errors=True)  # a killed process may have left it
        stage.mkdir()
        yield stage
        for path in sorted(stage.iterdir(), key=lambda path: (path.name == last, path.name)):
            moved.append(folder / path.name)
            os.replace(path, moved[-1])
        stage.rmdir()
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _write_all(stream, block) -> None:
    view = memoryview(block)
    while view:  # an unbuffered write may write only a part of the bytes
        view = view[stream.write(view) :]


@contextlib.contextmanager
def _naming_device(path) -> Iterator[None]:
    """Add the name of the file and the free space of its device to an `OSError`."""
    try:
        yield
    except OSError as error:
        mount = next(one for one in path.resolve().parents if one.is_mount())
        free = shutil.disk_usage(mount).free / 2**20
        room = "make room there or choose" if error.errno in _FULL else "choose"
        raise OSError(
            error.errno,
            f"cannot write {printable(path)}: {error.strerror}. The device mounted at "
            f"{printable(mount)} has {free:.1f} MiB free; {room} another folder, and try again",
        ) from error
