"""`config.json` of a Hugging Face model folder, read as hyper-parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from power_torch.hparams import GEMMA3, LLAMA, QWEN3, HyperParameters, RopeScaling
from power_torch.refusal import refuse

__all__ = ["HfConfig"]

_ARCHITECTURES = {"llama": LLAMA, "qwen3": QWEN3, "gemma3_text": GEMMA3, "gemma3": GEMMA3}
_FULL, _WINDOWED = "full_attention", "sliding_attention"
_WINDOW_PERIOD = 6  # Gemma 3: every sixth block sees everything


class HfConfig:
    """
    A parsed `config.json`; of a multimodal model the text part.

    Args:
        path: The file.

    Attributes:
        architecture: One of `ARCHITECTURES`.
        values: The keys.

    Raises:
        ArtifactError: It cannot be read, or is of another architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as exc:
            refuse(path, f"it cannot be read: {exc}", expected="the model's config.json", fix="download the file again")
        kind = document.get("model_type") if isinstance(document, dict) else None
        if kind not in _ARCHITECTURES:
            refuse(path, f"model_type is {kind!r}", got=kind, expected=" or ".join(_ARCHITECTURES))
        self.architecture = _ARCHITECTURES[kind]
        text = document.get("text_config", document)
        self.values: Mapping[str, Any] = text if isinstance(text, dict) else document

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            refuse(self.path, f"{key} is {value!r}", got=value, expected="an integer of 1 or more")
        return value

    def number(self, key: str, default: float | None = None, values: Mapping[str, Any] | None = None) -> float:
        value = (self.values if values is None else values).get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            refuse(self.path, f"{key} is {value!r}", got=value, expected="a positive number")
        return float(value)

    @property
    def is_tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        return bool(self.values.get("tie_word_embeddings", self.architecture == GEMMA3))

    def hyper_parameters(self) -> HyperParameters:
        """
        The sizes and constants of the model.

        Raises:
            ArtifactError: One is missing or out of range, or asks for what the forward pass does not compute.
        """
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            refuse(self.path, f"{heads} query heads on {kv_heads} key heads", expected="a multiple")
        is_gemma, layers = self.architecture == GEMMA3, self.integer("num_hidden_layers")
        head_dim = self.integer("head_dim", 256 if is_gemma else hidden // heads)
        if head_dim % 2:
            refuse(self.path, f"head_dim is {head_dim}", got=head_dim, expected="an even number")
        self._check_activation()
        rope, rope_window = self._rope_tables()
        windowed = self._windowed(layers)
        softcap = self.values.get("final_logit_softcapping") if is_gemma else None
        return HyperParameters(
            architecture=self.architecture,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=self.integer("intermediate_size"),
            trained_context=self.integer("max_position_embeddings"),
            norm_epsilon=self.number("rms_norm_eps"),
            rope_base=self.number("rope_theta", 1e6 if is_gemma else 1e4, rope),
            rope_scaling=self._scaling(rope, head_dim),
            rope_base_window=self.number("rope_theta", 1e4, rope_window),
            sliding_window=self.integer("sliding_window") if any(windowed) else 0,
            windowed=windowed if any(windowed) else (),
            attention_scale=(self.number("query_pre_attn_scalar", 256) if is_gemma else head_dim) ** -0.5,
            embedding_scale=hidden**0.5 if is_gemma else 1.0,
            logit_softcap=0.0 if softcap is None else self.number("final_logit_softcapping"),
            activation="gelu" if is_gemma else "silu",
        )

    def _check_activation(self) -> None:
        wanted = "gelu_pytorch_tanh" if self.architecture == GEMMA3 else "silu"
        found = self.values.get("hidden_activation", self.values.get("hidden_act", wanted))
        if found != wanted:
            refuse(self.path, f"the activation is {found!r}", got=found, expected=wanted)

    def _windowed(self, layers: int) -> tuple[bool, ...]:
        types = self.values.get("layer_types")
        if types is None:
            if self.architecture != GEMMA3:
                if self.values.get("use_sliding_window"):
                    refuse(self.path, "use_sliding_window is true", expected="full attention, or layer_types")
                return (False,) * layers
            period = self.integer("sliding_window_pattern", _WINDOW_PERIOD)
            return tuple((block + 1) % period != 0 for block in range(layers))
        if not isinstance(types, list) or len(types) != layers or not {*types} <= {_FULL, _WINDOWED}:
            refuse(self.path, f"layer_types is {types!r}", got=types, expected=f"{layers} times {_FULL} or {_WINDOWED}")
        if self.architecture != GEMMA3 and _WINDOWED in types:
            refuse(self.path, f"a block is {_WINDOWED}", got=types, expected=_FULL, fix="use power-llamacpp for it")
        return tuple(kind == _WINDOWED for kind in types)

    def _rope_tables(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Rotary settings of full and of windowed blocks, whichever of the three ways they are written."""
        rope = self.values.get("rope_parameters")
        if isinstance(rope, dict):
            full, window = rope.get(_FULL, rope), rope.get(_WINDOWED, {})
            if isinstance(full, dict) and isinstance(window, dict):
                return full, window
            refuse(self.path, f"rope_parameters is {rope!r}", got=rope, expected="a table, or one a kind of block")
        scaling = self.values.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            refuse(self.path, f"rope_scaling is {scaling!r}", got=scaling, expected="a table")
        full = {**scaling, "rope_theta": self.values.get("rope_theta")}
        return full, {"rope_theta": self.values.get("rope_local_base_freq")}

    def _scaling(self, rope: Mapping[str, Any], head_dim: int) -> RopeScaling:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return RopeScaling()
        if kind == "linear":
            return RopeScaling(self.number("factor", None, rope))
        if kind != "llama3":
            refuse(self.path, f"the rope type is {kind!r}", got=kind, expected="default, linear or llama3")
        return RopeScaling(factors=self._llama3_factors(rope, self.number("rope_theta", 1e4, rope), head_dim))

    def _llama3_factors(self, rope: Mapping[str, Any], base: float, head_dim: int) -> tuple[float, ...]:
        """
        Llama 3.1's divisors: 1 for short wavelengths, `factor` for long ones, a ramp of frequencies between.

        With s = (L / wavelength - low) / (high - low), the new frequency is (1 - s) * f / factor + s * f.
        """
        factor = self.number("factor", None, rope)
        low, high = self.number("low_freq_factor", None, rope), self.number("high_freq_factor", None, rope)
        trained = self.number("original_max_position_embeddings", None, rope)
        if high <= low:
            refuse(self.path, f"high_freq_factor is {high}", got=high, expected=f"more than low_freq_factor, {low}")
        divisors = []
        for pair in range(head_dim // 2):
            wavelength = 2 * math.pi * base ** (2 * pair / head_dim)
            share = min(max((trained / wavelength - low) / (high - low), 0.0), 1.0)
            divisors.append(1 / ((1 - share) / factor + share))
        return tuple(divisors)
