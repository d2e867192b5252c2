"""Starting an engine on this host: `launch(config)` gives a client whose ranks are ready."""

import os
from dataclasses import replace

from crossdock.core import ConfigError, EngineConfig, load_spec
from crossdock.launch.client import EngineClient, OnProgress
from crossdock.models.hub import resolve_model

_SILENCE_S = 600.0
"""How long ranks may say nothing while they load before the start is called failed."""


def launch(config: EngineConfig, on_progress: OnProgress | None = None) -> EngineClient:
    """Starts `config.ranks` processes and returns once all are ready.

    Raises:
        UserError: the model, a setting or the memory; the message says what to change.
        CrossdockError: a rank failed for another reason.
    """
    model_dir = resolve_model(config.model, config.revision)
    spec = load_spec(model_dir)
    from crossdock.engine import resolve_max_model_len

    max_model_len = resolve_max_model_len(config, spec)
