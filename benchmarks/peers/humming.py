"""Time Humming's NVFP4 grouped GEMMs (humming-kernels 0.1.19). `moe.py` starts this program.

It times the two GEMMs of an expert layer alone, without routing, activation and combine, with
Humming's own heuristics. The figure is the better of its grouped and its indexed form.
"""

import dataclasses
import sys

import contestant
import torch
from moe_cases import Case, draw_ids
from peers.torch_timing import time_graph

_LOCKS = 4096
_ANY_ROWS = 1 << 30  # a configuration is for all numbers of rows up to this one


@dataclasses.dataclass
class Product:
    """One GEMM ``[n, k]`` of all experts in one form: its weights and their description."""

    runner: object
    indexed: bool
    reads_slots: bool  # rows of x are slots (token, expert), not tokens

    def launches(self, case: Case, tokens: int, ids):
        """Return a function that enqueues the GEMM for each call in `ids`."""
        from humming import ops
        from humming.kernel.humming import HummingKernel
        from humming.testing.tuning import generate_heuristics_configs

        layer, compute = self.runner.layer_config, self.runner.compute_config
        slots = tokens * case.top_k
        config = generate_heuristics_configs(layer, compute, [slots])[0]
        kernels = HummingKernel.prepare_kernels(
            layer.to_str(), compute.to_str(), [(0, _ANY_ROWS, config)], device=0
        )
        rows = tokens if self.indexed and not self.reads_slots else slots
        x = torch.randn(rows, layer.shape_k, device="cuda").bfloat16()
        y = torch.zeros(slots, layer.shape_n, device="cuda", dtype=torch.bfloat16)
        locks = torch.zeros(_LOCKS, dtype=torch.int32, device="cuda")
        tables = [self._tables(case, slots, chosen, config) for chosen in ids]
        top_k = 1 if self.indexed and self.reads_slots else case.top_k

        def launch():
            for table in tables:
                ops.launch_kernel(
                    configs=kernels,
                    inputs=x,
                    outputs=y,
                    locks=locks,
                    top_k=top_k,
                    **table,
                    **self.runner.kernel_tensors,
                )

        return launch

    def _tables(self, case, slots, ids, config):
        from humming.testing.data import generate_moe_tensors

        if self.indexed and self.reads_slots:
            ids = ids.reshape(-1, 1)
        _, layout, sorted_ids, expert_ids, padded = generate_moe_tensors(
            ids,
            case.experts,
            gemm_type=self.runner.compute_config.gemm_type,
            block_size_config=config["block_shape"][0],
            expert_max_tokens=slots,
            expert_alignment=1,
        )
        return {
            "expert_layout": layout,
            "sorted_ids": sorted_ids,
            "expert_ids": expert_ids,
            "num_tokens_padded": padded,
        }


def make_layer(case: Case):
    """Make the weights of `case` and return a function from a number of tokens to figures."""
    made = [
        _forms(case, "gate_up", case.gate_up_rows, case.hidden, reads_slots=False),
        _forms(case, "down", case.hidden, case.intermediate, reads_slots=True),
    ]
    forms = list(zip(*made, strict=True))

    def time_tokens(tokens):
        ids = [torch.from_numpy(call).cuda() for call in draw_ids(case, tokens)]
        tried, failed = [], []
        for products in forms:
            try:
                tried.append(_time_form(products, case, tokens, ids))
            except Exception as error:  # one of the forms may not support a size
                failed.append(error)
        if not tried:
            raise failed[0]
        return min(tried, key=lambda figures: figures["us"])

    return time_tokens


def _time_form(products, case, tokens, ids):
    parts = [time_graph(p.launches(case, tokens, ids), len(ids)) for p in products]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    return total | {"form": "indexed" if products[0].indexed else "grouped"}


def _forms(case, name, n, k, *, reads_slots):
    """Return the GEMM in both forms, over the same weights."""
    from humming.config import ComputeConfig, GemmType
    from humming.testing.runner import KernelTestCase, KernelTestRunner

    grouped = ComputeConfig(gemm_type=GemmType.GROUPED_CONTIGUOUS)
    runner = KernelTestRunner(
        KernelTestCase(
            name=name,
            layer_config=_layer_config(case, n, k),
            compute_config=grouped,
            top_k=case.top_k,
        )
    )
    # The constructor would draw the weights again.
    other = KernelTestRunner.__new__(KernelTestRunner)
    other.__dict__.update(runner.__dict__)
    other.compute_config = ComputeConfig(gemm_type=GemmType.INDEXED)
    other.test_case = dataclasses.replace(runner.test_case, compute_config=other.compute_config)
    return Product(runner, False, reads_slots), Product(other, True, reads_slots)


def _layer_config(case, n, k):
    from humming import dtypes
    from humming.config import LayerConfig
    from humming.config.enum import WeightScale2Type, WeightScaleType

    return LayerConfig(
        shape_n=n,
        shape_k=k,
        num_experts=case.experts,
        a_dtype=dtypes.bfloat16,
        b_dtype=dtypes.float4e2m1,
        c_dtype=dtypes.bfloat16,
        bs_dtype=dtypes.float8e4m3,
        weight_scale_group_size=16,
        weight_scale_type=WeightScaleType.GROUP,
        weight_scale_2_type=WeightScale2Type.TENSOR,
    )


def main():
    parser = contestant.parser(__doc__)
    parser.add_argument(
        "--folder", required=True, help="folder of an unpacked humming-kernels wheel"
    )
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.folder)  # other functions import humming from there
    contestant.time_cells("humming_gemms", arguments.case, arguments.tokens, make_layer)


if __name__ == "__main__":
    main()
