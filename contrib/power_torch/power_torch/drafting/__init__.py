"""
What torch drafters share: a ring of draft K/V, a block backbone over it, output heads and loaders.

A drafter of the DFlash family is assembled from four parts::

    weights = load_backbone(file, shape)                    # `loading`: GGUF and safetensors names, one record
    ring = KvRing(layers=..., kv_heads=..., head_dim=..., cap=512)
    backbone = BlockBackbone(weights, ring)                 # `fold` adds target features, `forward` denoises a block
    head = ReducedHead(matrix, ids)                         # logits, top-k and argmax in target ids

A recurrent drafter uses `KvRing` and `attend` with its own layer.
"""

from power_torch.drafting.attention import attend
from power_torch.drafting.backbone import BlockBackbone
from power_torch.drafting.head import ReducedHead
from power_torch.drafting.loading import load_backbone, matrix_dtype, read_tensor
from power_torch.drafting.record import BackboneShape, BackboneWeights, ConvWeights, LayerWeights
from power_torch.drafting.ring import KvRing, RingView
from power_torch.drafting.rope import Rope, rms_norm

__all__ = [
    "BackboneShape",
    "BackboneWeights",
    "BlockBackbone",
    "ConvWeights",
    "KvRing",
    "LayerWeights",
    "ReducedHead",
    "RingView",
    "Rope",
    "attend",
    "load_backbone",
    "matrix_dtype",
    "read_tensor",
    "rms_norm",
]
