"""Test the hash of several tokens against Python's integers."""

import numpy as np
import pytest

from jax_nvfp4_moe.nn.ngram_embedding import find_rows, size_table

END = 7
SIZES = {
    "vocab": 248_320,
    "largest": 3,
    "heads": 8,
    "width": 2560,
    "base": 20_000_000,
    "divisor": 128,
    "seed": 1234,
    "end": END,
    "shards": 128,
    "index": 0,
}


def expected_rows(sizes, text, at):
    """Return the rows that the token `at` of a text reads."""
    tokens = [text[at]]
    for back in range(1, sizes.largest):
        open_ = at >= back and END not in text[at - back : at]
        tokens.append(text[at - back] if open_ else END)
    mixed, found, offset = tokens[0] * sizes.multipliers[0], [], 0
    primes = iter(sizes.primes)
    for back in range(1, sizes.largest):
        mixed ^= tokens[back] * sizes.multipliers[back]
        for _ in range(sizes.heads):
            prime = next(primes)
            found.append(mixed % prime + offset)
            offset += prime
    return found


@pytest.mark.parametrize("largest", [2, 3, 4])
def test_rows_at_published_sizes(largest):
    """Ids of 18 bits times multipliers of 45 bits, with texts that end and a call that goes on."""
    sizes = size_table(**SIZES | {"largest": largest, "width": 480})
    assert all(prime >= 20_000_000 for prime in sizes.primes)
    assert len(set(sizes.primes)) == len(sizes.primes) == (largest - 1) * 8
    ids = np.random.default_rng(0).integers(0, SIZES["vocab"], (2, 24)).astype(np.int32)
    ids[:, 0], ids[0, [5, 9, 10]], ids[1, 20] = SIZES["vocab"] - 1, END, END
    start = np.full((2, largest - 1), END, np.int32)
    whole = np.asarray(find_rows(sizes, ids, start))
    expected = [[expected_rows(sizes, row.tolist(), at) for at in range(24)] for row in ids]
    np.testing.assert_array_equal(whole, expected)
    rest = find_rows(sizes, ids[:, 11:], ids[:, 11 - largest + 1 : 11])
    np.testing.assert_array_equal(rest, whole[:, 11:])


def test_constants_are_those_of_transformers():
    """The constants of the model's own files, for a tiny table: see the checkpoint `qwen4_exp`."""
    small = {"vocab": 64, "heads": 2, "width": 64, "base": 29, "divisor": 8, "shards": 4}
    sizes = size_table(**SIZES | small)
    assert sizes.primes == (29, 31, 37, 41)
    assert (sizes.rows, sizes.width) == (144, 16)
    # The next layer with a table has the next primes.
    assert size_table(**SIZES | small | {"index": 1}).primes == (43, 47, 53, 59)
