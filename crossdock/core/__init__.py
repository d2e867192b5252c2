"""The nouns that every room may use. Imports no torch; tensor types appear for the checker only.

Shape legend, as suffixes: T tokens on this rank, H hidden, E logical experts, P physical slots,
S slots on this rank, K top-k, R ranks, N received rows, C slot capacity, F expert intermediate
size, L layers, B sequences, D head size.
"""

from crossdock.core.batch import ForwardBatch, OverlapMode, Plan, Scheduled
from crossdock.core.config import EngineConfig, ServerConfig, check_settings, parse_routing
from crossdock.core.errors import (
    Busy,
    CapacityError,
    CheckpointError,
    ConfigError,
    CrossdockError,
    RankLost,
    RequestError,
    UserError,
)
from crossdock.core.hf_config import load_spec, parse_config, read_config
from crossdock.core.model_spec import GQASpec, MLASpec, ModelSpec, MoESpec, QuantSpec, RopeSpec
from crossdock.core.protocols import (
    KV,
    Group,
    Grouped,
    Lockstep,
    Masked,
    Model,
    Received,
    Rows,
    SlotLayer,
    Transport,
)
from crossdock.core.request import (
    BROKEN,
    Request,
    Sampled,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
)
from crossdock.core.tensor_parallel import check_tp, shard_attention
from crossdock.core.topology import Member, Move, Placement, Routing, Topology, share_of

__all__ = [
    "BROKEN",
    "KV",
    "Busy",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "CrossdockError",
    "EngineConfig",
    "ForwardBatch",
    "GQASpec",
    "Group",
    "Grouped",
    "Lockstep",
    "MLASpec",
    "Masked",
    "Member",
    "MoESpec",
    "Model",
    "ModelSpec",
    "Move",
    "OverlapMode",
    "Placement",
    "Plan",
    "QuantSpec",
    "RankLost",
    "Received",
    "Request",
    "RequestError",
    "RopeSpec",
    "Routing",
    "Rows",
    "Sampled",
    "SamplingParams",
    "Scheduled",
    "ServerConfig",
    "SlotLayer",
    "TokenLogprob",
    "TokenOutput",
    "Topology",
    "Transport",
    "UserError",
    "check_settings",
    "check_tp",
    "load_spec",
    "parse_config",
    "parse_routing",
    "read_config",
    "shard_attention",
    "share_of",
]
