"""Test Hub names with the real client against a local stand-in of the Hub."""

import os
import shutil
import subprocess
import sys

import pytest
from support.files.given import EXAMPLE
from support.files.hub_server import COMMIT, serve
from support.files.mistral_files import write_mistral_format

from jax_nvfp4_moe.checkpoint.hub import TEMPLATES, HubName, parse_hub_name

# Folders whose names are like that of the chat templates, which alone is fetched.
NEAR = ("a", "additional", "bdditional_chat_templates", f"{TEMPLATES}2", "additional/chat")

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


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return a copy of the example as a repository that also holds other files."""
    folder = tmp_path_factory.mktemp("hub") / "repository"
    shutil.copytree(EXAMPLE, folder)
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"another form")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "params.json").write_text("{}")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another form")
    for name in (TEMPLATES, *NEAR):
        (folder / name).mkdir()
        (folder / name / "tool_use.jinja").write_text("x")
    return folder


def run(address, cache, *names, code=OPEN, cwd=None, **environment):
    """Open checkpoints by name in a process that uses this Hub address and this cache."""
    known = {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=os.environ | known | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_names():
    assert parse_hub_name("owner/model-1.0") == HubName("owner/model-1.0", None)
    assert parse_hub_name("owner/model@refs/pr/1") == HubName("owner/model", "refs/pr/1")
    for other in ("model", "./owner/model", "/owner/model", "a/b/c", "~/model", "a/b@", "a/ b"):
        assert parse_hub_name(other) is None
    assert str(HubName("a/b", "v1")) == "a/b@v1"


@pytest.fixture(scope="module")
def cache(repository):
    """Return the folder of the Hub's files, which the processes of this module share."""
    return repository.parent / "cache"


@pytest.fixture(scope="module")
def from_the_hub(repository, cache):
    """Open names with the Hub. Return its address, what it was asked, and a line for each name."""
    names = ("owner/model", "owner/model@v1", "owner/none", "owner/gated", "owner/model@v9")
    with serve(model=repository) as (address, asked):
        lines = run(address, cache, *names)
    return address, asked, dict(zip(names, lines, strict=True))


@pytest.fixture(scope="module")
def without_the_hub(from_the_hub, repository, cache):
    """Open names when the server has stopped: one that was fetched, one never, and a folder."""
    address, _, _ = from_the_hub
    names = ("owner/model", "owner/other@v1", "owner/here")
    shutil.copytree(EXAMPLE, repository.parent / "owner" / "here")
    lines = run(address, cache, *names, cwd=repository.parent)
    return dict(zip(names, lines, strict=True))


def test_a_model_is_fetched_once_and_found_again(from_the_hub, without_the_hub, cache):
    """Other formats are not fetched. A later call reads the cache, even without a network."""
    names = {path.name for path in EXAMPLE.iterdir() if path.suffix in (".json", ".safetensors")}
    address, asked, lines = from_the_hub
    first, second = lines["owner/model"], lines["owner/model@v1"]
    for line in (first, second):
        revision, count, *files = line.split()
        assert revision == COMMIT
        assert int(count) > 100
        assert names <= set(files)
        folders = {name for name in files if "." not in name}
        assert folders == {TEMPLATES}
        assert not {"pytorch_model.bin", "consolidated.safetensors"} & set(files)
    fetched = [line for line in asked if line.startswith("GET") and "/resolve/" in line]
    assert len(fetched) == len(set(fetched))
    assert without_the_hub["owner/model"] == first
    offline = run(address, cache, "owner/model@v1", HF_HUB_OFFLINE="1")
    assert offline == [first]


def test_what_is_not_there_says_what_to_do(from_the_hub, without_the_hub):
    _, _, lines = from_the_hub
    assert "neither a folder here nor a model on the Hub" in lines["owner/none"]
    assert "accept its terms on" in lines["owner/gated"]
    revision = lines["owner/model@v9"]
    assert "the Hub has owner/model, but it has no revision 'v9': pass a branch" in revision
    away = without_the_hub["owner/other@v1"]
    assert "the Hub cannot be reached" in away
    assert "`hf download owner/other --revision v1 --local-dir FOLDER`, and pass FOLDER" in away


def test_a_folder_of_that_name_comes_first(without_the_hub):
    assert without_the_hub["owner/here"].startswith("here ")


@pytest.mark.slow  # starts a process that compiles a model
def test_the_command_generates_from_a_name(repository, tmp_path):
    code = "import sys; from jax_nvfp4_moe.cli.app import main; sys.exit(main())"
    options = ("--prompt", "def f(", "--max-new-tokens", "2")
    with serve(model=repository) as (address, _):
        lines = run(address, tmp_path, "generate", "owner/model", *options, code=code)
    assert lines[0].startswith("def f(")


def test_a_model_in_the_format_of_mistral_alone_is_fetched(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    write_mistral_format(own)
    with serve(native=own) as (address, _):
        (line,) = run(address, tmp_path / "cache", "owner/native")
    _, count, *files = line.split()
    assert int(count) > 100
    assert files == ["consolidated.safetensors", "params.json"]
