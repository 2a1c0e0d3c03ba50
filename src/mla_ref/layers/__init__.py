"""The parts of a layer beside attention: its dimensions, rotary positions and norms."""

from mla_ref.layers.config import MLAConfig, default_softmax_scale
from mla_ref.layers.norm import rms_norm
from mla_ref.layers.presets import PRESETS, preset
from mla_ref.layers.rope import (
    RopeConfig,
    YarnConfig,
    apply_rope,
    inverse_frequencies,
    rope_table,
    yarn_mscale,
)

__all__ = [
    "PRESETS",
    "MLAConfig",
    "RopeConfig",
    "YarnConfig",
    "apply_rope",
    "default_softmax_scale",
    "inverse_frequencies",
    "preset",
    "rms_norm",
    "rope_table",
    "yarn_mscale",
]
