"""Test that a reader puts each piece of an array where numpy would put it."""

import numpy as np
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.examples import examples

from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.reading.reader import Reader
from jax_nvfp4_moe.checkpoint.reading.unread import Piece, Unread
from jax_nvfp4_moe.checkpoint.safetensors import open_tensors


def slices(size):
    bounds = st.tuples(st.integers(0, size), st.integers(0, size))
    return bounds.map(lambda pair: slice(min(pair), max(pair)))


@st.composite
def places(draw, shape):
    """Draw indices into an array. No two of them have an index of the first axis in common."""
    found, first = [], 0
    while first < shape[0]:
        count = draw(st.integers(1, shape[0] - first))
        one = draw(st.sampled_from([first, slice(first, first + count)]))
        more = [
            draw(slices(size) | st.integers(0, size - 1))
            for size in shape[1 : draw(st.integers(1, len(shape)))]
        ]
        found.append((one, *more))
        first += count
    return draw(st.permutations(found))


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_fill_their_places(tmp_path, data):
    """A tensor has the shape of its place, another shape or dtype, one element, or more of them."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    dtype = np.dtype(data.draw(st.sampled_from((np.uint8, np.float32))))
    expected = np.full(shape, np.nan if dtype == np.float32 else 0, dtype)
    covered = np.zeros(shape, bool)
    pieces, arrays = [], {}
    for number, at in enumerate(data.draw(places(shape))):
        held = expected[at].shape
        count = expected[at].size
        values = (np.arange(count) + 10 * number + 1).reshape(held)
        form = data.draw(st.sampled_from(("own", "own", "flat", "scalar", "wide", "part")))
        given, part = None, ()
        if form == "scalar":
            values, given = values.reshape(-1)[:1], ()
        if form == "flat":
            stored, given = values.reshape(-1), held
        else:
            stored = values
        if form == "scalar" and count == 0:
            continue
        if form == "part":
            stored, part = np.stack([values * 0, values]), (1,)
        wide = np.float64 if dtype == np.float32 else np.int32
        name = f"t{number}"
        arrays[name] = stored.astype(wide if form == "wide" else dtype)
        pieces.append(Piece(name, at, given, part))
        expected[at] = np.broadcast_to(values.reshape(() if form == "scalar" else held), held)
        covered[at] = True
    write_safetensors(tmp_path / "model.safetensors", arrays)
    whole = tuple(slice(0, size) for size in shape)
    rows = slices(shape[0]).map(lambda one: (one, *whole[1:]))
    region = data.draw(st.just(whole) | rows | st.tuples(*map(slices, shape)))
    checked = []
    leaf = Unread(shape, dtype, pieces, lambda part: checked.append(part.size))
    advanced = []
    with open_tensors(tmp_path) as tensors:
        found = Reader(tensors, advanced.append).open(leaf)[region]
    assert found.dtype == dtype
    mask = covered[region]
    np.testing.assert_array_equal(found[mask], expected[region][mask])
    if dtype == np.float32:
        assert np.isnan(found[~mask]).all()
    assert sum(checked) == found.size
    assert sum(advanced) >= 0


def test_the_piece_with_a_bad_value_is_named(tmp_path):
    """All pieces are checked at once, and then each by itself if a value is bad."""
    arrays = {f"t{x}": np.full(4, x, np.uint8) for x in range(6)}
    write_safetensors(tmp_path / "model.safetensors", arrays)
    pieces = [Piece(f"t{x}", (x,)) for x in reversed(range(6))]

    def check(part):
        return f"{np.count_nonzero(part % 2)} are odd" if (part % 2).any() else None

    with open_tensors(tmp_path) as tensors:
        reader = Reader(tensors, lambda _: None)
        reader.open(Unread((6, 4), np.dtype(np.uint8), pieces, check))[1:4, 1:]
    assert reader.problems == [
        "'t1' ('model.safetensors'): 3 are odd",
        "'t3' ('model.safetensors'): 3 are odd",
    ]
