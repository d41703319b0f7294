"""Key tables: where the parts of a model stand in its checkpoint.

A table maps the path of a part in the model, such as ``layers.*.attention.out``, to the name that
its tensors have in the file, such as ``model.layers.*.self_attn.o_proj``; ``*`` is the index of a
layer. A name may be a tuple: of several names that files use, the first that the file has counts.
"""

import re
from collections.abc import Callable, Mapping

KeyTable = Mapping[str, str | tuple[str, ...]]

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def find_key(keys: KeyTable, path: str, has_under: Callable[[str], bool]) -> str:
    """Return the name in the file of the part at `path`.

    Args:
      keys: of the model.
      path: of the part, such as "layers.3.attention.out".
      has_under: whether the file has tensors whose names begin with a prefix.

    Raises:
      KeyError: the table has no such path.
    """
    names = keys[_INDEX.sub("*", path)]
    layer = _INDEX.search(path)
    options = [
        name.replace("*", layer[0]) if layer else name
        for name in ((names,) if isinstance(names, str) else names)
    ]
    return next((name for name in options if has_under(name)), options[0])


def below(path: str, names: str | tuple[str, ...], parts: Mapping[str, str]) -> KeyTable:
    """Return a table of `parts`, path -> name, below a path of the model and a name of the file."""
    names = (names,) if isinstance(names, str) else names
    return {
        f"{path}.{part}": tuple(f"{name}.{key}" if key else name for name in names)
        for part, key in parts.items()
    }
