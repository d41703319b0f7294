"""Test the errors of both extensions for an operand whose memory starts at an odd address.

XLA aligns every buffer. A program that is built from the handlers' header therefore makes the
buffers.
"""

import subprocess

import jax
import pytest
from support.files.given import ROOT, TESTS

GPU, CPU = 16, 1  # alignments in cuda_checks.h and cpu_bindings.cc
# Ends of the names of operands whose elements are bytes.
BYTES = {"packed", "block_scale", "workspace"}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    program = tmp_path_factory.mktemp("alignment") / "operand_alignment"
    includes = [f"-I{ROOT / 'ffi'}", f"-I{jax.ffi.include_dir()}"]
    source = TESTS / "cpp" / "operand_alignment.cc"
    subprocess.run(["g++", "-std=c++17", "-w", *includes, source, "-o", program], check=True)
    return program


def messages(program, alignment, past):
    """Return (target, operand that starts `past` bytes too late) -> the message of the checks."""
    command = [program, str(alignment), str(past)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    said, target = {}, None
    for line in lines:
        operand, _, message = line.partition(": ")
        if message:
            said[target, operand] = message
        else:
            target = line
    return said


@pytest.mark.parametrize("alignment", [GPU, CPU])
def test_aligned_operands_are_accepted(program, alignment):
    said = messages(program, alignment, 0)
    assert len(said) == 16 + 10 + 7  # operands of three targets, plus one aligned call of each
    assert set(said.values()) == {"accepted"}


@pytest.mark.parametrize("past", [1, 4, 8])
def test_kernels_of_gpus_name_the_operand(program, past):
    for (target, operand), message in messages(program, GPU, past).items():
        expected = (
            f"{operand}: expected memory that starts at a multiple of 16 bytes, got memory that "
            f"starts {past} bytes past such a multiple"
        )
        assert message == ("accepted" if operand == "none" else expected), target


def test_kernels_of_cpus_take_what_suits_the_elements(program):
    said = messages(program, CPU, 1)
    accepted = {operand for (_, operand), message in said.items() if message == "accepted"}
    assert accepted == {"none", *(name for _, name in said if name.endswith(tuple(BYTES)))}
    assert said["layer", "expert_ids"].startswith(
        "expert_ids: expected memory that starts at a multiple of 4 bytes"
    )
    assert set(messages(program, CPU, 4).values()) == {"accepted"}
