"""Print the oldest versions that pyproject.toml allows, as pip's constraints: name==version.

Of what users install, and of what modules are saved and exported with; tools of tests are free.
Run: python .ci/oldest.py > constraints.txt
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
