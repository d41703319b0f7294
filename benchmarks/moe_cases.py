"""Define the expert layers that are timed, their bytes and FLOPs, and their targets."""

import dataclasses
import functools

import numpy as np

TOKENS = tuple(2**power for power in range(14))  # 1 to 8192
BYTES_PER_WEIGHT = 0.5625  # half a byte of code, and one byte of scale for 16 weights


@dataclasses.dataclass(frozen=True)
class Case:
    """One expert layer of a real model."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gated: bool = True

    @property
    def activation(self) -> str:
        return "silu" if self.gated else "relu2"

    @property
    def gate_up_rows(self) -> int:
        return (2 if self.gated else 1) * self.intermediate

    @property
    def expert_weights(self) -> int:
        """Return the number of weights of one expert."""
        return self.hidden * (self.gate_up_rows + self.intermediate)

    def packed_bytes(self, active: float) -> float:
        """Return the bytes of codes and block scales of `active` experts."""
        return active * self.expert_weights * BYTES_PER_WEIGHT

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.top_k * self.expert_weights


CASES = {
    case.name: case
    for case in (
        Case("qwen3-30b-a3b", 2048, 768, 128, 8),
        Case("qwen3.6-35b-a3b", 2048, 512, 256, 8),
        Case("nemotron3-nano", 2688, 1856, 128, 6, gated=False),
        Case("mixtral-8x7b", 4096, 14336, 8, 2),
        Case("deepseek-v3", 7168, 2048, 256, 8),
        Case("small", 1024, 512, 64, 8),  # for CPUs
        Case("tiny", 64, 48, 8, 2),  # to try the benchmark itself
    )
}
# How a layer uses several devices. Experts are sharded whole ("psum", "all_to_all", "ragged") or
# each expert is cut ("tensor"). Tokens are replicated ("psum", "tensor") or sharded.
FORMS = ("psum", "tensor", "all_to_all", "ragged")
REAL_CASES = tuple(name for name in CASES if name not in ("small", "tiny"))

# The most microseconds that the whole layer may take on one H200.
TARGETS = {
    "qwen3-30b-a3b": {1: 16, 16: 68, 64: 100, 256: 125, 1024: 180, 8192: 1000},
    "qwen3.6-35b-a3b": {1: 14, 16: 56, 64: 118, 256: 145, 1024: 190, 8192: 720},
    "mixtral-8x7b": {1: 56, 16: 228, 64: 240, 256: 380, 1024: 1150, 8192: 8200},
    "deepseek-v3": {1: 58, 16: 720, 64: 1550, 256: 1900, 1024: 2300, 8192: 9300},
    "nemotron3-nano": {1: 22, 16: 115, 64: 200, 256: 230, 1024: 380, 8192: 1650},
}


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The highest rates of the device, measured in the same run."""

    copy_tb_per_s: float  # bytes read and written
    matmul_tflop_per_s: float  # bfloat16

    def __str__(self):
        return (
            f"copy {self.copy_tb_per_s:.3g} TB/s, bf16 matmul {self.matmul_tflop_per_s:.3g} TFLOP/s"
        )


def calls_of(tokens: int) -> int:
    """Return how many different calls are timed together.

    There are enough of them that small calls read their weights from memory and not from a cache.
    """
    return max(2, min(16, 8192 // tokens))


def draw_ids(case: Case, tokens: int) -> np.ndarray:
    """Return int32 ``[calls, tokens, top_k]``: uniform, and distinct within a token.

    Every contestant gets the same ids.
    """
    rng = np.random.default_rng([case.experts, tokens])
    draws = rng.random((calls_of(tokens), tokens, case.experts), np.float32)
    return np.argpartition(draws, case.top_k - 1, axis=-1)[..., : case.top_k].astype(np.int32)


def count_active(ids: np.ndarray) -> float:
    """Return the mean number of different experts that a call touches."""
    return float(np.mean([len(np.unique(call)) for call in ids]))


@functools.cache
def active_experts(case: Case, tokens: int) -> float:
    """Return the mean number of experts that a timed call of `tokens` tokens touches."""
    return count_active(draw_ids(case, tokens))


def floor_us(case: Case, tokens: int, active: float, ceilings: Ceilings) -> float:
    """Return the lower bound of the time of a layer, in microseconds.

    It is the longer of two times. One is the time to move its bytes at the copy bandwidth: the
    packed weights of active experts, and hidden states in and out in bfloat16. The other is the
    time of its GEMMs at the rate of a large matmul.
    """
    moved = case.packed_bytes(active) + 2 * tokens * case.hidden * 2
    return max(
        moved / ceilings.copy_tb_per_s * 1e-6,
        case.flops(tokens) / ceilings.matmul_tflop_per_s * 1e-6,
    )
