"""Fetch checkpoints from the Hugging Face Hub by their names, through `huggingface_hub`."""

import pathlib
import re
from typing import NamedTuple

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.mistral_format import has_other_files

# The files of a checkpoint. Folders inside a repository hold other forms of the same model and are
# not fetched, except the one that holds further chat templates.
FILES = ("*.json", "*.jinja", "*.safetensors")
TEMPLATES = "additional_chat_templates"  # it has a file NAME.jinja for each named template
# The weights in Mistral's own format. Most of Mistral's models also have them in the other one.
_OF_MISTRAL = "consolidated*"
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)


class HubName(NamedTuple):
    """The name of a model on the Hub.

    Attributes:
      repository: the owner and the model, such as "nvidia/Qwen3-30B-A3B-FP4".
      revision: a branch, a tag or a commit. None means the repository's main branch.
    """

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def parse_hub_name(path: str) -> HubName | None:
    """Parse ``owner/model`` or ``owner/model@revision``; return None if `path` has another form."""
    found = _NAME.fullmatch(path)
    return HubName(*found.groups()) if found else None


def fetch(name: HubName) -> pathlib.Path:
    """Return the folder of a model in the Hub's local cache, after fetching what is missing.

    Only safetensors files, JSON files and chat templates are fetched. Several processes may fetch a
    model at the same time: each file is fetched once. Without a network, the files in the cache are
    used as they are. Weights in Mistral's own format are fetched if the model has no others.

    Args:
      name: the name of the model. A private model needs the token that ``hf auth login`` stores.

    Raises:
      CheckpointError: the Hub has no such model or revision, or the Hub cannot be reached and the
        cache does not hold the model. The message says how to get the files.

    Source: https://huggingface.co/docs/huggingface_hub/guides/download
    """
    from huggingface_hub import errors

    try:
        folder = _download(name, _OF_MISTRAL)
        if not has_other_files(folder):
            folder = _download(name)
    except errors.RevisionNotFoundError:
        problem = (
            f"the Hub has {name.repository}, but it has no revision {name.revision!r}: pass a "
            "branch, a tag or a commit after '@'"
        )
    except errors.GatedRepoError:
        problem = f"{name} is gated: accept its terms on {_page(name)}, then run `hf auth login`"
    except errors.RepositoryNotFoundError:
        problem = (
            f"{str(name)!r} is neither a folder here nor a model on the Hub, or it is private: "
            "check the name, or run `hf auth login`"
        )
    except errors.LocalEntryNotFoundError as error:
        problem = (
            f"{str(name)!r} is not a folder that exists, and the Hub cannot be reached "
            f"({_cause(error)}). Where there is a network, run `hf download {name.repository}"
            f"{f' --revision {name.revision}' if name.revision else ''} --local-dir FOLDER`, "
            "and pass FOLDER"
        )
    except (errors.HfHubHTTPError, OSError) as error:
        problem = f"{name}: fetching it from the Hub failed: {_cause(error)}"
    else:
        return folder
    raise CheckpointError([problem])


def _download(name, *left_out) -> pathlib.Path:
    """Return the folder of a model after fetching what is missing, except what patterns match."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name.repository,
        revision=name.revision,
        allow_patterns=list(FILES),
        ignore_patterns=[*_folders_except(TEMPLATES), *left_out],
    )
    return pathlib.Path(folder)


def _folders_except(folder: str) -> list[str]:
    """Return patterns that match every path in a folder, except the files of `folder` itself.

    The Hub's client ignores what matches any pattern, and its patterns cannot say "except". A path
    is in another folder if its first characters are those of `folder`, up to a place where it has
    another character.
    """
    whole = f"{folder}/"
    other = [f"{whole[:place]}[!{letter}]*/*" for place, letter in enumerate(whole)]
    shorter = [f"{folder[:length]}/*" for length in range(1, len(folder))]
    return [*other, *shorter, f"{whole}*/*"]


def _page(name: HubName) -> str:
    """Return the address of a model's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name.repository}"


def _cause(error: BaseException) -> str:
    """Return the first line of an exception's message, or of the message of its first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
