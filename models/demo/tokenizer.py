"""The demo model's vocabulary: byte-level BPE of 4,096 tokens, and its files.

Owns the special tokens, the split into words, the chat template, and tokenizer.json with
tokenizer_config.json. Once a model has been trained on a vocabulary it must not change.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

VOCAB_SIZE = 4096
END_OF_TEXT, USER, ASSISTANT, END, SYSTEM = (
    "<|endoftext|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|system|>",
)
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END, SYSTEM)  # ids 0 to 4
END_OF_TEXT_ID = 0
END_ID = 3
MAX_CONTEXT = 1024

# Newlines, indentation and words are apart, so that a prompt means the same whether it ends
# before or after a line break; ".name", "(self" and "_part" may be one token; digits are single.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build(texts: Iterable[str]) -> Tokenizer:
    """Trains the vocabulary; no normalizer, so every string comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Every training document follows the separator, so a prompt does too.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)],
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [USER, ASSISTANT, END, SYSTEM],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
