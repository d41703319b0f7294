"""Time tokamax's `ragged_dot` (0.0.17, its Hopper kernel) in an expert layer.

`moe.py` starts this program. It is timed on bfloat16 weights, and on int4 weights with a scale for
each 128 values. The latter is the nearest to W4A16 that tokamax runs on Hopper.
"""

import functools
import importlib
import sys

import contestant
from moe_cases import Case
from peers.ragged_layer import TOKENS, random_weights, time_layer


def make_layer(quantize, dot, case: Case):
    weights = [quantize(weight) for weight in random_weights(case)]
    return functools.partial(time_layer, case, dot, weights)


def main():
    parser = contestant.parser(__doc__)
    parser.add_argument("--folder", help="folder with tokamax and qwix, if they are not installed")
    arguments = parser.parse_args()
    if arguments.folder:
        sys.path.append(arguments.folder)
    tokamax, qwix = importlib.import_module("tokamax"), importlib.import_module("qwix")

    def int4(weight):
        return qwix.quantize(weight, "int4", tiled_axes={1: 128}, channelwise_axes=[0, 2])

    dot = functools.partial(tokamax.ragged_dot, implementation="mosaic")
    tokens = [count for count in arguments.tokens if count in TOKENS]
    for name, quantize in (("tokamax_bf16", lambda weight: weight), ("tokamax_int4", int4)):
        make = functools.partial(make_layer, quantize, dot)
        contestant.time_cells(name, arguments.case, tokens, make)


if __name__ == "__main__":
    main()
