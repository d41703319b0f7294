"""Print the oldest versions that pyproject.toml allows, as pip's constraints: name==version.

These are the versions of the packages that users install, and of those that save and export
modules. Tools for tests have no constraint. Run: python .ci/oldest.py > constraints.txt
"""

import pathlib
import re
import tomllib

SAVING = ("orbax-checkpoint", "flatbuffers")

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
extras = [one for one in project["optional-dependencies"]["test"] if one.startswith(SAVING)]
for requirement in (*project["dependencies"], *extras):
    name, version = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
    print(f"{name}=={version}")
