"""Test that safetensors files round-trip, and that a bad file gives one error with all problems."""

import functools
import json
import math
import os
import pathlib
import resource
import tempfile
import unittest.mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.examples import examples

from jax_nvfp4_moe.checkpoint import safetensors
from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.export import LazyTensor, write_checkpoint, write_safetensors
from jax_nvfp4_moe.checkpoint.folder import read_config, read_size
from jax_nvfp4_moe.checkpoint.reading.byte_runs import find_runs, index_shape
from jax_nvfp4_moe.checkpoint.safetensors import INDEX, STORED_TYPES, open_tensors, read_header

DTYPES = (
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
    *(ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.bool_),
    *(np.uint8, np.int8, np.int16, np.int32, np.int64),
)


def pack_file(header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def problems_of(folder):
    with pytest.raises(CheckpointError) as caught:
        open_tensors(folder)
    return caught.value.problems


def write_raw(folder, raw, name="model.safetensors"):
    (folder / name).write_bytes(raw)
    return folder


def random_array(rng, dtype, shape):
    raw = rng.integers(0, 2 if dtype is np.bool_ else 256, (*shape, np.dtype(dtype).itemsize))
    return raw.astype(np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_round_trip_of_every_dtype(tmp_path, dtype):
    rng = np.random.default_rng(0)
    arrays = {f"{i}": random_array(rng, dtype, s) for i, s in enumerate([(), (1,), (3, 5), (0, 4)])}
    arrays["odd"] = random_array(rng, np.uint8, (3,))  # leaves later data unaligned
    write_safetensors(tmp_path / "model.safetensors", arrays, {"by": "test"})
    with open_tensors(tmp_path) as tensors:
        assert tensors.names() == sorted(arrays)
        for name, array in arrays.items():
            read, out = tensors.read(name), np.empty_like(array)
            tensors.read_into(name, out)
            assert read.dtype == array.dtype
            assert read.shape == array.shape
            assert read.tobytes() == out.tobytes() == array.tobytes()


def test_four_bit_elements_are_read_as_bytes(tmp_path):
    header = {"a": entry("F4", [2, 4], [0, 4]), "b": entry("F4", [2, 3], [4, 7])}
    with open_tensors(write_raw(tmp_path, pack_file(header, bytes(range(7))))) as tensors:
        assert tensors.read("a").tolist() == [[0, 1], [2, 3]]
        assert tensors.read("b").tolist() == [4, 5, 6]


def test_arrays_outlive_the_file(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": np.arange(5)})
    with open_tensors(tmp_path) as tensors:
        array = tensors.read("a")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert array.tolist() == [0, 1, 2, 3, 4]


INDICES = st.one_of(
    st.integers(0, 2),
    st.builds(slice, st.integers(0, 3), st.integers(0, 3), st.integers(1, 2)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    index=st.lists(INDICES, max_size=3).map(tuple),
    gap=st.integers(0, 60),
    longest=st.sampled_from((2, 16, 1000)),
    bounded=st.booleans(),
)
def test_a_part_is_read_as_numpy_indexes_it(tmp_path, index, gap, longest, bounded):
    """The result does not depend on whether gaps between runs are read, nor on the longest run."""
    array = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    write_safetensors(tmp_path / "model.safetensors", {"odd": np.zeros(3, np.int8), "a": array})
    with open_tensors(tmp_path) as tensors:
        np.testing.assert_array_equal(tensors.read("a", index), array[index])
        found = np.full_like(array[index], -1)
        limits = {"gap": gap, "longest": longest, "bounded": bounded}
        for run in find_runs(array.shape, 2, index, **limits):
            found[run.at] = tensors.read_run("a", run)
            assert run.nbytes <= max(longest, 2) or (run.contiguous and not bounded)
        np.testing.assert_array_equal(found, array[index])


@pytest.mark.parametrize("index", [(2, slice(16, 32)), (slice(1, 3), slice(512, 528))])
def test_a_part_reads_its_own_bytes_alone(index):
    """A part is either rows of one matrix, or some rows of each matrix of a stack."""
    shape = (4, 1024, 256)
    runs = list(find_runs(shape, 1, index))
    assert sum(run.nbytes for run in runs) == math.prod(index_shape(shape, index))
    assert all(run.contiguous for run in runs)


def test_reading_a_file_that_shrank_is_an_error(tmp_path):
    """If the file were mapped, touching a page that is gone would end this process with SIGBUS."""
    empty = np.empty(5000, np.int64)
    for read in (lambda tensors: tensors.read("a"), lambda tensors: tensors.read_into("a", empty)):
        write_safetensors(tmp_path / "model.safetensors", {"a": np.arange(5000)})
        with open_tensors(tmp_path) as tensors:
            assert tensors.read("a").sum() == 12_497_500
            os.truncate(tmp_path / "model.safetensors", 100)
            with pytest.raises(CheckpointError, match=r"^'model.safetensors' shrank while it was"):
                read(tensors)


def test_lazy_tensors_are_made_one_at_a_time_and_checked(tmp_path):
    made = []

    def make(name):
        made.append(name)
        return np.full(3, len(made), np.int32)

    lazy = {n: LazyTensor((3,), np.dtype(np.int32), lambda n=n: make(n)) for n in "ba"}
    write_checkpoint(tmp_path, lazy, {"x": 1}, shard_bytes=12)
    assert made == ["b", "a"]
    with open_tensors(tmp_path) as tensors:
        assert {n: tensors.info(n).file for n in "ab"} == {
            "b": "model-00001-of-00002.safetensors",
            "a": "model-00002-of-00002.safetensors",
        }
        assert tensors.read("a").tolist() == [2, 2, 2]
    wrong = LazyTensor((4,), np.dtype(np.int32), lambda: np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"a: expected int32 \(4,\), got int32 \(3,\)"):
        write_safetensors(tmp_path / "w", {"a": wrong})
    assert not (tmp_path / "w").exists()
    with pytest.raises(ValueError, match="has no dtype complex128"):
        write_safetensors(tmp_path / "w", {"a": np.zeros(3, np.complex128)})


def test_a_full_device_is_named_and_nothing_is_left(tmp_path):
    """`/dev/full` answers every write as a full disk does."""
    (tmp_path / "model.safetensors.partial").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"model\.safetensors: No space left on device.* mounted at /"
    ):
        write_safetensors(tmp_path / "model.safetensors", {"a": np.zeros(1000)})
    assert os.listdir(tmp_path) == []
    write_safetensors(tmp_path / "model.safetensors", {"a": np.zeros(1000)})
    assert os.listdir(tmp_path) == ["model.safetensors"]


BAD_FILES = {
    "empty": (b"", "truncated: 0 bytes"),
    "short": (b"1234567", "truncated: 7 bytes"),
    "header past the end": ((100).to_bytes(8, "little") + b"{}", "header of 100 bytes in a file"),
    "header over the cap": ((1 << 62).to_bytes(8, "little") + b"{}", "at most 100000000"),
    "not JSON": (pack_file(b"{nope"), "not JSON"),
    "not UTF-8": (pack_file(b'{"\xff": 1}'), "not JSON"),
    "nested": (pack_file(b"[" * 100_000), "nested too deeply"),
    "many objects": (
        pack_file(b'{"a": [' + b"{}," * 3_000_000 + b"{}]}"),
        "expected at most 5000000",
    ),
    "long integer": (pack_file(b'{"a": ' + b"9" * 5000 + b"}"), "not JSON"),
    "an array": (pack_file([1, 2]), "expected a JSON object, got list"),
    "repeated name": (pack_file(b'{"a": 1, "a": 2}'), "repeated keys: 'a'"),
    "repeated names": (pack_file(b'{"a": 1, "b": 2, "b": 3, "a": 4}'), "repeated keys: 'b', 'a'"),
    "repeated field": (pack_file(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "repeated keys: 'd"),
    "metadata": (pack_file({"__metadata__": {"a": 1}}), "__metadata__: expected an object"),
    "entry is no object": (pack_file({"a": 7}), "'a': expected an object with dtype"),
    "entry lacks a field": (pack_file({"a": {"dtype": "U8"}}), r"got \['dtype'\]"),
    "unknown dtype": (pack_file({"a": entry("F7")}, bytes(8)), "unknown dtype 'F7'; known: F4"),
    "dtype is a list": (pack_file({"a": entry(["F32"])}, bytes(8)), "unknown dtype"),
    "negative size": (pack_file({"a": entry(shape=[-2])}, bytes(8)), r"got \[-2\]"),
    "boolean size": (pack_file({"a": entry(shape=[True, 2])}, bytes(8)), r"got \[True, 2\]"),
    "fractional size": (pack_file({"a": entry(shape=[2.0])}, bytes(8)), r"got \[2.0\]"),
    "shape is a string": (pack_file({"a": entry(shape="2")}, bytes(8)), "shape: expected"),
    "too many axes": (pack_file({"a": entry(shape=[1] * 33)}, bytes(8)), "at most 32 sizes"),
    "huge product": (pack_file({"a": entry(shape=[2**62] * 8)}, bytes(8)), "does not fill 8"),
    "product wraps to 8": (pack_file({"a": entry("U8", [2**32 + 1] * 2)}, bytes(1)), "truncated"),
    "size does not match": (pack_file({"a": entry(shape=[3])}, bytes(8)), "does not fill 8 bytes"),
    "half a byte": (pack_file({"a": entry("F4", [3], [0, 1])}, bytes(1)), "does not fill 1 bytes"),
    "negative offset": (pack_file({"a": entry(offsets=[-8, 0])}, bytes(8)), "expected .begin, end"),
    "reversed offsets": (pack_file({"a": entry(offsets=[8, 0])}, bytes(8)), "expected .begin, end"),
    "three offsets": (pack_file({"a": entry(offsets=[0, 8, 8])}, bytes(8)), "expected .begin"),
    "boolean offset": (pack_file({"a": entry(offsets=[False, 8])}, bytes(8)), "expected .begin"),
    "past the end": (pack_file({"a": entry()}, bytes(7)), "truncated: the tensor ends at byte"),
    "bytes left over": (
        pack_file({"a": entry()}, bytes(9)),
        "to end with its last tensor, got 1 more bytes",
    ),
    "hole": (pack_file({"a": entry(offsets=[1, 9])}, bytes(9)), "leaves a hole after the header"),
    "overlap": (
        pack_file({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        "'b' overlaps 'a'",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(tmp_path, case):
    raw, expected = BAD_FILES[case]
    with pytest.raises(CheckpointError, match=expected) as caught:
        open_tensors(write_raw(tmp_path, raw))
    assert "'model.safetensors'" in str(caught.value)


ODD_FIELDS = {
    "dtype": ("F32", "U8", "F4", "F7", None, ["F32"]),
    "shape": (
        [2],
        [8],
        [2, 1],
        [True, 2],
        [2.0],
        [-2],
        [[2]],
        [2**63],
        [1] * 33,
        [0],
        [],
        "2",
        None,
    ),
    "data_offsets": (
        *([0, 8], [8, 16], [16, 24], [4, 12], [8, 8], [0, 0], [8, 0], [False, 8], [0.0, 8]),
        *([-8, 0], [0, 8, 8], [2**64, 2**64 + 8], ["0", 8], [[0], 8], None),
    ),
}


@examples(400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.lists(
        st.fixed_dictionaries({key: st.sampled_from(odd) for key, odd in ODD_FIELDS.items()})
        | st.sampled_from([7, None, {"dtype": "F32"}, {**entry(), "more": 1}]),
        max_size=2,
    ),
    valid=st.integers(0, 3),
    more=st.sampled_from([0, 0, 8, 9]),
)
def test_all_entries_at_once_are_checked_as_each_by_itself(tmp_path, entries, valid, more):
    good = [entry(offsets=[8 * i, 8 * i + 8]) for i in range(valid)]
    header = {f"t{i}": one for i, one in enumerate([*good, *entries])}
    path = write_raw(tmp_path, pack_file(header, bytes(8 * valid + more))) / "model.safetensors"
    found: list[str] = []
    infos = read_header(path, "f", found)
    with unittest.mock.patch.object(safetensors, "_parse_valid", return_value=None):
        expected: list[str] = []
        assert infos == read_header(path, "f", expected)
    assert found == expected


def test_all_problems_come_at_once(tmp_path):
    header = {"good": entry(), "bad dtype": entry("F7"), "bad shape": entry(shape=[5])}
    write_raw(tmp_path, pack_file(header, bytes(8)), "1.safetensors")
    write_raw(tmp_path, b"x", "2.safetensors")
    weight_map = {"good": "1.safetensors", "lost": "1.safetensors", "b": "2.safetensors"}
    weight_map |= {"c": "3.safetensors", "d": "../4.safetensors", "e": 5}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    found = "\n".join(problems_of(tmp_path))
    for expected in (
        "'1.safetensors': 'bad dtype': unknown dtype 'F7'",
        "'1.safetensors': 'bad shape': F32 [5] does not fill 8 bytes",
        "'2.safetensors': truncated: 1 bytes",
        "'3.safetensors' is missing",
        "'../4.safetensors' lies outside the checkpoint's folder",
        "'e': expected a file's name, got 5",
        "'lost' is not in '1.safetensors'",
    ):
        assert expected in found
    assert len(problems_of(tmp_path)) == 7


def test_an_index_may_not_leave_the_folder(tmp_path):
    folder, outside = tmp_path / "inside", tmp_path / "outside.safetensors"
    folder.mkdir()
    write_safetensors(outside, {"a": np.zeros(2, np.float32)})
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "folder.safetensors").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    files = (str(outside), "../outside.safetensors", "x/../../outside.safetensors")
    files += ("link.safetensors", "loop.safetensors", "folder.safetensors", "pipe.safetensors")
    files += ("null\0.safetensors", "/dev/zero", ".", "")
    for file in files:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
        assert len(problems_of(folder)) == 1, file


def test_links_inside_the_folder_and_of_the_hub_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_safetensors(blobs / "123", {"a": np.zeros(2, np.float32)})
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    with open_tensors(snapshot) as tensors:
        assert tensors.names() == ["a"]


def test_a_tensor_in_two_files_and_one_not_where_the_index_says(tmp_path):
    write_safetensors(tmp_path / "1.safetensors", {"a": np.zeros(2), "b": np.zeros(2)})
    write_safetensors(tmp_path / "2.safetensors", {"a": np.zeros(2)})
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert problems_of(tmp_path) == (
        "'a' is stored twice, in '1.safetensors' and '2.safetensors'",
        f"'{INDEX}': 'b' is not in '2.safetensors'",
    )


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": []}', "{}", '{"a":1,"a":1}'])
def test_bad_indices(tmp_path, text):
    write_safetensors(tmp_path / "model.safetensors", {"a": np.zeros(2)})
    (tmp_path / INDEX).write_text(text)
    assert INDEX in problems_of(tmp_path)[0]


def test_a_folder_without_tensors(tmp_path):
    assert problems_of(tmp_path) == ("'model.safetensors' is missing",)


def test_an_index_of_many_files_is_refused_before_they_are_opened(tmp_path):
    weight_map = {f"t{i}": f"{i}.safetensors" for i in range(25_000)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (problem,) = problems_of(tmp_path)
    assert problem == f"'{INDEX}': names 25000 files; expected at most 2000"


def test_a_process_that_may_open_few_files_says_how_to_raise_its_limit(tmp_path):
    weight_map = {f"t{i}": f"{i}.safetensors" for i in range(40)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for i in range(40):
        write_raw(tmp_path, pack_file({f"t{i}": entry()}, b"8 bytes "), f"{i}.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(tmp_path / "0.safetensors", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 20, hard))
    try:
        with pytest.raises(OSError, match="has 40 files, and this process may not open so many"):
            open_tensors(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    open_tensors(tmp_path).close()


def test_a_header_of_many_tensors_is_refused_before_it_is_parsed(tmp_path):
    """Empty tensors take no bytes of the file."""
    one = json.dumps(entry(shape=(0,), offsets=(0, 0)))
    header = "{" + ",".join(f'"{i}":{one}' for i in range(300_001)) + "}"
    (problem,) = problems_of(write_raw(tmp_path, pack_file(header.encode())))
    assert problem.endswith("the header lists 300001 tensors; expected at most 300000 in a file")


def test_a_message_of_many_problems_ends():
    error = CheckpointError(f"problem {i}" for i in range(5000))
    assert len(error.problems) == 5000
    assert str(error).splitlines()[-2:] == ["  problem 999", "  and 4000 more"]


def test_names_from_files_stay_printable(tmp_path):
    name = "a\n\ud800\x1b[31m" + "x" * 1000
    (problem,) = problems_of(write_raw(tmp_path, pack_file({name: 1})))
    assert problem.isprintable()
    assert problem.isascii()
    assert len(problem) < 400


def test_config_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"'config\.json' is missing"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"'config\.json': expected a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 3, "b": null, "c": 0, "d": true, "e": "4"}')
    config = read_config(tmp_path)
    assert read_size(config, "b", "a") == 3
    assert read_size(config, "b", default=7) == 7
    for name in ("c", "d", "e"):
        with pytest.raises(CheckpointError, match=f"config.json: {name}: expected a positive"):
            read_size(config, name)
    with pytest.raises(CheckpointError, match=r"config.json: x or y: missing"):
        read_size(config, "x", "y")


# All that UTF-8 can write. To find the same characters by the name of the codec takes 3 s.
text = functools.partial(st.text, st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text(max_size=5), inner),
    max_leaves=10,
)
SIZES = st.lists(st.integers(-2, 2**65) | st.integers(0, 9) | st.booleans() | JSON, max_size=4)
ENTRIES = st.fixed_dictionaries(
    {"dtype": st.sampled_from(sorted(STORED_TYPES)) | JSON, "shape": SIZES | JSON},
    optional={"data_offsets": SIZES | JSON, "more": JSON},
)
HEADERS = st.dictionaries(text(max_size=4) | st.just("__metadata__"), ENTRIES | JSON, max_size=4)


def open_or_refuse(raw):
    """Open `raw` as a file. It is refused, or its tensors cover all its data and are readable."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_raw(pathlib.Path(folder), raw)
        try:
            tensors = open_tensors(path)
        except CheckpointError:
            return
        with tensors:
            infos = [tensors.info(name) for name in tensors.names()]
            assert sum(info.nbytes for info in infos) == len(raw) - min(
                [info.start for info in infos], default=len(raw)
            )
            for info in infos:
                if math.prod(max(size, 1) for size in info.shape) < 2**40:
                    assert tensors.read(info.name).nbytes == info.nbytes


FUZZ = examples(150, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(st.binary(max_size=64))
def test_random_bytes_never_crash(raw):
    open_or_refuse(raw)


@FUZZ
@given(HEADERS, st.binary(max_size=16))
def test_random_headers_never_crash(header, data):
    open_or_refuse(pack_file(header, data))


@FUZZ
@given(st.data())
def test_mutated_files_never_crash(data):
    header = {"a": entry("U8", [2, 4], [0, 8]), "b": entry("F8_E4M3", [3], [8, 11])}
    raw = bytearray(pack_file(header, bytes(range(11))))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(0, len(raw)) | st.just(len(raw))) :]
    open_or_refuse(bytes(raw))


@FUZZ
@given(
    st.dictionaries(
        text(max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    )
)
@example({})
def test_what_was_written_is_accepted(specs):
    rng = np.random.default_rng(0)
    arrays = {name: random_array(rng, dtype, shape) for name, (dtype, shape) in specs.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_safetensors(f"{folder}/model.safetensors", arrays)
        with open_tensors(folder) as tensors:
            assert {n: tensors.read(n).tobytes() for n in tensors.names()} == {
                n: array.tobytes() for n, array in arrays.items()
            }
