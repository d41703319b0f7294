"""Test that `explain` names every module inside of a module."""

from flax import nnx

from jax_nvfp4_moe import NVFP4Linear, NVFP4MoE, Target, explain

SIZES = {"num_experts": 8, "hidden": 64, "intermediate": 32}
HOPPER = Target("cuda", (9, 0))


def make(**changes):
    return NVFP4MoE(**{**SIZES, "top_k": 2, "rngs": nnx.Rngs(0)} | changes)


def test_explain_names_every_module_inside():
    shared = NVFP4Linear(64, 64, rngs=nnx.Rngs(1), target=HOPPER)
    choice = explain(make(target=HOPPER, shared_experts=shared))
    assert choice.backend == "moe_w4a16_sm90"
    assert [path for path, _ in choice.modules] == ["experts", "shared_experts"]
    problem = choice.problem
    assert (problem.num_experts, problem.top_k, problem.hidden) == (8, 2, 64)
    assert "moe_w4a4_sm100" in str(choice)
