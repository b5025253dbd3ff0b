"""One tokenizer.json for everything, and text stays text."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sirara.data import tokenizer as tokenizer_module
from sirara.data.tokenizer import (
    TextTokenizer,
    byte_tokenizer,
    tokenizer_digest,
    tokenizer_vocab,
    train_bpe,
)
from sirara.errors import DataError

TEXT = "Fellow citizens,\n\nthe state of the union: naïve café 你好 <|endoftext|> \t end.\n"


def word_level(words, special=()):
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(list(special))
    return made


def save(made, folder):
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_bytes_are_the_bytes_and_the_library_agrees():
    tokenizer = TextTokenizer(byte_tokenizer(), name="bytes")
    assert (tokenizer.vocab, tokenizer.eot, tokenizer.is_bytes) == (257, 256, True)
    everything = "".join(map(chr, range(1, 1000))) + TEXT
    fast = tokenizer.encode(everything)
    assert fast.tolist() == list(everything.encode())
    tokenizer.is_bytes = False
    np.testing.assert_array_equal(tokenizer.encode(everything), fast)
    assert tokenizer.decode(fast) == everything


def test_text_of_a_special_token_does_not_end_a_document():
    trained = TextTokenizer(train_bpe([TEXT] * 3, 300), name="trained")
    for tokenizer in (trained, TextTokenizer(byte_tokenizer(), name="bytes")):
        ids = tokenizer.encode(TEXT)
        assert tokenizer.eot not in ids
        assert tokenizer.decode(ids) == TEXT


def test_a_trained_bpe_is_the_same_every_time_and_loads_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    texts = [f"{TEXT} number {n} of the states" for n in range(50)]
    raw = train_bpe(texts, 400)
    assert train_bpe(texts, 400) == raw
    (tmp_path / "tokenizer.json").write_bytes(raw)
    ours = TextTokenizer.load(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert ours.eot == 0
    assert len(theirs) == ours.vocab
    plain = "the state of the union: naïve 你好\n"
    assert theirs.encode(plain) == ours.encode(plain).tolist()


def test_long_text_is_cut_where_the_tokens_stay_the_same(monkeypatch):
    text = "".join(f"line {n} of a long document\n\n    with blocks,\nand words\n" for n in range(3000))
    tokenizer = TextTokenizer(train_bpe([text], 600), name="trained")
    whole = tokenizer.encode(text)
    monkeypatch.setattr(tokenizer_module, "CHUNK_CHARS", 5000)
    np.testing.assert_array_equal(tokenizer.encode(text), whole)


def test_text_without_a_place_to_cut_still_comes_back(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "CHUNK_CHARS", 100)
    tokenizer = TextTokenizer(train_bpe(["ab ab"], 300), name="trained")
    for text in ("x" * 1234, "word " * 300, "好" * 1000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_of_the_file_are_not_obeyed(tmp_path):
    made = word_level(["<unk>", "a", "b"], ["</s>"])
    made.enable_truncation(4)
    made.enable_padding(length=8)
    tokenizer = TextTokenizer.load(save(made, tmp_path / "t"))
    assert tokenizer.encode("a b " * 10).tolist() == [1, 2] * 10


def test_no_token_is_added_to_the_text(tmp_path):
    from tokenizers.processors import TemplateProcessing

    made = word_level(["<unk>", "a"], ["<s>", "</s>"])
    made.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    assert TextTokenizer.load(save(made, tmp_path / "t")).encode("a a").tolist() == [1, 1]


def test_the_vocabulary_counts_up_to_the_highest_id(tmp_path):
    vocab = {"<unk>": 0, "a": 1, "far": 700, "</s>": 3}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    folder = save(made, tmp_path / "t")
    assert TextTokenizer.load(folder).vocab == tokenizer_vocab(folder) == 701


@pytest.mark.parametrize("configured", ["<end>", {"content": "<end>", "lstrip": False}])
def test_the_end_token_of_the_configuration_beside_it_wins(tmp_path, configured):
    folder = save(word_level(["<unk>", "a"], ["</s>", "<end>"]), tmp_path / "t")
    assert TextTokenizer.load(folder).end_token == "</s>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": configured}))
    assert TextTokenizer.load(folder).end_token == "<end>"
    assert TextTokenizer.load(folder, end_token="a").eot == 1
    assert TextTokenizer.load(folder, end_token=0).end_token == "<unk>"


def test_a_tokenizer_without_an_end_token_is_refused_with_what_it_has(tmp_path):
    folder = save(word_level(["<unk>", "a"], ["[CLS]"]), tmp_path / "t")
    with pytest.raises(DataError, match="no end-of-text token") as caught:
        TextTokenizer.load(folder)
    assert "[CLS]" in str(caught.value)
    assert "--end-token" in str(caught.value)
    with pytest.raises(DataError, match="no token 'b'"):
        TextTokenizer.load(folder, end_token="b")


@pytest.mark.parametrize("raw", [b"", b"\x0a\x0e\x0a\x05<unk>\x15", b'{"model": 3}', b"[]"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, raw):
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        TextTokenizer.load(tmp_path)
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        TextTokenizer.load(tmp_path / "missing.json")


def test_the_digest_does_not_depend_on_the_layout_of_the_file():
    raw = byte_tokenizer()
    parsed = json.loads(raw)
    shuffled = json.dumps(dict(reversed(parsed.items())), indent=3).encode()
    assert tokenizer_digest(shuffled, "x") == tokenizer_digest(raw, "x")
    parsed["added_tokens"][0]["content"] = "<end>"
    assert tokenizer_digest(json.dumps(parsed).encode(), "x") != tokenizer_digest(raw, "x")


def test_a_bpe_smaller_than_the_bytes_is_refused():
    with pytest.raises(DataError, match="need 257"):
        train_bpe([TEXT], 256)
