"""Test that written checkpoints are read back with the same tensors and parameters, bit for bit."""

import io
import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe import load_moe
from jax_nvfp4_moe.checkpoint.export import write_checkpoint, write_safetensors
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, read_header
from jax_nvfp4_moe.checkpoint.writing.files import copy_file, sole_writer, staged_folder, write_file

FOLDERS = sorted(p.name for p in CHECKPOINTS.iterdir() if (p / "model.safetensors").exists())


def read_all(folder):
    """Read every tensor of every file of a folder."""
    read = {}
    for path in sorted(folder.glob("model*.safetensors")):
        problems = []
        infos = read_header(path, path.name, problems)
        assert not problems
        with Tensors({path.name: path}, infos) as tensors:
            read |= {name: np.array(tensors.read(name)) for name in tensors.names()}
    return read


def write_again(source, folder, tensors):
    """Write tensors into about four files, with the quantization config of `source`."""
    config = json.loads((source / "config.json").read_text())
    total = sum(array.nbytes for array in tensors.values())
    write_checkpoint(folder, tensors, config, shard_bytes=total // 4 + 1)
    for name in ("config.json", "hf_quant_config.json"):
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())


@pytest.mark.parametrize("name", FOLDERS)
def test_every_checkpoint_comes_back_from_shards(tmp_path, name):
    written = read_all(CHECKPOINTS / name)
    write_again(CHECKPOINTS / name, tmp_path, written)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    read = read_all(tmp_path)
    assert read.keys() == written.keys()
    for tensor, array in written.items():
        assert (read[tensor].dtype, read[tensor].shape) == (array.dtype, array.shape)
        assert read[tensor].tobytes() == array.tobytes()


def expert_tensors(params, prefix):
    """Name canonical parameters as ModelOpt does: one tensor for each expert and projection."""
    e, i = params.num_experts, params.intermediate
    scales = {"gate_up": params.gate_up_input_scale, "down": params.down_input_scale}
    for expert in range(e):
        one = jax.tree.map(lambda leaf, expert=expert: np.asarray(leaf[expert]), params)
        rows = {"gate_proj": slice(0, i), "up_proj": slice(i, 2 * i), "down_proj": slice(None)}
        for half, (projection, part) in enumerate(rows.items()):
            which = "down" if projection == "down_proj" else "gate_up"
            weight, name = getattr(one, which), f"{prefix}.{expert}.{projection}"
            scale = np.broadcast_to(weight.global_scale, (2,))[half % 2]
            yield f"{name}.weight", weight.packed[part]
            yield f"{name}.weight_scale", weight.block_scale[part]
            yield f"{name}.weight_scale_2", np.asarray(scale)
            if scales[which] is not None:
                yield f"{name}.input_scale", np.asarray(scales[which][expert])


@pytest.mark.parametrize("name", ["qwen3moe-modelopt-w4a4", "qwen3moe-modelopt-w4a16"])
def test_canonical_parameters_come_back(tmp_path, name):
    """Parameters are loaded, renamed as in the file, written, and loaded again."""
    source, how = CHECKPOINTS / name, {"scheme": "checkpoint", "backend": "reference"}
    before = load_moe(source, 1, **how).experts.params.get_value()
    assert before.layout == "canonical"
    written = read_all(source)
    experts = re.compile(r"model\.layers\.1\.mlp\.experts\.\d+\.")
    again = dict(expert_tensors(before, "model.layers.1.mlp.experts"))
    # All names and bytes agree, except input scales: the loader ignores them in w4a16.
    assert {key for key in written if experts.match(key)} >= again.keys()
    for key, array in again.items():
        assert array.tobytes() == written[key].tobytes()
    write_again(
        source, tmp_path, {k: v for k, v in written.items() if not experts.match(k)} | again
    )
    after = load_moe(tmp_path, 1, **how).experts.params.get_value()
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_files_are_filled_to_the_byte_and_say_what_readers_ask_for(tmp_path):
    """Readers of other tools ask for the format in each header, and for the size in the index."""
    tensors = {name: np.arange(4, dtype=np.float32) for name in "abcde"}
    write_checkpoint(tmp_path / "shards", tensors, {}, shard_bytes=32)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * 16}
    files = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 1, 2, 2, 3)]
    assert index["weight_map"] == dict(zip("abcde", files, strict=True))
    write_checkpoint(tmp_path / "whole", tensors, {}, shard_bytes=80)
    whole = tmp_path / "whole" / "model.safetensors"
    for path in (*(tmp_path / "shards" / name for name in files), whole):
        contents = path.read_bytes()
        size = int.from_bytes(contents[:8], "little")
        assert json.loads(contents[8 : 8 + size])["__metadata__"] == {"format": "pt"}
        assert size % 8 == 0  # the data then begin at a multiple of their element size


def test_tensors_begin_at_multiples_of_their_element_size(tmp_path):
    """Names and shapes of many lengths, so that the length of the header needs each padding."""
    for length in range(1, 9):
        tensors = {"x" * length: np.zeros(3, np.uint8), "y": np.ones(2, np.float32)}
        path = tmp_path / "model.safetensors"
        write_safetensors(path, tensors)
        contents = path.read_bytes()
        size = int.from_bytes(contents[:8], "little")
        header = json.loads(contents[8 : 8 + size])
        assert size % 8 == 0
        assert header["y"]["data_offsets"] == [0, 8]
        assert contents[8 + size :] == tensors["y"].tobytes() + tensors["x" * length].tobytes()


def test_a_large_file_is_copied_whole(tmp_path):
    """A tokenizer has several megabytes."""
    contents = bytes(range(256)) * 9000 + b"end"
    (tmp_path / "tokenizer.json").write_bytes(contents)
    copy_file(tmp_path / "tokenizer.json", tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_bytes() == contents


def test_a_write_that_takes_a_part_goes_on(tmp_path, monkeypatch):
    """Linux writes at most 2 GiB at once."""

    class Short(io.FileIO):
        def write(self, block):
            return super().write(memoryview(block)[:7])

    monkeypatch.setattr(pathlib.Path, "open", lambda path, *_, **__: Short(path, "w"))
    write_file(tmp_path / "file", [bytes(range(100)), memoryview(b"more")])
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == bytes(range(100)) + b"more"


def test_the_file_that_says_that_all_are_there_moves_last(tmp_path, monkeypatch):
    """Readers that see ``config.json`` while files move would otherwise find a part of them."""
    replace, seen = os.replace, []

    def note(source, destination):
        seen.append(os.path.basename(destination))
        replace(source, destination)

    monkeypatch.setattr(os, "replace", note)
    with staged_folder(tmp_path / "new", last="config.json") as stage:
        for name in ("model.safetensors", "config.json", "a.txt", "tokenizer.json"):
            (stage / name).write_text(name)
    assert seen[-1] == "config.json"
    assert sorted(seen) == sorted(os.listdir(tmp_path / "new"))


def test_two_writers_of_one_folder(tmp_path):
    """The second writer is told, and the files of the first one stay."""
    with staged_folder(tmp_path / "new", last="b") as stage:
        (stage / "a").write_text("first")
        with (
            pytest.raises(ValueError, match="another process is writing to"),
            staged_folder(tmp_path / "new", last="b"),
        ):
            raise AssertionError("the second writer may not begin")
    assert os.listdir(tmp_path / "new") == ["a"]
    with (
        pytest.raises(ValueError, match="destination: expected a folder that is empty"),
        staged_folder(tmp_path / "new", last="b"),
    ):
        raise AssertionError("the folder is not empty any more")
    with sole_writer(tmp_path):
        pass
    assert os.listdir(tmp_path) == ["new"]
