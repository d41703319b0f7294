"""Make a file once for all pytest workers, and keep it for later runs with the same sources."""

import fcntl
import pathlib
import tempfile
from collections.abc import Callable


def made_once(path: pathlib.Path, make: Callable[[pathlib.Path], pathlib.Path]) -> pathlib.Path:
    """Return `path`, and make the file first if it does not exist.

    Args:
      path: the file. Its name must change with everything that it is made of. Other files with its
        suffix in this folder are from older sources and are removed.
      make: called with an empty folder, it makes the file there and returns its path. Processes
        that ask meanwhile wait.
    """
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            for old in path.parent.glob(f"*{path.suffix}"):
                old.unlink()
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                make(pathlib.Path(folder)).rename(path)
    return path
