"""A rank of vLLM whose CPU kernels compute with the parameters themselves.

vLLM imports it before it loads a model.

Packed, an output layer that shares its weight with the embedding is not packed again when weights
are loaded (``reload_weights``): the engine would go on with the head that it started with.
"""

from vllm import _custom_ops
from vllm.model_executor.layers import utils

_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *_: False


class UnpackedRank:
    """Adds nothing to the rank: importing this module is what counts."""
