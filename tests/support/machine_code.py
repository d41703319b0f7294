"""Read the machine code of the CUDA extension with cuobjdump."""

import collections
import importlib.util
import pathlib
import re
import shutil
import subprocess

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100f", "sm_120f")
# A disassembly names a family without its suffix. Only the listing of cubins shows the suffix.
SASS_NAMES = {"sm_100": "sm_100f", "sm_120": "sm_120f"}
# Architectures from 9.0 on.
LISTS_RESERVED = ("sm_90a", "sm_100f", "sm_120f")
LARGE_CHUNKS = ("sm_90a", "sm_100f")  # with shared memory for chunks of 64 tokens
WAIT, START_NEXT = "ACQBULK", "PREEXIT"
MEMORY = {"LDG", "LDGSTS", "STG", "LD", "ST", "ATOMG", "ATOM", "REDG", "RED", "UBLKCP"}


def cuobjdump():
    """Return the path of cuobjdump."""
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        for path in pathlib.Path(root).glob("*/bin/cuobjdump"):
            return str(path)
    raise FileNotFoundError("cuobjdump: install the CUDA toolkit or pip's nvidia-cuda-cuobjdump")


def run(*arguments):
    return subprocess.run(
        [cuobjdump(), *arguments], capture_output=True, text=True, check=True, timeout=300
    ).stdout


def disassemble(extension):
    """Return architecture -> kernel -> its instructions in order, with their modifiers."""
    listings, arch, current = {}, {}, []
    for line in run("--dump-sass", extension).splitlines():
        if found := re.match(r"\s*code for (\w+)", line):
            arch = listings.setdefault(SASS_NAMES.get(found[1], found[1]), {})
        elif found := re.match(r"\s*Function : (\S+)", line):
            current = arch.setdefault(found[1], [])
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", line):
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
