"""Read the machine code of the CUDA extension with cuobjdump and nvdisasm."""

import collections
import concurrent.futures
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess

from support.files.made_once import made_once

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100f", "sm_120f")
# A disassembly names a family without its suffix. Only the listing of cubins shows the suffix.
SASS_NAMES = {"sm_100": "sm_100f", "sm_120": "sm_120f"}
# Architectures from 9.0 on.
LISTS_RESERVED = ("sm_90a", "sm_100f", "sm_120f")
LARGE_CHUNKS = ("sm_90a", "sm_100f")  # with shared memory for chunks of 64 tokens
WAIT, START_NEXT = "ACQBULK", "PREEXIT"
MEMORY = {"LDG", "LDGSTS", "STG", "LD", "ST", "ATOMG", "ATOM", "REDG", "RED", "UBLKCP"}


# A step of a recurrent mixer that loads the state before it waits: kEarly in delta_step.cu and
# mamba2_step.cu.
_EARLY_STEP = re.compile(r"9DeltaStepI.*Lb1ELb[01]ELb1ELb[01]EE|10Mamba2StepI.*Li8ELb1ELb[01]EE")


def is_early_step(kernel):
    """Return whether a kernel is a step of a recurrent mixer that loads the state first."""
    return _EARLY_STEP.search(kernel) is not None


def find_tool(name):
    """Return the path of cuobjdump or nvdisasm."""
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        for path in pathlib.Path(root).glob(f"*/bin/{name}"):
            return str(path)
    raise FileNotFoundError(f"{name}: install the CUDA toolkit or pip's nvidia-cuda-{name}")


def run(name, *arguments, **options):
    return subprocess.run(
        [find_tool(name), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        **options,
    ).stdout


def disassembled(extension, cache):
    """Return architecture -> kernel -> its instructions in order, with their modifiers.

    Disassembly takes a minute, so the folder `cache` keeps the result.
    """
    name = hashlib.sha256(pathlib.Path(extension).read_bytes()).hexdigest()[:16]

    def make(folder):
        path = folder / "listing"
        path.write_text(json.dumps(_disassemble(extension, folder)))
        return path

    return json.loads(made_once(cache / f"{name}.json", make).read_text())


def _disassemble(extension, folder):
    # One process takes one core for a whole extension. Its cubins can be read at the same time.
    # nvdisasm needs two thirds of the time of cuobjdump, because it prints no encodings.
    run("cuobjdump", "--extract-elf", "all", extension, cwd=folder)
    cubins = sorted(folder.glob("*.cubin"))
    read = functools.partial(run, "nvdisasm", "--print-code", "--no-dataflow")
    listings, current = {}, []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for cubin, text in zip(cubins, pool.map(read, cubins), strict=True):
            name = cubin.stem.rpartition(".")[2]
            arch = listings.setdefault(SASS_NAMES.get(name, name), {})
            for line in text.splitlines():
                if found := re.match(r"\.text\.(\S+):", line):
                    current = arch.setdefault(found[1], [])
                elif found := re.match(
                    r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", line
                ):
                    current.append(found[1])
    return listings


def count(listing):
    """Return architecture -> kernel -> counts of instructions, without their modifiers."""
    return {
        arch: {
            kernel: collections.Counter(op.split(".")[0] for op in instructions)
            for kernel, instructions in kernels.items()
        }
        for arch, kernels in listing.items()
    }


def kernels(code, arch, name):
    return {k: c for k, c in code[arch].items() if name in k}
