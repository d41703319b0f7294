"""Test `ragged_dot`: its meaning, its operands, and what it leaves to other implementations."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import ManualAxisType
from jax.sharding import PartitionSpec as P
from support.devices.host_devices import make_mesh
from support.ops.fake_qarray import FakeQArray, qarray, transposed, values_of
from support.ops.numpy_weights import random_tensor

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.ops.conversion import forget_reports
from jax_nvfp4_moe.testing import assert_as_accurate_as

M, E, K, N = 12, 3, 64, 32
WEIGHT = random_tensor(0, E, N, K)
ROWS = np.random.default_rng(1).standard_normal((M, K), np.float32)
# All rows belong to a group, some do, none does; a group has too many, and a negative number.
SIZES = ([3, 5, 4], [3, 0, 4], [0, 0, 0], [12, 0, 0], [5, 7, 300], [-2, 4, 4])
TRANSPOSED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
BASIC = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


@functools.cache
def kernel():
    """Return the values of the weight ``[e, k, n]`` in float64."""
    return np.asarray(jax.jit(type(WEIGHT).dequantize)(WEIGHT), np.float64).swapaxes(1, 2)


def ragged(rows, kernel, sizes):
    """Return the equation in float64."""
    y, start = np.zeros((len(rows), kernel.shape[2])), 0
    for group, size in enumerate(np.maximum(sizes, 0)):
        own = slice(start, min(len(rows), start + size))
        y[own] = np.asarray(rows, np.float64)[own] @ kernel[group]
        start += size
    return y


@functools.partial(jax.jit, static_argnames=("dtype", "backend", "activation", "numbers"))
def run(rows, weight, sizes, group_offset=None, *, numbers=None, dtype=None, **how):
    """Run the function on what `tokamax.ragged_dot` passes to an implementation."""
    return nvfp4.ragged_dot(
        rows,
        weight,
        group_sizes=sizes,
        ragged_dot_dimension_numbers=numbers,
        precision=jax.lax.Precision.DEFAULT,
        preferred_element_type=dtype,
        **{"activation": None, "group_offset": group_offset, **how},
    )


def integers(numbers):
    return np.array(numbers, np.int32)


def check_sums(y, expected):
    """Check a result of float32 sums of k products against one whose sums have another order."""
    y, expected = np.asarray(y), np.asarray(expected)
    bound = 4 * K * 2**-24 * np.abs(expected).max()
    assert np.abs(y - expected).max() <= bound
    if expected.any():
        assert np.abs(1.01 * y - expected).max() > 10 * bound  # an error of a hundredth is found


def check(y, truth, dtype):
    """Check a result; the yardstick is the truth, rounded once."""
    assert y.dtype == dtype
    yardstick = truth.astype(np.float32).astype(dtype)
    if dtype == np.float32:  # rounded sums of k products
        yardstick = yardstick * np.float32(1 + K * 2**-24)
    assert_as_accurate_as(y, yardstick, truth)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(np.asarray(y) * y.dtype.type(1.1), yardstick, truth)


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_it_is_the_equation(dtype, backend):
    rows = ROWS.astype(dtype)
    for sizes in SIZES:
        y, truth = (
            run(rows, WEIGHT.mT, integers(sizes), backend=backend),
            ragged(rows, kernel(), sizes),
        )
        assert y.dtype == rows.dtype
        assert not np.asarray(y)[np.abs(truth).max(1) == 0].any()
        if truth.any():
            check(y, truth, rows.dtype)


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_and_groups_are_those_of_jax(sizes):
    """Rows that no group has give zeros in JAX too, and groups end at the last row."""
    plain = kernel().astype(np.float32)
    expected = jax.lax.ragged_dot(ROWS, plain, jnp.array(sizes), precision="highest")
    found = np.asarray(run(ROWS, WEIGHT.mT, integers(sizes)))
    if min(sizes) >= 0:  # JAX counts a negative size backwards
        check_sums(found, expected)
        np.testing.assert_array_equal(found.any(1), np.asarray(expected).any(1))


def test_a_row_keeps_nan_to_itself():
    rows = ROWS.copy()
    rows[[2, 11]] = np.nan  # the second belongs to no group
    y = np.asarray(run(rows, WEIGHT.mT, integers([3, 0, 4])))
    assert np.isnan(y[2]).all()
    assert np.isfinite(np.delete(y, 2, axis=0)).all()


@pytest.mark.parametrize("operand", [WEIGHT, WEIGHT.mT, nnx.Variable(WEIGHT.mT)], ids=type)
def test_a_weight_and_its_view(operand):
    y = nvfp4.ragged_dot(ROWS, operand, [3, 5, 4])
    np.testing.assert_array_equal(y, run(ROWS, WEIGHT.mT, integers([3, 5, 4])))


def test_dimension_numbers_say_where_the_blocks_are():
    sizes = integers([3, 5, 4])
    expected = run(ROWS, WEIGHT.mT, sizes)
    np.testing.assert_array_equal(run(ROWS, WEIGHT.mT, sizes, numbers=BASIC), expected)
    np.testing.assert_array_equal(run(ROWS, WEIGHT, sizes, numbers=TRANSPOSED), expected)
    array = qarray()
    turned = transposed(array)
    expected = nvfp4.ragged_dot(ROWS, array, sizes)
    for one, numbers in ((array, BASIC), (turned, TRANSPOSED)):
        found = nvfp4.ragged_dot(ROWS, one, sizes, ragged_dot_dimension_numbers=numbers)
        np.testing.assert_array_equal(found, expected)


def test_a_view_is_prepared_weights_with_the_shape_of_a_kernel():
    prepared = nvfp4.prepare(WEIGHT, dtype="float32")
    view = prepared.mT
    assert view.shape == (E, K, N)
    assert (view.ndim, view.dtype) == (3, np.float32)
    assert view.mT is prepared
    leaves, structure = jax.tree.flatten(view)
    assert jax.tree.unflatten(structure, leaves).shape == view.shape
    np.testing.assert_array_equal(view.dequantize(), kernel().astype(np.float32))
    assert view.dequantize(jnp.bfloat16).dtype == jnp.bfloat16
    sizes = integers([3, 0, 4])
    np.testing.assert_array_equal(run(ROWS, view, sizes), run(ROWS, WEIGHT.mT, sizes))
    one = jax.vmap(lambda view: view.dequantize())(view)
    np.testing.assert_array_equal(one, view.dequantize())


def test_no_rows_and_no_groups():
    assert run(ROWS[:0], WEIGHT.mT, integers([0, 0, 0])).shape == (0, N)
    for offset in (None, integers([1])):
        none = jax.tree.map(lambda leaf: leaf[:0], WEIGHT).mT
        sizes = integers([]) if offset is None else integers([3, 4])
        y = run(ROWS, none, sizes, offset)
        assert y.shape == (M, N)
        assert not np.asarray(y).any()
    assert run(ROWS[:0], WEIGHT.mT, integers([0, 4, 0, 2]), integers([1])).shape == (0, N)


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 6])
@pytest.mark.parametrize(
    "sizes",
    [[1, 2, 3, 1, 2, 2], [3, 0, 0, 4, 0, 1], [5, 4, 300, 1, 1, 1], [2, -3, 4, -1, 2, 2]],
)
def test_an_offset_takes_the_groups_from_it_on(offset, sizes):
    """The weights of other groups are elsewhere: their rows give zeros."""
    every = np.zeros((offset + len(sizes) + E, K, N))
    every[offset : offset + E] = kernel()
    truth = ragged(ROWS, every[: len(sizes)], sizes)
    y = run(ROWS, WEIGHT.mT, integers(sizes), integers([offset]))
    assert not np.asarray(y)[np.abs(truth).max(1) == 0].any()
    if truth.any():
        check(y, truth, np.float32)
    plain = run(ROWS, kernel().astype(np.float32), integers(sizes), integers([offset]))
    check_sums(plain, truth)


@pytest.mark.parametrize("given", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
def test_the_preferred_dtype(given, wanted):
    """The result is rounded once: from 16 bits to float32, it has the accuracy of float32."""
    rows = ROWS.astype(given)
    y = run(rows, WEIGHT.mT, integers([3, 5, 4]), dtype=wanted)
    check(y, ragged(rows, kernel(), [3, 5, 4]), jnp.dtype(wanted))


def test_large_sums_of_float16_do_not_overflow_in_bfloat16():
    rows = 3e4 * np.sign(kernel()[0, :, 0]).astype(np.float16) * np.ones((M, 1), np.float16)
    assert np.isinf(np.asarray(run(rows, WEIGHT.mT, integers([3, 5, 4])))).any()
    y = run(rows, WEIGHT.mT, integers([3, 5, 4]), dtype="bfloat16")
    assert np.isfinite(np.asarray(y, np.float32)).all()


def test_an_activation_sees_float32():
    sizes = integers([3, 5, 4])

    def squared(y):
        assert y.dtype == jnp.float32
        return y * y

    for weight in (WEIGHT.mT, kernel().astype(np.float32)):
        y = run(ROWS, weight, sizes)
        found = run(ROWS, weight, sizes, dtype="bfloat16", activation=squared)
        np.testing.assert_array_equal(found, (y * y).astype(jnp.bfloat16))


@pytest.mark.parametrize("offset", [None, 1])
def test_gradients_are_those_of_jax(offset):
    """The sizes are integers: their tangents are of `float0`."""
    sizes = integers([2, 0, 4] if offset is None else [2, 3, 0, 4, 1])
    first = None if offset is None else integers([offset])
    plain = kernel().astype(np.float32)
    given = plain if first is None else np.concatenate([0 * plain[:1], plain, 0 * plain[:1]])
    bar = np.random.default_rng(2).standard_normal((M, N), np.float32)

    def total(dot):
        return lambda rows, sizes: jnp.sum(jnp.sin(dot(rows, sizes)) * bar)

    ours = total(lambda rows, sizes: nvfp4.ragged_dot(rows, WEIGHT.mT, sizes, group_offset=first))
    jaxs = total(lambda rows, sizes: jax.lax.ragged_dot(rows, given, sizes, "highest"))
    found, expected = (
        jax.jit(jax.grad(one, (0, 1), allow_int=True))(ROWS, sizes) for one in (ours, jaxs)
    )
    check_sums(found[0], expected[0])
    assert np.abs(found[0]).max() > 0.1
    assert found[1].dtype == jax.dtypes.float0


def test_vmap_is_a_loop():
    rows, sizes = np.stack([ROWS, 2 * ROWS]), integers([[3, 0, 4], [1, 5, 6]])
    both = jax.jit(jax.vmap(lambda x, s: nvfp4.ragged_dot(x, WEIGHT.mT, s)))(rows, sizes)
    for y, one, own in zip(both, rows, sizes, strict=True):
        np.testing.assert_array_equal(y, run(one, WEIGHT.mT, own))
    shared = jax.jit(jax.vmap(lambda x: nvfp4.ragged_dot(x, WEIGHT.mT, sizes[0])))(rows)
    np.testing.assert_array_equal(shared[0], both[0])


@pytest.mark.eight_devices
def test_experts_of_each_device():
    """Two devices have half of the groups each, as expert parallelism divides them."""
    weight = random_tensor(3, 4, N, K)
    sizes = integers([2, 3, 0, 5])
    mesh = make_mesh((2,), names=("expert",))

    def part(rows, weight, sizes):
        first = 2 * jax.lax.axis_index("expert")[None]
        return jax.lax.psum(nvfp4.ragged_dot(rows, weight, sizes, group_offset=first), "expert")

    divided = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("expert"), P()), out_specs=P())

    def gradient(run):
        return jax.value_and_grad(lambda rows: jnp.sum(jnp.sin(run(rows, weight.mT, sizes))))

    found, expected = (jax.jit(gradient(one))(ROWS) for one in (divided, nvfp4.ragged_dot))
    for one, other in zip(found, expected, strict=True):
        check_sums(one, other)


@pytest.mark.eight_devices
def test_the_manual_axes_that_a_caller_names():
    mesh = make_mesh((2,), names=("data",))
    sizes = integers([3, 0, 4])

    def part(rows, **how):
        y = nvfp4.ragged_dot(rows, WEIGHT.mT, sizes, **how)
        return (y if how else jax.lax.pcast(y, "data", to="varying"))[None]

    kinds = {"manual_axis_type": ManualAxisType(varying=frozenset(["data"]))}
    for how in ({}, kinds):
        run_part = functools.partial(part, **how)
        both = jax.jit(jax.shard_map(run_part, mesh=mesh, in_specs=P(), out_specs=P("data")))(ROWS)
        np.testing.assert_array_equal(both[0], both[1])
    unreduced = ManualAxisType(unreduced=frozenset(["data"]))
    with pytest.raises(NotImplementedError, match="manual_axis_type: expected only varying"):
        nvfp4.ragged_dot(ROWS, WEIGHT.mT, sizes, manual_axis_type=unreduced)


@pytest.mark.eight_devices
def test_the_sharding_of_the_result():
    mesh = make_mesh((2,), jax.sharding.AxisType.Explicit, names=("data",))
    sizes = integers([3, 0, 4])
    expected = run(ROWS, WEIGHT.mT, sizes)
    for rhs in (WEIGHT.mT, kernel().astype(np.float32)):
        with jax.set_mesh(mesh):
            y = jax.jit(lambda x, rhs=rhs: nvfp4.ragged_dot(x, rhs, sizes, out_sharding=P("data")))(
                jax.device_put(ROWS, jax.NamedSharding(mesh, P()))
            )
        assert y.sharding.spec == P("data", None)
        check_sums(y, expected)


def test_arrays_of_qwix():
    """Those that NVFP4 can hold are served, also under `jax.jit`; others are left to others."""
    sizes = integers([3, 0, 4])
    for array in (qarray(), qarray(tile=K), qarray(dtype=ml_dtypes.float8_e4m3fn)):
        check(
            nvfp4.ragged_dot(ROWS, array, sizes),
            ragged(ROWS, values_of(array), [3, 0, 4]),
            np.float32,
        )
    array = qarray()

    @functools.partial(jax.jit, static_argnums=2)
    def traced(qvalue, scale, qtype):
        return nvfp4.ragged_dot(ROWS, FakeQArray(qvalue, scale, qtype=qtype), sizes)

    found = traced(array.qvalue, array.scale, "nvfp4")
    np.testing.assert_array_equal(found, nvfp4.ragged_dot(ROWS, array, sizes))
    with pytest.raises(NotImplementedError, match=r"^rhs: array: expected scales that are E4M3"):
        traced(array.qvalue, array.scale, "float4_e2m1fn")
    with pytest.raises(NotImplementedError, match=r"^rhs: array: expected one scale for each 16"):
        nvfp4.ragged_dot(ROWS, qarray(tile=8), sizes)


@pytest.mark.parametrize(
    ("given", "scales", "result"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float16", "bfloat16", "float32"),
        ("float16", "float8_e4m3fn", "float16"),
    ],
)
def test_the_result_has_the_dtype_of_the_scales_of_qwix(given, scales, result):
    array = qarray(dtype=jnp.dtype(scales))
    y = nvfp4.ragged_dot(ROWS.astype(given), array, integers([3, 0, 4]))
    check(y, ragged(ROWS.astype(given), values_of(array), [3, 0, 4]), jnp.dtype(result))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ragged_dot_dimension_numbers": TRANSPOSED}, r"^rhs: .* axis 1 of rhs"),
        ({"rhs": WEIGHT, "ragged_dot_dimension_numbers": BASIC}, r"^rhs: .* axis 2 of rhs"),
        ({"rhs": jax.tree.map(lambda leaf: leaf[0], WEIGHT).mT}, "^rhs: expected three axes"),
        ({"rhs": "weight"}, "^rhs: expected `weight.mT` of an NVFP4Tensor.*got str"),
        ({"lhs": ROWS.astype(np.int8)}, "^lhs: expected bfloat16, float16, float32; got int8"),
        ({"lhs": ROWS.astype(ml_dtypes.float8_e4m3fn)}, "^lhs: .*got float8_e4m3fn"),
        ({"lhs": ROWS[None]}, "^lhs: expected two axes"),
        ({"lhs": qarray((M, K, N))}, "^lhs: expected an array, got FakeQArray"),
        ({"preferred_element_type": jnp.int32}, "^preferred_element_type: .*got int32"),
        ({"preferred_element_type": jnp.float8_e4m3fn}, "^preferred_element_type: "),
        ({"fuse_gateup_activation": "silu"}, "^fuse_gateup_activation: expected None"),
        ({"backend": "moe_w4a16_sm90", "target": nvfp4.Target("cpu")}, "moe_w4a16_sm90"),
    ],
    ids=str,
)
def test_what_it_cannot_serve_is_left_to_others(change, message):
    """Any of these calls falls through `tokamax.ragged_dot` to its next implementation."""
    call = {"lhs": ROWS, "rhs": WEIGHT.mT, "group_sizes": integers([3, 0, 4]), **change}
    with pytest.raises(NotImplementedError, match=message):
        nvfp4.ragged_dot(**call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lhs": ROWS[:, :32]}, r"^lhs: expected shape \[m, 64\].*got \(12, 32\)"),
        ({"group_sizes": integers([3, 4])}, r"^group_sizes: expected integers of shape \(3,\)"),
        ({"group_sizes": np.ones(3)}, "^group_sizes: .*got float"),
        (
            {"group_sizes": np.ones((2, 3), np.int32), "group_offset": integers([0])},
            "^group_sizes: expected integers with one axis",
        ),
        ({"scheme": "w3a3"}, "scheme"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, message):
    call = {"lhs": ROWS, "rhs": WEIGHT.mT, "group_sizes": integers([3, 0, 4]), **change}
    with pytest.raises(ValueError, match=message):
        nvfp4.ragged_dot(**call)


def test_an_array_runs_on_xla():
    """Any call of `jax.lax.ragged_dot_general` is served, with the same bits."""
    rows, plain = ROWS.astype(ml_dtypes.bfloat16), kernel().astype(ml_dtypes.bfloat16)
    sizes = integers([3, 0, 4])
    for numbers, rhs in ((BASIC, plain), (TRANSPOSED, plain.swapaxes(1, 2))):
        expected = jax.lax.ragged_dot_general(rows, rhs, sizes, numbers)
        found = nvfp4.ragged_dot(rows, rhs, sizes, ragged_dot_dimension_numbers=numbers)
        np.testing.assert_array_equal(found, expected)
    found = nvfp4.ragged_dot(rows, plain, sizes, preferred_element_type=jnp.float32)
    assert found.dtype == jnp.float32
    with pytest.raises(NotImplementedError, match=r"^group_offset: expected None"):
        nvfp4.ragged_dot(
            rows, plain, sizes, ragged_dot_dimension_numbers=TRANSPOSED, group_offset=sizes[:1]
        )
    whole = np.ones((M, K), np.int8), np.ones((E, K, N), np.int8)
    found = nvfp4.ragged_dot(
        *whole, sizes, activation=lambda y: y + 1, preferred_element_type=jnp.int32
    )
    assert int(found[0, 0]) == K + 1


def test_it_can_stand_in_for_the_functions_of_jax(monkeypatch):
    """Libraries call these by their names. An array must then still reach XLA."""
    sizes, plain = integers([3, 0, 4]), kernel().astype(np.float32)
    expected = jax.lax.ragged_dot(ROWS, plain, sizes)
    monkeypatch.setattr(jax.lax, "ragged_dot", nvfp4.ragged_dot)
    monkeypatch.setattr(jax.lax, "ragged_dot_general", nvfp4.ragged_dot)
    for rhs in (plain, WEIGHT.mT):
        how = {"group_sizes": sizes, "ragged_dot_dimension_numbers": BASIC}
        for y in (
            jax.lax.ragged_dot(lhs=ROWS, rhs=rhs, group_sizes=sizes),
            jax.lax.ragged_dot_general(lhs=ROWS, rhs=rhs, **how),
        ):
            check_sums(y, expected)


def test_sizes_that_are_an_array_by_their_own_method():
    """`tokamax.RaggedDotGroupSizes` holds the sizes beside an example of them."""

    class Sizes:
        def __jax_array__(self):
            return jnp.array([3, 0, 4])

    found = nvfp4.ragged_dot(ROWS, WEIGHT.mT, Sizes())
    np.testing.assert_array_equal(found, run(ROWS, WEIGHT.mT, integers([3, 0, 4])))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_any_gpu_lowers_to_its_kernel(capability):
    target = nvfp4.Target("cuda", capability)
    weight = nvfp4.prepare(WEIGHT, target=target)
    call = functools.partial(nvfp4.ragged_dot, target=target)
    rows = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    traced = jax.jit(call).trace(rows, weight.mT, integers([3, 0, 4]))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    name = "sm90" if capability == (9, 0) else "sm80"
    assert text.count(f"custom_call @nvfp4_grouped_gemm_w4a16_{name}(") == 1
    assert text.count("custom_call") == 1


def test_a_warning_names_the_line_that_calls_tokamax(caplog):
    """The call comes from a module of a library; the user can change only their own line."""
    forget_reports()
    library = {"__name__": "tokamax._src.ops"}
    exec("def ragged_dot(implementation, *operands): return implementation(*operands)", library)
    library["ragged_dot"](nvfp4.ragged_dot, ROWS, WEIGHT.mT, integers([3, 0, 4]))
    assert [record.args[0] for record in caplog.records] == [__file__]
