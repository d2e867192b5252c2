"""How a model's publishers sample from it: their generation_config.json."""

from pathlib import Path
from typing import Any

from crossdock.core import CheckpointError, RequestError, SamplingParams
from crossdock.models.tokenizer_files import read_json

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model_dir: Path) -> dict[str, Any]:
    """Sampling parameters by name, for requests that say nothing of them. `do_sample` is passed
    over: a temperature of 0 is asked for as such.

    Raises:
        CheckpointError: a value that no request may have.
    """
    path = Path(model_dir) / "generation_config.json"
    given = read_json(path) if path.is_file() else {}
    found = {name: given[name] for name in _NAMES if given.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise CheckpointError(
            f'{path}: {error}; mend it, or set sampling_defaults = "openai" to pass it over'
        ) from None
    return found
