"""Test which devices share a sum, how their memory is connected, and when a kernel adds up.

A stand-in for the CUDA extension records what is connected. No GPU is needed.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.devices.host_devices import make_mesh

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.ops import all_reduce as op
from jax_nvfp4_moe.ops.running import find_plan
from jax_nvfp4_moe.parallel import connect_peers, find_expert_mesh, peers
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, TENSOR, ExpertMesh

pytestmark = pytest.mark.eight_devices
HOPPER = Target("cuda", (9, 0))


class Extension(types.ModuleType):
    """Record the calls that connect memory. Addresses are 1000 and the number of a device."""

    def __init__(self):
        super().__init__("extension")
        self.groups, self.accesses = [], []

    def allocate_peer_memory(self, device, count):
        return 1000 + device

    def enable_peer_access(self, device, peer):
        self.accesses.append((device, peer))

    def add_peer_group(self, *group):
        self.groups.append(group)


@pytest.fixture
def extension(monkeypatch):
    extension = Extension()
    monkeypatch.setattr(ExpertMesh, "target", HOPPER)
    monkeypatch.setattr(peers._ffi, "why_unavailable", lambda name: None)
    monkeypatch.setattr(peers._ffi, "load", lambda name: extension)
    monkeypatch.setattr(peers, "_connected", {})
    return extension


def test_gpus_of_one_process_reach_each_other(extension):
    ids = [device.local_hardware_id for device in jax.devices()[:4]]
    connected = connect_peers(make_mesh((2, 2)), timeout=5.0)
    names = {roles: (one.groups, one.size) for roles, one in connected.peers}
    assert names == {
        (EXPERT, TENSOR): ("expert+tensor 0,1,2,3", 4),
        (TENSOR,): ("tensor 0,1 2,3", 2),
    }
    whole = [1000 + one for one in ids]
    assert extension.groups[:4] == [
        ("expert+tensor 0,1,2,3", ids[rank], rank, whole, 5.0) for rank in range(4)
    ]
    assert extension.groups[4:] == [
        ("tensor 0,1 2,3", ids[index], index % 2, whole[index // 2 * 2 :][:2], 5.0)
        for index in range(4)
    ]
    assert all(device != peer for device, peer in extension.accesses)
    connect_peers(make_mesh((2, 2)), timeout=5.0)  # the same memory
    assert len(extension.groups) == 8


def test_another_timeout_for_the_same_gpus_is_an_error(extension):
    """Programs that run hold the timeout that was given first."""
    connect_peers(make_mesh((1, 2)), timeout=5.0)
    with pytest.raises(ValueError, match=r"timeout: expected 5\.0, .* got 6\.0"):
        connect_peers(make_mesh((1, 2)), timeout=6.0)
    assert {group[-1] for group in extension.groups} == {5.0}


def test_gpus_wait_ten_minutes_by_default(extension):
    connect_peers(make_mesh((1, 2)))
    assert {group[-1] for group in extension.groups} == {600.0}


def test_an_axis_of_one_device_has_no_sums(extension):
    assert [roles for roles, _ in connect_peers(make_mesh((2, 1))).peers] == [(EXPERT, TENSOR)]
    assert connect_peers(make_mesh((1, 1))).peers == ()


def test_handles_of_other_processes_are_imported(monkeypatch):
    """Each process gathers the handles of all, by the ids of the devices."""
    others = np.array([[0, *b"\0\0\0"], [1, *b"def"], [1, *b"xyz"]], np.uint8)

    def gather(own):
        return np.stack([own, others])

    monkeypatch.setattr(peers.multihost_utils, "process_allgather", gather)
    found = peers._exchange({3: b"abc"}, [3, 5, 4])
    assert found == {3: b"abc", 5: b"def", 4: b"xyz"}


@pytest.fixture
def two_processes(extension, monkeypatch):
    """Let jax say that there are two processes, of which this one has all devices."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)


def test_a_process_without_gpus_of_the_mesh_is_an_error(two_processes, extension, monkeypatch):
    """Its own call raises the error. Those of the processes with GPUs would wait for it."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match=r"GPUs of all 2 processes.*process 1 has none of them"):
        connect_peers(make_mesh((1, 2)))
    assert not extension.groups


def test_another_host_is_an_error(two_processes, monkeypatch):
    def gather(own):
        return np.stack([own, own + np.uint8(1)])

    monkeypatch.setattr(peers.multihost_utils, "process_allgather", gather)
    with pytest.raises(ValueError, match="processes 0 and 1 run on different hosts"):
        peers._check_processes({0, 1})
    monkeypatch.setattr(peers.multihost_utils, "process_allgather", lambda own: np.stack([own] * 2))
    peers._check_processes({0, 1})


def test_an_error_of_jax_tells_why_a_sum_has_failed(extension):
    extension.peer_failure = lambda: "rank 0 and rank 1 did not meet"
    for connects in (False, True):
        if connects:
            connect_peers(make_mesh((1, 2)))
        with pytest.raises(jax.errors.JaxRuntimeError) as caught, peers.explain_failed_sums():
            raise jax.errors.JaxRuntimeError("INTERNAL: unspecified launch failure")
        notes = getattr(caught.value, "__notes__", [])
        assert any("rank 0 and rank 1 did not meet" in note for note in notes) == connects


def test_what_cannot_be_connected_is_named(extension, monkeypatch):
    for timeout in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout: expected a positive, finite number of sec"):
            connect_peers(make_mesh((1, 2)), timeout=timeout)
    monkeypatch.setattr(peers, "facts", lambda: types.SimpleNamespace(PEERS=range(2, 4)))
    with pytest.raises(ValueError, match="expected at most 3 GPUs along the axes expert, tensor"):
        connect_peers(make_mesh((2, 2)))


def test_cpus_are_refused():
    with pytest.raises(ValueError, match="mesh: expected NVIDIA GPUs, got cpu"):
        connect_peers(make_mesh((1, 2)))


def test_a_connected_mesh_is_a_mesh():
    mesh = dataclasses.replace(find_expert_mesh(make_mesh((1, 2))), peers=(((TENSOR,), "x"),))
    assert find_expert_mesh(mesh) is mesh
    assert mesh.automatic().peers == mesh.peers


@pytest.mark.parametrize(
    ("size", "nbytes", "target", "backend"),
    [
        (2, 16, HOPPER, "all_reduce_cuda"),
        (8, 1 << 20, HOPPER, "all_reduce_cuda"),
        (9, 16, HOPPER, "xla"),
        (2, (1 << 20) + 16, HOPPER, "xla"),
        (2, 24, HOPPER, "xla"),
        (2, 16, Target("cpu"), "xla"),
    ],
)
def test_the_kernel_adds_up_small_arrays_of_few_gpus(size, nbytes, target, backend):
    plan = find_plan("all_reduce", target=target, sizes={"GPUs": size, "bytes": nbytes})
    assert plan.backend.name == backend


def lowered(mesh, x):
    """Return the program of sums on a mesh for an absent GPU, as text."""

    def body(x):
        chosen = dict(mesh.peers).get((TENSOR,))
        return op.all_reduce(x, ("tensor",), peers=chosen, target=HOPPER)

    rows = mesh.spec(TENSOR)
    run = jax.jit(mesh.shard_map(body, (rows,), rows))
    return run.trace(x).lower(lowering_platforms=("cuda",)).as_text()


def test_the_kernel_is_called_only_on_a_connected_mesh():
    plain, x = find_expert_mesh(make_mesh((1, 2))), jnp.ones((2, 64))
    group = op.PeerGroups("tensor 0,1", 2)
    assert "all_reduce_cuda" not in lowered(plain, x)
    text = lowered(dataclasses.replace(plain, peers=(((TENSOR,), group),)), x)
    assert "nvfp4_all_reduce_cuda" in text
    assert 'groups = "tensor 0,1"' in text
    assert "stablehlo.all_reduce" not in text


def test_default_checks_of_shard_map_take_psum():
    """There, the type of a result says that all devices have the same values."""
    mesh, group = make_mesh((1, 2)), op.PeerGroups("tensor 0,1", 2)
    spec = jax.sharding.PartitionSpec("tensor")

    def body(x):
        return op.all_reduce(x, ("tensor",), peers=group, target=HOPPER)

    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    np.testing.assert_array_equal(jax.jit(run)(jnp.arange(4.0)), [2, 4])
