"""Prompts that ask for what is between a prefix and a suffix, with tokenizers of each family, made here."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason
from gateway.request import GenerationRequest
from gateway.text.encoding import Encoding
from gateway.text.fill_in_middle import FORMS, Hole
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import demo_tokenizer, serving, spec
from tests.unit.gateway.text.vocabularies import write_sentence_piece

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.text import tokenizer

PREFIX, SUFFIX = "def add(a, b):\n    ", "\n    return c\n"
# What each family's own code makes of them.
PROMPTS = {
    "Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 3.3 and 4": (
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    ),
    "StarCoder, StarCoder2, Granite Code": f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
    "SantaCoder": f"<fim-prefix>{PREFIX}<fim-suffix>{SUFFIX}<fim-middle>",
    "Code Llama": f"▁<PRE>{PREFIX}▁<SUF>{SUFFIX}▁<MID>",
    "DeepSeek-Coder": f"<｜fim▁begin｜>{PREFIX}<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>",
    "Codestral": f"[SUFFIX]{SUFFIX}[PREFIX]{PREFIX}",
}
QWEN = next(iter(FORMS))


def backend_of(family: str, *, metaspace: bool = False) -> Tokenizer:
    """Makes a tokenizer with the tokens of a family and a begin token: of bytes, or with spaces as SentencePiece's."""
    form = FORMS[family]
    made = Tokenizer(models.BPE(byte_fallback=metaspace))
    if metaspace:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = alphabet if metaspace else []
    initial = [] if metaspace else alphabet
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=initial, special_tokens=specials, show_progress=False
    )
    made.train_from_iterator([PREFIX, SUFFIX, "return the sum of a and b"] * 4, trainer)
    markers = [part for part in form.parts if not isinstance(part, Hole)]
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", *markers, *form.ends)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def load(folder: Path, backend: Tokenizer) -> tokenizer.Tokenizer:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def prompt_of(made: tokenizer.Tokenizer, prefix: str = PREFIX, suffix: str = SUFFIX, **fields: Any) -> list[int]:
    encoding = Encoding()
    try:
        request = GenerationRequest(prefix, suffix=suffix, **fields)
        return list(asyncio.run(encoding.prompt_of(request, made, 4096)))
    finally:
        encoding.close()


def test_every_family_has_a_prompt_here() -> None:
    assert PROMPTS.keys() == FORMS.keys()


@pytest.mark.parametrize("family", FORMS)
def test_a_prompt_is_that_of_the_family(family: str, tmp_path: Path) -> None:
    made = load(tmp_path, backend_of(family))
    ids = prompt_of(made)
    assert made.decode(ids, skip_special_tokens=False) == "<s>" + PROMPTS[family]
    assert ids == made.encode(PROMPTS[family]), "each text is encoded by itself between the markers"
    assert prompt_of(made, add_special_tokens=False) == ids[1:]
    tokens = made.fill_tokens
    assert tokens is not None
    ends = {made.piece(token_id) for token_id in tokens.end_token_ids}
    form = FORMS[family]
    assert ends == {*form.ends, *(part for part in form.parts if not isinstance(part, Hole))}


def test_a_suffix_behind_other_tokens_begins_with_no_space_of_sentence_piece(tmp_path: Path) -> None:
    made = load(tmp_path, backend_of("Code Llama", metaspace=True))
    ids = prompt_of(made, "return", "the sum")
    pieces = "".join(made.piece(token_id) for token_id in ids)
    # Meta's own code encodes the prefix with the space and the suffix without.
    assert pieces == "<s>▁<PRE>▁return▁<SUF>the▁sum▁<MID>"


@pytest.mark.parametrize(("kind", "space"), [("llama", "▁"), ("gemma", "")])
def test_a_sentence_piece_of_its_own_adds_what_it_adds(kind: str, space: str, tmp_path: Path) -> None:
    write_sentence_piece(tmp_path, kind)
    made = load_tokenizer(tmp_path)
    assert made.fill_tokens is None
    mark, num_tokens = made.inner_mark
    assert bool(mark) is bool(space)
    inner = made.encode(mark + "the mat", False)[num_tokens:]
    assert "".join(map(made.piece, inner)) == "the▁mat"
    assert "".join(map(made.piece, made.encode("the mat", False))) == space + "the▁mat"


def test_long_texts_are_encoded_as_short_ones_are(tmp_path: Path) -> None:
    made = load(tmp_path, backend_of(QWEN))
    prefix, suffix = "a b\n" * 300, "c d\n" * 300
    encoding = Encoding()
    try:
        request = GenerationRequest(prefix, suffix=suffix)
        ids = list(asyncio.run(encoding.prompt_of(request, made, 10_000)))
        with pytest.raises(BlockyardError) as raised:
            asyncio.run(encoding.prompt_of(GenerationRequest("a", suffix=suffix * 100), made, 100))
    finally:
        encoding.close()
    assert ids == made.encode(f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>")
    assert raised.value.reason is Reason.PROMPT_TOO_LONG


@pytest.mark.parametrize(
    ("fields", "reason", "told"),
    [
        ({"truncate_prompt_tokens": 3}, Reason.UNSUPPORTED_PARAMETER, "with truncate_prompt_tokens"),
        ({"prefix": (5, 6)}, Reason.FIELD_INVALID, "only with a text as prompt"),
    ],
)
def test_what_a_suffix_does_not_go_with_is_refused(
    fields: dict[str, Any], reason: Reason, told: str, tmp_path: Path
) -> None:
    with pytest.raises(BlockyardError, match=told) as raised:
        prompt_of(load(tmp_path, backend_of(QWEN)), **fields)
    assert (raised.value.reason, raised.value.violations[0].field) == (reason, "suffix")


def test_a_tokenizer_without_such_tokens_says_so() -> None:
    with pytest.raises(BlockyardError, match="no tokens for filling in the middle") as raised:
        prompt_of(demo_tokenizer())
    assert (raised.value.reason, raised.value.http_status) == (Reason.UNSUPPORTED_PARAMETER, 400)


async def test_each_front_fills_in_and_ends_at_the_familys_tokens(tmp_path: Path) -> None:
    made = load(tmp_path, backend_of(QWEN))
    middle = made.encode("the sum", False)
    end = made.backend.token_to_id("<|file_separator|>")
    async with FakeScheduler() as scheduler:
        scheduler.facts.vocab_size = made.vocab_size
        scheduler.script = scripted(*middle, end, then=middle[0])
        async with (
            serving(scheduler, tokenizer=made) as front,
            serve_openai(front.service) as url,
            httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
        ):
            told = (await front.generate(spec(PREFIX, max_tokens=30, suffix=SUFFIX))).choices[0]
            assert (told.text, told.finished.reason) == ("the sum", sampling_pb2.FINISH_REASON_STOP)
            body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 30}
            for extra in ({}, {"return_token_ids": True}):
                answer = (await http.post("/v1/completions", json=body | extra)).json()
                (choice,) = answer["choices"]
                assert (choice["text"], choice["finish_reason"]) == ("the sum", "stop")
            asked = {"text_input": PREFIX, "exclude_input_in_output": True, **body}
            del asked["prompt"]
            generated = (await http.post("/v2/models/demo/generate", json=asked)).json()
            assert generated["text_output"] == "the sum"
            plain = await http.post("/v1/completions", json=body | {"ignore_eos": True})
            assert plain.json()["choices"][0]["finish_reason"] == "length"
            echoed = (await http.post("/v1/completions", json=body | {"echo": True})).json()["error"]
            assert (echoed["code"], echoed["param"]) == ("UNSUPPORTED_PARAMETER", "suffix")
        expected = made.encode(PROMPTS[QWEN])
        assert [list(added.prompt_token_ids) for added in scheduler.added] == [expected] * 5
