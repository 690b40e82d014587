"""Reads a tokenizer, its chat template, end tokens and generation defaults from the files of a model or an adapter.

Reads no other files, and runs no code from the model folder.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from blockyard.contract.sampling import NUMBERS
from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.fields import asks_for_own_code, read_object
from blockyard.model_files import model_digest
from blockyard.paths import read_file
from blockyard.telemetry import EventLogger
from gateway.dialects.table import AUTO
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from gateway.text.vocabulary_files import TokenizerSettings, find_vocabulary, load_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import tokenizers


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
# Fields of generation_config.json that are not applied although they would change an answer, with their neutral values.
# null is always neutral.
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


def load_tokenizer(folder: Path, *, chat_template_file: Path | None = None, dialect: str = AUTO) -> Tokenizer:
    """Reads the tokenizer in a model folder; raises BlockyardError MODEL_NOT_LOADED with the cause and a remedy.

    Args:
        folder: the model folder, with config.json and a vocabulary (tokenizer.json, tekken.json, tokenizer.model, or
            vocab.json with merges.txt), and optionally tokenizer_config.json, special_tokens_map.json,
            added_tokens.json, generation_config.json and chat_template.jinja.
        chat_template_file: a Jinja template to use instead of the model's own; None: the model's own.
        dialect: the name of a dialect, "auto" or "none"; see `choose_dialect`.
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
    """Reads the tokenizer and the chat template in an adapter's folder. Missing ones are taken from the model.

    Args:
        folder: the adapter's folder.
        model: the model's tokenizer.
        root: the folder below which all files must lie, after following links; None: anywhere.

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
    """Reads a JSON object; returns an empty one if the file does not exist."""
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
    # Some files have -1 for no token.
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
    """Reads the sampling numbers of the file, as vLLM does: do_sample is ignored. A top_k of -1 means 0, off."""
    found = {name: generation_config.get(name) for name in NUMBERS}
    defaults: dict[str, float] = {name: value for name, value in found.items() if isinstance(value, int | float)}
    if wrong := sorted(name for name, value in found.items() if value is not None and name not in defaults):
        raise _not_loaded(f"generation_config.json: {wrong[0]} must be a number, not {found[wrong[0]]!r}: correct it")
    if defaults.get("top_k") == -1:
        defaults["top_k"] = 0
    # Requests are checked before these defaults are filled in, so that an invalid default would reach the worker.
    for name, value in defaults.items():
        if not NUMBERS[name].holds(value):
            wanted = NUMBERS[name].description
            raise _not_loaded(f"generation_config.json: {name} must be {wanted}, not {value}: correct or remove it")
    names = [name for name, neutral in _NOT_APPLIED.items() if generation_config.get(name) not in (None, *neutral)]
    if names:
        log.warning("fields of generation_config.json that are not applied", fields=",".join(sorted(names)))
    if "top_k" in defaults:
        defaults["top_k"] = int(defaults["top_k"])
    return defaults
