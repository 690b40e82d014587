"""Loads the model's tokenizer, chat template, end tokens and generation defaults.

Knows nothing of requests. Reads the files of a model folder and nothing else, and runs no code of theirs.
"""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.model_config.fields import read_object
from blockyard.model_config.own_code import asks_for_own_code
from blockyard.model_files import model_digest
from blockyard.panics import panics_as_errors
from blockyard.paths import read_file
from blockyard.telemetry import EventLogger
from gateway.dialects.table import AUTO, choose_dialect
from gateway.text.chat_template import ChatTemplate
from gateway.text.detokenizer import DetokenizerFactory
from gateway.text.slices import Encoded, encode_steps
from gateway.text.template_roles import arrange
from gateway.text.token_texts import TokenTexts
from gateway.text.vocabulary import TokenizerSettings, find_vocabulary, load_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import tokenizers

    from gateway.text.detokenizer import Detokenizer
    from gateway.text.slices import Steps
    from gateway.text.template_roles import TemplateRoles
    from gateway.text.vocabulary import Vocabulary

log = EventLogger(__name__)

Json = dict[str, Any]
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# The fields of generation_config.json that are defaults, and what they may be: one out of range would pass by the
# checks of requests and be refused by the worker, with its whole step.
_GENERATION_DEFAULTS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: -1 <= value < 2**32,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value < math.inf,
}
# Of the others those that would change an answer, and the values with which they do not; null is always one of them.
_NOT_APPLIED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "length_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty",), (1,)),
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "stop_strings", "top_h", "bad_words_ids"), ()),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("renormalize_logits", "token_healing"), (False,)),
    "watermarking_config": (),
}


class Tokenizer:
    """Turns text into ids and back, as the files of one model say. Safe to call from several threads.

    Attributes:
        vocabulary: its pieces, and how texts become ids of them.
        vocab_size: number of ids that have a piece; the model's own vocabulary may be larger.
        end_token_ids: the ids that end a sequence, of config.json, generation_config.json and the tokenizer together.
        generation_defaults: the fields of generation_config.json that apply where a request is silent.
        model_digest: SHA-256 of config.json, in hex.
        special_tokens: the texts of special tokens by their names in tokenizer_config.json.
        truncation_side: from which texts of pooling calls are cut, "left" or "right".
        dialect: how the model writes reasoning and calls of tools, by its chat template; None where that is not known.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        chat_template: ChatTemplate | None = None,
        end_token_ids: frozenset[int] = frozenset(),
        generation_defaults: dict[str, float] | None = None,
        model_digest: str = "",
        special_tokens: dict[str, str] | None = None,
        truncation_side: str = "right",
        dialect: str = AUTO,
    ) -> None:
        self.vocabulary = vocabulary
        self._backend = backend = vocabulary.backend
        self.truncation_side = truncation_side
        self._chat_template = chat_template
        self._named_dialect = dialect
        self.dialect = choose_dialect(dialect, chat_template.source if chat_template else "")
        self._detokenizers = DetokenizerFactory(backend, self.dialect.markers if self.dialect else ())
        self._token_texts = {skip: TokenTexts(self._detokenizers, skip_special_tokens=skip) for skip in (False, True)}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.end_token_ids = end_token_ids
        self.generation_defaults = generation_defaults or {}
        self.model_digest = model_digest
        self.special_tokens = special_tokens or {}

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's own, which nobody may set truncation or padding of."""
        return self._backend

    @property
    def backend_encodes(self) -> bool:
        """Whether the library's own makes the ids of texts, as of all but SentencePiece's and tekken's files."""
        return self.vocabulary.backend_encodes

    @cached_property
    def shows_reasoning(self) -> bool:
        """Whether the chat template writes what the model thinks: models of one dialect think, or do not."""
        begins = self.dialect.reasoning.begins if self.dialect and self.dialect.reasoning else ()
        template = self._chat_template.source if self._chat_template else ""
        return any(begin in template for begin in begins)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of special tokens by their texts."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def num_ids(self) -> int:
        """The largest id that has a piece, and 1."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return self._chat_template is not None

    @property
    def template_roles(self) -> TemplateRoles | None:
        """Which orders of roles the chat template takes; None without one."""
        return self._chat_template.roles if self._chat_template else None

    def adapt(
        self, vocabulary: Vocabulary | None, chat_template: str | None, special_tokens: dict[str, str]
    ) -> Tokenizer:
        """Makes the tokenizer of an adapter: with another vocabulary, another template, or both, else this one's."""
        special_tokens = self.special_tokens | special_tokens
        vocabulary = vocabulary or self.vocabulary
        end = vocabulary.backend.token_to_id(special_tokens.get("eos_token", ""))
        return Tokenizer(
            vocabulary,
            chat_template=ChatTemplate(chat_template, special_tokens) if chat_template else self._chat_template,
            end_token_ids=self.end_token_ids | ({end} if end is not None else set()),
            generation_defaults=self.generation_defaults,
            model_digest=self.model_digest,
            special_tokens=special_tokens,
            dialect=self._named_dialect,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turns text into ids; with the model's special tokens (a begin token, say) by default.

        Raises BlockyardError FIELD_INVALID for half a surrogate pair, which JSON can bring and UTF-8 cannot say.
        """
        return list(self._encode("prompt", text, add_special_tokens))

    def min_tokens(self, text: str, enough: int | None = None) -> int:
        """Returns a number of tokens that a text has at least, without making any: see `TextBounds`; 0: not known."""
        return self.vocabulary.bounds.min_tokens(text, enough)

    def encode_steps(
        self, text: str, add_special_tokens: bool = True, *, enough: int | None = None, from_end: bool = False
    ) -> Steps[Encoded]:
        """Encodes a long text as `encode` does, step by step; with `enough`, so many tokens of its beginning or end."""
        try:
            return (
                yield from encode_steps(
                    self.vocabulary, text, add_special_tokens=add_special_tokens, enough=enough, from_end=from_end
                )
            )
        except TypeError:
            raise _half_a_pair("prompt") from None

    @panics_as_errors()
    def _encode(self, field: str, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        try:
            return tuple(self.vocabulary.encode(text, add_special_tokens))
        except TypeError:
            raise _half_a_pair(field) from None

    def encode_bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Turns bad words into token sequences that must not be generated.

        Each word is encoded as at the beginning of a text, and also as behind a space if that has as many tokens and
        begins with another one. This is vLLM's rule: longer spellings of a word would forbid parts of other words.
        """
        sequences: list[tuple[int, ...]] = []
        for word in words:
            bare = word.lstrip(" ")
            # Nothing but spaces is a word as it is.
            alone = self._encode("sampling.bad_words", bare or word)
            inside = self._encode("sampling.bad_words", f" {bare}") if bare else alone
            sequences.append(alone)
            if alone[:1] != inside[:1] and len(alone) == len(inside):
                sequences.append(inside)
        return list(filter(None, sequences))

    @panics_as_errors()
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns ids into text. Ids outside of the vocabulary have no text."""
        # The library takes what 32 bits hold.
        known = [token_id for token_id in token_ids if 0 <= token_id < 2**32]
        # A batch of one lets other threads run meanwhile.
        return self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]

    def piece(self, token_id: int) -> str:
        """Returns how the vocabulary itself spells an id; empty for one that it has not."""
        return self._backend.id_to_token(token_id) or ""

    def make_detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True, keeps_markers: bool = False
    ) -> Detokenizer:
        """Makes the incremental detokenizer of a sequence that continues a prompt.

        `keeps_markers`: special tokens that the model's dialect consists of are in the text, for its parser.
        """
        return self._detokenizers.make(
            prompt_token_ids, skip_special_tokens=skip_special_tokens, keeps_markers=keeps_markers
        )

    def token_texts(self, *, skip_special_tokens: bool = True) -> TokenTexts:
        """Returns the texts of single tokens, for log probabilities."""
        return self._token_texts[skip_special_tokens]

    def apply_chat_template(
        self,
        messages: list[Json],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[Json] | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders messages as the prompt that the model was trained on; encode it with add_special_tokens=False.

        An order of roles that the template does not take is changed to one that it does.

        Raises BlockyardError: FEATURE_DISABLED when the model has no template, FIELD_INVALID when it refuses.
        """
        if self._chat_template is None:
            raise BlockyardError(
                Reason.FEATURE_DISABLED,
                "the model has no chat template: send a prompt, or start the gateway with --chat-template FILE",
            )
        return self._chat_template.render(
            **{"documents": None, **kwargs},
            messages=arrange(messages, self._chat_template.roles),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )


def _half_a_pair(field: str) -> BlockyardError:
    return invalid([Violation(field, "must be Unicode text, and has half a surrogate pair")])


def load_tokenizer(folder: Path, *, chat_template_file: Path | None = None, dialect: str = AUTO) -> Tokenizer:
    """Reads a model folder; raises BlockyardError MODEL_NOT_LOADED that says what is wrong and what to do.

    Args:
        folder: has config.json and a vocabulary (tokenizer.json, tekken.json, tokenizer.model, or vocab.json with
            merges.txt), and perhaps tokenizer_config.json, special_tokens_map.json, added_tokens.json,
            generation_config.json and chat_template.jinja.
        chat_template_file: a Jinja template that goes before the model's own.
        dialect: the name of a dialect, or how to choose one; see `choose_dialect`.
    """
    config = _read_json(folder / "config.json")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    generation_config = _read_json(folder / "generation_config.json")
    _refuse_unsupported(folder, config, tokenizer_config)
    settings = _settings(folder, tokenizer_config)
    vocabulary, special_tokens = load_vocabulary(folder, settings), dict(settings.special_tokens)
    source = _chat_template_source(folder, tokenizer_config, chat_template_file)
    return Tokenizer(
        vocabulary,
        chat_template=None if source is None else ChatTemplate(source, special_tokens),
        end_token_ids=_end_token_ids(config, generation_config, vocabulary.backend, special_tokens.get("eos_token")),
        generation_defaults=_generation_defaults(generation_config),
        model_digest=model_digest(folder),
        special_tokens=special_tokens,
        truncation_side="left" if tokenizer_config.get("truncation_side") == "left" else "right",
        dialect=dialect,
    )


def load_adapter_tokenizer(folder: Path, model: Tokenizer, root: Path | None = None) -> Tokenizer:
    """Reads the tokenizer and the chat template in an adapter's folder; what it does not have is the model's.

    Args:
        folder: the adapter's.
        model: the model's tokenizer.
        root: below which all files have to lie, links followed; None: they may lie anywhere.

    Raises BlockyardError MODEL_NOT_LOADED.
    """
    tokenizer_config = _read_json(folder / "tokenizer_config.json", root)
    has_tokenizer = find_vocabulary(folder) is not None
    source = _chat_template_source(folder, tokenizer_config, None, root)
    if not has_tokenizer and source is None:
        return model
    if has_tokenizer and (why := asks_for_own_code(tokenizer_config, "tokenizer_config.json")):
        raise _not_loaded(why)
    settings = _settings(folder, tokenizer_config, root)
    vocabulary = load_vocabulary(folder, settings, root) if has_tokenizer else None
    return model.adapt(vocabulary, source, dict(settings.special_tokens))


def _settings(folder: Path, tokenizer_config: Json, root: Path | None = None) -> TokenizerSettings:
    special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json", root), **tokenizer_config})
    return TokenizerSettings(tokenizer_config, special_tokens, _read_json(folder / "added_tokens.json", root))


def _not_loaded(message: str) -> BlockyardError:
    return BlockyardError(Reason.MODEL_NOT_LOADED, message)


def _read_json(file: Path, root: Path | None = None) -> Json:
    """Reads an object; a file that is not there is an empty one."""
    return read_object(file, root) if file.exists() else {}


def _refuse_unsupported(folder: Path, config: Json, tokenizer_config: Json) -> None:
    for values, file in ((config, "config.json"), (tokenizer_config, "tokenizer_config.json")):
        if why := asks_for_own_code(values, file):
            raise _not_loaded(why)


def _text_of(token: object) -> str | None:
    if isinstance(token, dict):
        token = cast("Json", token).get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Json) -> dict[str, str]:
    found = {name: _text_of(config.get(name)) for name in _SPECIAL_TOKEN_NAMES}
    return {name: text for name, text in found.items() if text is not None}


def _read_template(read: Callable[[], bytes], name: str) -> str:
    try:
        return read().decode()
    except OSError as error:
        raise _not_loaded(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _not_loaded(f"cannot read {name}: it is not UTF-8") from None


def _chat_template_source(
    folder: Path, tokenizer_config: Json, given: Path | None, root: Path | None = None
) -> str | None:
    if given is not None:
        return _read_template(given.read_bytes, f"--chat-template {given}")
    own = folder / "chat_template.jinja"
    if own.exists():
        return _read_template(partial(read_file, own, root), f"{own}")
    template: object = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {str(item.get("name")): item.get("template") for item in cast("list[Json]", template)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


def _ids_of(value: object) -> set[int]:
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    # Some files say -1 for none.
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**32}


def _end_token_ids(
    config: Json, generation_config: Json, backend: tokenizers.Tokenizer, eos_token: str | None
) -> frozenset[int]:
    text_config = config.get("text_config")
    sources = [config, generation_config, cast("Json", text_config) if isinstance(text_config, dict) else {}]
    found = {token_id for source in sources for token_id in _ids_of(source.get("eos_token_id"))}
    own = backend.token_to_id(eos_token) if eos_token is not None else None
    return frozenset(found | {own} if own is not None else found)


def _generation_defaults(generation_config: Json) -> dict[str, float]:
    """Reads the fields that the file has, as vLLM does: do_sample is ignored. A top_k of -1 means 0, off."""
    found = {name: generation_config.get(name) for name in _GENERATION_DEFAULTS}
    defaults: dict[str, float] = {name: value for name, value in found.items() if isinstance(value, int | float)}
    if wrong := sorted(name for name, value in found.items() if value is not None and name not in defaults):
        raise _not_loaded(f"generation_config.json: {wrong[0]} must be a number, not {found[wrong[0]]!r}: correct it")
    for name, value in defaults.items():
        if not _GENERATION_DEFAULTS[name](value):
            raise _not_loaded(f"generation_config.json: {name} cannot be {value}: correct it, or take it out")
    names = [name for name, neutral in _NOT_APPLIED.items() if generation_config.get(name) not in (None, *neutral)]
    if names:
        log.warning("fields of generation_config.json that are not applied", fields=",".join(sorted(names)))
    if "top_k" in defaults:
        defaults["top_k"] = max(0, int(defaults["top_k"]))
    return defaults
