"""From what a user calls a model to a directory with its files."""

import logging
import os
from pathlib import Path

from crossdock.core import UserError

log = logging.getLogger(__name__)

# What is read of a repository: never pickles, never code, nothing of its sub-directories.
_ALLOW = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_IGNORE = ["*/*", "consolidated*", "training_args*"]


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The directory of `model`, a directory or a Hugging Face id; downloads what is not cached.

    Without a network (or with HF_HUB_OFFLINE=1) the cache alone is used.

    Raises:
        UserError: no such directory, repository or revision, no access, or neither reachable nor
            cached; says what to do.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise UserError(f"{model} is a directory; --revision is for Hugging Face ids")
        return path.resolve()
    if path.exists():
        raise UserError(f"{path}: a file; expected the directory that holds it and config.json")
    if not _looks_like_id(model):
        raise UserError(f"{path}: directory not found")
    return _download(model, revision)


def _looks_like_id(model: str) -> bool:
    """Whether `model` reads as "owner/name" or "name" and not as a path."""
    parts = model.split("/")
    if model.startswith((".", "/", "~")) or len(parts) > 2 or not all(parts) or os.sep != "/":
        return False
    return len(parts) == 1 or not Path(parts[0]).exists()


def _download(model: str, revision: str | None) -> Path:
    # Importing it takes a good part of a second, and a directory does without.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub

    name = f"{model!r}" + (f", revision {revision!r}" if revision else "")

    def fetch(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=_ALLOW,
                ignore_patterns=_IGNORE,
                local_files_only=local_files_only,
            )
        )

    try:
        # snapshot_download alone would fall back to the cache without a word.
        HfApi().repo_info(model, revision=revision)
        return fetch(local_files_only=False)
    except hub.GatedRepoError:
        raise UserError(
            f"{name}: gated; accept its terms at https://huggingface.co/{model}, then set HF_TOKEN "
            "or run `hf auth login`"
        ) from None
    except hub.RevisionNotFoundError:
        raise UserError(
            f"{name}: the repository has no such revision; give a branch, tag or commit of "
            f"https://huggingface.co/{model}/tree/main"
        ) from None
    except hub.RepositoryNotFoundError:
        raise UserError(
            f"{name}: neither a directory nor a Hugging Face repository that you may read; check "
            "the name, and for a private one set HF_TOKEN or run `hf auth login`"
        ) from None
    except hub.HFValidationError as error:
        raise UserError(f"{name}: neither a directory nor a Hugging Face id: {error}") from None
    except Exception as error:  # offline, no network, a proxy, the hub is down, the disk is full
        reason = (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        )
    try:
        path = fetch(local_files_only=True)
    except hub.LocalEntryNotFoundError:
        raise UserError(
            f"{name}: not a directory, not completely in the cache, and not downloaded: {reason}; "
            "check the name and the network, or give the directory of a copy"
        ) from None
    log.warning("%s: Hugging Face not reached (%s); using the cache: %s", name, reason, path)
    return path
