"""Time llama.cpp on a GPU: a model of random NVFP4 weights, with the sizes of a Qwen3-MoE config.

    python benchmarks/peers/llama_cuda.py CONFIG --build FOLDER --cells 1x128 16x128 --new 64

FOLDER holds the program `llama_steps`, which ``llama_cuda/CMakeLists.txt`` builds. The package
``gguf`` is needed (`llama_gguf.py`). The file of the model goes to the folder for temporary files,
17 GB for Qwen3-30B-A3B; set TMPDIR to choose another.

Prints one JSON object: the device, the method, and a row for each cell.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from llama_gguf import write_model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--cells", nargs="+", required=True, metavar="BATCHxPROMPT")
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.gguf"
        write_model(path, json.loads(arguments.config.read_text(encoding="utf-8")))
        command = [arguments.build / "llama_steps", path, arguments.new, arguments.rounds]
        done = subprocess.run(
            [*map(str, command), *arguments.cells], stdout=subprocess.PIPE, text=True, check=False
        )
    if done.returncode:  # the program has said why
        raise SystemExit(1)
    result = json.loads(done.stdout)
    json.dump(result | {"method": "NVFP4 weights, 8-bit activations, float16 cache"}, sys.stdout)


if __name__ == "__main__":
    main()
