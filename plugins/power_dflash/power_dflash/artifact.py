"""
The contracts `dflash-v1` and `dflash2`: which files are of these kinds, and what must hold before one is used.

H hidden, A query heads, B key/value heads of size D, F feed-forward, V vocabulary, V' rows of the output matrix, n
target blocks read, R selector rank, T convolution taps, G channels a group. Shapes are (rows out, columns in).

====================================================  ================================  =============
safetensors (a prefix ``model.`` is allowed)          GGUF, architecture ``dflash``     shape
====================================================  ================================  =============
``fc.weight``                                         ``fc.weight``                     H, n*H
``hidden_norm.weight``                                ``enc.output_norm.weight``        H       (F32)
``norm.weight``                                       ``output_norm.weight``            H       (F32)
``layers.i.input_layernorm.weight``                   ``blk.i.attn_norm.weight``        H       (F32)
``layers.i.self_attn.q_proj.weight``                  ``blk.i.attn_q.weight``           A*D, H
``layers.i.self_attn.k_proj.weight``                  ``blk.i.attn_k.weight``           B*D, H
``layers.i.self_attn.v_proj.weight``                  ``blk.i.attn_v.weight``           B*D, H
``layers.i.self_attn.o_proj.weight``                  ``blk.i.attn_output.weight``      H, A*D
``layers.i.self_attn.q_norm.weight``                  ``blk.i.attn_q_norm.weight``      D       (F32)
``layers.i.self_attn.k_norm.weight``                  ``blk.i.attn_k_norm.weight``      D       (F32)
``layers.i.post_attention_layernorm.weight``          ``blk.i.ffn_norm.weight``         H       (F32)
``layers.i.mlp.gate_proj.weight``                     ``blk.i.ffn_gate.weight``         F, H
``layers.i.mlp.up_proj.weight``                       ``blk.i.ffn_up.weight``           F, H
``layers.i.mlp.down_proj.weight``                     ``blk.i.ffn_down.weight``         H, F
``embed_tokens.weight``      (optional)               ``token_embd.weight``             V, H
``lm_head.weight``           (optional)               ``output.weight``                 V', H
``d2t``                      (optional)               ``d2t``                           V'      (I64)
====================================================  ================================  =============

DFlash2 has these as well; `dflash-v1` has none of them:

====================================================  ================================  =============
safetensors                                           GGUF                              shape
====================================================  ================================  =============
``layers.i.attention_conv.base_kernel``               ``blk.i.attn_conv_base``          2, T, H (F32)
``layers.i.attention_conv.kernel_projection.weight``  ``blk.i.attn_conv_proj.weight``   2*T*(H/G), H
``layers.i.mlp_conv.base_kernel``                     ``blk.i.ffn_conv_base``           2, T, H (F32)
``layers.i.mlp_conv.kernel_projection.weight``        ``blk.i.ffn_conv_proj.weight``    2*T*(H/G), H
``candidate_selector.predecessor_codebook``           ``selector_predecessor.weight``   V, R
``candidate_selector.successor_codebook``             ``selector_successor.weight``     V, R
``candidate_selector.hidden_projection.weight``       ``selector_hidden.weight``        R, H
====================================================  ================================  =============

Without embedding or output matrix the target's are used. A reduced vocabulary (V' < V) needs `d2t`, the target id of
each output row, distinct, and its own output matrix. In safetensors `d2t` holds ids too, except in files of the
``speculators`` library, which store id - row. The rows behind the anchor are the embedding of the mask id: an id of
the vocabulary that text does not use. "(F32)" holds for GGUF; safetensors are F32, F16 or BF16 throughout. GGUF
matrices are floats or quantized. Every other tensor is refused, and so is what would make the file DSpark's.

Metadata: ``config.json`` beside a safetensors file (keys in parentheses lie in its table ``dflash_config``), header
keys of a GGUF file, with the prefix ``dflash.`` where none is shown; integers are u32, fractions f32:

==========================  ===============================================  ==================================
config.json                 GGUF                                             value
==========================  ===============================================  ==================================
``architectures``           ``general.architecture`` = ``dflash``            ``["DFlashDraftModel"]`` (or 2)
``max_position_embeddings``  ``context_length``                              positions
``hidden_size``             ``embedding_length``                             H, the target's
``num_hidden_layers``       ``block_count``                                  decoder layers
``intermediate_size``       ``feed_forward_length``                          F
``num_attention_heads``     ``attention.head_count``                         A
``num_key_value_heads``     ``attention.head_count_kv``                      B, a divisor of A
``head_dim``                ``attention.key_length``, ``.value_length``      D
``rms_norm_eps``            ``attention.layer_norm_rms_epsilon``             of every norm
``rope_theta``              ``rope.freq_base``                               plain NeoX rotation
(none)                      ``rope.dimension_count``                         D
``is_causal`` = false       ``attention.causal`` = false                     rows of a block see each other
``vocab_size``              ``vocab_size``                                   V, the target's
``block_size``              ``block_size``                                   rows of a round, the anchor's included
(``target_layer_ids``)      ``target_layers``                                see below
(``mask_token_id``)         ``tokenizer.ggml.mask_token_id``                 id of the masked rows
``num_target_layers``       (none)                                           optional: blocks of the target
``tokenizer_sha256``        ``power.tokenizer_sha256`` (no prefix)           optional: the target tokenizer's digest
``sample_from_anchor``      (none)                                           optional: the anchor's row drafts too
(``conv_kernel_size``)      ``conv_kernel_size``                             DFlash2: T
(``conv_group_size``)       ``conv_group_size``                              DFlash2: G, a divisor of H
(``selector_rank``)         ``selector_rank``                                DFlash2: R
(``selector_top_k``)        ``selector_top_k``                               DFlash2: k, with k * (k + 1) <= H
==========================  ===============================================  ==================================

A GGUF file without a tokenizer states ``tokenizer.ggml.model`` = ``none``; one with a tokenizer must have the target's
tokens. ``target_layer_ids`` are blocks whose OUTPUT is read, numbered from 0. GGUF's ``target_layers`` are one higher:
llama.cpp's id i is the input of block i. ``sliding_window`` with ``layer_types`` (GGUF: ``attention.sliding_window``
with ``attention.sliding_window_pattern``) is optional, and so are ``input_embedding_scale``, ``output_multiplier``
and ``final_logit_softcapping`` (GGUF: ``embedding_scale``, ``logit_scale``, ``final_logit_softcapping``), each 1e-6 to
1e6. An epsilon is 1e-12 to 0.1, a rotation base 2 to 1e12. Any other key under ``dflash.`` is refused, but for a few
that change nothing at the value they have.
"""

from __future__ import annotations

from itertools import islice

from power_core.artifacts import ArtifactFacts, TensorFile
from power_core.target import TargetModel
from power_dflash.header import DFLASH2, DFLASH_V1, Header, read_header
from power_dflash.keys import deny
from power_dflash.tensors import check_payload, check_tensors, is_selector

__all__ = ["BlockContract"]

_TRAIN = "use a drafter that was trained for this target"
_DSPARK_KEYS = ("dflash.sample_from_anchor", "dflash.has_confidence_head")


class BlockContract:
    """
    The contract of one of the two kinds.

    Args:
        kind: `dflash-v1` or `dflash2`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def matches(self, file: TensorFile) -> bool:
        """Whether metadata and tensors are DFlash's, and the selector is there or not as the kind wants it."""
        return _is_dflash(file) and is_selector(file) == (self.kind == DFLASH2)

    def check(self, file: TensorFile) -> ArtifactFacts:
        """See `ArtifactContract.check`."""
        if not self.matches(file):
            deny(
                file, f"metadata and tensors are not those of a {self.kind} drafter", got=self.kind,
                expected="DFlash metadata, a fused feature matrix, no Markov head"
                + (", a selector" if self.kind == DFLASH2 else ", no selector"),
            )  # fmt: skip
        _check_name(file, self.kind)
        header = read_header(file, self.kind)
        rows = check_tensors(file, header)
        if header.selector is not None and header.selector.top_k > rows:
            top_k = header.selector.top_k
            deny(file, f"{top_k} candidates of {rows} tokens", got=top_k, expected=f"at most {rows}")
        return ArtifactFacts(
            hidden_layers=header.target_blocks,
            hidden_size=header.hidden_size,
            vocab_size=header.vocab_size,
            draft_vocab_size=rows,
            block_size=header.drafts,
            details={
                "layers": header.layers,
                "mask_token_id": header.mask_id,
                "rows": header.block_size,
                "window": next((window for window in header.windows if window is not None), None),
                **({"top_k": header.selector.top_k} if header.selector is not None else {}),
            },
        )

    def check_payload(self, file: TensorFile) -> None:
        """See `ArtifactContract.check_payload`."""
        check_payload(file, read_header(file, self.kind))

    def check_target(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        """See `ArtifactContract.check_target`."""
        header, identity = read_header(file, self.kind), target.identity
        if facts.hidden_size != identity.hidden_size:
            _misfit(file, "hidden size", facts.hidden_size, identity.hidden_size)
        if facts.vocab_size != identity.vocab_size:
            _misfit(file, "vocabulary size", facts.vocab_size, identity.vocab_size)
        if header.target_layers not in (None, identity.num_layers):
            _misfit(file, "target's number of blocks", header.target_layers, identity.num_layers)
        # llama.cpp gives a block's output as the next block's input: there is none after the last.
        last = identity.num_layers - (2 if file.format == "gguf" else 1)
        highest = max(facts.hidden_layers)
        if highest > last:
            expected = f"blocks 0 to {last} of a target with {identity.num_layers}"
            deny(file, f"the drafter reads block {highest}'s output", got=highest, expected=expected, fix=_TRAIN)
        _check_tokenizer(file, header, target)


def _is_dflash(file: TensorFile) -> bool:
    """Whether *file* is of the family and no DSpark: that one is told by its Markov head."""
    names = {name.removeprefix("model.") for name in file.tensors}
    if file.format == "gguf":
        is_family = file.metadata.get("general.architecture") == "dflash"
        has_keys = any(key in file.metadata for key in _DSPARK_KEYS)
        return is_family and not has_keys and not names & {"markov_w1.weight", "markov_w2.weight"}
    config = file.metadata
    declared = (
        "dflash_config" in config
        or config.get("speculators_model_type") == "dflash"
        or any("DFlash" in str(name) for name in _listed(config.get("architectures")))
        or ("target_layer_ids" in config and "mask_token_id" in config)
    )
    # DeepSpec's trainer makes DFlash with its DSpark class and a Markov head of rank 0.
    is_dspark = any("DSpark" in str(name) for name in _listed(config.get("architectures"))) and (
        config.get("markov_rank") != 0 or bool(config.get("enable_confidence_head"))
    )
    has_markov = any(name.startswith("markov_head.") for name in names)
    return declared and {"fc.weight", "hidden_norm.weight"} <= names and not is_dspark and not has_markov


def _check_name(file: TensorFile, kind: str) -> None:
    """Refuse a file that names the other kind: its tensors are not what its maker says."""
    names = _listed(file.metadata.get("architectures"))
    if kind == DFLASH_V1 and any("DFlash2" in str(name) for name in names):
        deny(file, "the file says DFlash2 and has no selector", got=names, expected="the selector's tensors")
    if kind == DFLASH2 and any("DSpark" in str(name) for name in names):
        deny(file, "the file says DSpark and has a DFlash2 selector", got=names, expected="one kind")


def _check_tokenizer(file: TensorFile, header: Header, target: TargetModel) -> None:
    """Compare digests and tokens where the file carries them: vocabularies of one size can still differ."""
    wanted, found = header.tokenizer_sha256, target.identity.tokenizer_sha256
    if wanted is not None and wanted.removeprefix("sha256:") != found.removeprefix("sha256:"):
        deny(file, f"the drafter's tokenizer is {wanted:.16}...", got=wanted, expected=f"{found:.16}...", fix=_TRAIN)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    name = target.tokenizer.token_name
    for token_id, token in enumerate(islice(tokens, target.identity.vocab_size)):
        if token != name(token_id):
            what = f"token {token_id} of the drafter's vocabulary is {token!r:.40}"
            deny(file, what, got=token, expected=repr(name(token_id)), fix=_TRAIN)


def _misfit(file: TensorFile, what: str, got: object, expected: object) -> None:
    deny(file, f"the {what} is {got}", got=got, expected=f"the target's, {expected}", fix=_TRAIN)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
