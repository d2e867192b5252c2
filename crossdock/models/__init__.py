"""Models: one file per architecture, and reading their checkpoints."""

from crossdock.core import CheckpointError, ModelSpec
from crossdock.models import deepseek, mixtral, olmoe, qwen3_moe
from crossdock.models.base import Decoder, ModelContext, build_decoder
from crossdock.models.weights import WeightSource

_FAMILIES = {
    "DeepseekV2ForCausalLM": deepseek.FAMILY,
    "DeepseekV3ForCausalLM": deepseek.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "OlmoeForCausalLM": olmoe.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}


def build_model(spec: ModelSpec, weights: WeightSource, context: ModelContext) -> Decoder:
    """A `core.Model` with this rank's weights.

    Raises:
        CheckpointError: the architecture is not supported, or a tensor is missing or misshapen.
    """
    if spec.architecture not in _FAMILIES:
        raise CheckpointError(
            f"architecture {spec.architecture!r} is not supported; "
            f"supported: {', '.join(sorted(_FAMILIES))}"
        )
    return build_decoder(spec, _FAMILIES[spec.architecture], weights, context)


__all__ = ["Decoder", "ModelContext", "WeightSource", "build_model"]
