"""From a trained module to a drafter: scales are folded in and factored matrices are multiplied out."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from power_train.drafter_file import Drafter, Settings
from power_train.modules import BlockDrafter, BlockLayer, Layer, MtpDrafter
from power_train.setup import Trainable

__all__ = ["exported"]

_VECTORS = ("attn_norm", "q_norm", "k_norm", "ffn_norm")
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@torch.no_grad()
def exported(trainable: Trainable, *, context: int, tokenizer_sha256: str) -> Drafter:
    """
    The drafter as files hold it.

    Args:
        trainable: After training.
        context: Positions the target has.
        tokenizer_sha256: Of the target's identity.
    """
    module = trainable.module
    layers: list[Layer] = [module.layer] if isinstance(module, MtpDrafter) else [*module.stack]
    tensors = {f"{i}.{name}": value for i, layer in enumerate(layers) for name, value in _layer(layer).items()}
    tensors["norm"] = module.norm
    tensors["output"] = trainable.matrix.float()
    tensors["d2t"] = trainable.vocabulary.ids
    tensors |= _mtp(module) if isinstance(module, MtpDrafter) else _block(module, trainable)
    settings = _settings(module, context, tokenizer_sha256)
    return Drafter(settings, {name: _array(value) for name, value in tensors.items()})


def _layer(layer: Layer) -> dict[str, Tensor]:
    tensors = {name: getattr(layer, name) for name in (*_VECTORS, *_MATRICES)}
    if isinstance(layer, BlockLayer) and layer.has_convolutions:
        for name, conv in (("attn_conv", layer.attn_conv), ("ffn_conv", layer.ffn_conv)):
            tensors[f"{name}_base"] = conv.base
            tensors[name] = conv.projection
    return tensors


def _mtp(module: MtpDrafter) -> dict[str, Tensor]:
    return {
        "feature_fc": torch.cat(list(module.feature_fc), 1) * module.feature_scale,
        "fc": torch.cat(list(module.fc), 1),
        "hidden_norm": module.hidden_norm,
        "embed_norm": module.embed_norm,
    }


def _block(module: BlockDrafter, trainable: Trainable) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {
        "fc": torch.cat(list(module.fc), 1) * module.feature_scale,
        "hidden_norm": module.hidden_norm,
    }
    kind = module.shape.kind
    embedding = module.embedding.float()
    if kind == "dspark":
        tensors["markov_w1"] = embedding @ module.previous.T
        tensors["markov_w2"] = trainable.matrix.float() @ module.bias
        tensors["confidence"] = module.confidence
        tensors["confidence_bias"] = module.confidence_bias
    if kind == "dflash2":
        tensors["predecessor"] = embedding @ module.previous.T
        successor = torch.zeros_like(tensors["predecessor"])  # of ids that are never candidates: zero
        successor[trainable.vocabulary.ids] = trainable.matrix.float() @ module.bias
        tensors["successor"] = successor
        tensors["selector"] = module.gate
    return tensors


def _settings(module: BlockDrafter | MtpDrafter, context: int, tokenizer_sha256: str) -> Settings:
    shape = module.shape
    selects = shape.kind == "dflash2"
    return Settings(
        kind=shape.kind,
        hidden=shape.hidden,
        ffn=shape.ffn,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        blocks=shape.blocks,
        epsilon=shape.epsilon,
        rope_base=shape.rope_base,
        vocab=len(module.embedding),
        context=context,
        layers=shape.layers,
        block_size=shape.block,
        mask_id=shape.mask_id,
        tokenizer_sha256=tokenizer_sha256,
        from_anchor=shape.kind == "dspark",
        has_confidence=shape.kind == "dspark",
        rank=shape.rank if selects else 0,
        top_k=shape.top_k,
        kernel=shape.kernel,
        group=shape.group,
    )


def _array(value: Tensor) -> NDArray[np.generic]:
    value = value.detach()
    return value.numpy() if value.dtype == torch.int64 else value.float().contiguous().numpy()
