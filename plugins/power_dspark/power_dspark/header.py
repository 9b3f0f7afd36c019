"""What a DSpark file says about itself, in one record for both containers."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from power_core.artifacts.tensors import TensorFile
from power_dspark.fields import Fields, refuse
from power_dspark.layout import Dims, canonical_name

__all__ = [
    "EPSILONS",
    "MAX_BLOCK_SIZE",
    "MAX_LAYER",
    "ROPE_BASES",
    "Header",
    "Keys",
    "read_anchor_first",
    "read_dims",
    "tensor_names",
]

MAX_BLOCK_SIZE = 256
"""Rows of one draft round; published drafters have 4 to 16."""
MAX_LAYER = 2**16
"""More than any target's blocks: `check_target` knows the number."""
EPSILONS = (1e-12, 0.1)
"""Least and most of a norm's epsilon; published ones are 1e-12 to 1e-5."""
ROPE_BASES = (2.0, 1e12)
"""Least and most base of the rotation; published ones are 1e4 to 3.6e9."""
_MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS


@frozen
class Header:
    """
    A checked header.

    Args:
        dims: Sizes; see `Dims`.
        hidden_layers: Target block outputs, numbered from 0, in the order their features are concatenated.
        block_size: Rows of a draft round.
        sample_from_anchor: Whether the anchor's own row predicts (anchor-first) or is skipped (bonus-anchor).
        mask_id: Token of the rows after the anchor.
        epsilon: Of every RMS norm.
        rope_base: Of the rotary embedding (NeoX pairs, absolute positions).
        context: Positions the drafter was made for.
    """

    dims: Dims
    hidden_layers: tuple[int, ...]
    block_size: int
    sample_from_anchor: bool
    mask_id: int
    epsilon: float
    rope_base: float
    context: int

    @property
    def max_drafts(self) -> int:
        """Tokens one round can propose."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_row(self) -> int:
        """The first row of a round that predicts."""
        return 0 if self.sample_from_anchor else 1

    def rows_for(self, drafts: int) -> int:
        """Rows of a round that proposes *drafts* tokens."""
        return drafts + self.first_row


@frozen
class Keys:
    """What a container calls the sizes that both have."""

    hidden: str
    feed_forward: str
    heads: str
    kv_heads: str
    head_dim: str
    blocks: str
    confidence: str


def tensor_names(file: TensorFile) -> dict[str, str]:
    """GGUF name -> the name *file* spells it with. A published file that spells a tensor twice is refused."""
    if file.format == "gguf":
        return {name: name for name in file.tensors}
    names: dict[str, str] = {}
    for name in file.tensors:
        canonical = canonical_name(name)
        if canonical in names:
            refuse(file.path, f"{name} and {names[canonical]} are the same tensor", got=name, expected="one of them")
        names[canonical] = name
    return names


def read_dims(
    file: TensorFile,
    fields: Fields,
    keys: Keys,
    *,
    vocab: int,
    features: int,
    confidence_with_markov: bool = True,
) -> Dims:
    """
    The sizes of *file*: those of the Markov head and of a reduced vocabulary stand in the tensor table.

    Args:
        file: The file.
        fields: Its keys.
        keys: What they are called.
        vocab: The target's vocabulary.
        features: Target layers read.
        confidence_with_markov: Whether the confidence head reads the previous token's Markov row as well.
    """
    names = tensor_names(file)
    hidden, heads, kv_heads = fields.integer(keys.hidden), fields.integer(keys.heads), fields.integer(keys.kv_heads)
    if heads % kv_heads:
        refuse(file.path, f"{heads} query heads on {kv_heads} key heads", got=(heads, kv_heads), expected="a multiple")
    rank = _rank(file, names)
    width = hidden + (rank if confidence_with_markov else 0)
    return Dims(
        hidden=hidden,
        feed_forward=fields.integer(keys.feed_forward),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(file, fields, hidden, heads, keys.head_dim),
        blocks=fields.integer(keys.blocks, most=_MAX_BLOCKS),
        features=features,
        vocab=vocab,
        draft_vocab=_draft_vocab(file, names, vocab),
        rank=rank,
        confidence=width if _has_confidence(file, fields, names, keys.confidence) else 0,
    )


def read_anchor_first(file: TensorFile, fields: Fields, block_size: int, *, default: bool) -> bool:
    """`sample_from_anchor`, for a block in which some row is left to predict."""
    first = fields.flag("sample_from_anchor", default=default)
    if not first and block_size < 2:
        what = "a bonus-anchor block of one row drafts nothing"
        refuse(file.path, what, got=block_size, expected="block_size of at least 2")
    return first


def _rank(file: TensorFile, names: Mapping[str, str]) -> int:
    name = names["markov_w1.weight"]
    shape = file.tensors[name].shape
    if len(shape) != 2 or shape[1] < 1:
        refuse(file.path, f"{name} has shape {shape}", got=shape, expected="(vocabulary, rank)")
    return shape[1]


def _draft_vocab(file: TensorFile, names: Mapping[str, str], vocab: int) -> int:
    if "d2t" not in names:
        return vocab
    shape = file.tensors[names["d2t"]].shape
    if len(shape) != 1 or not 1 <= shape[0] < vocab:
        refuse(file.path, f"d2t has shape {shape}", got=shape, expected=f"1 to {vocab - 1} rows")
    if "output.weight" not in names:
        refuse(file.path, "d2t without an output matrix of its own", expected="output.weight with as many rows")
    return shape[0]


def _head_dim(file: TensorFile, fields: Fields, hidden: int, heads: int, key: str) -> int:
    if key not in fields and hidden % heads:
        refuse(file.path, f"{hidden} hidden do not divide into {heads} heads", expected=f"the key {key}")
    size = fields.integer(key, default=hidden // heads)
    if size % 2:
        refuse(file.path, f"a head of {size}", got=size, expected="an even size: rotary pairs")
    return size


def _has_confidence(file: TensorFile, fields: Fields, names: Mapping[str, str], key: str) -> bool:
    """Metadata and tensor table must agree: llama.cpp gives stale numbers where they do not."""
    is_there = "conf_proj.weight" in names
    if fields.flag(key, default=is_there) != is_there:
        what = f"{key} is {str(not is_there).lower()} and conf_proj.weight is {'there' if is_there else 'missing'}"
        refuse(file.path, what, got=is_there, expected="both or neither")
    if not is_there and "conf_proj.bias" in names:
        refuse(file.path, "conf_proj.bias without conf_proj.weight", expected="both or neither")
    return is_there
