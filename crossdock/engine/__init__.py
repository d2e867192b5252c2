"""One rank: its model, its cache, its step."""

from crossdock.engine.build import (
    build_engine,
    initial_placement,
    read_spec,
    resolve_dtype,
    resolve_max_model_len,
)
from crossdock.engine.engine import Agreed, Engine, Step, agree
from crossdock.engine.overlap import check_overlap

__all__ = [
    "Agreed",
    "Engine",
    "Step",
    "agree",
    "build_engine",
    "check_overlap",
    "initial_placement",
    "read_spec",
    "resolve_dtype",
    "resolve_max_model_len",
]
