"""Tokenizers of every make, and texts that are hard to cut and to count: what bounds and cuts are held against."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from gateway.text.vocabulary import Vocabulary
from tests.unit.gateway.text.vocabularies import merges, sentences, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATTERNS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer | None = None) -> tokenizers.Tokenizer:
    """Merges of bytes, of which one is long; texts begin with a special token and end with another one."""
    backend = tokenizers.Tokenizer.from_str(merges().to_str())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    ends = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ends
    )
    return backend


def with_normalizer(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    backend = byte_level(split(PATTERNS["llama-3"]))
    backend.normalizer = normalizer
    return backend


def with_added(*tokens: AddedToken) -> tokenizers.Tokenizer:
    backend = byte_level(split(PATTERNS["llama-3"]))
    backend.add_tokens(list(tokens))
    return backend


def gemma(*, crosses: bool = False) -> tokenizers.Tokenizer:
    """A text is one word, whose bytes are spelled where it has no piece: as Gemma's tokenizer.json has it."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "▁ab", "ab", "▁▁", "▁▁▁▁"]
    pairs = [("▁", "a"), ("▁a", "b"), ("a", "b"), ("▁", "▁"), ("▁▁", "▁▁")]
    if crosses:
        pieces, pairs = [*pieces, "b▁"], [("b", "▁"), *pairs]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return backend


@cache
def word_piece() -> tokenizers.Tokenizer:
    """BERT's way: accents and control characters are dropped, and a word that is too long is one token."""
    pieces = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"##{letter}" for letter in "abcdefghs"),
        "the",
    ]
    backend = tokenizers.Tokenizer(
        models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend


# Each has places to cut at; those in BOUNDED have a bound too.
CUT: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **{name: lambda pattern=pattern: byte_level(split(pattern)) for name, pattern in PATTERNS.items()},
    "gpt-2 by itself": byte_level,
    "with a space before": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "nfc": lambda: with_normalizer(normalizers.NFC()),
    "lower case, nfkc": lambda: with_normalizer(normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKC()])),
    "nfd": lambda: with_normalizer(normalizers.NFD()),
    "added": lambda: with_added(AddedToken("<|long|>"), AddedToken("12345678" * 4, single_word=True)),
    "gemma": gemma,
}
BOUNDED = dict(CUT)
CUT_ONLY: dict[str, Callable[[], tokenizers.Tokenizer]] = {"word piece": word_piece}


def vocabulary_of(backend: tokenizers.Tokenizer) -> Vocabulary:
    return Vocabulary.of(tokenizers.Tokenizer.from_str(backend.to_str()))


def hard_texts(seed: int, count: int) -> Iterator[str]:
    """Yields texts of all scripts, runs of one character, decomposed characters and many words."""
    rng = random.Random(seed)
    words = [word for sentence in sentences() for word in sentence.split() if word.isascii()]
    odd = ["a\u0301", "\u03b1\u0313\u0300\u0345", "\u1100\u1161\u11a8", "\u00a0", "\u200b", "\r\n", "'s", "'LL", "\x00"]
    odd += ["\u017f", "\u212a", "1234", "<s>", "ab a", "12345678" * 4, "naïve", "Привет", "日本語"]
    yield from texts(seed, count)
    for _ in range(count):
        parts: list[str] = []
        for _ in range(rng.randint(1, 30)):
            part = rng.choice(words) if rng.random() < 0.8 else rng.choice(odd)
            parts.append(part * (rng.randint(1, 40) if rng.random() < 0.1 else 1))
            parts.append(rng.choice([" ", " ", " ", "", "  ", "\n", " " * rng.randint(1, 40)]))
        yield "".join(parts)
