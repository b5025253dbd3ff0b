"""Text to token ids and back: Hugging Face tokenizer.json files, BPE trained here, plain bytes.

All three are one thing, a tokenizer.json, so that a run, an export and transformers use the same file.
Text is only ever text: a document that contains "<|endoftext|>" does not end there.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sirara.errors import DataError

END_OF_TEXT = "<|endoftext|>"
KNOWN_END_TOKENS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)
CHUNK_CHARS = 1 << 20

# Between two lines without blanks beside the newline: the pre-tokenizers of GPT-2, Llama 3 and Qwen split
# there anyway, so that pieces of a long document give the tokens of the whole.
_SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)")


class TextTokenizer:
    """One tokenizer.json with its end-of-text token.

    `vocab` is the highest id + 1; `digest` names the content of the file, however it is laid out; `raw` are
    its bytes.
    """

    def __init__(
        self, raw: bytes, *, name: str, end_token: str | int | None = None, folder: Path | None = None
    ) -> None:
        self.raw = raw
        self.name = name
        self.digest = tokenizer_digest(raw, name)
        self.is_bytes = self.digest == tokenizer_digest(byte_tokenizer(), "bytes")
        self._tokenizer = _parse(raw, name)
        # A tokenizer.json may carry the truncation of its last use and would silently cut documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = max(ids.values(), default=-1) + 1
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        self.end_token = _end_token(ids, special, name, end_token, folder)
        self.eot = ids[self.end_token]

    @classmethod
    def load(cls, path: Path, *, end_token: str | int | None = None) -> "TextTokenizer":
        """From a tokenizer.json or a folder with one.  Raises DataError naming the file.

        `end_token` is the token that ends a document, or its id; None: what the tokenizer calls so.
        """
        file = tokenizer_file(path)
        return cls(read_tokenizer(file), name=str(file), end_token=end_token, folder=file.parent)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int64, without the end-of-text token."""
        if self.is_bytes:
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        parts = [
            # The fast variant does not work out offsets; one text at a time keeps it to this thread.
            self._tokenizer.encode_batch_fast([chunk], add_special_tokens=False)[0].ids
            for chunk in _chunks(text)
        ]
        return np.concatenate([np.array(part, dtype=np.int64) for part in parts])

    def decode(self, ids: Sequence[int] | np.ndarray, *, show_special: bool = True) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not show_special)


def tokenizer_digest(raw: bytes, name: str) -> str:
    """xxh3-128 of the parsed file, so that white space and the order of keys do not count."""
    try:
        parsed = json.loads(raw)
    except ValueError as error:
        raise DataError(
            f"{name} is not a tokenizer.json: {error}",
            code="SR311",
            try_=(
                "for a SentencePiece .model: load it with transformers and save it with save_pretrained, "
                "which writes a tokenizer.json",
            ),
        ) from error
    canonical = json.dumps(parsed, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def tokenizer_vocab(path: Path) -> int:
    """The highest token id + 1 of a tokenizer.json or of the one in the folder `path`."""
    file = tokenizer_file(path)
    ids = _parse(read_tokenizer(file), str(file)).get_vocab(with_added_tokens=True)
    return max(ids.values(), default=-1) + 1


def byte_tokenizer() -> bytes:
    """The tokenizer.json whose ids 0..255 are the UTF-8 bytes and 256 is the end of text."""
    # Written by hand, because the layout (and so the digest) must not move with the library's version.
    vocab = {character: byte for byte, character in _byte_characters().items()}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 256, "content": END_OF_TEXT, **special}],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [],
            },
        },
        ensure_ascii=False,
    ).encode()


def train_bpe(texts: Iterable[str], vocab: int) -> bytes:
    """The tokenizer.json of a byte-level BPE with at most `vocab` tokens; id 0 is the end of text.

    The result depends on the texts and their order alone.
    """
    if vocab < 257:
        raise DataError(
            f"a byte-level BPE of {vocab} tokens is too small: 256 bytes and the end of text need 257",
            code="SR312",
            try_=("--train-bpe 4096", "--bytes"),
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((chunk for text in texts for chunk in _chunks(text)), trainer)
    return tokenizer.to_str(pretty=True).encode()


def tokenizer_file(path: Path | str) -> Path:
    """`path`, or the tokenizer.json in it when it is a folder."""
    path = Path(path)
    return path / "tokenizer.json" if path.is_dir() else path


def read_tokenizer(file: Path) -> bytes:
    """The bytes of the file.  Raises DataError naming it."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer {file}: {error.strerror}",
            code="SR310",
            try_=("the path of a tokenizer.json, or of a folder with one",),
        ) from error


def _chunks(text: str) -> Iterator[str]:
    """`text` in pieces of about a million characters; the tokenizer takes some 100 bytes per token."""
    start = 0
    while len(text) - start > CHUNK_CHARS:
        safe = _SAFE_CUT.search(text, start + CHUNK_CHARS // 2, start + CHUNK_CHARS)
        stop = safe.start() if safe else text.rfind(" ", start + 1, start + CHUNK_CHARS)
        stop = stop if stop > start else start + CHUNK_CHARS
        yield text[start:stop]
        start = stop
    yield text[start:]


def _parse(raw: bytes, name: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(raw.decode())
    # The library raises bare Exception for every malformed file.
    except Exception as error:
        raise DataError(f"{name} is not a tokenizer.json: {error}", code="SR311") from error


def _end_token(
    ids: dict[str, int], special: list[str], name: str, wanted: str | int | None, folder: Path | None
) -> str:
    if isinstance(wanted, int):
        wanted = next((token for token, number in ids.items() if number == wanted), str(wanted))
    candidates = [wanted] if wanted is not None else [*_configured_end_token(folder), *KNOWN_END_TOKENS]
    for candidate in candidates:
        if candidate in ids:
            return candidate
    raise DataError(
        f"{name} has no token {wanted!r}"
        if wanted
        else f"{name} has no end-of-text token that is known here",
        code="SR313",
        why=f"its special tokens: {' '.join(special[:12]) or 'none'}",
        try_=("--end-token TOKEN with the token that ends a document",),
    )


def _configured_end_token(folder: Path | None) -> list[str]:
    file = folder / "tokenizer_config.json" if folder else None
    if file is None or not file.is_file():
        return []
    try:
        token = json.loads(file.read_bytes()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{file} is not a tokenizer configuration: {error}", code="SR311") from error
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(256 + n) for n, byte in enumerate(others)}
