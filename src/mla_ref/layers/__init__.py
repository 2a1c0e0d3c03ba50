"""The parts of a layer beside attention: dimensions, rotary positions, norms, linear maps."""

from mla_ref.layers.config import MLAConfig, default_softmax_scale
from mla_ref.layers.index_share import full_layers, index_source, is_full_layer
from mla_ref.layers.indexer_config import IndexerConfig
from mla_ref.layers.mxfp8_linear import OnlineMXFP8Linear
from mla_ref.layers.norm import layer_norm, rms_norm
from mla_ref.layers.presets import PRESETS, preset
from mla_ref.layers.projection import Projection, project
from mla_ref.layers.quantised_linear import QuantisedLinear
from mla_ref.layers.rope import (
    RopeConfig,
    YarnConfig,
    apply_rope,
    inverse_frequencies,
    rope_table,
    yarn_mscale,
)
from mla_ref.layers.w4a16_linear import W4A16Linear

__all__ = [
    "PRESETS",
    "IndexerConfig",
    "MLAConfig",
    "OnlineMXFP8Linear",
    "Projection",
    "QuantisedLinear",
    "RopeConfig",
    "W4A16Linear",
    "YarnConfig",
    "apply_rope",
    "default_softmax_scale",
    "full_layers",
    "index_source",
    "inverse_frequencies",
    "is_full_layer",
    "layer_norm",
    "preset",
    "project",
    "rms_norm",
    "rope_table",
    "yarn_mscale",
]
