"""Damage checkpoint folders at random, and run what a user would run on them.

``python tests/hostile/folder_mutations.py [--sample N] [--workers N]`` changes one to three things
in a copy of each test checkpoint and of each tokenizer folder of the tests: bytes, headers, fields
of JSON files, names, links. It then inspects the folder, traces its model, loads its weights in
some cases, and loads and uses its tokenizer. A case is a folder and a seed, which decides all.
"""

import contextlib
import functools
import json
import os
import pathlib
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import config_sweep
import hostile
from support.files import tokenizer_folders
from support.files.given import CHECKPOINTS, EXAMPLE, MODELS

SEEDS = 500  # cases of one folder
LOADS = 8  # the weights are read in one case of so many
SHARDED = "sharded"  # two files and an index, made of this folder:
_WHOLE = "qwen3moe-modelopt-w4a16"
INDEX = "model.safetensors.index.json"
TYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F4", "U8", "I8", "I64", "BOOL", "C64",
         "F8_E8M0", "X", "", 7, None, [])  # fmt: skip
SIZES = (0, 1, -1, 2, 3, 16, 1.5, 2**31, 2**62, 2**64, 10**400, "1", None, True, [])
NAMES = (
    "model.layers.2000000000.mlp.experts.0.down_proj.weight",
    "model.layers.1.mlp.experts.999999999999999999999.down_proj.weight",
    "model.layers.٣.input_layernorm.weight",
    "model.layers.-1.input_layernorm.weight",
    "model.layers.01.input_layernorm.weight",
    "language_model.model.layers.0.input_layernorm.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.experts.w13_weight",
    "x.moe.down_proj.weight",
    "\x1b[2J\x07\u202e",
    "",
    "." * 5000,
    "n" * 200_000,
    "__metadata__",
    "lm_head.weight.weight",
    "../../etc/passwd",
    "mtp.0.weight",
)
FILES = (  # which a loader may look for
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    INDEX,
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
TEMPLATES = (
    "{{ messages[0].content * 100 }}",
    "{% for i in range(100000000) %}x{% endfor %}",
    "{{ raise_exception('\x1b[2J') }}",
    "{{ 1 / 0 }}",
    "{{ messages.x.y.z }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 'x' * 1000000000 }}",
    "{{ 2 ** 10000000 }}",
    "{% include 'config.json' %}",
    "{{",
    "{% if %}",
    "{{ messages | tojson(indent=-1) }}",
    "{{ strftime_now('%') }}",
    "{{ strftime_now(1) }}",
    "\x00",
)
NESTED = ("[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, '{"a":' * 500 + "1" + "}" * 500)
Folder = pathlib.Path
Rng = random.Random


def list_cases() -> Sequence[str]:
    """Return ``[FOLDER, SEED]`` for all folders."""
    tokenizers = [f"tokenizer: {name}" for name in tokenizer_folders.VARIANTS]
    names = [EXAMPLE.name, SHARDED, *MODELS, *tokenizers]
    return [json.dumps([name, seed]) for name in names for seed in range(SEEDS)]


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    """Return a folder of this process. It is deleted when the process ends."""
    memory = pathlib.Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


@functools.cache
def pristine(base: str) -> Folder:
    """Return a folder as it is before it is damaged. Its files must not change."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=_root().name))
    if base.startswith("tokenizer: "):
        tokenizer_folders.write(tokenizer_folders.VARIANTS[base.partition(": ")[2]], folder)
        return folder
    source = EXAMPLE if base == EXAMPLE.name else CHECKPOINTS / base
    for path in (CHECKPOINTS / _WHOLE if base == SHARDED else source).iterdir():
        if not path.name.startswith("reference"):
            shutil.copy(path, folder)
    if base == SHARDED:
        _shard(folder)
    return folder


def _shard(folder: Folder) -> None:
    """Divide ``model.safetensors`` of a folder into two files with an index."""
    header, data = read_safetensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [name for name in header if name != "__metadata__"]
    found: dict[str, str] = {}
    for part, own in enumerate((names[::2], names[1::2]), 1):
        file, content, kept = f"model-{part:05}-of-00002.safetensors", b"", {}
        for name in own:
            start, end = header[name]["data_offsets"]
            place = [len(content), len(content) + end - start]
            kept[name] = {**header[name], "data_offsets": place}
            content += data[start:end]
        write_safetensors(folder / file, kept, content)
        found |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": len(data)}, "weight_map": found}
    (folder / INDEX).write_text(json.dumps(index))


def read_safetensors(path: Folder) -> tuple[dict[str, Any], bytes]:
    """Return the header of a file, and the bytes after it."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_safetensors(path: Folder, header: Any, data: bytes) -> None:
    """Write a file with this header, whatever it is."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    replace(path, struct.pack("<Q", len(text)) + text + data)


def replace(path: Folder, content: bytes | str) -> None:
    """Write a new file, because the old one is a link to the pristine file."""
    remove(path)
    content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    path.write_bytes(content)


def remove(path: Folder) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Damage of any file.


def _flip(rng: Rng, path: Folder) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 20))):
        if raw:
            raw[rng.randrange(min(len(raw), rng.choice((16, 4096, 1 << 30))))] = rng.randrange(256)
    replace(path, bytes(raw))


def _truncate(rng: Rng, path: Folder) -> None:
    raw = path.read_bytes()
    replace(path, raw[: rng.choice((0, 1, 7, 8, 9, len(raw) // 2, max(len(raw) - 1, 0)))])


def _append(rng: Rng, path: Folder) -> None:
    more = rng.choice((b"\0", b"}", b"x" * 1000, b"\xff\xfe", path.read_bytes()))
    replace(path, path.read_bytes() + more)


def _insert(rng: Rng, path: Folder) -> None:
    raw = path.read_bytes()
    place = rng.randrange(min(len(raw), 1 << 16) + 1)
    more = rng.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\0", b"\xf4\x90\x80\x80", b'"'))
    replace(path, raw[:place] + more + raw[place:])


def _encode(rng: Rng, path: Folder) -> None:
    text = path.read_bytes().decode("latin-1")
    made = rng.choice(("utf-16", "utf-32", "utf-8-sig", "cp037"))
    replace(path, text.encode(made, "replace"))


def _content(rng: Rng, path: Folder) -> None:
    texts = ("", " ", "null", "[]", "{}", "1" * 5000, "NaN", '"x"', "\0" * 100, "{}{}", *NESTED)
    replace(path, rng.choice((*texts, rng.randbytes(1000), *TEMPLATES)))


def _delete(rng: Rng, path: Folder) -> None:
    remove(path)


def _folder(rng: Rng, path: Folder) -> None:
    remove(path)
    path.mkdir()


def _link(rng: Rng, path: Folder) -> None:
    remove(path)
    beside = [other.name for other in path.parent.iterdir()]
    aims = (path.name, "/etc/passwd", "/dev/zero", "..", "/proc/self/mem", "nowhere", *beside)
    path.symlink_to(rng.choice(aims))


def _pipe(rng: Rng, path: Folder) -> None:
    remove(path)
    os.mkfifo(path)


def _copy_over(rng: Rng, path: Folder) -> None:
    beside = [other for other in path.parent.iterdir() if other.is_file()]
    replace(path, rng.choice([path, *beside]).read_bytes())


def _swap(rng: Rng, path: Folder) -> None:
    beside = [other for other in path.parent.iterdir() if other.is_file()]
    other = rng.choice([path, *beside])
    first, second = path.read_bytes(), other.read_bytes()
    replace(path, second)
    replace(other, first)


def _rename(rng: Rng, path: Folder) -> None:
    made = path.with_name(rng.choice((*FILES, "x\n\x1b[2J.json", "x" * 200)))
    if made != path:
        remove(made)
        path.rename(made)


ANY = (_flip, _flip, _truncate, _append, _insert, _insert, _encode, _content, _content, _delete,
       _folder, _link, _pipe, _copy_over, _swap, _rename)  # fmt: skip

# Damage of JSON.


def _json(change: Callable[[Rng, Any], Any]) -> Callable[[Rng, Folder], None]:
    """Return damage of a file from a function that changes what the file holds."""

    @functools.wraps(change)
    def damage(rng, path):
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return  # damaged before
        replace(path, json.dumps(change(rng, content)))

    return damage


def _pick(rng: Rng, content: Any) -> tuple[Any, Any] | None:
    """Return a random object or list inside `content`, and a key of it."""
    holder, key = None, None
    inner = content
    while isinstance(inner, (dict, list)) and inner and (holder is None or rng.random() < 0.7):
        holder, key = inner, rng.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
        inner = holder[key]
    return None if holder is None else (holder, key)


@_json
def _set_field(rng: Rng, content: Any) -> Any:
    found = _pick(rng, content)
    value = config_sweep.VALUES[rng.choice([*config_sweep.VALUES])]
    if found is None:
        return value(content) if callable(value) else value
    holder, key = found
    holder[key] = value(holder[key]) if callable(value) else value
    return content


@_json
def _drop_field(rng: Rng, content: Any) -> Any:
    found = _pick(rng, content)
    if found is not None:
        del found[0][found[1]]
    return content


@_json
def _move_field(rng: Rng, content: Any) -> Any:
    one, other = _pick(rng, content), _pick(rng, content)
    if one is not None and other is not None:
        mine, theirs = one[0][one[1]], other[0][other[1]]
        one[0][one[1]] = json.loads(json.dumps(theirs))
        if other[1] in other[0] if isinstance(other[0], dict) else other[1] < len(other[0]):
            other[0][other[1]] = json.loads(json.dumps(mine))
    return content


@_json
def _rename_key(rng: Rng, content: Any) -> Any:
    found = _pick(rng, content)
    if found is not None and isinstance(found[0], dict):
        name = rng.choice(("", "x", "\x1b[2J", "n" * 10_000, *content) if content else ("x",))
        found[0][str(name)] = found[0].pop(found[1])
    return content


def _text(rng: Rng, path: Folder) -> None:
    """Replace a token of the text by another one."""
    raw = path.read_bytes()
    old = rng.choice((b"0", b"1", b":", b",", b"{", b"}", b"[", b"]", b'"', b"true", b"null"))
    new = rng.choice((b"", b"1e999", b"-", b"1" * 5000, b'"\\ud800"', b"{}", b"\\u0000", b"'"))
    replace(path, raw.replace(old, new, rng.choice((1, 1, 5))))


JSON = (*(_set_field,) * 6, _drop_field, _drop_field, _move_field, _rename_key, _text)

# Damage of headers.


def _header(change: Callable[[Rng, dict[str, Any], str], None]) -> Callable[[Rng, Folder], None]:
    """Return damage of a file from a function that changes one tensor of its header."""

    @functools.wraps(change)
    def damage(rng, path):
        try:
            header, data = read_safetensors(path)
            name = rng.choice([name for name in header if name != "__metadata__"])
            change(rng, header, name)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error):
            return  # damaged before
        write_safetensors(path, header, data)

    return damage


@_header
def _set_type(rng: Rng, header: dict[str, Any], name: str) -> None:
    header[name]["dtype"] = rng.choice(TYPES)


@_header
def _set_shape(rng: Rng, header: dict[str, Any], name: str) -> None:
    shape = header[name]["shape"]
    made = [shape[::-1], [*shape, 1], [1, *shape], shape[1:], [], [2**40] * 40, "x", None, [[1]]]
    if shape:
        changed = list(shape)
        changed[rng.randrange(len(shape))] = rng.choice(SIZES)
        made += [changed] * 6
    header[name]["shape"] = rng.choice(made)


@_header
def _set_offsets(rng: Rng, header: dict[str, Any], name: str) -> None:
    start, end = header[name]["data_offsets"]
    other = rng.choice([*header.values()])
    made = (
        [end, start],
        [start, end + 8],
        [start + 8, end],
        [-8, end],
        [start, 2**63],
        [start],
        [start, 10**400],
        [],
        None,
        "x",
        [1.5, end],
        [0, 0],
        other.get("data_offsets"),
    )
    header[name]["data_offsets"] = rng.choice(made)


@_header
def _rename_tensor(rng: Rng, header: dict[str, Any], name: str) -> None:
    made = (
        *NAMES,
        f"{name}.x",
        name.upper(),
        name.replace(".0.", ".1."),
        f"model.{name}",
        name[:-1],
    )
    header[rng.choice(made)] = header.pop(name)


@_header
def _drop_tensor(rng: Rng, header: dict[str, Any], name: str) -> None:
    del header[name]


@_header
def _add_tensors(rng: Rng, header: dict[str, Any], name: str) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    stem = rng.choice(("x", "model.layers", "model.layers.1.mlp.experts", name))
    for index in range(rng.choice((1, 10, 3000))):
        header[f"{stem}.{index + 5}.weight"] = empty


@_header
def _set_entry(rng: Rng, header: dict[str, Any], name: str) -> None:
    value = config_sweep.VALUES[rng.choice([*config_sweep.VALUES])]
    header[rng.choice((name, "__metadata__"))] = None if callable(value) else value


def _set_length(rng: Rng, path: Folder) -> None:
    raw = path.read_bytes()
    if len(raw) >= 8:
        (length,) = struct.unpack("<Q", raw[:8])
        made = rng.choice((0, 1, length - 1, length + 1, len(raw), 2**63, 2**64 - 1, 10**8))
        replace(path, struct.pack("<Q", made % 2**64) + raw[8:])


def _set_data(rng: Rng, path: Folder) -> None:
    """Fill a part of the data with one byte, such as those of NaN."""
    raw = bytearray(path.read_bytes())
    if len(raw) > 20_000:
        start = rng.randrange(10_000, len(raw))
        end = min(start + rng.choice((1, 64, 100_000)), len(raw))
        raw[start:end] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * (end - start)
        replace(path, bytes(raw))


HEADER = (
    _set_type,
    _set_type,
    _set_shape,
    _set_shape,
    _set_offsets,
    _set_offsets,
    _rename_tensor,
    _rename_tensor,
    _drop_tensor,
    _add_tensors,
    _set_entry,
    _set_length,
    _set_data,
)


def _add_file(rng: Rng, folder: Folder) -> str:
    """Add a file that the folder lacks."""
    name = rng.choice([name for name in FILES if not (folder / name).exists()])
    content: Any = rng.choice(
        ("{}", "[]", "x", "{{ messages }}", '{"chat_template": "{{"}', b"\xff\xfe", *TEMPLATES)
    )
    replace(folder / name, content)
    return f"{name} added"


def damage(rng: Rng, folder: Folder) -> str:
    """Damage a folder, and return what was done."""
    if rng.random() < 0.05:
        return _add_file(rng, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:
        return "nothing left"
    path = rng.choice(files)
    kinds: Sequence[Callable[[Rng, Folder], None]] = ANY
    if rng.random() < 0.6:
        kinds = {".safetensors": HEADER, ".json": JSON}.get(path.suffix, ANY)
    kind = rng.choice(kinds)
    kind(rng, path)
    return f"{path.name}: {kind.__name__}"


@contextlib.contextmanager
def open_case(case: str) -> Iterator[list[hostile.Step]]:
    """Make the damaged folder, and yield what a user runs on it."""
    base, seed = json.loads(case)
    rng = random.Random(case)
    folder = pathlib.Path(tempfile.mkdtemp(dir=_root().name))
    source = pristine(base)
    try:
        for path in source.rglob("*"):
            if path.is_file():
                (folder / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                os.link(path, folder / path.relative_to(source))
        done = [damage(rng, folder) for _ in range(rng.choice((1, 1, 1, 1, 2, 3)))]
        print(f"{case}: {', '.join(done)}", file=sys.stderr, flush=True)
        yield list(_steps(base, seed, folder))
    finally:
        shutil.rmtree(folder)


def _steps(base: str, seed: int, folder: Folder) -> Iterator[hostile.Step]:
    if not base.startswith("tokenizer: "):
        yield "inspect", hostile.command("inspect", str(folder))
        yield "trace", hostile.as_command(lambda: config_sweep.trace(folder))
        if seed % LOADS == 0:
            yield "load", hostile.as_command(lambda: load(folder))
    if base == EXAMPLE.name or base.startswith("tokenizer: "):
        yield "tokenizer", hostile.as_command(lambda: use_tokenizer(folder))
        yield "chat", hostile.as_command(lambda: chat(folder))


def load(folder: Folder) -> None:
    """Load the model of a folder with its weights."""
    import jax_nvfp4_moe as nvfp4

    nvfp4.load_model(folder)


def use_tokenizer(folder: Folder) -> None:
    """Load the tokenizer of a folder, and encode and decode texts."""
    import jax_nvfp4_moe as nvfp4

    tokenizer = nvfp4.load_tokenizer(folder)
    for text in tokenizer_folders.TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
        for _ in tokenizer.decode_stream(iter(ids.tolist())):
            pass


def chat(folder: Folder) -> None:
    """Render a conversation."""
    import jax_nvfp4_moe as nvfp4

    nvfp4.load_tokenizer(folder).chat(tokenizer_folders.TALKS["turns"])


if __name__ == "__main__":
    hostile.run_program(__file__, list_cases, open_case)
