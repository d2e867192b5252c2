"""crossdock: expert-parallel inference for mixture-of-experts language models.

`LLM` and `SamplingParams` are loaded on first use, so that `import crossdock.core` needs no torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from crossdock.core import SamplingParams
    from crossdock.launch import LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from crossdock.launch import LLM

        return LLM
    if name == "SamplingParams":
        from crossdock.core import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'crossdock' has no attribute {name!r}")
