"""Reads the vocabulary of a model folder, in each of its file formats. Knows no templates and no requests.

`tokenizers` reads `tokenizer.json`, and computes the byte-level merges of `tekken.json` (Mistral) and of `vocab.json`
with `merges.txt` (GPT-2). A model that only has `tokenizer.model` is encoded by SentencePiece itself.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from blockyard.errors import BlockyardError, Reason
from blockyard.paths import read_file
from gateway.text.detokenizer import byte_of_character
from gateway.text.sentence_piece import SentencePiece
from gateway.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

Json = dict[str, Any]

# The tokenizer classes of transformers that make the same ids from these files; empty: no class is named.
_SENTENCE_PIECE = ("", "Llama", "CodeLlama", "Gemma", "Mistral")
_MERGES = ("", "GPT2", "CodeGen", "Qwen2")
# Qwen 2's pattern of words, which its files do not contain.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The special tokens of the first versions, whose files do not list them.
_TEKKEN_SPECIALS = """
    <unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]
    [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]
"""


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    config: Json
    """tokenizer_config.json."""
    special_tokens: Mapping[str, str]
    """The texts of special tokens, by their names in tokenizer_config.json."""
    added_tokens: Json = field(default_factory=dict[str, Any])
    """added_tokens.json: ids by text."""

    @property
    def tokenizer_class(self) -> str:
        """The name of the class in transformers, without Tokenizer or TokenizerFast at its end."""
        name = self.config.get("tokenizer_class")
        return name.removesuffix("Fast").removesuffix("Tokenizer") if isinstance(name, str) else ""

    def flag(self, name: str, default: bool) -> bool:
        """Returns a flag of tokenizer_config.json; `default` if it is null or missing."""
        value = self.config.get(name)
        return value if isinstance(value, bool) else default

    def added(self) -> Iterator[tuple[int, AddedToken]]:
        """Yields the tokens that were added to the vocabulary, with their ids."""
        specials = set(self.special_tokens.values())
        described: Json = self.config.get("added_tokens_decoder") or {}
        for token_id, given in described.items():
            how = {name: bool(given[name]) for name in ("lstrip", "rstrip", "single_word", "special") if name in given}
            yield int(token_id), AddedToken(str(given["content"]), normalized=False, **how)
        for text, token_id in () if described else self.added_tokens.items():
            yield int(token_id), AddedToken(text, normalized=False, special=text in specials)


def load_vocabulary(folder: Path, settings: TokenizerSettings, root: Path | None = None) -> Vocabulary:
    """Reads a folder's vocabulary; raises BlockyardError MODEL_NOT_LOADED with the cause and a remedy.

    `root`: the folder below which the files must lie, links followed; None: anywhere.
    """
    found = find_vocabulary(folder)
    if found is None:
        raise _not_loaded(
            f"{folder} has no tokenizer, which is one of {', '.join(VOCABULARY_FILES)}: copy the model's files to it"
        )
    try:
        return _READERS[found](folder / found, settings, root)
    except BlockyardError:
        raise
    except OSError as error:
        raise _not_loaded(f"{error.filename or folder / found} cannot be read: {error.strerror}") from None
    except Exception:  # noqa: BLE001 - the libraries raise plain Exception, and a file may have anything
        raise _not_loaded(f"{folder / found} is damaged or has an unknown format: copy it again") from None


def find_vocabulary(folder: Path) -> str | None:
    """Returns the name of a folder's vocabulary file; None: it has none."""
    return next((name for name in _READERS if (folder / name).exists()), None)


def _not_loaded(message: str) -> BlockyardError:
    return BlockyardError(Reason.MODEL_NOT_LOADED, message)


def _require_class(file: Path, settings: TokenizerSettings, known: Sequence[str]) -> None:
    if settings.tokenizer_class not in known:
        raise _not_loaded(
            f"{file.parent} has {file.name} of a {settings.config['tokenizer_class']} and no tokenizer.json: convert "
            "it once with transformers, AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )


def _read_tokenizers(file: Path, settings: TokenizerSettings, root: Path | None) -> Vocabulary:
    return Vocabulary.of(tokenizers.Tokenizer.from_buffer(read_file(file, root)))


def _read_sentence_piece(file: Path, settings: TokenizerSettings, root: Path | None) -> Vocabulary:
    _require_class(file, settings, _SENTENCE_PIECE)
    pieces = SentencePiece(
        read_file(file, root),
        dict(settings.added()),
        specials=settings.special_tokens,
        adds_begin=settings.flag("add_bos_token", True),
        adds_end=settings.flag("add_eos_token", False),
        # The default of transformers 5: a file without the flag is read as a current one.
        prefixes_each=settings.flag("legacy", False),
        prefixes_first=settings.flag("add_prefix_space", True),
    )
    return Vocabulary(pieces.backend, pieces.encode, bounds=pieces.bounds)


def _read_tekken(file: Path, settings: TokenizerSettings, root: Path | None) -> Vocabulary:
    """Reads Mistral's tekken.json, which has special tokens, then byte sequences with their ranks.

    In this format, two neighbours merge if a token consists of their bytes, the lowest rank first. So the merges are
    all pairs of tokens that together are a token.
    """
    stored = json.loads(read_file(file, root))
    config: Json = stored["config"]
    num_specials: int = config["default_num_special_tokens"]
    given = stored["vocab"][: config["default_vocab_size"] - num_specials]
    ranks = {base64.b64decode(token["token_bytes"]): int(token["rank"]) for token in given}
    merges = [(token[:cut], token[cut:]) for token in ranks for cut in _cuts(token, ranks)]
    specials = [f"<SPECIAL_{number}>" for number in range(num_specials)]
    hidden = [True] * num_specials
    defaults: list[Json] = [{"rank": rank, "token_str": text} for rank, text in enumerate(_TEKKEN_SPECIALS.split())]
    named: list[Json] = stored.get("special_tokens") or defaults
    for token in named:
        specials[token["rank"]] = token["token_str"]
        hidden[token["rank"]] = bool(token.get("is_control", True))
    vocabulary = {_spell(token): rank + num_specials for token, rank in ranks.items()}
    vocabulary |= {text: number for number, text in enumerate(specials)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(_spell(left), _spell(right)) for left, right in merges],
            ignore_merges=True,
        )
    )
    backend.pre_tokenizer = _split(config["pattern"])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(text, special=is_hidden, normalized=False)
            for text, is_hidden in zip(specials, hidden, strict=True)
        ]
    )
    _add_begin(backend, "<s>" if settings.flag("add_bos_token", True) else None)
    return Vocabulary.of(backend)


def _cuts(token: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Returns the positions at which a token splits into two other tokens, those with the lowest ranks first."""
    cuts = [cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks]
    return sorted(cuts, key=lambda cut: (ranks[token[:cut]], ranks[token[cut:]]))


def _read_merges(file: Path, settings: TokenizerSettings, root: Path | None) -> Vocabulary:
    """Reads GPT-2's format: vocab.json and merges.txt."""
    _require_class(file, settings, _MERGES)
    vocabulary: dict[str, int] = json.loads(read_file(file, root))
    merges = list(_split_merges(read_file(file.with_name("merges.txt"), root).decode()))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    has_prefix = settings.flag("add_prefix_space", False)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    if settings.tokenizer_class == "Qwen2":
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _split(_QWEN2_WORDS, has_prefix)
    backend.decoder = decoders.ByteLevel()
    # The backend numbers added tokens in the given order, after the vocabulary: add them in the order of their ids.
    backend.add_tokens([token for _, token in sorted(settings.added(), key=lambda item: item[0])])
    backend.add_special_tokens(
        [text for text in settings.special_tokens.values() if backend.token_to_id(text) is not None]
    )
    _add_begin(backend, settings.special_tokens.get("bos_token") if settings.flag("add_bos_token", False) else None)
    return Vocabulary.of(backend)


def _split_merges(text: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs of merges.txt; raises ValueError for a line without two parts."""
    for line in text.removesuffix("\n").split("\n") if text else ():
        if not line.startswith("#version"):
            left, right = line.removesuffix("\r").split(" ")
            yield left, right


def _split(pattern: str, has_prefix: bool = False) -> pre_tokenizers.PreTokenizer:
    """Returns a pre-tokenizer that splits texts into words by a pattern, and maps them to byte-level characters."""
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=False)])


def _add_begin(backend: tokenizers.Tokenizer, begin: str | None) -> None:
    """Makes the backend put a begin token before each text that gets special tokens; None: no token."""
    if begin is not None and (token_id := backend.token_to_id(begin)) is not None:
        backend.post_processor = processors.TemplateProcessing(single=[begin, "$A"], special_tokens=[(begin, token_id)])


_CHARACTER_OF = {byte: character for character, byte in byte_of_character().items()}


def _spell(token: bytes) -> str:
    """Returns bytes as characters of a byte-level vocabulary."""
    return token.decode("latin-1").translate(_CHARACTER_OF)


_READERS: dict[str, Callable[[Path, TokenizerSettings, Path | None], Vocabulary]] = {
    "tokenizer.json": _read_tokenizers,
    "tekken.json": _read_tekken,
    "tokenizer.model": _read_sentence_piece,
    "vocab.json": _read_merges,
}
VOCABULARY_FILES = tuple(_READERS)
"""The names of vocabulary files, in the order of preference."""
