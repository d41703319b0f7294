"""Write files and folders that are complete or absent, with errors that name the full device."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator

PARTIAL = ".partial"
_STAGE = f".jax-nvfp4-moe{PARTIAL}"
_COPIED = 1 << 20  # bytes at once


def write_file(path: pathlib.Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Write one file, which has its name only once it is complete.

    Args:
      path: of the file, replaced if it exists.
      blocks: its bytes, one block in memory at a time.

    Raises:
      OSError: the file cannot be written; names it, the device and the room on it. Whatever the
        error is, nothing incomplete is left.
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
                stream.close()  # a network's file system may find no room only now
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def copy_file(source: pathlib.Path, path: pathlib.Path) -> None:
    """Copy the bytes of one file; errors are those of `write_file`."""
    with source.open("rb") as stream:
        write_file(path, iter(lambda: stream.read(_COPIED), b""))


def is_free(folder: pathlib.Path) -> bool:
    """Return whether `staged_folder` may write to `folder`.

    It may where there is nothing, or a folder that is empty but for what a process that was killed
    has left there.
    """
    if not os.path.lexists(folder):
        return True
    return folder.is_dir() and all(path.name == _STAGE for path in folder.iterdir())


@contextlib.contextmanager
def staged_folder(folder: pathlib.Path, last: str) -> Iterator[pathlib.Path]:
    """Give a folder to write files into, which move to `folder` when the block ends without error.

    It lies inside `folder`, so that both are on one device and moving is renaming. After an error
    `folder` is as it was: empty, or not there.

    Args:
      folder: see `is_free`; made where it is missing.
      last: the file that moves last, by which readers know that all are there.
    """
    existed = folder.exists()
    stage = folder / _STAGE
    moved: list[pathlib.Path] = []
    try:
        shutil.rmtree(stage, ignore_errors=True)  # of a process that was killed
        stage.mkdir(parents=True)
        yield stage
        for path in sorted(stage.iterdir(), key=lambda path: (path.name == last, path.name)):
            moved.append(folder / path.name)
            os.replace(path, moved[-1])
        stage.rmdir()
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        shutil.rmtree(stage, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # never made, or in use by somebody else
                folder.rmdir()
        raise


def _write_all(stream, block) -> None:
    view = memoryview(block)
    while view:  # a write of a file without a buffer may take a part
        view = view[stream.write(view) :]


@contextlib.contextmanager
def _naming_device(path) -> Iterator[None]:
    """Say of an error which file could not be written, and what room its device has."""
    try:
        yield
    except OSError as error:
        mount = next(one for one in path.resolve().parents if one.is_mount())
        free = shutil.disk_usage(mount).free / 2**20
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror}, on the device mounted at {mount}, which has "
            f"{free:.1f} MiB free; make room there or choose another folder, and try again",
        ) from error
