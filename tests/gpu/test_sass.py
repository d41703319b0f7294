"""Test the machine code of the CUDA extension: each architecture has code, and no kernel is empty.

A wrong architecture suffix compiles without a warning and leaves empty kernels, so these tests read
the cubins. They need cuobjdump, from the CUDA toolkit or from the PyPI package
nvidia-cuda-cuobjdump with nvidia-cuda-nvdisasm. The tests fail if it is missing.
"""

import collections
import re

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
    run,
)

from jax_nvfp4_moe.backends.launch_facts import facts

# Each case reads the machine code of other kernels.
pytestmark = [pytest.mark.cuda_build, pytest.mark.every_case]

PTX = {"sm_80"}
TENSOR_KERNELS, FLOAT_KERNELS = 3, 2  # instances of PlainGemmTensor and PlainGemmFloat
# Instances of ExpertGemmSm90: six tile sizes, and three for transposed weights; two dtypes.
HOPPER_KERNELS = 18
LINEAR_KERNELS = 6  # instances of LinearFew: three of slabs and depth, two dtypes
ROW_KERNELS = (
    12  # instances of LinearRow: two dtypes, three kinds of norms, with and without refills
)
# Rows of LinearFewWide in eights -> the MMAs of a warp for a weight tile along k. They are two for
# each slab and eight rows in half of a tile, which a loop runs twice. Of 64 rows, a warp has half.
WIDE_KERNELS = {2: 2 * 2 * 2, 4: 2 * 2 * 4, 8: 2 * 2 * 4}
# Instances of ExpertGemmSm80: six tile sizes, two of which exist with claims too, and two dtypes.
AMPERE_KERNELS = 16
# Weights of LinearSm90, and rows of x in eights -> the wgmmas of a step. They are four for each 64
# of k, and a step has one or two of these. Each has two numbers of teams and two dtypes.
SM90_LINEARS = {
    **{("PackedLayer", eights): 8 for eights in (1, 2, 4)},
    ("PackedLayer", 8): 4,
    **{("DenseLayer", eights): 4 for eights in (1, 2, 4, 8)},
    **{("Fp8Layer", eights): 8 for eights in (1, 2, 4)},
    ("Fp8Layer", 8): 4,
}
# How DenseFew stores weights: the values of WeightKind in dense_few.cu, in order. E4M3 has a scale
# for each row, or for each group of k.
WEIGHT_KINDS = ("16-bit", "float32", "E4M3", "grouped E4M3")
# Weights and tile of DenseFew -> its instances, and the MMAs of a warp for a piece of k and 8 rows
# of x. They are two for each step over 32 of k and each slab, or six if weights are float32.
DENSE_KERNELS = {
    ("float32", 16): (4, 6 * 1 * 1),
    **{
        (kind, tile): kernels
        for kind in ("16-bit", "E4M3", "grouped E4M3")
        for tile, kernels in {
            16: (8, 2 * 1 * 1),
            64: (4, 2 * 2 * 1),
            128: (4, 2 * 1 * 2),
        }.items()
    },
}
# Collective for 10.x -> a part of its kernel's name, and how often instructions occur in it.
# UTCOMMA is an MMA over 64 of a step's 256 of k. The first steps have their own MMAs if accumulator
# tiles overlap. UTMALDG loads one of two operands or their scales, before or in the loop. UTCCP
# copies scales of 128 rows to the memory of the tensor cores.
COLLECTIVES = {
    "few_rows": ("Li128EEENSC_ILi64EEENSC_ILi256", {"UTCOMMA": 4, "UTMALDG": 8, "UTCCP": 8}),
    "many_rows": ("SM100_MMA_MXF4_2x1SM", {"UTCOMMA": 8, "UTMALDG": 8, "UTCCP": 24}),
}
FP4_ROWS = (16, 32, 64, 128)  # rows of the tiles of ExpertGemmSm120, for two dtypes each
# The driver reserves 1 KiB of shared memory per block. From 9.0 on, the listing includes it. The
# limit per block that a device reports never includes it.
RESERVED_SHARED_BYTES = 1024
# The kernels that may overlap with any preceding kernel (launch_kernel.cuh). Those of the first two
# kinds touch no memory before they wait, except for prefetches. Those of the first kind are short,
# and in a chain they start the next kernel before they wait. Those of the third kind know what the
# preceding kernel writes, or what a chain does not write, and may read something else. Those of the
# last kind do both.
START_FIRST = (
    "AddRmsNorm",
    "AddRmsNormAny",
    "PrepareHeads",
    "Activate",
    "AddGated",
    "AddGatedRmsNorm",
    "AddLinearGated",
    "GateHeads",
    "PrepareLatents",
    "AllReduce",
    "AllReduceRmsNorm",
    "ShiftIds",
)
# Sums over GPUs, which end with an error if another GPU does not come.
SUMS = r"9AllReduceI|16AllReduceRmsNormI"
WAIT_FIRST = (
    "AbsorbQueries",
    "ExpandValues",
    "LatentAttention",
    "Route",
    "CountSegment",
    "SortByExpert",
    "GroupTiles",
    "DeltaStep",
    "AdvanceKeys",
    "Mamba2Step",
)
READ_FIRST = (
    "AttentionSm80",
    "DenseFew",
    "LinearFewWide",
    "MergeParts",
    "Combine",
    "FinishMamba2",
    "CombinedGemmFew",
    "ExpertGemmSm80",
    "ExpertGemmFew",
    "LinearFew",
    "DenseVector",
)
START_AND_READ_FIRST = ("CombineRmsNorm", "LinearRow")
# Architecture -> a part of the names of the kernels that only this architecture has.
OWN_KERNELS = {"sm_90a": "sm90", "sm_120f": "sm120"}
# For one tile, a thread unpacks 32 weights and starts four wgmmas. These are the most instructions
# per weight: logic instructions, which issue every other cycle, and all instructions. They include
# the half of a step's bookkeeping that falls between the wgmmas. float16 needs more instructions,
# because it has to move its codes.
LOGIC_BUDGET = {"bfloat16": 1.2, "half": 1.2}
ISSUE_BUDGET = {"bfloat16": 2.4, "half": 2.6}
LOGIC = {"LOP3", "SHF", "PRMT", "ISETP", "SEL", "VIADD", "IADD3", "LEA"}


def own(code, arch):
    """Return the kernels that do not come from CUTLASS."""
    return {k: c for k, c in code[arch].items() if "cutlass" not in k}


def listed(extension, kind):
    """Return the architectures that have code of `kind`, with their suffixes."""
    return set(re.findall(rf"Fatbin {kind} code:\n=+\narch = (\w+)", run("cuobjdump", extension)))


def test_cubins_are_those_of_the_list(extension):
    assert listed(extension, "elf") == set(ARCHITECTURES)
    assert listed(extension, "ptx") == PTX


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_products_use_their_units(code, arch):
    """The GEMMs use tensor cores and FFMAs.

    A step of the tensor kernel has 64 of k and 2x2 fragments of 16x16: 4 * 4 * 2 MMAs per warp. A
    step of the float32 kernel has 32 of k, with 4x8 FFMAs for each.
    """
    tensor = kernels(code, arch, "PlainGemmTensor")
    assert len(tensor) == TENSOR_KERNELS
    for name, count in tensor.items():
        assert count["HMMA"] >= 32, name
        assert count["LDSM"] >= 16, name
    single = kernels(code, arch, "PlainGemmFloat")
    assert len(single) == FLOAT_KERNELS
    for name, count in single.items():
        assert count["FFMA"] + 2 * count["FFMA2"] >= 8 * 32, name


# Kernel for few slots -> the static shared memory of a block: all that does not hold rows, weights
# or sums.
FEW_STATIC_BYTES = {
    "ExpertGemmFew": facts().FEW_STATIC_BYTES,
    "CombinedGemmFew": facts().COMBINED_STATIC_BYTES,
}


@pytest.mark.parametrize("kernel", FEW_STATIC_BYTES)
def test_few_slots_have_the_static_shared_memory_that_is_counted(extension, kernel):
    ours = FEW_STATIC_BYTES[kernel]
    _, *cubins = re.split(
        r"^arch = ", run("cuobjdump", "--dump-resource-usage", extension), flags=re.MULTILINE
    )
    found = {}
    for cubin in cubins:
        sizes = re.findall(rf"Function \S*{kernel}I\S*:\s.* SHARED:(\d+)", cubin)
        found |= {cubin.split()[0]: sizes} if sizes else {}
    reserved = {
        arch: RESERVED_SHARED_BYTES if arch in LISTS_RESERVED else 0 for arch in ARCHITECTURES
    }
    # Two dtypes, with and without rounding, with and without refills.
    assert found == {arch: [str(ours + reserved[arch])] * 8 for arch in ARCHITECTURES}


@pytest.mark.parametrize("arch", LISTS_RESERVED)
@pytest.mark.parametrize("kernel", START_FIRST + WAIT_FIRST + READ_FIRST + START_AND_READ_FIRST)
def test_kernels_that_overlap_wait(listing, kernel, arch):
    """They wait before they start the next kernel, and before they access memory.

    A short kernel starts the next one at two places. The flag of its call decides at which. A step
    of a recurrent mixer has a second kernel, which knows what a chain does not write.
    """
    found = {k: c for k, c in listing[arch].items() if f"{len(kernel)}{kernel}" in k}
    assert found
    for name, instructions in found.items():
        operations = [instruction.split(".")[0] for instruction in instructions]
        wait = operations.index(WAIT)
        starts = [i for i, operation in enumerate(operations) if operation == START_NEXT]
        assert (min(starts) < wait) == (kernel in START_FIRST + START_AND_READ_FIRST), name
        assert wait < max(starts), name
        if kernel not in READ_FIRST + START_AND_READ_FIRST and not is_early_step(name):
            assert not MEMORY.intersection(operations[:wait]), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_is_empty_or_traps(code, arch):
    assert own(code, arch)
    for name, count in own(code, arch).items():
        waits_for_gpus = (
            re.search(SUMS, name) is not None
        )  # and ends with an error if they do not come
        assert count["BPT"] == int(waits_for_gpus), f"{name} traps"
        large = r"(Delta|Mamba2)PrepareILi64E|ChunkScanI\w+ELi64E"
        if arch not in LARGE_CHUNKS and re.search(large, name):
            assert count.total() < 24, f"{name} cannot run on this device"
            continue
        assert count["STG"] >= 1, f"{name} stores nothing"
        assert count.total() >= 24, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sums_over_gpus_exchange_values_and_epochs_at_once(listing, arch):
    """Each store and load has 16 bytes. No fence makes one wait for another."""
    found = {name: code for name, code in listing[arch].items() if re.search(SUMS, name)}
    assert len(found) == 3 + 4  # one for each dtype, and with a norm
    for name, instructions in found.items():
        assert instructions.count("STG.E.128.STRONG.SYS") >= 2, name
        assert instructions.count("LDG.E.128.STRONG.SYS") >= 2, name
        before = instructions[: instructions.index("LDG.E.128.STRONG.SYS")]
        assert not any(op.startswith("MEMBAR") for op in before), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_are_the_same_everywhere(code, arch):
    single = {a: set(kernels(code, a, part)) for a, part in OWN_KERNELS.items()}
    shared = set(own(code, "sm_90a")) - single["sm_90a"]
    assert set(own(code, arch)) == shared | single.get(arch, set())
    assert all(single.values())


def test_hopper_product_uses_warpgroup_instructions(code):
    """A step has two tiles with four wgmmas of 16 of k each. The bulk engine copies the data.

    In tiles of 32 rows or more, it also copies rows of x, 32 at a time, by their tensor map.
    """
    hopper = kernels(code, "sm_90a", "ExpertGemmSm90")
    assert len(hopper) == HOPPER_KERNELS
    for name, count in hopper.items():
        assert count["HGMMA"] >= 8, name
        # If ptxas serializes the wgmmas (warning C7510 and others), each has a fence and a wait.
        assert count["WARPGROUP"] < count["HGMMA"], f"{name} waits after every product"
        assert count["UBLKCP"] >= 2, name
        rows, transposed = re.search(r"ConfigILi(\d+)E.*Lb([01])E", name).groups()
        assert (count["UTMALDG"] > 0) == (int(rows) >= 32), name
        # A tile has four fragments of four registers, each of which is an 8x8 matrix.
        assert (count["MOVM"] >= 2 * 16) == (transposed == "1"), name
        assert count["HMMA"] == 0, name


def test_hopper_product_of_few_rows_copies_in_bulk(code):
    """A step of 256 of k with two slabs takes 32 MMAs, and a loop for the rest of k takes 8.

    Weights take two bulk copies and rows of x one. No thread copies by itself.
    """
    few = kernels(code, "sm_90a", "ExpertGemmFewRowsSm90")
    assert len(few) == 2
    for name, count in few.items():
        assert count["HMMA"] == 40, name
        assert count["UBLKCP"] >= 3, name
        assert count["LDGSTS"] == 0, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ampere_product_copies_while_it_multiplies(code, arch):
    """A step of 64 of k with two slabs of 16 rows takes 8 MMAs for each 8 columns.

    Copies to shared memory bypass the registers.
    """
    ampere = kernels(code, arch, "ExpertGemmSm80")
    assert len(ampere) == AMPERE_KERNELS
    for name, count in ampere.items():
        assert count["HMMA"] >= 16, name
        assert count["LDSM"] >= 2, name
        assert count["LDGSTS"] >= 4, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_linear_of_few_rows_loads_all_weights_before_it_multiplies(listing, arch):
    """A warp requests its first weight tiles one after the other, and only then waits for x.

    Each weight tile takes a load of 16 bytes for the codes and one of 8 bytes for the scales.
    """
    linear = kernels(listing, arch, "LinearFewI")
    assert len(linear) == LINEAR_KERNELS
    for name, instructions in linear.items():
        depth = int(re.search(r"Li\d+ELi(\d+)E", name)[1])
        copies = next(i for i, op in enumerate(instructions) if op.startswith("LDGSTS"))
        before = [op for op in instructions[:copies] if op.startswith("LDG.")]
        for width in ("128", "64"):
            assert sum(op.endswith(f".{width}") for op in before) == depth, name
        assert not any(op.startswith("HMMA") for op in instructions[:copies]), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_linear_of_one_row_requests_its_weights_at_once(listing, arch):
    """A warp requests eight weight tiles before it multiplies the first: codes and scales of each.

    Two weight tiles are unpacked and multiplied outside of the loop, or one beside a norm that
    needs many registers. A weight tile takes four MMAs.
    """
    found = kernels(listing, arch, "LinearRowI")
    assert len(found) == ROW_KERNELS
    for name, instructions in found.items():
        products = [i for i, op in enumerate(instructions) if op.startswith("HMMA")]
        norm, refills = re.search(r"LinearRowI(.*)Lb([01])E", name).groups()
        much = norm.endswith("f") or ("NoNorm" not in norm and refills == "1")
        ready = 1 if much else 2
        assert len(products) == 4 * (ready + 1), name
        copies = [op for op in instructions[: products[0]] if op.startswith("LDGSTS")]
        assert len(copies) >= 2 * 8, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_wide_linear_loads_a_fragment_of_x_for_two_slabs(code, arch):
    wide = kernels(code, arch, "LinearFewWideI")
    assert len(wide) == 2 * len(WIDE_KERNELS)
    for name, count in wide.items():
        products = WIDE_KERNELS[int(re.search(r"Li(\d)E", name)[1])]
        assert count["HMMA"] == products, name
        assert count["LDSM"] == products // 4, name
        assert count["LDGSTS"] >= 4, name


def test_linear_of_hopper_uses_warpgroup_instructions(code):
    found = kernels(code, "sm_90a", "LinearSm90I")
    forms = collections.Counter()
    for name, count in found.items():
        weights = re.search("PackedLayer|DenseLayer|Fp8Layer", name)[0]
        forms[weights] += 1
        products = SM90_LINEARS[weights, int(re.search(r"Li(\d)ELi[24]E", name)[1])]
        assert count["HGMMA"] == products, name
        # If ptxas serializes the wgmmas (warning C7510 and others), each has a fence and a wait.
        assert count["WARPGROUP"] < products, f"{name} waits after every product"
        assert count["HMMA"] == 0, name
        assert count["LDSM"] == (4 if weights == "DenseLayer" else 0), name
        assert count["LDGSTS"] >= 4, name
        assert count["CCTL"] >= 1, name
    # Each has two dtypes, two numbers of teams, and four of eights; FP8 has two kinds of scales.
    assert forms == {"PackedLayer": 16, "DenseLayer": 16, "Fp8Layer": 32}


def test_linear_of_hopper_waits_for_the_preceding_kernel(listing):
    for name, instructions in kernels(listing, "sm_90a", "LinearSm90I").items():
        operations = [instruction.split(".")[0] for instruction in instructions]
        starts = [i for i, operation in enumerate(operations) if operation == START_NEXT]
        assert starts, name
        assert operations.index(WAIT) < min(starts), name


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f", "sm_120f"])
def test_linear_of_few_rows_waits_for_the_preceding_kernel(code, arch):
    """The kernel prefetches weights before it waits, and lets the next kernel start."""
    for name, count in kernels(code, arch, "LinearFew").items():
        assert count["ACQBULK"] >= 1, name
        assert count["PREEXIT"] == 1, name
        assert count["CCTL"] >= 1, name


@pytest.mark.cutlass
@pytest.mark.parametrize("name", COLLECTIVES)
def test_blackwell_product_uses_its_tensor_cores(code, name):
    """For other architectures, plain sm_100 included, CUTLASS compiles kernels without these."""
    part, expected = COLLECTIVES[name]
    (count,) = kernels(code, "sm_100f", part).values()
    assert {key: count[key] for key in expected} == expected
    assert count["HMMA"] == 0


@pytest.mark.cutlass
def test_collectives_are_in_no_other_cubin(code):
    for arch in ARCHITECTURES:
        assert len(kernels(code, arch, "cutlass")) == (len(COLLECTIVES) if arch == "sm_100f" else 0)


@pytest.mark.parametrize("rows", FP4_ROWS)
def test_fp4_product_uses_its_instruction(code, rows):
    """128 of k with two slabs of 16 rows take 4 MMAs for each 8 rows.

    The kernel has them twice: for full tiles, and for others.
    """
    fp4 = kernels(code, "sm_120f", f"ConfigILi{rows}E")
    fp4 = {name: count for name, count in fp4.items() if "ExpertGemmSm120" in name}
    assert len(fp4) == 2
    for name, count in fp4.items():
        assert count["OMMA"] == 2 * 4 * rows // 8, name
        assert count["LDSM"] == 2 * rows // 8, name
        assert count["LDGSTS"] >= 6, name
        assert count["SHFL"] < 200, f"{name} emulates"


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "sm_120f"])
def test_no_other_architecture_has_the_fp4_product(code, arch):
    assert not kernels(code, arch, "ExpertGemmSm120")
    assert not any(count["OMMA"] for count in code[arch].values())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_products_keep_their_registers(code, arch):
    """Spilled registers would show as accesses to local memory."""
    for name, count in code[arch].items():
        assert count["LDL"] + count["STL"] == 0, name


@pytest.fixture(scope="module")
def hopper_listing(listing):
    """Return name -> instructions in order, for each ExpertGemmSm90 with the smallest tiles."""
    return {
        name: instructions
        for name, instructions in listing["sm_90a"].items()
        if "ExpertGemmSm90" in name and "ConfigILi8E" in name
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rounding_in_place_reads_through_the_coherent_cache(listing, arch):
    """QuantizeRows may write the rows that it reads, so LDG.CONSTANT would be undefined there."""
    rows = kernels(listing, arch, "QuantizeRows")
    assert len(rows) == 3  # one for each dtype of the rows
    for name, instructions in rows.items():
        assert any(op.startswith("LDG") for op in instructions), name
        assert not any("CONSTANT" in op for op in instructions), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("weight", DENSE_KERNELS, ids=str)
def test_plain_linears_of_few_rows_use_wide_loads(listing, arch, weight):
    """All MMAs of a piece are there, and shared memory is read 16 bytes at a time.

    E4M3 weights are read 8 bytes at a time. Weights, x and scales come to shared memory by cp.async
    only. No register is spilled.
    """
    kind, tile = weight
    mangled = f"WeightKindE{WEIGHT_KINDS.index(kind)}"
    instances, products = DENSE_KERNELS[weight]
    found = {}
    for name, instructions in listing[arch].items():
        if part := re.search(rf"DenseFewI\w+?{mangled}ELi{tile}ELi(\d)E", name):
            found[name] = (int(part[1]), instructions)
    assert len(found) == instances
    for name, (eights, instructions) in found.items():
        count = collections.Counter(op.split(".")[0] for op in instructions)
        assert count["HMMA"] == products * eights, name
        assert count["LDGSTS"] >= 4, name
        assert count["LDG"] == 0, name
        assert count["LDL"] == count["STL"] == 0, name
        # A warp reads a fragment of x with one load, and one of weights with two or four.
        steps = products // (6 if kind == "float32" else 2)
        each = {"float32": 4, "16-bit": 2}.get(kind, 0)
        loads = [op for op in instructions if op.startswith("LDS")]
        assert sum(".128" in op for op in loads) >= eights + steps * each, name
        assert each > 0 or sum(".64" in op for op in loads) >= 2 * steps, name


def second_tile(instructions):
    """Return the instructions of the second of the two tiles of a step, including its wgmmas."""
    products = [i for i, name in enumerate(instructions) if name.startswith("HGMMA")]
    assert len(products) == 8
    return instructions[products[3] + 1 : products[7] + 1]


@pytest.mark.parametrize("dtype", ISSUE_BUDGET)
def test_unpacking_stays_within_its_budget(hopper_listing, dtype):
    """Four warps share an issue slot, and memory brings each a weight in about three cycles."""
    (instructions,) = (code for name, code in hopper_listing.items() if dtype in name)
    tile = second_tile(instructions)
    assert sum(name.split(".")[0] in LOGIC for name in tile) <= 32 * LOGIC_BUDGET[dtype]
    assert len(tile) <= 32 * ISSUE_BUDGET[dtype]


@pytest.mark.parametrize("arch", ["sm_100f", "sm_120f"])
def test_quantizer_converts_to_e2m1_natively(code, arch):
    """A thread converts two blocks of 16 values, two per instruction, which Hopper lacks."""
    counts = [c["F2FP"] for c in kernels(code, arch, "8QuantizeI13__nv_bfloat16").values()]
    assert counts == [16, 16]
    assert not any(c["F2FP"] for c in kernels(code, "sm_90a", "8QuantizeI13__nv_bfloat16").values())
