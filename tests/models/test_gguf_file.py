"""Reading GGUF files: whole ones, against the package gguf, and all that can be wrong with one."""

import contextlib
import struct
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from mla_ref.models.gguf_file import GGUFFile, default_gguf
from mla_ref.models.gguf_header import read_header

HERE = Path("model.gguf")


def header(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def small_file() -> bytes:
    """Two keys, a list of strings, and one F32 tensor [2, 3], by hand from the format."""
    head = header(
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("layers") + struct.pack("<II", 4, 30),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("é"),
        text("w") + struct.pack("<IQQIQ", 2, 3, 2, 0, 0),
        tensors=1,
        keys=3,
    )
    return head + b"\0" * (-len(head) % 32) + struct.pack("<6f", *range(6))


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "file.gguf"
    path.write_bytes(data)
    return path


def test_reads_a_file_written_by_hand(tmp_path):
    pytest.importorskip("gguf")
    file = GGUFFile(write(tmp_path, small_file()))
    assert file.metadata == {"general.architecture": "llama", "layers": 30, "tokens": ["a", "é"]}
    assert torch.equal(file.tensor("w", (2, 3)), torch.arange(6.0).view(2, 3))
    assert file.tensor("w", (2, 3), torch.float64).dtype == torch.float64


def test_the_tensor_is_a_copy_that_may_be_written(tmp_path):
    pytest.importorskip("gguf")
    file = GGUFFile(write(tmp_path, small_file()))
    file.tensor("w", (2, 3)).zero_()
    assert file.tensor("w", (2, 3)).sum() == 15


@pytest.mark.parametrize("kind", [None, "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_reads_what_the_package_gguf_wrote(write_gguf, kind):
    path = write_gguf(quantise=kind)
    gguf = pytest.importorskip("gguf")
    reader, file = gguf.GGUFReader(path), GGUFFile(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == fields
    assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        expected = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(file.tensor(tensor.name, tuple(expected.shape)), expected)


def test_every_scalar_type(tmp_path):
    unsigned, signed = {0: "B", 2: "H", 4: "I", 10: "Q"}, {1: "b", 3: "h", 5: "i", 11: "q"}
    values = {kind: (code, 7) for kind, code in unsigned.items()}
    values |= {kind: (code, -7) for kind, code in signed.items()}
    values |= {6: ("f", 0.5), 7: ("?", True), 12: ("d", 0.1)}
    parts = [text(f"k{t}") + struct.pack(f"<I{c}", t, v) for t, (c, v) in values.items()]
    read = read_header(HERE, header(*parts, keys=len(parts)))
    assert read.metadata == {f"k{t}": v for t, (_, v) in values.items()}
    assert isinstance(read.metadata["k7"], bool)


def test_a_file_cut_anywhere_says_so(tmp_path):
    pytest.importorskip("gguf")
    whole = small_file()
    for length in range(4, len(whole)):
        with pytest.raises(ValueError, match=r"file\.gguf is truncated"):
            GGUFFile(write(tmp_path, whole[:length]))


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, len(small_file()) - 1), st.integers(0, 255)), max_size=4)
)
@hypothesis.settings(max_examples=200)
def test_a_damaged_header_raises_nothing_but_a_value_error(changes):
    data = bytearray(small_file())
    for position, byte in changes:
        data[position] = byte
    # Any other error fails the test.
    with contextlib.suppress(ValueError):
        read_header(HERE, bytes(data))


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(100), r"not a GGUF file: it starts with b'PK"),
        (b"GG", r"not a GGUF file: it starts with b'GG'"),
        (header(version=1), "GGUF version 1, expected 2 or 3"),
        # Big-endian files have the bytes of the version turned round.
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648"),
        (header(*[text("k") + struct.pack("<II", 4, 1)] * 2, keys=2), "damaged: it has k twice"),
        (header(text("k") + struct.pack("<I", 99), keys=1), "the type 99"),
        (header(text("k") + struct.pack("<IIQ", 9, 9, 1), keys=1), "the type 9"),
        (header(struct.pack("<Q", 1) + b"\xff", keys=1), "not UTF-8"),
        (header(text("w") + struct.pack("<I", 5), tensors=1), "w has 5 dimensions"),
        (header(text("w") + struct.pack("<I", 0), tensors=1), "w has 0 dimensions"),
        (header(text("w") + struct.pack("<IQIQ", 1, 1, 77, 0), tensors=1), "number format 77"),
        (header(text("w") + struct.pack("<IQIQ", 1, 33, 8, 0), tensors=1), "in blocks of 32"),
        (header(text("general.alignment") + struct.pack("<II", 4, 0), keys=1), "alignment is 0"),
        (header(keys=2**60), "truncated or damaged"),
    ],
)
def test_a_wrong_file_says_what_was_found(tmp_path, data, message):
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match=message):
        GGUFFile(write(tmp_path, data))


def test_no_file_and_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nothing"):
        GGUFFile(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is a folder"):
        GGUFFile(tmp_path)


def test_a_wrong_question_names_file_and_key(tmp_path, plain_calls):
    pytest.importorskip("gguf")
    file = GGUFFile(write(tmp_path, small_file()))
    with pytest.raises(ValueError, match=r"file\.gguf: depth is missing, expected a value of int"):
        file.get("depth", int)
    with pytest.raises(ValueError, match=r"layers is 30, expected a value of str"):
        file.get("layers", str)
    with pytest.raises(ValueError, match=r"file\.gguf has no tensor v"):
        file.tensor("v", (2, 3))
    with pytest.raises(ValueError, match=r"w has the shape \[2, 3\], expected \[3, 2\]"):
        file.tensor("w", (3, 2))


def test_a_format_that_cannot_be_dequantised(tmp_path):
    pytest.importorskip("gguf")
    head = header(text("w") + struct.pack("<IQIQ", 1, 8, 26, 0), tensors=1)  # 26 is I32
    file = GGUFFile(write(tmp_path, head + bytes(-len(head) % 32 + 32)))
    with pytest.raises(ValueError, match="w is I32, which gguf cannot dequantise"):
        file.tensor("w", (8,))


def test_without_the_package_gguf_the_error_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path, small_file())
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"] + ["gguf"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "mla-ref\[model\]"'):
        GGUFFile(path)


@pytest.mark.model
@pytest.mark.parametrize("num_bytes", [1_000, 40_000_000])
def test_the_real_file_cut_short(tmp_path, num_bytes):
    with default_gguf().open("rb") as file:
        path = write(tmp_path, file.read(num_bytes))
    with pytest.raises(ValueError, match="is truncated"):
        GGUFFile(path)
