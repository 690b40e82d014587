"""Tokenizers as models bring them that have no tokenizer.json, trained here: tiny, and the same each time."""

from __future__ import annotations

import base64
import io
import json
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TRAINED_ON = """
    the cat sat on a mat and looked at aaaa aaaaaaa ababab people's 12345 7890 don't HELLO Hello hello naïve café
    Größe año Привет мир дела 日本語 のテスト 中文 字符 한국어 안녕 שלום مرحبا हिन्दी ไทย 🙂 🎉🎉 ﬁne ①② e\u0301
"""
_WORDS = _TRAINED_ON.split()
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity"},
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<mask>", "▁▁", "▁▁▁", "\n\n"],
        "control_symbols": ["[INST]", "[/INST]"],
    },
    "unigram": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc"},
}
SENTENCE_PIECE = tuple(_KINDS)
# A kind of words that splits at letters, marks, digits and others, as tekken's does.
PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NUM_SPECIALS = 30


def sentences() -> Iterator[str]:
    """Yields texts of all scripts to train on."""
    rng = random.Random(5)
    for _ in range(400):
        yield " ".join(rng.choices(_WORDS, k=rng.randint(3, 12)))


@cache
def sentence_piece(kind: str) -> bytes:
    """Trains a `tokenizer.model`."""
    written = io.BytesIO()
    defaults = {"remove_extra_whitespaces": False, "character_coverage": 0.99, "vocab_size": 460}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(),
        model_writer=written,
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        **{**defaults, **_KINDS[kind]},
    )
    return written.getvalue()


def write_sentence_piece(folder: Path, kind: str, **config: Any) -> None:
    """Writes a model folder's text files around it."""
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "tokenizer.model").write_bytes(sentence_piece(kind))
    given = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))


@cache
def merges() -> tokenizers.Tokenizer:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(sentences(), trainer)
    return trained


def write_merges(folder: Path, **config: Any) -> int:
    """Writes a model folder's text files with the two of GPT-2; returns the id of </s>, an added token."""
    (folder / "config.json").write_text("{}")
    merges().model.save(str(folder))
    size = merges().get_vocab_size()
    added = {size: {"content": "</s>", "special": True}, size + 1: {"content": "<tool>", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, **config}))
    return size


def ranks() -> dict[bytes, int]:
    """Byte sequences by rank: first the bytes, then what was merged, in that order."""
    pieces = sorted(merges().get_vocab().items(), key=lambda item: item[1])
    spelled = [merges().decoder.decode([piece]).encode() for piece, _ in pieces]
    whole = [token for token in dict.fromkeys(spelled) if len(token) > 1 and b"\xef\xbf\xbd" not in token]
    return {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + whole)}


def write_tekken(folder: Path, *, lists_specials: bool = True) -> None:
    """Writes a model folder's text files with a tekken.json, which holds some ranks more than are used."""
    (folder / "config.json").write_text("{}")
    used = [*ranks().items(), (b"zzzz", len(ranks()))]
    vocab = [{"rank": r, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for token, r in used]
    sizes = {"default_vocab_size": len(ranks()) + NUM_SPECIALS, "default_num_special_tokens": NUM_SPECIALS}
    stored: dict[str, Any] = {"config": {"pattern": PATTERN, "version": "v3", **sizes}, "vocab": vocab}
    if lists_specials:
        named = [("<unk>", True), ("<s>", True), ("</s>", True), ("[INST]", True), ("[THINK]", False)]
        stored["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": hidden} for rank, (text, hidden) in enumerate(named)
        ]
    (folder / "tekken.json").write_text(json.dumps(stored))


def texts(seed: int, count: int) -> Iterator[str]:
    """Yields texts of many scripts, with runs of one character, spaces at both ends, and what nobody trained on."""
    rng = random.Random(seed)
    blocks = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE00), (0x2000, 0x2070)]
    blocks += [(0x3040, 0x30FF), (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0x1F300, 0x1F6FF), (0x1, 0x20), (0xFB00, 0xFB10)]
    for _ in range(count):
        parts: list[str] = []
        for _ in range(rng.randint(1, 8)):
            low, high = rng.choice(blocks)
            parts += [
                rng.choice(_WORDS) if rng.random() < 0.5 else "".join(chr(rng.randrange(low, high)) for _ in range(4)),
                chr(rng.randrange(low, high)) * rng.randint(0, 9) if rng.random() < 0.3 else "",
                rng.choice(["", " ", "  ", "\n", "\n\n", "\t", "'s"]),
            ]
        yield "".join(parts)
