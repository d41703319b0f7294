"""`python -m tests.reference qwen3_moe:modelopt-w4a4 --folder references`: see README.md."""

import argparse
import pathlib
import sys
import traceback

from tests.reference.architectures import ARCHITECTURES
from tests.reference.forms import FORMS, REWRITES


def main(arguments: list[str]) -> int:
    """Generate each `architecture:form`, and return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference", description=__doc__)
    parser.add_argument("wanted", nargs="*", metavar="architecture:form[:rewrite]")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("references"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="list architectures and forms")
    options = parser.parse_args(arguments)
    if options.list or not options.wanted:
        print("architectures:", *ARCHITECTURES, "\nforms:", *FORMS, "\nrewrites:", *REWRITES)
        return 0
    failed = []
    for wanted in options.wanted:
        architecture, form, rewrite = (*wanted.split(":"), "", "")[:3]
        if architecture not in ARCHITECTURES or form not in FORMS or rewrite not in REWRITES:
            parser.error(f"{wanted}: expected architecture:form of those that --list shows.")
    options.folder.mkdir(parents=True, exist_ok=True)
    from tests.reference.generate import generate  # torch is slow to import, so mistakes come first

    for wanted in options.wanted:
        architecture, form, rewrite = (*wanted.split(":"), "")[:3]
        folder = options.folder / wanted.replace(":", "-")
        try:
            generate(architecture, form, rewrite, options.seed, folder)
            print(f"{wanted}: written to {folder}", flush=True)
        except Exception:  # the other checkpoints are still useful
            traceback.print_exc()
            failed.append(wanted)
    print(f"{len(options.wanted) - len(failed)} written; failed: {failed}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
