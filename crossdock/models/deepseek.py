"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), thus V2-Lite, R1, V3.1 and Kimi-K2."""

from functools import partial

from crossdock.models.base import Family
from crossdock.models.weights import load_mla

# The norms of the latents keep their default epsilon, whatever rms_norm_eps says.
FAMILY = Family(load_attention=partial(load_mla, latent_eps=1e-6))
