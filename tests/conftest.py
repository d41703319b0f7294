"""Set strict promotion and fast XLA settings, and skip tests whose needs a machine lacks."""

import collections
import functools
import gc
import hashlib
import importlib
import importlib.util
import itertools
import os
import pathlib
import shutil
import zlib

import jax
import jaxlib
import pytest
from hypothesis import settings
from jax._src.interpreters import mlir
from jax._src.lru_cache import LRUCache
from support.examples import USUAL

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _gpus():
    return [device for device in jax.devices() if device.platform in ("gpu", "cuda")]


def _compute_capability():
    gpus = _gpus()
    return tuple(map(int, gpus[0].compute_capability.split("."))) if gpus else None


def _emulates_blackwell():
    if importlib.util.find_spec("jax_nvfp4_moe._nvfp4_cuda") is None:
        return False
    return importlib.import_module("jax_nvfp4_moe._nvfp4_cuda").emulates_blackwell()


@functools.cache
def _isas():
    """Return the instruction sets of the CPU kernels that this machine has."""
    return importlib.import_module("jax_nvfp4_moe._nvfp4_cpu").isa_levels()


@functools.cache
def _why_absent(marker):
    """Return why this machine cannot run tests with `marker`, or None if it can."""
    capability = _compute_capability()
    has = {
        "gpu": capability is not None,
        "several_gpus": len(_gpus()) > 1,
        "two_devices": len(jax.devices()) > 1,
        "hopper": capability is not None and capability[0] == 9,
        "blackwell": capability is not None and capability[0] in (10, 12),
        "fp4": capability is not None
        and (capability[0] == 12 or (capability[0] == 9 and _emulates_blackwell())),
        "fp4_sm100": capability is not None and (capability[0] == 10 or _emulates_blackwell()),
        "cuda_build": importlib.util.find_spec("jax_nvfp4_moe._nvfp4_cuda") is not None,
        "cutlass": importlib.util.find_spec("cutlass_library") is not None,
        "notebook": all(map(importlib.util.find_spec, ("ipykernel", "nbclient"))),
        "lm_eval": importlib.util.find_spec("lm_eval") is not None,
        "qwix": importlib.util.find_spec("qwix") is not None,
        "chromium": shutil.which("chromium") is not None,
        "tokamax": importlib.util.find_spec("tokamax") is not None,
        "maxtext": importlib.util.find_spec("maxtext") is not None,
        "deviceless": importlib.util.find_spec("jax_cuda13_plugin") is not None,
        **{f"isa_{isa}": isa in _isas() for isa in ("amx", "avx512", "avx2")},
        "eight_devices": len(jax.devices()) >= CPU_DEVICES and jax.default_backend() == "cpu",
    }
    return None if has[marker] else f"this machine has no {marker}"


MARKERS = (
    "gpu",
    "several_gpus",
    "two_devices",
    "hopper",
    "blackwell",
    "fp4",
    "fp4_sm100",
    "cuda_build",
    "cutlass",
    "lm_eval",
    "qwix",
    "chromium",
    "tokamax",
    "maxtext",
    "notebook",
    "deviceless",
    "isa_amx",
    "isa_avx512",
    "isa_avx2",
    "eight_devices",
)


# XLA spends most of the tests' time on optimizing programs that run once. These settings change how
# a CPU program is compiled, never what it must compute. `--default-xla` leaves them out. The flags
# are passed to jaxlib 0.10 only, because XLA ends a process that names a flag it does not know. The
# verifier checks XLA's own passes, and takes a twelfth of the time of compilation.
FAST_XLA_FLAGS = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    " --xla_disable_hlo_passes=hlo-verifier"
    if jaxlib.__version__.startswith("0.10.")
    else ""
)


def _set(name, value):
    """Set a JAX option here and, by an environment variable, in processes that tests start."""
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)


def _share_one_context():
    """Let all programs of this process share one MLIR context.

    JAX makes a new context for each program that it lowers. That takes a quarter of the tests' time
    and half of their memory, because tests lower thousands of small programs. JAX has no option
    for that, so a private function of JAX is replaced.
    """
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)


def _put_whole(cache, key, program):
    """Add a program to the compilation cache so that no other worker reads half of it.

    JAX writes entries in place. Here the file gets its name when it is complete. JAX locks the
    folder if `jax_compilation_cache_max_size` is set, but then it reads the age of every entry
    whenever it adds one. A private method of JAX is therefore replaced.
    """
    path = cache.path / f"{key}-cache"
    if not path.exists():
        part = path.with_name(f"{key}-{os.getpid()}")
        part.write_bytes(program)
        part.replace(path)


def _processor():
    """Return the facts about the processor that compiled programs depend on."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})


# Each worker has this many CPU devices. Tests of meshes use the first ones, all others the first.
CPU_DEVICES = 8

# Each run uses the same examples, so that only a change of the code decides whether tests pass.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=USUAL)
settings.register_profile("more", derandomize=False, deadline=None, max_examples=10 * USUAL)


def pytest_configure(config):
    """Choose the XLA settings and hypothesis examples before the first program is compiled.

    On a machine with an NVIDIA driver, compilation stays as users have it, because the tests there
    check the programs that users get.
    """
    folders = "", "programs", "hostile"
    shared = (str(pathlib.Path(__file__).parent / name) for name in folders)
    given = (os.environ["PYTHONPATH"],) if os.environ.get("PYTHONPATH") else ()
    # Programs that tests start import modules from these folders.
    os.environ["PYTHONPATH"] = os.pathsep.join((*shared, *given))
    os.environ["HF_HUB_OFFLINE"] = "1"  # a name of the Hub must not start a download
    # A worker has one core. Without this, each NumPy product wakes a thread for every core, which
    # costs a quarter of the time of tests that compare with NumPy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # `pytest_collection_modifyitems` orders modules
    # Programs that tests start import the installed package, not the folder that they start in.
    os.environ["PYTHONSAFEPATH"] = "1"
    settings.load_profile("more" if config.getoption("--more-examples") else "default")
    if not pathlib.Path("/dev/nvidiactl").exists() or os.environ.get("JAX_PLATFORMS") == "cpu":
        # Tests of meshes need several devices. Only the option is set and no environment variable,
        # so that programs that tests start have one device.
        jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    if pathlib.Path("/dev/nvidiactl").exists():
        return
    if not config.getoption("--default-xla"):
        flags = os.environ.get("XLA_FLAGS", "")
        if FAST_XLA_FLAGS not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {FAST_XLA_FLAGS}".strip()
        _set("jax_disable_most_optimizations", True)
        _set("jax_traceback_in_locations_limit", 0)  # no test reads where an operation comes from
        _share_one_context()
    # Later runs reuse the programs that were compiled before. The workers share one folder.
    # Processes that they start have one device, so that no program of theirs is one of a worker's.
    # Those processes have a folder for each worker.
    key = [jax.__version__, jaxlib.__version__, os.environ.get("XLA_FLAGS"), *_processor()]
    name = f"xla-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    started = config.cache.mkdir(f"{name}-started-by-{worker}")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(started)
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir(name)))
    LRUCache.put = _put_whole
    # Caches of XLA's GPU compiler would make the folder's name a part of each program's key.
    _set("jax_persistent_cache_enable_xla_caches", "none")
    _set("jax_persistent_cache_min_compile_time_secs", 0)
    _set("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_addoption(parser):
    parser.addoption(
        "--more-examples",
        action="store_true",
        help="run property tests on ten times as many examples, and on new ones each time",
    )
    parser.addoption(
        "--default-xla",
        action="store_true",
        help="compile as users do; the default compiles faster on machines without a GPU",
    )
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="run at most N cases of each test, spread over all of them",
    )
    parser.addoption(
        "--must-run",
        action="append",
        default=[],
        choices=MARKERS,
        help="fail instead of skipping where the machine lacks this",
    )


# Modules that take 8 s or more, from the longest on. They run first, so that no worker begins one
# of them when the others are done. The order of all other modules does not matter. The first three
# are long by their slow tests: one worker runs all notebooks, which takes 5 minutes.
LONG_MODULES = (
    "test_notebooks.py",
    "test_published_sizes.py",
    "test_w4a4_quality.py",
    "test_architectures.py",
    "test_default_dtype.py",
    "test_long_text.py",
    "test_drafting.py",
    "test_fine_tune.py",
    "test_cpu_kernel.py",
    "test_cpu_transposed.py",
    "test_no_rows.py",
    "test_cli.py",
    "test_readme.py",
    "test_parallel_models.py",
    "test_attention.py",
    "test_gradient.py",
    "test_wide_numbers.py",
    "test_attention_cpu.py",
    "test_data_parallel.py",
    "test_docstrings.py",
    "test_lora.py",
    "test_quantize_model.py",
    "test_generation.py",
    "test_generate_own_model.py",
    "test_qwix_provider.py",
    "test_one_mesh_of_each_mixer.py",
    "test_transforms.py",
    "test_resharding.py",
    "test_ops.py",
    "test_heads.py",
    "test_prefill.py",
    "test_balance.py",
    "test_saved_folder.py",
    "test_lora_on_meshes.py",
    "test_training_mesh.py",
    "test_chat.py",
    "test_own_transformer.py",
    "test_calibrate_own_model.py",
    "test_quantize_command.py",
    "test_shard_map_gradients.py",
    "test_fp8_attention.py",
    "test_mixed_formats.py",
    "test_processes.py",
    "test_hub.py",
    "test_exporting.py",
    "test_example_drafts.py",
    "test_groups_of_32.py",
    "test_whole_steps.py",
    "test_drafting_on_meshes.py",
    "test_conversation.py",
    "test_pictures.py",
    "test_automatic_mesh.py",
)


def _rank(item):
    name = item.path.name
    return LONG_MODULES.index(name) if name in LONG_MODULES else len(LONG_MODULES)


# Tests in these folders need a build with CUDA.
EMULATION = pathlib.Path(__file__).parent / "emulation"
CUDA_FOLDERS = pathlib.Path(__file__).parent / "gpu", EMULATION


def pytest_ignore_collect(collection_path, config):
    """Collect one module of a folder whose tests this machine lacks a build for.

    To collect the 10,000 tests of all modules takes each worker 3 s. The reasons that pytest prints
    therefore count the tests of one module, the shortest. Modules that are named on the command
    line are collected in any case.
    """
    folder = collection_path.parent
    if folder not in CUDA_FOLDERS or config.getoption("--must-run"):
        return None
    modules = sorted(folder.glob("test_*.py"), key=lambda path: path.stat().st_size)
    others = collection_path in modules and collection_path != modules[0]
    return True if others and _why_absent("cuda_build") else None


def _why_skipped(item):
    """Return a marker of `item` that this machine lacks and why, or None if the test can run."""
    own = {marker.name for marker in item.iter_markers()}
    for marker in MARKERS:
        if marker in own and (why := _why_absent(marker)):
            return marker, why
    return None


# Why tests are skipped -> how many of those that were collected.
_skipped = collections.Counter()


def _leave_one_of_each_reason(config, items):
    """Keep one of all tests that are skipped for the same reason; it tells how many there are.

    To start thousands of tests, only to skip them, takes 10 s.
    """
    kept, others = [], []
    for item in items:
        absent = _why_skipped(item)
        if absent is None or absent[0] in config.getoption("--must-run"):
            kept.append(item)
            continue
        _skipped[absent[1]] += 1
        (kept if _skipped[absent[1]] == 1 else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def _leave_some_cases(config, items):
    """Keep as many cases of each test as `--cases` says, at equal distances.

    Most tests have a case for each family, form or shape, and most faults show in any of them. The
    name of a test says which case is the first, so that all tests together have most families.
    Tests with the marker `every_case` keep all cases.
    """
    most = config.getoption("--cases")
    if most is None:
        return
    tests = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("every_case"):
            tests[item.nodeid.partition("[")[0]].append(item)
    left = set()
    for name, cases in tests.items():
        count, first = len(cases), zlib.crc32(name.encode())
        if count > most:
            kept = {cases[(first + number * count // most) % count] for number in range(most)}
            left.update(set(cases) - kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(trylast=True)  # behind the selection by markers
def pytest_collection_modifyitems(config, items):
    """Order the tests, and drop most of those that are skipped and of those of `--cases`."""
    _leave_one_of_each_reason(config, items)
    _leave_some_cases(config, items)
    items.sort(key=_rank)


def pytest_collection_finish(session):
    """Let Python's garbage collector run less often.

    Tracing makes many objects that live long, and by default the collector visits all of them
    again and again. That takes a seventh of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


# Linux gives a process 65,530 memory maps, and each compiled program takes several. Beyond that
# the process ends, so a worker frees its programs when it has this many maps. To free them takes
# seconds, and later tests compile some of them again. Counting maps takes a while, so it happens
# behind each module and once in so many tests.
_MANY_MAPS, _TESTS_BETWEEN = 30_000, 40
_tests = itertools.count(1)


def pytest_runtest_teardown(item, nextitem):
    """Free the compiled programs if there are many."""
    maps = pathlib.Path("/proc/self/maps")
    ends = nextitem is None or item.path != nextitem.path
    counts = ends or next(_tests) % _TESTS_BETWEEN == 0
    if counts and maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()


@pytest.fixture
def on_cpu():
    """Run programs on the CPU where there is a GPU too, for tests of what runs on CPUs alone."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def pytest_runtest_setup(item):
    if absent := _why_skipped(item):
        marker, why = absent
        if marker in item.config.getoption("--must-run"):
            pytest.fail(f"{why}, and --must-run {marker} was given")
        pytest.skip(f"{why}, which {_skipped[why]} of the chosen tests need")
