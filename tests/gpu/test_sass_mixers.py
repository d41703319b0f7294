"""Test the machine code of the kernels around the experts: attention, norms, recurrent mixers."""

import itertools

import pytest
from support.extensions.machine_code import (
    ARCHITECTURES,
    LARGE_CHUNKS,
    LISTS_RESERVED,
    MEMORY,
    START_NEXT,
    WAIT,
    is_early_step,
    kernels,
)

# Each case reads the machine code of other kernels.
pytestmark = [pytest.mark.cuda_build, pytest.mark.every_case]

# Instances of AttentionSm80, for two dtypes each: 17 forms of tiles with keys of 16 bits, and 12
# with keys in FP8. Eight of the former also exist with heads that they prepare, for weights of two
# types.
ATTENTION_KERNELS, FP8_ATTENTION_KERNELS = 2 * (17 + 2 * 8), 24
# Rows of a tile of LatentAttention -> the MMAs of a warp for a tile of 32 keys. For the scores, it
# has its share of keys and of 16 rows for each of its steps in 64 channels. A loop over these steps
# is unrolled three times up to 32 rows. For the output, it has its channels of all rows and keys.
LATENT_KERNELS = {
    16: 3 * 2 * 2 + 2 * 16,
    32: 3 * 2 * 2 + 2 * 2 * 8,
    64: 2 * 4 + 2 * 4 * 8,
}
# Sizes of AttentionSm90 -> its wgmmas, and the exponentials of one tile of keys in a thread. A tile
# takes one wgmma for each 16 channels of its keys, and one for each 16 keys, or two if values have
# 256 channels. The first tile and the loop have them, or the loop and the last tile.
HOPPER_ATTENTION = {
    "ILi64ELi64ELi128ELi4E": (2 * (4 + 8), 64),
    "ILi128ELi128ELi128ELi3E": (2 * (8 + 8), 64),
    "ILi192ELi128ELi128ELi2E": (2 * (12 + 8), 64),
    "ILi256ELi256ELi64ELi2E": (2 * (16 + 8), 32),
}
NORM_KERNELS = 10  # instances of AddRmsNorm: five pairs of dtypes, two lengths of rows
# Instances of PrepareHeads: four pairs of dtypes, two widths, few and many heads, a cache in FP8 or
# not.
HEAD_KERNELS = 32


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_copies_while_it_multiplies(code, arch):
    """A tile takes two products, which read their operands by ldmatrix.

    The smallest form has 4 steps of 16 channels, 2 tiles of 8 keys, and 8 tiles of 8 values.
    """
    attention = attention_kernels(code, arch, fp8=False)
    assert len(attention) == ATTENTION_KERNELS
    for name, count in attention.items():
        assert count["HMMA"] >= 16, name
        assert count["LDSM"] >= 8, name
        # A kernel that prepares heads copies no queries.
        assert count["LDGSTS"] >= (5 if "NoHeads" in name else 4), name
        assert count["MUFU"] >= 8, name


def attention_kernels(code, arch, *, fp8):
    """Return the instances of AttentionSm80 with keys in FP8, or the others."""
    found = kernels(code, arch, "AttentionSm80")
    return {name: count for name, count in found.items() if ("ELb1EE" in name) == fp8}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_decodes_fp8_in_registers(code, arch):
    """An MMA takes two pairs of numbers, and each pair is decoded by one multiplication.

    There are as many MMAs again for NaN, which decode nothing. The smallest form has 4 steps of 16
    channels and 4 tiles of 8 keys, and 2 pairs of keys and 8 tiles of values.
    """
    attention = attention_kernels(code, arch, fp8=True)
    assert len(attention) == FP8_ATTENTION_KERNELS
    for name, count in attention.items():
        decoded = count["HMUL2"] + count["HFMA2"]  # the latter is also a move on some devices
        assert decoded >= 2 * (4 * 4 + 2 * 8), name
        assert 64 <= count["HMMA"] <= decoded, name
        assert count["LDSM"] >= 8, name
        assert count["LDGSTS"] >= 5, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("rows", LATENT_KERNELS)
def test_latent_attention_reads_a_key_once_for_both_products(code, arch, rows):
    """A thread copies its units of each 64 channels of queries and keys, and of nothing else."""
    latent = kernels(code, arch, "LatentAttentionI")
    latent = {name: count for name, count in latent.items() if f"LatentFormILi{rows}E" in name}
    assert len(latent) == 2  # one for each dtype
    for name, count in latent.items():
        assert count["HMMA"] >= LATENT_KERNELS[rows], name
        assert count["LDSM"] >= 4, name
        assert count["LDGSTS"] % 9 == 0, name


def test_latent_attention_on_hopper_starts_all_products_of_a_tile_at_once(listing):
    """A tile of 64 keys takes 36 wgmmas for its scores, and then 8 for 256 channels of the output.

    If ptxas serialized the wgmmas, there would be a wait behind each.
    """
    found = kernels(listing, "sm_90a", "LatentAttentionSm90")
    assert len(found) == 2  # one for each dtype
    for name, instructions in found.items():
        operations = [op.split(".")[0] for op in instructions]
        wait = operations.index(WAIT)
        assert wait < operations.index(START_NEXT), name
        assert not MEMORY.intersection(operations[:wait]), name
        ran = [op for op in instructions if op.startswith(("HGMMA", "WARPGROUP"))]
        groups = itertools.groupby(op.split(".")[0] for op in ran)
        products = [len(list(group)) for kind, group in groups if kind == "HGMMA"]
        assert products == [36, 8], name


@pytest.mark.parametrize("sizes", HOPPER_ATTENTION)
def test_hopper_attention_computes_the_softmax_beside_products(listing, sizes):
    """The loop starts both products of a step, and waits for the first one and for the second one.

    If the compiler moves exponentials behind the second wait, nothing runs beside the products.
    """
    products, exponentials = HOPPER_ATTENTION[sizes]
    attention = kernels(listing, "sm_90a", "AttentionSm90")
    attention = {name: code for name, code in attention.items() if sizes in name}
    assert len(attention) == 2  # one for each dtype
    for name, instructions in attention.items():
        assert sum(op.startswith("HGMMA") for op in instructions) == products, name
        assert any(op.startswith("UTMALDG") for op in instructions), name
        waits = [i for i, op in enumerate(instructions) if op.startswith("WARPGROUP.DEPBAR")]
        assert len(waits) == 4, f"{name}: one for the first tile, two in the loop, one for the last"
        beside = instructions[waits[1] : waits[2]]
        assert beside.count("MUFU.EX2") >= exponentials, name


def bound_of_loads(name, arch):
    """Return the operation ahead of which a step of a recurrent mixer requests its state."""
    return WAIT if is_early_step(name) and arch in LISTS_RESERVED else "BAR"


def first_of(instructions, operation):
    return next(i for i, op in enumerate(instructions) if op.startswith(operation))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_delta_step_requests_its_state_before_it_waits(listing, arch):
    """The 16 vectors of a thread are requested before the barrier that ends the convolution.

    There are two kernels for full widths and one for others, for each of three dtypes, and these
    nine again for decays of channels. One for full widths requests the state before it waits for
    the preceding kernel. All of them exist for one token, and for windows of tokens.
    """
    steps = kernels(listing, arch, "9DeltaStepI")
    assert len(steps) == 36
    assert sum(map(is_early_step, steps)) == 12
    for name, instructions in steps.items():
        loads = [i for i, op in enumerate(instructions) if op.startswith("LDG") and "128" in op]
        assert len(loads) == 16, name
        assert loads[-1] < first_of(instructions, bound_of_loads(name, arch)), name
        cluster = any("CGABAR" in op for op in instructions)
        assert cluster == (arch in LISTS_RESERVED), name  # 9.0 and later have clusters


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_mamba2_step_requests_its_state_before_it_waits(listing, arch):
    """A thread requests 8 vectors of usual sizes, and 16 of others, for each of three dtypes.

    For usual sizes there are two kernels, as for a delta step, and all of them again for windows.
    """
    steps = kernels(listing, arch, "10Mamba2StepI")
    assert sum(map(is_early_step, steps)) == 6
    counts = []
    for name, instructions in steps.items():
        loads = [i for i, op in enumerate(instructions) if op.startswith("LDG") and "128" in op]
        assert loads[-1] < first_of(instructions, bound_of_loads(name, arch)), name
        counts.append(len(loads))
    assert sorted(counts) == [8] * 12 + [16] * 6


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_convolution_keeps_its_window_in_registers(listing, arch):
    """There are kernels for 7 numbers of taps and two dtypes.

    A thread stores 16 bytes of each token. The loop for padding, which is first, has one, a batch
    has 4, and the loop behind the batches one. The inputs of a batch are requested before the first
    store of the batch, and nothing is kept in local memory.
    """
    convolutions = kernels(listing, arch, "CausalConvolutionI")
    assert len(convolutions) == 14
    for name, instructions in convolutions.items():
        operations = [op.split(".")[0] for op in instructions]
        assert not {"STL", "LDL"}.intersection(operations), name
        stores = [i for i, op in enumerate(instructions) if op.startswith("STG") and "128" in op]
        assert len(stores) == 6, name
        assert sum(op == "LDG" for op in operations[stores[0] : stores[1]]) >= 4, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_many_tokens_are_combined_with_all_rows_in_flight(listing, arch):
    """A thread requests 16 bytes of each of 8 rows before it uses the first one."""
    found = kernels(listing, arch, "CombineManyI")
    assert len(found) == 2  # one for each dtype
    for name, instructions in found.items():
        loads = [i for i, op in enumerate(instructions) if op.startswith("LDG") and "128" in op]
        assert len(loads) == 8, name
        assert "FFMA" not in [op.split(".")[0] for op in instructions[: loads[-1]]], name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_norm_requests_all_that_it_sums_at_once(listing, arch):
    """A thread requests 16 bytes of x and of each of 8 rows before it uses one of them."""
    found = kernels(listing, arch, "CombineRmsNormI")
    assert len(found) == 4  # pairs of dtypes
    for name, instructions in found.items():
        operations = [op.split(".")[0] for op in instructions]
        assert not {"STL", "LDL"}.intersection(operations), name
        first = operations.index("FFMA")
        loads = [op for op in instructions[:first] if op.startswith("LDG") and "128" in op]
        assert len(loads) == 9, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("recurrence", "products"), [(0, 3), (1, 3), (2, 2)])
def test_recurrences_leave_out_pairs_with_later_tokens(code, arch, recurrence, products):
    """Chunks of 32 and of 64 tokens: products with keys and queries, and half the pairs.

    The delta rule has one product more than Mamba-2, with the decayed keys. A product of S.T
    [16, 128] with c tokens is c / 8 * 16 instructions. Chunks of 64 tokens have code only where a
    block may have enough shared memory.
    """
    found = kernels(code, arch, "9ChunkScanI")
    counts = [count for name, count in found.items() if f"10RecurrenceE{recurrence}E" in name]
    large = 8 if arch in LARGE_CHUNKS else 0
    expected = sorted(products * tiles * 16 + tiles * (tiles + 1) // 2 for tiles in (4, large))
    assert sorted(count["HMMA"] for count in counts) == expected
    assert not any(count["LDL"] + count["STL"] for count in counts)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["12DeltaPrepareI", "19ChannelDeltaPrepareI", "13Mamba2PrepareI"])
def test_recurrences_prepare_chunks_in_registers(code, arch, name):
    found = kernels(code, arch, name)
    assert len(found) == 2  # sizes of a chunk
    assert not any(count["LDL"] + count["STL"] for count in found.values())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_norms_move_16_bytes_at_a_time(listing, arch):
    found = kernels(listing, arch, "AddRmsNormI")
    assert len(found) == NORM_KERNELS
    for name, instructions in found.items():
        moves = [op for op in instructions if op.startswith(("LDG", "STG"))]
        assert moves, name
        assert all(".128" in op for op in moves), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_heads_load_everything_before_they_compute(listing, arch):
    """A load after the sum of a norm would wait for memory a second time."""
    found = kernels(listing, arch, "PrepareHeadsI")
    assert len(found) == HEAD_KERNELS
    for name, instructions in found.items():
        first_sum = next(i for i, op in enumerate(instructions) if op.startswith("SHFL"))
        loads = [i for i, op in enumerate(instructions) if op.startswith("LDG")]
        assert loads, name
        assert max(loads) < first_sum, name
