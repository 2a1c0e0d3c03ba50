"""Models whose attention climbs the ladder: SmolLM2 in MLA form, and DeepSeek-shaped layers."""

from mla_ref.models.gguf_file import GGUFFile, default_gguf
from mla_ref.models.gqa_as_mla import PackedMLA, Packing, SplitMLA, group_selectors
from mla_ref.models.mla_layer import MLALayer
from mla_ref.models.mtp import MTPModule, MTPWeights
from mla_ref.models.passage import passage
from mla_ref.models.projections import FORMS, LatentProjections, attend_latent
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_attention import GQAProjections, attend_grouped
from mla_ref.models.smollm2_layer import ATTENTIONS, SmolLM2Layer
from mla_ref.models.smollm2_weights import LayerWeights, SmolLM2Config, SmolLM2Weights
from mla_ref.models.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "ATTENTIONS",
    "FORMS",
    "GGUFFile",
    "GQAProjections",
    "LatentProjections",
    "LayerWeights",
    "MLALayer",
    "MTPModule",
    "MTPWeights",
    "PackedMLA",
    "Packing",
    "SmolLM2",
    "SmolLM2Config",
    "SmolLM2Layer",
    "SmolLM2Weights",
    "SplitMLA",
    "StreamDecoder",
    "Tokenizer",
    "attend_grouped",
    "attend_latent",
    "default_gguf",
    "group_selectors",
    "passage",
]
