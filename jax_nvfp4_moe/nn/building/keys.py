"""Key tables: the names under which a checkpoint stores the parts of a model.

A key table maps the path of a part in the model to the name of its tensors in the file. For
example, it maps ``layers.*.attention.out`` to ``model.layers.*.self_attn.o_proj``; ``*`` stands for
the index of a layer. A value may also be a tuple of names. The first name that the file has is then
used.
"""

import re
from collections.abc import Callable, Mapping

KeyTable = Mapping[str, str | tuple[str, ...]]

DRAFTER = "drafter"  # the path of the drafting layers of a model

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def find_key(keys: KeyTable, path: str, has_under: Callable[[str], bool]) -> str:
    """Return the name in the file of the part at `path`.

    If the table lists several names and the file has none of them, the first one is returned.

    Args:
      keys: key table of the model.
      path: path of the part, such as "layers.3.attention.out".
      has_under: function that returns whether the file has tensors whose names begin with a prefix.

    Raises:
      KeyError: the table does not have `path`.
    """
    names = keys[_INDEX.sub("*", path)]
    layer = _INDEX.search(path)
    options = [
        name.replace("*", layer[0]) if layer else name
        for name in ((names,) if isinstance(names, str) else names)
    ]
    return next((name for name in options if has_under(name)), options[0])


def below(path: str, names: str | tuple[str, ...], parts: Mapping[str, str]) -> KeyTable:
    """Return the key table of a module inside a model.

    For example, ``below("layers.*.mlp", "model.layers.*.mlp", {"down": "down_proj"})`` maps
    ``layers.*.mlp.down`` to ``model.layers.*.mlp.down_proj``.

    Args:
      path: path of the module in the model.
      names: name of the module in the file, or a tuple of names of which a file has one.
      parts: path of each part inside the module -> its name inside the module's name in the file.
        An empty name stands for the name of the module itself.
    """
    names = (names,) if isinstance(names, str) else names
    return {
        f"{path}.{part}": tuple(f"{name}.{key}" if key else name for name in names)
        for part, key in parts.items()
    }
