"""Detokenizers: any grouping of the same ids gives the text that one-shot decoding gives."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.gateway.text.stop_strings import StopStrings
from services.gateway.text.text_stream import TextStream
from services.gateway.text.tokenizer import Tokenizer as GatewayTokenizer

SPECIAL = ["<s>", "</s>"]
CORPUS = ["the cat sat on the mat", " leading and  double  spaces ", "naïve 漢字 👩‍💻 é", "ab ab ab\n\nHuman: hi"] * 3


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "two words"])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """As of Llama 2: spaces are written as an underscore mark, unknown characters as bytes, and the space in front
    of the whole text is dropped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "▁the", "▁cat", "cat", "s", "▁sat", "the", "▁on", "a", "b", "▁▁", "é", "漢"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


KINDS = {"byte_level": byte_level(), "sentencepiece_like": sentencepiece_like()}
GATEWAY = {name: GatewayTokenizer(tokenizer.to_str()) for name, tokenizer in KINDS.items()}
VOCAB_SIZES = {name: tokenizer.get_vocab_size() for name, tokenizer in KINDS.items()}


def shown(tokenizer: GatewayTokenizer, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(context)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def whole_characters(data: bytes) -> str:
    """As one-shot decoding, without a character that the end cuts off."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


@settings(deadline=None)
@given(data=st.data())
def test_byte_level_text_equals_one_shot_decoding(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, VOCAB_SIZES["byte_level"] - 1), max_size=40))
    tokenizer = GATEWAY["byte_level"]
    spelled = b"".join(tokenizer.spelling(i) for i in ids if i >= len(SPECIAL))
    text = "".join(shown(tokenizer, ids))
    assert text == whole_characters(spelled)
    one_shot = KINDS["byte_level"].decode(ids, skip_special_tokens=True)
    assert one_shot.removeprefix(text).strip("\ufffd") == ""


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_a_text_comes_back_whole_and_never_in_half_characters(text: str) -> None:
    """One byte a token: every character beyond ASCII is split."""
    tokenizer = GATEWAY["byte_level"]
    id_of = {tokenizer.spelling(i): i for i in range(len(SPECIAL), VOCAB_SIZES["byte_level"])}
    pieces = shown(tokenizer, [id_of[bytes([byte])] for byte in text.encode()])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


SENTENCES = st.lists(
    st.sampled_from(["▁the", "▁cat", "cat", "s", "▁sat", "▁on", "é", "漢", "bytes of 👩", "▁▁"]), max_size=20
)


def sentence_ids(pieces: list[str]) -> list[int]:
    vocab = KINDS["sentencepiece_like"].get_vocab()
    ids: list[int] = []
    for piece in pieces:
        if piece.startswith("bytes of "):
            ids += [vocab[f"<0x{byte:02X}>"] for byte in piece.removeprefix("bytes of ").encode()]
        else:
            ids.append(vocab[piece])
    return ids


@settings(deadline=None)
@given(pieces=SENTENCES)
def test_a_decoder_that_drops_the_first_space_drops_only_that(pieces: list[str]) -> None:
    ids = sentence_ids(pieces)
    expected = KINDS["sentencepiece_like"].decode(ids, skip_special_tokens=True)
    out = shown(GATEWAY["sentencepiece_like"], ids)
    assert "".join(out) == expected
    assert all("\ufffd" not in piece for piece in out)


@settings(deadline=None)
@given(prompt=SENTENCES.filter(bool), pieces=SENTENCES)
def test_output_reads_as_it_does_after_its_prompt(prompt: list[str], pieces: list[str]) -> None:
    prompt_ids, ids = sentence_ids(prompt), sentence_ids(pieces)
    decode: Any = KINDS["sentencepiece_like"].decode
    expected = decode(prompt_ids + ids)[len(decode(prompt_ids)) :]
    assert "".join(shown(GATEWAY["sentencepiece_like"], ids, prompt_ids)) == expected


def test_special_tokens_spell_nothing() -> None:
    for kind, tokenizer in GATEWAY.items():
        special = [KINDS[kind].token_to_id(token) for token in SPECIAL]
        assert "".join(shown(tokenizer, special)) == ""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_window_of_tokens_stays_short(kind: str) -> None:
    detokenizer = GATEWAY[kind].detokenizer()
    vocab = KINDS[kind].get_vocab()
    cat = vocab.get("▁cat", vocab.get("cat", 5))
    for _ in range(2000):
        detokenizer.push(cat)
    assert len(getattr(detokenizer, "_window", [])) < 40


ALPHABET = st.text(alphabet="abc\n ", max_size=30)
STOPS = st.lists(st.text(alphabet="abc\n ", min_size=1, max_size=4), min_size=1, max_size=4)


def cut_by_character(text: str, stops: list[str]) -> tuple[str, bool]:
    """The reference: read one character at a time; the first stop string that is complete cuts, the longest of
    several that are."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


@settings(deadline=None)
@given(text=ALPHABET, stops=STOPS, data=st.data())
def test_the_cut_does_not_depend_on_how_the_text_arrives(text: str, stops: list[str], data: st.DataObject) -> None:
    cutter, out, stopped, rest = StopStrings(stops), "", False, text
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:size], rest[size:]
        new, stopped = cutter.push(piece)
        out += new
        assert cut_by_character(text, stops)[0].startswith(out), "nothing shown is ever taken back"
    out += "" if stopped else cutter.flush()
    assert (out, stopped) == cut_by_character(text, stops)


@settings(deadline=None)
@given(text=st.text(alphabet="ab漢👩", min_size=1, max_size=20), data=st.data())
def test_stop_strings_cut_the_same_whatever_tokens_the_text_came_in(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    tokenizer = GATEWAY["byte_level"]
    id_of = {tokenizer.spelling(i): i for i in range(len(SPECIAL), VOCAB_SIZES["byte_level"])}
    in_bytes = [id_of[bytes([byte])] for byte in text.encode()]
    in_tokens: list[int] = KINDS["byte_level"].encode(text).ids
    for ids in (in_bytes, in_tokens):
        stream, out = TextStream(tokenizer.detokenizer(), [stop]), ""
        for token_id in ids:
            out += stream.push(token_id)
            if stream.stopped:
                break
        assert out + stream.flush() == text[: text.index(stop)]
