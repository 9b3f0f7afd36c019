"""
An independent reference: one token a decode on raw llama-cpp-python calls, argmax in numpy.

Shares no code with Power, so that an error in both is unlikely. `pad` repeats each single-row decode
in a second sequence and reads two rows of every decode, for builds whose single rows (of the whole
pass, and of the output matrix alone) are in another width class.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as native

from power_core.runtime import Engine
from power_core.shapes import ExactnessLevel

__all__ = ["RawLoop", "raw_loop"]


class RawLoop:
    """A model decoded greedily, one token at a time."""

    def __init__(self, path: Path, *, extra_buffers: bool, flash_attention: bool, threads: int, pad: bool = False):
        native.llama_backend_init()
        model_params = native.llama_model_default_params()
        model_params.use_extra_bufts = extra_buffers
        self.model = native.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model
        vocab = native.llama_model_get_vocab(self.model)
        self.vocab_size = native.llama_vocab_n_tokens(vocab)
        self.is_end = [bool(native.llama_vocab_is_eog(vocab, token)) for token in range(self.vocab_size)]
        params = native.llama_context_default_params()
        params.n_seq_max = 1 + pad
        params.n_ctx = 2048 * (1 + pad)
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash_attention else 0
        params.kv_unified = False
        self.context = native.llama_init_from_model(self.model, params)
        assert self.context
        self.pad = pad

    def decode(self, tokens: Sequence[int], position: int) -> np.ndarray:
        """Evaluate *tokens* from *position* on; logits of the last one, float32[vocab]."""
        sequences = 2 if self.pad and len(tokens) == 1 else 1
        batch = native.llama_batch_init(len(tokens) * sequences, 0, 1)
        batch.n_tokens = len(tokens) * sequences
        for i in range(batch.n_tokens):
            seq, offset = divmod(i, len(tokens))
            batch.token[i], batch.pos[i] = tokens[offset], (position if seq == 0 else 0) + offset
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = offset >= len(tokens) - 1 - self.pad
        assert native.llama_decode(self.context, batch) == 0
        native.llama_batch_free(batch)
        if sequences == 2:
            native.llama_memory_seq_rm(native.llama_get_memory(self.context), 1, -1, -1)
        pointer = native.llama_get_logits_ith(self.context, len(tokens) - 1)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)).copy()

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy ids after *prompt*, an end-of-generation id included."""
        native.llama_memory_clear(native.llama_get_memory(self.context), True)
        out: list[int] = []
        token = int(self.decode(prompt, 0).argmax())
        while True:
            out.append(token)
            if len(out) == max_tokens or self.is_end[token]:
                return out
            token = int(self.decode([token], len(prompt) + len(out) - 1).argmax())

    def close(self) -> None:
        native.llama_free(self.context)
        native.llama_model_free(self.model)


def raw_loop(engine: Engine) -> RawLoop:
    """A raw loop with the settings that *engine* measured to be exact."""
    facts = engine.profile.evidence
    return RawLoop(
        engine.model.path,  # type: ignore[attr-defined] # a llama.cpp model
        extra_buffers=facts["settings"]["extra_buffers"],
        flash_attention=facts["settings"]["flash_attention"],
        threads=facts["threads"],
        pad=engine.profile.level is ExactnessLevel.PADDED,
    )
