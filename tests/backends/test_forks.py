"""Test which calls of a chain run in parallel with others, and that these share no memory."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops.shared_expert_block import HIDDEN, make_layer, run_layers

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe import Target, ops
from jax_nvfp4_moe.backends.chains import emission
from jax_nvfp4_moe.backends.chains.calls import Call, Value
from jax_nvfp4_moe.backends.chains.forks import Fork, find_forks
from jax_nvfp4_moe.backends.chains.fusion import find_fused

# What the calls of a layer with shared experts read. The calls are: norm, router, route, experts,
# gate_up, activate, down, sum.
LAYER = ([], [0], [1], [0, 2], [0], [4], [5], [3, 6])
SCOPE, FORK = range(1, 4), range(4, 7)


def make_calls(reads, aliases=(), target="target"):
    """Return calls with one result each.

    Args:
      reads: for each call, the indices of the calls whose results it reads.
      aliases: indices of calls that update an operand in place.
      target: the target of all calls.
    """
    weight = Value((64, 64), jnp.uint8)
    calls = []
    for index, sources in enumerate(reads):
        operands = [weight, *(calls[source].results[0] for source in sources)]
        result = Value((64, 64), jnp.uint8)
        pairs = {0: 0} if index in aliases else {}
        calls.append(Call(target, {}, [(v, v.shape) for v in operands], [result], pairs))
    return calls


def shifted(reads, by):
    return [[source + by for source in sources] for sources in reads]


def test_shared_experts_are_a_fork():
    assert find_forks(make_calls(LAYER)) == [Fork(1, 4, 7)]


def test_a_fork_may_begin_at_the_start_of_the_chain():
    assert find_forks(make_calls([[], [0], [], [2], [1, 3]])) == [Fork(0, 2, 4)]


def test_each_layer_has_a_fork():
    second = shifted(LAYER, 8)
    second[0] = [7]
    calls = make_calls([*LAYER, *second])
    assert find_forks(calls) == [Fork(1, 4, 7), Fork(9, 12, 15)]


def test_a_sum_may_begin_the_next_scope():
    """The sum waits for the first fork, and the second fork does not read the sum."""
    calls = make_calls([*LAYER, [7], [6], [9], [8, 10]])
    assert find_forks(calls) == [Fork(1, 4, 7), Fork(7, 9, 11)]


@pytest.mark.parametrize("source", [2, 3])
@pytest.mark.parametrize("reader", FORK)
def test_no_fork_has_a_call_that_reads_a_late_result_of_the_scope(source, reader):
    reads = [list(sources) for sources in LAYER]
    reads[reader].append(source)
    found = find_forks(make_calls(reads))
    assert all(reader not in range(fork.begin, fork.join) for fork in found)


def test_a_scope_begins_after_the_last_result_that_the_fork_reads():
    reads = [list(sources) for sources in LAYER]
    reads[5].append(1)  # activate reads the result of the router
    assert find_forks(make_calls(reads)) == [Fork(2, 4, 7)]


@pytest.mark.parametrize("index", FORK)
def test_calls_with_aliases_are_in_no_fork(index):
    found = find_forks(make_calls(LAYER, aliases=[index]))
    assert all(index not in range(fork.begin, fork.join) for fork in found)


@pytest.mark.parametrize(("index", "expected"), [(1, [Fork(2, 4, 7)]), (2, []), (3, [])])
def test_calls_with_aliases_are_in_no_scope(index, expected):
    assert find_forks(make_calls(LAYER, aliases=[index])) == expected


@pytest.mark.parametrize("index", [*SCOPE, *FORK])
def test_sums_over_gpus_run_beside_no_other_call(index):
    """They run one at a time, and in the same order on all GPUs."""
    calls = make_calls(LAYER)
    calls[index] = dataclasses.replace(calls[index], target="nvfp4_all_reduce_cuda")
    for fork in find_forks(calls):
        assert index not in range(fork.start, fork.join)


def test_no_fork_of_one_call():
    assert find_forks(make_calls([[], [0], [1], [2], [0], [3, 4]])) == []


def test_no_scope_of_one_call():
    assert find_forks(make_calls([[], [0], [0], [2], [3], [1, 4]])) == []


def test_the_next_call_reads_a_result_of_the_fork():
    assert find_forks(make_calls([[], [0], [1], [0], [3]])) == []
    assert find_forks(make_calls([[], [0], [1], [0], [3], [2]])) == []
    assert find_forks(make_calls([[], [0], [1], [0], [3], [4]])) == [Fork(1, 3, 5)]


def product(outputs, inputs, source, target="nvfp4_grouped_gemm_w4a16_sm90"):
    x = source or Value((1, inputs), jnp.bfloat16)
    result = Value((1, outputs), jnp.bfloat16)
    return Call(target, {}, [(x, (1, inputs))], [result], {})


@pytest.mark.parametrize(
    ("outputs", "inputs", "found"),
    [(1024, 4096, True), (64, 512, True), (1008, 512, True), (1008, 4096, False)],
)
def test_products_that_could_take_each_others_room_run_in_order(outputs, inputs, found):
    first = [product(outputs, inputs, None)]
    first.append(product(1024, 1024, first[0].results[0]))
    second = [product(1024, 1024, None)]
    second.append(product(1024, 1024, second[0].results[0]))
    ends = [first[1].results[0], second[1].results[0]]
    total = Call("sum", {}, [(v, v.shape) for v in ends], [Value((1, 1024), jnp.bfloat16)], {})
    assert bool(find_forks([*first, *second, total])) == found


def random_calls(rng):
    """Return calls of layers like `LAYER`, with random sizes, more reads, and calls of no layer."""
    values, calls = [Value((int(rng.integers(1, 3000)),), jnp.uint8)], []
    for _ in range(6):
        reads = [[source + 1 for source in sources] for sources in LAYER]
        norm = len(values) - 1
        written = [values[-1]]
        for sources in reads:
            operands = [written[source] for source in sources] or [written[0]]
            if rng.random() < 0.15:  # possibly something old, even of another layer
                operands.append(values[int(rng.integers(0, norm + 1))])
            results = [Value((int(rng.integers(0, 3000)),), jnp.uint8) for _ in range(2)]
            calls.append(Call("target", {}, [(v, v.shape) for v in operands], results, {}))
            written.append(results[0])
            values += results[::-1]
        values.append(written[-1])
    return calls


def must_follow(one, two, forks):
    """Return whether call `two` begins after call `one` has ended, for all forks."""
    parallel = any(one in range(b.start, b.begin) and two in range(b.begin, b.join) for b in forks)
    return one < two and not parallel


@pytest.mark.parametrize("seed", range(10))
def test_values_that_may_be_needed_at_once_share_no_memory(seed):
    calls = random_calls(np.random.default_rng(seed))
    forks = find_forks(calls)
    assert len(forks) >= 2
    values = [value for call in calls for value in call.results]
    kept = set(values[::11])
    offsets, size = emission._place_scratch(calls, kept, forks)
    assert offsets.keys() == set(values) - kept
    assert size < sum(value.nbytes for value in offsets)  # memory is shared at all
    needed = {
        v: [i for i, c in enumerate(calls) if v in {*c.results, *dict(c.operands)}] for v in offsets
    }
    for one, two in itertools.combinations(offsets, 2):
        apart = any(
            all(must_follow(a, b, forks) for a in needed[first] for b in needed[second])
            for first, second in ((one, two), (two, one))
        )
        before = offsets[one] + one.nbytes <= offsets[two]
        after = offsets[two] + two.nbytes <= offsets[one]
        assert apart or before or after


def test_memory_in_the_order_of_calls_would_be_shared():
    """The test above fails if the places ignore forks."""
    calls = random_calls(np.random.default_rng(0))
    one, other = (emission._place_scratch(calls, set(), b) for b in (find_forks(calls), []))
    assert one[1] > other[1]


@pytest.mark.parametrize("seed", range(5))
def test_forks_read_nothing_of_their_scopes(seed):
    calls = random_calls(np.random.default_rng(seed))
    last = 0
    for fork in find_forks(calls):
        scope, inside = (calls[fork.start : fork.begin], calls[fork.begin : fork.join])
        written = {value for call in scope for value in call.results}
        assert not any(value in written for call in inside for value, _ in call.operands)
        assert last <= fork.start <= fork.begin - 2 <= fork.join - 4
        last = fork.join


def flags_of(function, width, *weights):
    """Return the flags of all calls of the only chain of a function."""
    program = jax.make_jaxpr(ops.chain_calls(function))(
        jax.ShapeDtypeStruct((2, width), jnp.bfloat16), *weights
    )
    (chain,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "ffi_call"]
    return [
        int(np.asarray(getattr(value, "val", value))[2])
        for name, value in sorted(chain.params["attributes"])
        if re.fullmatch(r"call_\d+_buffers", name)
    ]


def test_calls_for_gpus_have_flags():
    target = Target("cuda", (9, 0))
    layers = jax.eval_shape(lambda: [make_layer(seed, target) for seed in range(2)])
    layer = [0, 1, 0, 0, 2, 2, 2, 4 + 8]  # the next norm does the work of the last call
    found = flags_of(lambda x, layers: run_layers(x, layers, target), HIDDEN, layers)
    assert found == [*layer, *layer, 0]


@pytest.mark.parametrize(("platform", "flags"), [("sm90", [1, 0, 2, 2, 4]), ("cpu", [0] * 5)])
def test_calls_for_cpus_have_no_flags(platform, flags):
    weight = nvfp4.quantize(np.eye(64, dtype=np.float32))
    target = Target("cpu") if platform == "cpu" else Target("cuda", (9, 0))

    def twice(x):
        options = {"target": target, "backend": f"moe_w4a16_{platform}"}
        return ops.linear(ops.linear(x, weight, **options), weight, **options), options

    def function(x):
        scope, (fork, options) = twice(x)[0], twice(x)
        return scope, ops.linear(fork, weight, **options)

    assert flags_of(function, 64) == flags


def make_pair(rows=1, *, target="nvfp4_dense_few_cuda", reads_norm=True):
    """Return the calls of a norm and of a layer that reads its result, or the sum before it."""
    x, added, weight = (Value((rows, 64), jnp.bfloat16) for _ in range(3))
    total, y, logits = (Value((rows, 64), jnp.bfloat16) for _ in range(3))
    operands = [(value, value.shape) for value in (x, added, weight)]
    norm = Call("nvfp4_add_rms_norm_cuda", {}, operands, [total, y], {})
    source = y if reads_norm else total
    return [norm, Call(target, {}, [(v, v.shape) for v in (source, weight)], [logits], {})]


def make_attention(tokens=1, *, target="nvfp4_attention_cuda"):
    """Return the calls that prepare heads, and that attend with them."""
    shapes = ((2, tokens, 4, 8), (2, 2, 16, 8), (2, 2, 16, 8))
    old, new = ([Value(shape, jnp.bfloat16) for shape in shapes] for _ in range(2))
    operands = [(value, value.shape) for value in old]
    heads = Call("nvfp4_prepare_heads_cuda", {}, operands, new, {1: 1, 2: 2})
    result = Value(shapes[0], jnp.bfloat16)
    return [heads, Call(target, {}, [(value, value.shape) for value in new], [result], {})]


def make_experts(rows=2, *, target="nvfp4_add_rms_norm_cuda", reads_sum=True):
    """Return the calls of experts, and of a norm that adds their results, or normalizes these."""
    x, y, weight, total, result = (Value((rows, 64), jnp.bfloat16) for _ in range(5))
    experts = Call("nvfp4_moe_w4a16_sm90", {}, [(x, x.shape)], [y, Value((9,), jnp.uint8)], {})
    operands = (x, y, weight) if reads_sum else (y, x, weight)
    return [experts, Call(target, {}, [(v, v.shape) for v in operands], [total, result], {})]


def test_the_sum_over_experts_is_left_to_the_norm_that_adds_it():
    assert find_fused(make_experts(), []) == {0}
    assert find_fused(make_experts(1), []) == set()  # their second product sums
    assert find_fused(make_experts(reads_sum=False), []) == set()
    assert find_fused(make_experts(target="nvfp4_route_cuda"), []) == set()
    calls = make_experts()
    assert find_fused(calls, calls[0].results[:1]) == set()  # it must be written


def make_gated(rows=2, *, target="nvfp4_add_gated_cuda", reads_sum=True):
    """Return the calls of a gated sum, and of a norm that adds its result, or normalizes it."""
    x, z, y, weight, total, result = (Value((rows, 64), jnp.bfloat16) for _ in range(6))
    gated = Call(target, {}, [(v, v.shape) for v in (x, z)], [y], {})
    operands = [(v, v.shape) for v in ((x, y, weight) if reads_sum else (y, x, weight))]
    return [gated, Call("nvfp4_add_rms_norm_cuda", {}, operands, [total, result], {})]


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("target", ["nvfp4_add_gated_cuda", "nvfp4_add_linear_gated_cuda"])
def test_a_gated_sum_is_left_to_the_norm_that_adds_it(target, rows):
    calls = make_gated(rows, target=target)
    assert find_fused(calls, []) == {0}
    assert find_fused(calls, calls[0].results) == set()  # it must be written
    assert find_fused(make_gated(rows, target=target, reads_sum=False), []) == set()


@pytest.mark.parametrize(("rows", "expected"), [(1, {1}), (2, {0})])
def test_a_norm_that_is_left_to_the_next_call_gets_no_work(rows, expected):
    """One row: a layer computes the norm. Several: the norm has a kernel, and adds the sum."""
    gated, norm = make_gated(rows)
    _, layer = make_pair(rows)
    operands = [(norm.results[1], (rows, 64)), layer.operands[1]]
    calls = [gated, norm, Call(layer.target, {}, operands, layer.results, {})]
    assert find_fused(calls, []) == expected


@pytest.mark.parametrize(("rows", "expected"), [(1, {1}), (2, {0}), (64, {0})])
def test_a_sum_over_gpus_is_left_to_the_norm_that_adds_it(rows, expected):
    """The sum has one dimension. A layer computes the norm of one row, as above."""
    gated, norm = make_gated(rows)
    flat = Value((rows * 64,), jnp.bfloat16)
    total = Call("nvfp4_all_reduce_cuda", {}, [(flat, flat.shape)], gated.results, {})
    _, layer = make_pair(rows)
    operands = [(norm.results[1], (rows, 64)), layer.operands[1]]
    calls = [total, norm, Call(layer.target, {}, operands, layer.results, {})]
    assert find_fused(calls, []) == expected
    assert find_fused(calls[:2], []) == {0}
    assert 0 not in find_fused(calls, total.results)  # it must be written
    apart = [total, dataclasses.replace(norm, target="nvfp4_route_cuda")]
    assert find_fused(apart, []) == set()


def test_ids_that_are_shifted_are_left_to_the_shift():
    logits, ids, weights, first, shifted = (Value((3, 4), jnp.int32) for _ in range(5))
    route = Call("nvfp4_route_cuda", {}, [(logits, logits.shape)], [ids, weights], {})
    operands = [(ids, ids.shape), (first, ())]
    calls = [route, Call("nvfp4_shift_ids_cuda", {}, operands, [shifted], {})]
    assert find_fused(calls, [weights]) == {0}
    assert find_fused(calls, [ids]) == set()  # it must be written


@pytest.mark.parametrize("make", [make_pair, make_attention])
def test_the_work_on_one_token_is_left_to_the_next_call(make):
    assert find_fused(make(), []) == {0}
    assert find_fused(make(2), []) == set()
    assert find_fused(make(target="nvfp4_route_cuda"), []) == set()
    assert find_fused([make()[0], *make()], []) == {1}


def test_a_norm_is_left_to_the_call_that_reads_it():
    assert find_fused(make_pair(reads_norm=False), []) == set()
    calls = make_pair()
    assert find_fused(calls, calls[0].results) == {0}  # it is written in any case


def test_heads_are_not_left_to_attention_if_others_read_queries():
    calls = make_attention()
    q = calls[0].results[0]
    assert find_fused(calls, [q]) == set()
    other = Call("target", {}, [(q, q.shape)], [Value((1,), jnp.uint8)], {})
    assert find_fused([*calls, other], []) == set()


def test_forks_do_not_divide_a_call_from_the_one_that_does_its_work():
    calls = make_calls(LAYER)
    assert find_forks(calls, frozenset({0})) == [Fork(2, 4, 7)]  # the fork is behind both
    assert all(b.begin != 4 for b in find_forks(calls, frozenset({3})))
    assert all(b.join != 7 for b in find_forks(calls, frozenset({6})))
    assert find_forks(calls, frozenset({1})) == [Fork(1, 4, 7)]


@pytest.mark.parametrize("fused", [(), (0,)])
def test_what_a_fused_call_reads_stays_until_its_work_is_done(fused):
    """The first call reads the only value that is read before the last one writes its result."""
    sizes = [Value((512,), jnp.uint8) for _ in range(4)]
    first, *others = (Call("target", {}, [], [value], {}) for value in sizes)
    calls = [
        first,
        *(
            dataclasses.replace(call, operands=[(value, value.shape)])
            for call, value in zip(others, sizes, strict=False)
        ),
    ]
    shifted = [index + 1 for index in fused]
    offsets, _ = emission._place_scratch(calls, set(), fused=shifted)
    assert (offsets[sizes[0]] == offsets[sizes[2]]) == (not fused)
