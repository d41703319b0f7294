"""Compile the CUDA kernels for the CPU, from the same sources, except for the plain kernels.

All assembly is in seven headers. `emulation` has a replacement for each of them, and everything
else is compiled unchanged. Threads are fibers. A kernel must not depend on the order of its
threads, so every call runs twice, with the threads in both orders. Operands end at a protected
page, so that an access past their end fails.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import math
import mmap
import os
import pathlib
import shutil
import subprocess
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from support.extensions import cuda_calls
from support.files.given import ROOT, TESTS
from support.files.made_once import made_once
from support.kernels.float64_layer import Layer, Options, kind_of

from jax_nvfp4_moe.numerics.layouts import find_layout, to_layout
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.ops.quantize import QUANTIZE_PARTIALS

ENGINES = {"sm80": 0, "sm90": 1}  # the 16-bit engines; values of EngineKind in launch.h
_ENGINES = {**ENGINES, "sm100": 2, "sm120": 3}
# The other engines use "mma_64x64".
_LAYOUTS = {"sm100": "fp4_128x64", "sm120": "fp4_64x64"}
HOPPER_SHARED_BYTES = 227 << 10  # of shared memory for a block
_LEAST_SHARED_BYTES = 99 << 10  # of a block on 8.6, 8.9 and 12.x
_FORMS = TESTS / "emulation"
_FFI = ROOT / "ffi"
# Files of ffi/cuda that are not compiled: the plain kernels, whose instructions have no replacement
# here, and the GEMM of CUTLASS.
_LEFT_OUT = {"plain_gemm", "moe", "grouped_gemm", "fp4_gemm_sm100"}
# The fibers jump from stack to stack, which a fortified longjmp forbids.
_FLAGS = (
    "-std=c++17 -O2 -fPIC -w -fno-strict-aliasing -ffp-contract=off -U_FORTIFY_SOURCE "
    "-DNVFP4_EMULATE_BLACKWELL=1"
)
_TYPES = {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3}
_SCALES = ("none", "static", "token")
_SCORES = ("softmax", "sigmoid", "sqrt_softplus")
_KINDS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2")
_GUARD = mmap.PAGESIZE


def cuda_include() -> pathlib.Path:
    """Return the folder of CUDA's headers."""
    spec = importlib.util.find_spec("nvidia")
    wheels = (
        [pathlib.Path(root) / "cu13" for root in (spec.submodule_search_locations or ())]
        if (spec)
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


def load(cache: pathlib.Path) -> ctypes.CDLL:
    """Load the library of all kernels. It is compiled first if the folder `cache` lacks it."""
    library = made_once(cache / f"{_fingerprint()}.so", _build)
    loaded = ctypes.CDLL(str(library))
    loaded.moe_workspace_bytes.restype = ctypes.c_int64
    loaded.combined_few_shared_bytes.restype = ctypes.c_int64
    loaded.combined_few_shared_bytes.argtypes = [ctypes.c_int64] * 2
    loaded.grouped_gemm_workspace_bytes.restype = ctypes.c_int64
    loaded.attention_workspace_bytes.restype = ctypes.c_int64
    loaded.latent_attention_workspace_bytes.restype = ctypes.c_int64
    loaded.delta_rule_workspace_bytes.restype = ctypes.c_int64
    loaded.mamba2_scan_workspace_bytes.restype = ctypes.c_int64
    return loaded


def _fingerprint() -> str:
    """Return a hash of the sources, of the compiler and its flags, and of CUDA's number types."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    found = hashlib.sha256(repr((compiler.stdout, _FLAGS, sorted(_LEFT_OUT))).encode())
    sources = [*_FFI.glob("*.h"), *(_FFI / "cuda").rglob("*.*"), *_FORMS.rglob("*.*")]
    headers = [cuda_include() / name for name in ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")]
    for source in sorted([*sources, *headers]):
        if source.suffix not in (".py", ".pyc"):
            found.update(str(source).encode() + source.read_bytes())
    return found.hexdigest()[:16]


def _build(folder: pathlib.Path) -> pathlib.Path:
    """Compile the kernels in `folder`, and return the path of the library."""
    for header in _FFI.glob("*.h"):
        shutil.copy(header, folder)
    for tree in (_FFI / "cuda", _FORMS / "cuda"):  # the replacements overwrite the originals
        shutil.copytree(tree, folder / "cuda", dirs_exist_ok=True)
    for source in _FORMS.glob("*.*"):
        shutil.copy(source, folder)
    compiler = ["g++", *_FLAGS.split(), f"-I{folder}", f"-I{cuda_include()}"]
    kernels = sorted(p for p in folder.glob("cuda/*/*.cu") if p.stem not in _LEFT_OUT)
    names = [str(p.relative_to(folder)) for p in kernels] + ["cuda_on_cpu.cc", "driver.cc"]

    def compile_one(name):
        command = [*compiler, "-include", "cuda_on_cpu.h", "-x", "c++", "-c", name]
        return subprocess.run([*command, "-o", f"{name}.o"], cwd=folder, check=False).returncode

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        if any(pool.map(compile_one, names)):
            raise RuntimeError("g++ could not compile the kernels for the CPU")
    library = folder / "libemulation.so"
    objects = [f"{name}.o" for name in names]
    subprocess.run(["g++", "-shared", *objects, "-o", library], cwd=folder, check=True)
    return library


class Guarded:
    """Memory that ends at a protected page, except for alignment to 16 bytes."""

    def __init__(self, size: int, content: np.ndarray | None = None):
        pages = -(-max(size, 1) // _GUARD)
        self._memory = mmap.mmap(-1, (pages + 1) * _GUARD)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + pages * _GUARD), _GUARD, 0)
        self.address = (begin + pages * _GUARD - size) // 16 * 16
        self._size = size
        ctypes.memset(self.address, 0xFF, size)
        self._content = None if content is None else np.ascontiguousarray(content).tobytes()
        if self._content:
            ctypes.memmove(self.address, self._content, size)

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self._size)

    def check(self):
        """Raise an error if a kernel has changed this operand."""
        if self._content is not None and self.read() != self._content:
            raise RuntimeError("a kernel wrote to an operand")


class _MoEShape(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("t", "top_k", "e", "h", "i", "n1")]


class _ProductShape(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("m", "n", "n_pad", "k", "e", "parts")]


class LinearFewCut(ctypes.Structure):
    """How the kernel for linear layers with few rows cuts a layer (linear_few.cuh)."""

    _fields_: ClassVar = [
        (name, ctypes.c_int32) for name in ("slabs", "ranks", "rank_tiles", "shared_bytes")
    ]


class _Activation(ctypes.Structure):
    _fields_: ClassVar = [
        ("kind", ctypes.c_int),
        ("gated", ctypes.c_bool),
        ("interleaved", ctypes.c_bool),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("gate_limit", ctypes.c_float),
        ("up_limit", ctypes.c_float),
    ]


class _RouterCall(ctypes.Structure):
    _fields_: ClassVar = [
        ("t", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("e", "top_k", "num_groups", "groups_kept")),
        ("score", ctypes.c_int),
        ("select_logits", ctypes.c_bool),
        ("renormalize", ctypes.c_bool),
        ("scaling", ctypes.c_float),
    ]


def _activation(options: Options) -> _Activation:
    interleaved = options.activation == "swigluoai"
    gate_limit = options.limit
    if options.activation == "swiglustep" and math.isfinite(gate_limit):
        # The bindings find this gate: silu(gate_limit) = limit, or g = limit * (1 + e^-g).
        for _ in range(200):
            gate_limit = options.limit * (1 + math.exp(-gate_limit))
    values = options.gated, interleaved, options.alpha, options.beta, gate_limit, options.limit
    return _Activation(_KINDS.index(kind_of(options.activation)), *values)


def _run(
    library,
    call,
    operands,
    likes,
    workspace,
    multiprocessors,
    shared_bytes=HOPPER_SHARED_BYTES,
    in_place=(),
):
    """Call twice, with the threads of a block in both orders. Return outputs like `likes`.

    Both calls must return the same bytes. `shared_bytes` is the shared memory that a block may
    have. `in_place` has arrays that the kernel changes. They are further outputs.
    """
    outputs = []
    for backwards in (0, 1):
        library.configure(multiprocessors, shared_bytes, backwards)
        guarded = [None if a is None else Guarded(a.nbytes, a) for a in operands]
        results = [Guarded(like.nbytes) for like in likes]
        results += [Guarded(a.nbytes, a) for a in in_place]
        places = [*guarded, *results, Guarded(workspace)]
        addresses = [None if place is None else place.address for place in places]
        if error := call((ctypes.c_void_p * len(places))(*addresses)):
            raise RuntimeError(f"CUDA error {error}")
        for operand in filter(None, guarded):
            operand.check()
        outputs.append([result.read() for result in results])
    if outputs[0] != outputs[1]:
        raise RuntimeError("the result depends on the order of the threads")
    return [
        np.frombuffer(content, like.dtype).reshape(like.shape)
        for content, like in zip(outputs[0], [*likes, *in_place], strict=True)
    ]


def _weights(packed, block_scale, global_scale, input_scale, bias):
    scales = np.asarray(block_scale), global_scale, input_scale
    return [np.asarray(packed), *scales, bias if bias.size else None]


def moe(
    library,
    engine,
    x,
    layer: Layer,
    ids,
    weights,
    options: Options,
    multiprocessors,
    shared_bytes=HOPPER_SHARED_BYTES,
    function="moe",
):
    """Run an expert layer on canonical weights, and return [t, h] in the dtype of x.

    `function` is that of ``driver.cc``: "moe", or "moe_and_combine".
    """
    layout = _LAYOUTS.get(engine, "mma_64x64")
    prepared = cuda_calls.prepare(jax.tree.map(jnp.asarray, layer), layout, gated=options.gated)
    i = layer.down_packed.shape[2] * 2
    gate_up_rows = (2 if options.gated else 1) * i
    shape = _MoEShape(
        x.shape[0], ids.shape[1], layer.down_packed.shape[0], x.shape[1], i, gate_up_rows
    )
    gate_up = _weights(*prepared[:3], layer.gate_up_input_scale, layer.gate_up_bias)
    down = _weights(
        prepared.down_packed,
        prepared.down_block_scale,
        layer.down_global_scale,
        layer.down_input_scale,
        layer.down_bias,
    )
    call = functools.partial(
        getattr(library, function),
        ctypes.byref(shape),
        ctypes.byref(_activation(options)),
        _TYPES[x.dtype.name],
        _ENGINES[engine],
        int(options.weight_on_input),
        _SCALES.index(options.activation_scale),
    )
    size = library.moe_workspace_bytes(ctypes.byref(shape), _ENGINES[engine])
    operands = [x, *gate_up, *down, ids, weights]
    operands = [_array(a) for a in operands]
    return _run(library, call, operands, [x], size, multiprocessors, shared_bytes)[0]


def _array(operand):
    return None if operand is None else np.asarray(operand)


def grouped_gemm(library, engine, operands, mode, multiprocessors, *, older=False):
    """Multiply rows, sorted by group, by canonical weights; return [m, n] in the dtype of x.

    `operands` and `mode` are those of `float64_layer.grouped_gemm`. If `older`, the weights are
    older than the preceding kernel.
    """
    x, packed, block_scale, global_scale, input_scale, bias, sizes = operands
    (m, k), (e, n, _) = x.shape, packed.shape
    packed, block_scale = to_layout(
        jnp.asarray(packed),
        jnp.asarray(block_scale),
        find_layout(_LAYOUTS.get(engine, "mma_64x64")),
    )
    shape = _ProductShape(m, n, n, k, e, global_scale.shape[1])
    call = functools.partial(
        library.grouped_gemm,
        ctypes.byref(shape),
        _TYPES[x.dtype.name],
        _ENGINES[engine],
        _SCALES.index(mode),
        int(older),
    )
    size = library.grouped_gemm_workspace_bytes(ctypes.byref(shape), _ENGINES[engine])
    weights = _weights(packed, block_scale, global_scale, input_scale, bias)
    operands = [_array(a) for a in (x, *weights, sizes if sizes.size else None)]
    y = np.empty((m, n), x.dtype)
    return _run(library, call, operands, [y], size, multiprocessors)[0]


def cut_linear_few(
    library, rows, n, k, multiprocessors, *, clusters=True, shared_bytes=HOPPER_SHARED_BYTES
) -> LinearFewCut:
    """Return how the kernel for few rows cuts a linear layer. shared_bytes is 0 if it does not."""
    library.configure(multiprocessors, shared_bytes, 0)
    cut, sizes = LinearFewCut(), [ctypes.c_int64(size) for size in (rows, n, k)]
    library.cut_linear_few(*sizes, int(clusters), ctypes.byref(cut))
    return cut


@contextlib.contextmanager
def capability(library, major: int):
    """Let the emulated device have compute capability `major`, where kernels depend on it."""
    library.use_capability(major)
    try:
        yield
    finally:
        library.use_capability(0)


class LinearSm90Cut(ctypes.Structure):
    """How the kernel for linear layers on 9.0 cuts a layer (linear_sm90.cuh)."""

    _fields_: ClassVar = [(name, ctypes.c_int32) for name in ("teams", "ranks")]


def cut_linear_sm90(library, n, k, multiprocessors, *, few) -> LinearSm90Cut:
    """Return how the kernel for 9.0 cuts a linear layer, with `few` NVFP4 rows or other ones."""
    library.configure(multiprocessors, HOPPER_SHARED_BYTES, 0)
    cut, sizes = LinearSm90Cut(), [ctypes.c_int64(size) for size in (n, k)]
    library.cut_linear_sm90(*sizes, int(few), ctypes.byref(cut))
    return cut


def multiply_fp4(library, a, b, scale_a, scale_b, *, shuffled):
    """Return the sums ``[32, 4]`` of one FP4 MMA on fragments, with one row for each lane.

    If `shuffled`, the sums come from the emulation for GPUs without the instruction. Otherwise they
    come from the replacement header that the kernels use here.
    """
    operands = [np.ascontiguousarray(x, np.uint32) for x in (a, b, scale_a, scale_b)]
    like = np.empty((32, 4), np.float32)
    call = functools.partial(library.multiply_fp4, int(shuffled))
    return _run(library, call, operands, [like], 0, multiprocessors=1)[0]


def pack_groups(library, starts, slots, scales, weight_rows, k, scaled):
    """Return the arguments that a CUTLASS collective receives for one grouped GEMM, by name.

    Each array has one entry per expert, except that `places` has one per slot. ``scales [2, e]``
    holds global scales and input scales. Offsets are in bytes: those of the codes and the scales of
    weights, of the codes and the scales of rows, and of the output.
    """
    e = len(starts) - 1
    likes = {
        "shapes": np.empty((e, 3), np.int32),
        "strides": np.empty((e, 3), np.int64),
        "scale_layouts": np.empty((e, 10), np.int32),
        "offsets": np.empty((e, 5), np.int64),
        "alpha": np.empty(e, np.float32),
        "places": np.empty(len(slots), np.int32),
    }
    call = functools.partial(library.pack_groups, e, len(slots), weight_rows, k, int(scaled))
    operands = [starts, slots, scales[0], scales[1]]
    arrays = _run(library, call, operands, [*likes.values()], 0, multiprocessors=1)
    return dict(zip(likes, arrays, strict=True))


def route(library, router: Router, logits, bias=None):
    """Return expert_ids and expert_weights ``[t, top_k]`` for `logits`."""
    logits = np.asarray(logits)
    t, e = logits.shape
    call = _RouterCall(
        t,
        e,
        router.top_k,
        router.num_groups,
        router.groups_kept,
        _SCORES.index(router.score),
        router.select == "logits",
        router.renormalize and router.select == "scores",  # as the lowering passes it
        router.scaling,
    )
    likes = [np.empty((t, router.top_k), dtype) for dtype in (np.int32, np.float32)]
    bound = functools.partial(library.route, ctypes.byref(call))
    return _run(library, bound, [logits, _array(bias)], likes, 0, multiprocessors=1)


def quantize(library, x, global_scale=None, scale_layout="linear"):
    """Quantize rows.

    Returns packed uint8, block_scale as bytes (with padding if swizzled), and global_scale.
    """
    m, k = x.shape
    swizzled = scale_layout != "linear"
    scales = (-(-m // 128) * 128, -(-k // 64) * 4) if swizzled else (m, k // 16)
    likes = [np.empty((m, k // 2), np.uint8), np.empty(scales, np.uint8), np.empty((), np.float32)]
    call = functools.partial(
        library.quantize,
        ctypes.c_int64(m),
        ctypes.c_int64(k),
        _TYPES[x.dtype.name],
        int(swizzled),
    )
    scale = None if global_scale is None else np.float32(global_scale)
    workspace = 4 * QUANTIZE_PARTIALS if global_scale is None else 0
    return _run(library, call, [x, scale], likes, workspace, multiprocessors=1)


def add_rms_norm(library, x, added, weight, *, eps):
    """Return the sum and the normalized sum ``[rows, h]``, as `ops.add_rms_norm` does."""
    rows, h = x.shape
    call = functools.partial(
        library.add_rms_norm,
        ctypes.c_int64(rows),
        ctypes.c_int64(h),
        _TYPES[x.dtype.name],
        _TYPES[weight.dtype.name],
        ctypes.c_float(eps),
    )
    total, y = _run(library, call, [x, _array(added), weight], [x, x], 0, multiprocessors=1)
    return (x if added is None else total), y


def sines(library, angles):
    """Return the sines and the cosines of float32 angles, as the kernel of heads computes them."""
    results = [np.empty_like(angles) for _ in range(2)]
    places = (array.ctypes.data_as(ctypes.c_void_p) for array in (angles, *results))
    library.sines(ctypes.c_int64(angles.size), *places)
    return results
