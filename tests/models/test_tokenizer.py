"""The tokenizer: round trips, streams, and files it must refuse."""

import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from mla_ref.models.gguf_file import GGUFFile
from mla_ref.models.passage import passage
from mla_ref.models.tokenizer import StreamDecoder, Tokenizer


@pytest.fixture
def tiny(write_gguf) -> Tokenizer:
    pytest.importorskip("tokenizers")
    return Tokenizer(GGUFFile(write_gguf()))


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.from_gguf()


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.add(token_id) for token_id in token_ids), decoder.finish()]


# The fixture does not change between examples.
one_tokenizer = hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


@one_tokenizer
@hypothesis.given(st.text())
def test_any_text_comes_back(tiny, text):
    token_ids = tiny.encode(text)
    assert tiny.decode(token_ids) == text
    assert "".join(stream(tiny, token_ids)) == text


@one_tokenizer
@hypothesis.given(st.lists(st.integers(3, 263)))
def test_a_stream_of_any_tokens_ends_as_the_library_decodes_them(tiny, token_ids):
    from tokenizers import decoders

    tiny._library.decoder = decoders.ByteLevel()
    expected = tiny._library.decode(token_ids, skip_special_tokens=False)
    assert tiny.decode(token_ids) == expected
    assert "".join(stream(tiny, token_ids)) == expected


def test_merges_are_used_and_digits_stay_apart(tiny):
    the, one, two = tiny.encode("the"), tiny.encode("1"), tiny.encode("2")
    assert len(the) == 1
    # The table has a merge of 1 and 2; the split of digits comes before it.
    assert tiny.encode("12") == one + two


def test_a_character_is_held_back_until_it_is_whole(tiny):
    token_ids = tiny.encode("€")
    assert [len(tiny.token_bytes(i)) for i in token_ids] == [1, 1, 1]
    assert stream(tiny, token_ids) == ["", "", "€", ""]
    assert stream(tiny, token_ids[:2]) == ["", "", "\ufffd"]


def test_control_tokens_are_known_by_name(tiny):
    assert (tiny.eos_id, tiny.special_ids) == (2, {0, 1, 2})
    assert tiny.encode("<|im_start|>t<|im_end|>")[::2] == [1, 2]
    assert tiny.decode([1, 2]) == "<|im_start|><|im_end|>"


def test_a_byte_without_a_token_is_refused_not_dropped(write_gguf):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b"]
    tables = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 3, 1, 1]}
    tables["tokenizer.ggml.merges"] = ["a b"]
    with pytest.raises(ValueError, match="its tokens and merges do not fit"):
        Tokenizer(GGUFFile(write_gguf(metadata=tables)))
    tables["tokenizer.ggml.tokens"] = [*tokens[:4], "b", "ab"]
    tables["tokenizer.ggml.token_type"] = [3, 3, 3, 1, 1, 1]
    tokenizer = Tokenizer(GGUFFile(write_gguf(metadata=tables)))
    assert tokenizer.encode("ab") == [5]
    with pytest.raises(ValueError, match="byte 0x63, for which the tokenizer has no token"):
        tokenizer.encode("abc")


def test_text_that_is_none(tiny, plain_calls):
    with pytest.raises(TypeError, match="text must be a string, got 7"):
        tiny.encode(7)
    with pytest.raises(ValueError, match="text must be valid Unicode"):
        tiny.encode("\ud800")
    with pytest.raises(ValueError, match="token_id must be below 264, got 264"):
        tiny.decode([264])
    with pytest.raises(ValueError, match="token_id must be at least 0, got -1"):
        tiny.decode([-1])


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"tokenizer.ggml.model": "llama"}, "model is 'llama', expected 'gpt2'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre is 'llama-bpe', expected 'smollm'"),
        ({"tokenizer.ggml.pre": None}, "pre is missing"),
        ({"tokenizer.ggml.tokens": ["a"]}, "1 tokens but 264 token types"),
        ({"tokenizer.ggml.eos_token_id": 264}, "the end token 264 is not in the vocabulary"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "its tokens and merges do not fit"),
    ],
)
def test_another_tokenizer_is_refused(write_gguf, metadata, message):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=rf"tiny\d\.gguf: .*{message}"):
        Tokenizer(GGUFFile(write_gguf(metadata=metadata)))


def test_without_the_package_the_error_names_the_extra(write_gguf, monkeypatch):
    file = GGUFFile(write_gguf())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r'tokenizers .* pip install "mla-ref\[model\]"'):
        Tokenizer(file)


@pytest.mark.model
def test_the_real_tokenizer(real):
    assert (real.vocab_size, real.eos_id, len(real.special_ids)) == (49152, 2, 17)
    # Known from the model's own tokenizer: digits one by one, a space before a word in its token.
    assert real.encode("Hello world") == [19556, 905]
    assert len(real.encode("20261129")) == 8
    assert real.encode("<|im_start|>user") == [1, 4093]
    assert real.decode(real.encode(passage())) == passage()
    with pytest.raises(ValueError, match="byte 0x04"):
        real.encode("a\x04")


@pytest.mark.model
@hypothesis.given(st.text(st.characters(exclude_characters="\x04\x06\x13\x14\x16\x1d")))
def test_any_text_comes_back_from_the_real_tokenizer(real, text):
    hypothesis.assume(all(ord(c) < 0x40000 or ord(c) >= 0xC0000 for c in text))
    token_ids = real.encode(text)
    assert real.decode(token_ids) == text
    assert "".join(stream(real, token_ids)) == text
