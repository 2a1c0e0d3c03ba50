"""Small GGUF files of every kind a test asks for, and the pretrained model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config, SmolLM2Weights

# Rows of 64 and 96 numbers: whole blocks of 32, so that quantised formats can store them.
TINY = SmolLM2Config(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=264,
    context_length=128,
)


def tiny_tables() -> tuple[list[str], list[int], list[str]]:
    """A byte-level vocabulary: 3 control tokens, 256 bytes, 5 merges."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(hidden))]
    merges = ["t h", "th e", "Ġ the", "Ã ©", "1 2"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *characters]
    return tokens + [m.replace(" ", "") for m in merges], [3] * 3 + [1] * 261, merges


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a small model of random weights with the package gguf, and return its path.

    `metadata` overrides keys (None leaves one out), `tensors` overrides tensors (None leaves one
    out), `quantise` names the format of the matrices.
    """
    gguf = pytest.importorskip("gguf")

    def write(
        *,
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, torch.Tensor | None] | None = None,
        quantise: str | None = None,
        seed: int = 0,
    ) -> Path:
        tokens, types, merges = tiny_tables()
        keys = {
            "general.architecture": "llama",
            "llama.block_count": TINY.num_layers,
            "llama.context_length": TINY.context_length,
            "llama.embedding_length": TINY.hidden_size,
            "llama.feed_forward_length": TINY.intermediate_size,
            "llama.attention.head_count": TINY.num_heads,
            "llama.attention.head_count_kv": TINY.num_kv_heads,
            "llama.rope.freq_base": TINY.rope_theta,
            "llama.attention.layer_norm_rms_epsilon": TINY.rms_norm_eps,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.eos_token_id": 2,
        } | (metadata or {})
        path = tmp_path / f"tiny{len(list(tmp_path.iterdir()))}.gguf"
        writer = gguf.GGUFWriter(path, keys.pop("general.architecture"))
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        for key, value in keys.items():
            if value is not None:
                add.get(type(value), writer.add_array)(key, value)
        for name, tensor in (named_tensors(seed) | (tensors or {})).items():
            if tensor is None:
                continue
            if quantise and tensor.ndim == 2:
                kind = gguf.GGMLQuantizationType[quantise]
                data = gguf.quants.quantize(tensor.numpy(), kind)
                writer.add_tensor(name, data, raw_dtype=kind)
            else:
                writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def named_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """The tiny model's random tensors under their GGUF names."""
    weights = SmolLM2Weights.random(TINY, seed)
    named = {"token_embd.weight": weights.embedding, "output_norm.weight": weights.output_norm}
    for i, layer in enumerate(weights.layers):
        named |= {f"blk.{i}.{name}.weight": tensor for name, tensor in vars(layer).items()}
    return named


@pytest.fixture(scope="session")
def smollm2() -> SmolLM2:
    """SmolLM2-135M in float32; tests that use it carry the marker `model`."""
    return SmolLM2.from_gguf(attention="gqa")
