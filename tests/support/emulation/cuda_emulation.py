"""Run the FFI targets of the CUDA extension on a CPU.

The kernels and the handlers are compiled from the same sources, except for the plain kernels. All
assembly is in eight headers. `tests/emulation` has a replacement for each of them, and everything
else is compiled unchanged. Threads are fibers. A kernel must not depend on the order of its
threads, so every call runs twice, with the threads in both orders. Buffers end at a protected page,
so that an access past their end fails. The targets are registered for JAX's CPU platform under
their own names, so that the ops of the package call them.
"""

import concurrent.futures
import ctypes
import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
from typing import Any, ClassVar

import jax
import numpy as np
from support.extensions import cuda_calls
from support.files.given import ROOT, TESTS
from support.files.made_once import made_once

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.numerics.routing import Router

ENGINES = ("sm80", "sm90")  # the 16-bit engines
# Engine -> how the FFI targets that run it end.
SUFFIXES = {
    "sm80": "w4a16_sm80",
    "sm90": "w4a16_sm90",
    "sm100": "w4a4_sm100",
    "sm120": "w4a4_sm120",
}
HOPPER_SHARED_BYTES = 227 << 10  # of shared memory for a block
LEAST_SHARED_BYTES = 99 << 10  # of a block on 8.6, 8.9 and 12.x
TARGET = Target("cuda", (9, 0))  # for which ops are lowered
_FORMS = TESTS / "emulation"
_FFI = ROOT / "ffi"
# Files of ffi/cuda that are not compiled: the plain kernels, whose instructions have no replacement
# here, and the GEMM of CUTLASS.
_LEFT_OUT = {"plain_gemm", "moe", "grouped_gemm", "fp4_gemm_sm100"}
# The fibers jump from stack to stack, which a fortified longjmp forbids.
_FLAGS = (
    "-std=c++17 -O1 -fPIC -w -fno-strict-aliasing -ffp-contract=off -U_FORTIFY_SOURCE "
    "-DNVFP4_EMULATE_BLACKWELL=1 -DNVFP4_CUTLASS=0"
)
# What handlers launch, if tests may choose among kernels (device_functions.h).
_CHOICES = "-DLaunchAttention=LaunchChosenAttention -DLaunchDenseFew=LaunchChosenDense"
_TYPES = {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3}
_FORCED = ("nothing", "sm90", "tiles")  # as in device_functions.h


def cuda_include() -> pathlib.Path:
    """Return the folder of CUDA's headers."""
    spec = importlib.util.find_spec("nvidia")
    wheels = (
        [pathlib.Path(root) / "cu13" for root in (spec.submodule_search_locations or ())]
        if spec
        else []
    )
    nvcc = shutil.which("nvcc")
    roots = [*([pathlib.Path(nvcc).resolve().parents[1]] if nvcc else []), *wheels]
    for root in [*roots, *sorted(pathlib.Path("/usr/local").glob("cuda*"))]:
        if (root / "include" / "cuda_bf16.h").exists():
            return root / "include"
    raise FileNotFoundError("cuda_bf16.h: install the CUDA toolkit or pip's nvidia-cuda-runtime")


def cutlass_include() -> pathlib.Path:
    """Return the folder of CUTLASS's headers, without an import, which would run a generator."""
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("cutlass.h: pip install --no-deps nvidia-cutlass==4.2.0.0")
    return pathlib.Path(spec.submodule_search_locations[0]) / "source/include"


@dataclasses.dataclass(frozen=True)
class Device:
    """What the next calls run on.

    Attributes:
      multiprocessors: their number.
      shared_bytes: shared memory that a block may have.
      capability: the major number of the compute capability, where kernels depend on it; else 0.
      forced: kernels that run, also where others would be faster: "nothing", "sm90" for those for
        9.0 alone, or "tiles" for the kernel for plain weights on devices before 9.0.
      unchanged: whether operands are unchanged since the previous kernel, as in a chain.
    """

    multiprocessors: int = 1
    shared_bytes: int = HOPPER_SHARED_BYTES
    capability: int = 0
    forced: str = "nothing"
    unchanged: bool = False


_DEVICE = Device()


def load(cache: pathlib.Path) -> ctypes.CDLL:
    """Register the FFI targets. They are compiled first if the folder `cache` lacks them."""
    library = ctypes.CDLL(str(made_once(cache / f"{_fingerprint()}.so", _build)))
    library.target_name.restype = ctypes.c_char_p
    library.target_handler.restype = ctypes.c_void_p
    index = 0
    while name := library.target_name(index):
        handler = jax.ffi.pycapsule(ctypes.c_void_p(library.target_handler(index)))
        jax.ffi.register_ffi_target(name.decode(), handler, platform="cpu")
        index += 1
    return library


def _fingerprint() -> str:
    """Return a hash of the sources, of the compiler and its flags, and of the headers."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    given = compiler.stdout, _FLAGS, _CHOICES, sorted(_LEFT_OUT)
    found = hashlib.sha256(repr(given).encode())
    sources = [*_bindings(), *_FFI.glob("*.h"), *(_FFI / "cuda").rglob("*.*"), *_FORMS.rglob("*.*")]
    headers = [cuda_include() / name for name in ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")]
    headers += (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api").glob("*.h")
    for source in sorted([*sources, *headers]):
        if source.suffix not in (".py", ".pyc"):
            found.update(str(source).encode() + source.read_bytes())
    return found.hexdigest()[:16]


def _bindings() -> list[pathlib.Path]:
    """Return the files of the CUDA extension that are compiled for the host, but its module."""
    return [path for path in _FFI.glob("cuda_*.cc") if path.stem != "cuda_module"]


def _build(folder: pathlib.Path) -> pathlib.Path:
    """Compile the kernels and their handlers in `folder`, and return the path of the library."""
    for source in (*_FFI.glob("*.h"), *_bindings(), *_FORMS.glob("*.*")):
        shutil.copy(source, folder)
    for tree in (_FFI / "cuda", _FORMS / "cuda"):  # the replacements overwrite the originals
        shutil.copytree(tree, folder / "cuda", dirs_exist_ok=True)
    includes = [f"-I{path}" for path in (folder, cuda_include(), jax.ffi.include_dir())]
    compiler = ["g++", *_FLAGS.split(), *includes, "-include", "cuda_on_cpu.h", "-x", "c++"]
    kernels = sorted(p for p in folder.glob("cuda/*/*.cu") if p.stem not in _LEFT_OUT)
    names = [str(p.relative_to(folder)) for p in (*kernels, *folder.glob("*.cc"))]

    def compile_one(name):
        choices = _CHOICES.split() if name.endswith("_bindings.cc") else []
        command = [*compiler, *choices, "-c", name, "-o", f"{name}.o"]
        return subprocess.run(command, cwd=folder, check=False).returncode

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        if any(pool.map(compile_one, names)):
            raise RuntimeError("g++ could not compile the kernels for the CPU")
    library = folder / "libemulation.so"
    objects = [f"{name}.o" for name in names]
    subprocess.run(["g++", "-shared", *objects, "-o", library], cwd=folder, check=True)
    return library


def emulate(library, function, *operands, device=_DEVICE, **options):
    """Call `function`, which calls one FFI target, and return its results as numpy arrays.

    Args:
      library: of `load`.
      function: a function of arrays. It is compiled.
      operands: arrays and None.
      device: what the target runs on.
      options: keyword arguments of the function. Those that are arrays are traced.
    """
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray | jax.Array)}
    static = {name: x for name, x in options.items() if name not in arrays}
    run = jax.jit(lambda operands, arrays: function(*operands, **arrays, **static))
    library.configure(
        device.multiprocessors,
        device.shared_bytes,
        device.capability,
        _FORCED.index(device.forced),
        int(device.unchanged),
    )
    results = jax.tree.map(np.asarray, run(operands, arrays))
    # Without rows, an op calls no kernel, even if it also returns a scale.
    if not library.call_count() and jax.tree.leaves(results)[0].size:
        raise RuntimeError("no kernel ran")
    return results


def on_device(library, function, backend=None, **device) -> Any:
    """Return `function`, an op, for the emulated device, with the record `backend`."""
    how = {"target": TARGET} | ({} if backend is None else {"backend": backend})
    usual = Device(**device)

    def run(*operands, device=usual, **options):
        return emulate(library, function, *operands, device=device, **how, **options)

    return run


def call_target(name, operands, results, **attributes):
    """Call an FFI target. `results` are arrays or pairs (shape, dtype), and None is left out."""
    likes = [
        jax.ShapeDtypeStruct(*((x.shape, x.dtype) if hasattr(x, "shape") else x)) for x in results
    ]
    operands = [np.zeros(0, np.float32) if x is None else x for x in operands]
    return jax.ffi.ffi_call(name, likes)(*operands, **attributes)


def moe(library, engine, x, layer, ids, weights, options, multiprocessors, **device):
    """Run an expert layer on canonical weights, and return [t, h] in the dtype of x.

    A single token runs twice, because a kernel may read its row before it waits. Both results must
    have the same bits.
    """
    first, *others = (
        emulate(
            library,
            lambda *operands: cuda_calls.moe(*operands, options, SUFFIXES[engine]),
            *(x, layer, ids, weights),
            device=Device(multiprocessors, unchanged=unchanged, **device),
        )
        for unchanged in ((False, True) if len(x) == 1 else (False,))
    )
    if any(other.tobytes() != first.tobytes() for other in others):
        raise RuntimeError("the result depends on what the preceding kernel has written")
    return first


def grouped_gemm(library, engine, operands, mode, multiprocessors, **device):
    """Multiply rows, sorted by group, by canonical weights; return [m, n] in the dtype of x.

    `operands` and `mode` are those of `float64_layer.grouped_gemm`.
    """
    return emulate(
        library,
        lambda *operands: cuda_calls.grouped_gemm(*operands, mode, SUFFIXES[engine]),
        *operands,
        device=Device(multiprocessors, **device),
    )


class LinearFewCut(ctypes.Structure):
    """How the kernel for linear layers with few rows cuts a layer (linear_few.cuh)."""

    _fields_: ClassVar = [
        (name, ctypes.c_int32) for name in ("slabs", "ranks", "rank_tiles", "shared_bytes")
    ]


class LinearSm90Cut(ctypes.Structure):
    """How the kernel for linear layers on 9.0 cuts a layer (linear_sm90.cuh)."""

    _fields_: ClassVar = [(name, ctypes.c_int32) for name in ("teams", "ranks")]


class DenseFewCut(ctypes.Structure):
    """How the kernel for plain weights and few rows cuts a layer (dense_few.cuh)."""

    _fields_: ClassVar = [
        (name, ctypes.c_int32) for name in ("tile", "ranks", "rank_pieces", "shared_bytes")
    ]


def _cut(library, function, cut, sizes, others, multiprocessors, shared_bytes=HOPPER_SHARED_BYTES):
    library.configure(multiprocessors, shared_bytes, 0, 0, 0)
    numbers = *map(ctypes.c_int64, sizes), *map(int, others)
    getattr(library, function)(*numbers, ctypes.byref(cut))
    return cut


def cut_linear_few(
    library, rows, n, k, multiprocessors, *, clusters=True, shared_bytes=HOPPER_SHARED_BYTES
) -> LinearFewCut:
    """Return how the kernel for few rows cuts a linear layer. shared_bytes is 0 if it does not."""
    how = (rows, n, k), (clusters,), multiprocessors, shared_bytes
    return _cut(library, "cut_linear_few", LinearFewCut(), *how)


def cut_linear_sm90(library, n, k, multiprocessors, *, few, weight_bits) -> LinearSm90Cut:
    """Return how the kernel for 9.0 cuts a linear layer, with `few` rows or more."""
    others = few, weight_bits
    return _cut(library, "cut_linear_sm90", LinearSm90Cut(), (n, k), others, multiprocessors)


def cut_dense_few(library, sizes, x_type, weight_type, multiprocessors, *, clusters=True):
    """Return how the kernel for plain weights cuts a layer of ``sizes = (rows, n, k)``.

    The layer has a bias in float32, which takes the most shared memory.
    """
    others = _TYPES[x_type], _TYPES[weight_type], clusters
    return _cut(library, "cut_dense_few", DenseFewCut(), sizes, others, multiprocessors)


def fills_sm90(library, *sizes) -> bool:
    """Return whether Hopper takes its own kernel for attention of sizes ``b, t, n, m, s, d``."""
    return bool(library.attention_fills_sm90(*map(ctypes.c_int64, sizes)))


def multiply_fp4(library, a, b, scale_a, scale_b, *, shuffled):
    """Return the sums ``[32, 4]`` of one FP4 MMA on fragments, with one row for each lane.

    If `shuffled`, the sums come from the emulation for GPUs without the instruction. Otherwise they
    come from the replacement header that the kernels use here.
    """

    def run(*operands):
        results = [((32, 4), np.float32)]
        return call_target("emulated_multiply_fp4", operands, results, shuffled=shuffled)[0]

    return emulate(library, run, *(np.asarray(x, np.uint32) for x in (a, b, scale_a, scale_b)))


def pack_groups(library, starts, slots, scales, weight_rows, k, scaled):
    """Return the arguments that a CUTLASS collective receives for one grouped GEMM, by name.

    Each array has one entry per expert, except that `places` has one per slot. ``scales [2, e]``
    holds global scales and input scales. Offsets are in bytes: those of the codes and the scales of
    weights, of the codes and the scales of rows, and of the output.
    """
    e = len(starts) - 1
    likes = {
        "shapes": ((e, 3), np.int32),
        "strides": ((e, 6), np.int32),  # JAX has no numbers of 64 bits here
        "scale_layouts": ((e, 10), np.int32),
        "offsets": ((e, 10), np.int32),
        "alpha": ((e,), np.float32),
        "places": ((len(slots),), np.int32),
    }
    attributes = {"weight_rows": np.int64(weight_rows), "k": np.int64(k), "scaled": scaled}

    def run(*operands):
        return call_target("emulated_pack_groups", operands, likes.values(), **attributes)

    arrays = emulate(library, run, starts, slots, *scales)
    found = dict(zip(likes, arrays, strict=True))
    return found | {name: found[name].view(np.int64) for name in ("strides", "offsets")}


def connect_peers(library, groups, rank, sent, *, by_rows=False):
    """Make the emulated GPU rank `rank` of connected GPUs, in groups of that name.

    `sent` are arrays by rank, of one shape and dtype. The other GPUs have sent theirs for the next
    two sums: the emulation runs each kernel twice. With `by_rows`, blocks are rows.
    """
    sent = np.stack(sent)
    pieces = sent[0].nbytes // 16
    row = sent[0, 0].nbytes // 16 if by_rows else pieces
    kind = _TYPES[sent.dtype.name]
    data = sent.ctypes.data_as(ctypes.c_void_p)
    library.connect_peers(groups.encode(), rank, len(sent), pieces, row, int(by_rows), kind, data)


def route(library, router: Router, logits, bias=None):
    """Return expert_ids and expert_weights ``[t, top_k]`` for `logits`."""
    logits = np.asarray(logits)
    results = [((len(logits), router.top_k), dtype) for dtype in (np.int32, np.float32)]
    attributes = {
        "score": router.score,
        "select_logits": router.select == "logits",
        "renormalize": router.renormalize and router.select == "scores",  # as the lowering does
        "num_groups": np.int32(router.num_groups),
        "groups_kept": np.int32(router.groups_kept),
        "scaling": np.float32(router.scaling),
    }

    def run(*operands):
        return call_target("nvfp4_route_cuda", operands, results, **attributes)

    return emulate(library, run, logits, bias)


def quantize(library, x, global_scale=None, scale_layout="linear"):
    """Quantize rows.

    Returns packed uint8, block_scale e4m3 (with padding if swizzled), and global_scale.
    """
    scale = None if global_scale is None else np.float32(global_scale)
    return emulate(library, cuda_calls.quantize, x, scale, scale_layout=scale_layout)


def sines(library, angles):
    """Return the sines and the cosines of float32 angles, as the kernel of heads computes them."""
    results = [np.empty_like(angles) for _ in range(2)]
    places = (array.ctypes.data_as(ctypes.c_void_p) for array in (angles, *results))
    library.sines(ctypes.c_int64(angles.size), *places)
    return results
