"""Test Hub names with the real client against a local stand-in of the Hub."""

import os
import shutil
import subprocess
import sys

import pytest
from given import EXAMPLE
from hub_server import COMMIT, serve

from jax_nvfp4_moe.checkpoint.hub import HubName, parse_hub_name

OPEN = """
import sys
from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.opening import open_checkpoint

for name in sys.argv[1:]:
    try:
        with open_checkpoint(name) as checkpoint:
            files = sorted(path.name for path in checkpoint.folder.iterdir())
            print(checkpoint.folder.name, len(checkpoint.tensors.names()), *files)
    except CheckpointError as error:
        print(error)
"""


@pytest.fixture
def repository(tmp_path):
    """Return a copy of the example as a repository that also holds other files."""
    folder = tmp_path / "repository"
    shutil.copytree(EXAMPLE, folder)
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"another form")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    return folder


def run(address, cache, *names, code=OPEN, **environment):
    """Open checkpoints by name in a process that uses this Hub address and this cache."""
    known = {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=os.environ | known | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_names():
    assert parse_hub_name("owner/model-1.0") == HubName("owner/model-1.0", None)
    assert parse_hub_name("owner/model@refs/pr/1") == HubName("owner/model", "refs/pr/1")
    for other in ("model", "./owner/model", "/owner/model", "a/b/c", "~/model", "a/b@", "a/ b"):
        assert parse_hub_name(other) is None
    assert str(HubName("a/b", "v1")) == "a/b@v1"


def test_a_model_is_fetched_once_and_found_again(repository, tmp_path):
    """Other formats are not fetched. A later call reads the cache, even without a network."""
    names = {path.name for path in EXAMPLE.iterdir() if path.suffix in (".json", ".safetensors")}
    with serve(model=repository) as (address, asked):
        first, second = run(address, tmp_path / "cache", "owner/model", "owner/model@v1")
    for line in (first, second):
        revision, count, *files = line.split()
        assert revision == COMMIT
        assert int(count) > 100
        assert names <= set(files)
        assert {"original", "pytorch_model.bin"}.isdisjoint(files)
    fetched = [line for line in asked if line.startswith("GET") and "/resolve/" in line]
    assert len(fetched) == len(set(fetched))
    assert run(address, tmp_path / "cache", "owner/model") == [first]  # the server has stopped
    offline = run(address, tmp_path / "cache", "owner/model@v1", HF_HUB_OFFLINE="1")
    assert offline == [first]


def test_what_is_not_there_says_what_to_do(repository, tmp_path):
    with serve(model=repository) as (address, _):
        missing, gated, revision = run(
            address, tmp_path / "cache", "owner/none", "owner/gated", "owner/model@v9"
        )
    assert "neither a folder here nor a model on the Hub" in missing
    assert "accept its terms on" in gated
    assert "the Hub has owner/model, but it has no revision 'v9': pass a branch" in revision
    (away,) = run("http://127.0.0.1:9", tmp_path / "empty", "owner/model@v1")
    assert "the Hub cannot be reached" in away
    assert "`hf download owner/model --revision v1 --local-dir FOLDER`, and pass FOLDER" in away


def test_a_folder_of_that_name_comes_first(repository, tmp_path, monkeypatch):
    shutil.copytree(EXAMPLE, tmp_path / "owner" / "model")
    monkeypatch.chdir(tmp_path)
    (line,) = run("http://127.0.0.1:9", tmp_path / "cache", "owner/model")
    assert line.startswith("model ")


@pytest.mark.slow  # starts a process that compiles a model
def test_the_command_generates_from_a_name(repository, tmp_path):
    code = "import sys; from jax_nvfp4_moe.cli.app import main; sys.exit(main())"
    options = ("--prompt", "def f(", "--max-new-tokens", "2")
    with serve(model=repository) as (address, _):
        lines = run(address, tmp_path, "generate", "owner/model", *options, code=code)
    assert lines[0].startswith("def f(")
