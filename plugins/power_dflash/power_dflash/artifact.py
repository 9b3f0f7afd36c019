"""
The contracts `dflash-v1` and `dflash2`: which files are of these kinds, and what must hold before one is used.

H hidden, A query heads, B key/value heads of size D, F feed-forward, V vocabulary, V' rows of the output matrix, n target
blocks read, R selector rank, T convolution taps, G channels a group. Shapes are (rows out, columns in).

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
the vocabulary that text does not use. "(F32)" holds for GGUF; safetensors are F32, F16 or BF16 throughout. GGUF matrices
are floats or quantized. Every other tensor is refused, and so is whatever would make the file a DSpark drafter.

Metadata: ``config.json`` beside a safetensors file (keys in parentheses lie in its table ``dflash_config``), header
keys of a GGUF file, with the prefix ``dflash.`` where none is shown; integers are u32, fractions f32:

==========================  ===============================================  ==================================
config.json                 GGUF                                             value
==========================  ===============================================  ==================================
``architectures``           ``general.architecture`` = ``dflash``            ``["DFlashDraftModel"]``, ``["DFlash2DraftModel"]``
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
``tokenizer_sha256``        ``tokenizer_sha256``                             optional: the target tokenizer's digest
``sample_from_anchor``      ``sample_from_anchor``                           optional: the anchor's row drafts too
(``conv_kernel_size``)      ``conv_kernel_size``                             DFlash2: T
(``conv_group_size``)       ``conv_group_size``                              DFlash2: G, a divisor of H
(``selector_rank``)         ``selector_rank``                                DFlash2: R
(``selector_top_k``)        ``selector_top_k``                               DFlash2: k, with k * (k + 1) <= H
==========================  ===============================================  ==================================

A GGUF file without a tokenizer states ``tokenizer.ggml.model`` = ``none``; one with a tokenizer must have the target's
tokens. ``target_layer_ids`` are blocks whose OUTPUT is read, numbered from 0. GGUF's ``target_layers`` are one higher:
llama.cpp's id i is the input of block i. ``sliding_window`` with ``layer_types`` (GGUF: ``attention.sliding_window`` with
``attention.sliding_window_pattern``) is optional, and so are ``input_embedding_scale``, ``output_multiplier`` and
``final_logit_softcapping`` (GGUF: ``embedding_scale``, ``logit_scale``, ``final_logit_softcapping``).
"""
