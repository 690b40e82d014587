"""Every architecture against transformers, and against itself under other schedules and on more ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.decoder_config import Activation, Experts, NormKind
from blockyard.model_config.names import RowOrder
from blockyard.model_config.network import FAMILIES
from blockyard.model_config.parallel_sizes import legal_tensor_sizes
from tests.kit.kernels.backends import BEST, REFERENCE, Kernels
from tests.kit.kernels.families import RECIPES, VOCAB_SIZE, family_model
from tests.kit.kernels.ranks import Ranks
from tests.kit.kernels.step_runner import StepRunner
from worker_service.models.builder import build_decoder
from worker_service.models.model_config import ModelConfig, read_config
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 110
# A difference of logits of routers that is larger than what bfloat16 rounds away.
CLEAR = 2**-6
TOKEN_IDS = tuple(random.Random(3).choices(range(VOCAB_SIZE), k=LENGTH))
# Those of the kernels that have all ops.
COMPLETE = [
    kernels
    for name in (REFERENCE, BEST)
    for kernels in (Kernels(name, torch.float32), Kernels(name, torch.bfloat16))
    if kernels.backend.is_complete
]
for_all = pytest.mark.parametrize("kernels", COMPLETE, ids=str)
for_each = pytest.mark.parametrize("name", RECIPES)


def load(name: str, kernels: Kernels) -> StepRunner:
    return StepRunner.load(family_model(name), kernels.dtype, kernels.backend)


@cache
@torch.no_grad()
def reference_logits(name: str, dtype: torch.dtype) -> torch.Tensor:
    """What transformers computes, spelled out: its other ways of attention know no bounded scores."""
    made = getattr(transformers, RECIPES[name].architecture)
    model = made.from_pretrained(family_model(name), dtype=dtype, attn_implementation="eager")
    return model.eval()(torch.tensor([TOKEN_IDS])).logits[0].float()


@cache
@torch.no_grad()
def rows_of_clear_choice(name: str) -> torch.Tensor:
    """Finds the rows [LENGTH] that rounding sends to no other experts: all, where there are none."""
    made = getattr(transformers, RECIPES[name].architecture)
    model = made.from_pretrained(family_model(name), attn_implementation="eager")
    clear = torch.ones(LENGTH, dtype=torch.bool)

    def look(module: torch.nn.Module, _: object, output: tuple[torch.Tensor, ...]) -> None:
        largest = output[0].topk(int(module.top_k) + 1).values
        clear.logical_and_(largest[:, -2] - largest[:, -1] > CLEAR)

    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(look)
    model.eval()(torch.tensor([TOKEN_IDS]))
    assert clear.sum() > LENGTH // 2
    return clear


def test_each_architecture_is_tried() -> None:
    assert {recipe.architecture for recipe in RECIPES.values()} == FAMILIES.keys()


@for_all
@for_each
def test_logits_are_those_of_transformers_and_the_same_bits_under_any_schedule(name: str, kernels: Kernels) -> None:
    """Whole against transformers; then in pieces beside others, and one by one: replayed, where there are plans."""
    runner = load(name, kernels).probe()
    assert runner.is_exact
    whole, expected = runner.run("whole", TOKEN_IDS, [LENGTH]), reference_logits(name, torch.float32)
    if kernels.dtype is torch.float32:
        assert (whole - expected).abs().max() <= 2e-5 * expected.abs().max()
    else:
        clear = rows_of_clear_choice(name)
        theirs = (reference_logits(name, kernels.dtype) - expected)[clear].abs().mean()
        assert (whole - expected)[clear].abs().mean() <= 1.5 * theirs
    if not kernels.is_reference:
        runner.capture(64)
    mates = [("one", TOKEN_IDS[:37]), ("other", TOKEN_IDS[5:6])]
    first = runner.step([*mates, ("subject", TOKEN_IDS[:50])])[2]
    middle = [runner.step([("subject", TOKEN_IDS[start : start + 7]), ("one", [7])])[0] for start in range(50, 99, 7)]
    last = [runner.step([("subject", [token_id])])[0] for token_id in TOKEN_IDS[99:]]
    assert torch.equal(torch.cat([first, *middle, *last]), whole)
    assert kernels.is_reference or runner.num_replayed > len(middle)


@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_give_the_bits_of_one(name: str) -> None:
    kernels = COMPLETE[-1]
    if 2 not in legal_tensor_sizes(read_config(family_model(name), None)):
        assert name in ("olmo2", "olmo3", "olmoe"), "norms of whole rows alone need all heads"
        return
    whole = load(name, kernels).run("whole", TOKEN_IDS[:40], [40])
    assert torch.equal(Ranks(family_model(name), kernels, 2).logits(TOKEN_IDS[:40], [30, 10]), whole)


@torch.no_grad()
def test_factors_are_those_of_the_longest_sequence_that_is_served() -> None:
    """transformers takes those of the running sequence: of short ones it computes what is served for short ones."""
    name, kernels = "phi3_longrope", Kernels(REFERENCE, torch.float32)
    model = transformers.Phi3ForCausalLM.from_pretrained(family_model(name), attn_implementation="eager").eval()
    short = model(torch.tensor([TOKEN_IDS[:64]])).logits[0]
    served, whole = load(name, kernels), load(name, kernels)
    served.model.serve_length(64)
    near = 2e-5 * short.abs().max()
    assert (served.run("short", TOKEN_IDS[:64], [50, 14]) - short).abs().max() <= near
    assert (whole.run("long", TOKEN_IDS[:64], [50, 14]) - short).abs().max() > near
    # What was taken once stays, whatever was computed before.
    served.model.serve_length(65)
    assert torch.equal(served.run("long", TOKEN_IDS[:64], [64]), whole.run("again", TOKEN_IDS[:64], [64]))


def each_layer(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, layers=tuple(replace(layer, **changes) for layer in config.layers))


def each_attention(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(config: ModelConfig) -> ModelConfig:
        layers = (replace(layer, mixer=replace(layer.mixer, **changes)) for layer in config.layers)
        return replace(config, layers=tuple(layers))

    return change


def each_feed(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: each_layer(feed=replace(config.layers[0].feed, **changes))(config)


def each_norm(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: each_layer(norm=replace(config.layers[0].norm, **changes))(config)


def each_router(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(config: ModelConfig) -> ModelConfig:
        feed = config.layers[0].feed
        assert isinstance(feed, Experts)
        return each_feed(router=replace(feed.router, **changes))(config)

    return change


def each_rotary(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, rotaries=tuple(replace(rotary, **changes) for rotary in config.rotaries))


def rows_in(order: RowOrder) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, names=replace(config.names, row_order=order))


# What an architecture has, taken away: its numbers must become others.
TAKEN_AWAY: dict[tuple[str, str], Callable[[ModelConfig], ModelConfig]] = {
    ("gemma2", "bounded scores"): each_attention(softcap=0.0),
    ("gemma2", "a window"): each_attention(window=None),
    ("gemma2", "a scale of scores"): each_attention(scale=32**-0.5),
    ("gemma2", "bounded logits"): lambda config: replace(config, head=replace(config.head, softcap=0.0)),
    ("gemma2", "1 + weight"): each_norm(offset=0.0),
    ("gemma2", "a scaled embedding"): lambda config: replace(config, embedding_scale=1.0),
    ("gemma3", "two rotaries"): each_attention(rotary=0),
    ("gemma3", "positions"): each_attention(rotary=None),
    ("granite", "a scaled residual"): each_layer(residual_scale=1.0),
    ("granite", "scaled logits"): lambda config: replace(config, head=replace(config.head, scale=1.0)),
    ("olmo2", "norms of whole rows"): each_norm(epsilon=0.1),
    ("smollm3", "layers that turn nothing"): each_attention(rotary=0),
    ("glm4", "partial rotary"): each_rotary(share=1.0),
    ("cohere", "interleaved pairs"): rows_in(RowOrder.PLAIN),
    ("cohere", "layer norms"): each_norm(kind=NormKind.RMS),
    ("phi", "its activation"): each_feed(activation=Activation.RELU),
    ("nemotron", "its activation"): each_feed(activation=Activation.RELU),
    ("hunyuan", "norms of what is turned"): each_attention(norms_turned=False),
    ("ministral3", "queries that grow"): each_rotary(query_growth=0.0),
    ("phi3_longrope", "factors of long texts"): lambda config: each_rotary(
        long_factors=config.rotaries[0].short_factors
    )(config),
    ("arcee", "its activation"): each_feed(activation=Activation.SILU),
    ("mixtral", "a window"): each_attention(window=None),
    ("qwen3_moe", "renormalised weights"): each_router(renormalises=False),
    ("olmoe", "weights that are not"): each_router(renormalises=True),
    ("granite_moe", "the number of experts of a row"): each_router(top_k=2),
    ("gpt_oss", "sinks"): each_attention(has_sinks=False),
    ("gpt_oss", "limits"): each_feed(limit=100.0),
    ("gpt_oss", "its activation"): each_feed(limit=0.0),
    ("gpt_oss", "a bias of the router"): each_router(has_bias=False),
}


@pytest.mark.parametrize("kernels", COMPLETE[::2], ids=str)
@pytest.mark.parametrize(("name", "what"), TAKEN_AWAY)
def test_nothing_is_there_for_nothing(name: str, what: str, kernels: Kernels) -> None:
    config = TAKEN_AWAY[name, what](read_config(family_model(name), kernels.dtype))
    files = WeightFiles(family_model(name), lambda done_bytes, total_bytes: None)
    got = StepRunner(build_decoder(config, kernels.backend, files), kernels.backend).run("x", TOKEN_IDS, [LENGTH])
    expected = reference_logits(name, torch.float32)
    assert (got - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("name", ["ministral3", "hunyuan", "mixtral"])
def test_kernels_that_lack_ops_refuse_a_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Kernels(REFERENCE, torch.float32).backend
    monkeypatch.setattr(type(backend), "is_complete", False)
    with pytest.raises(BlockyardError, match="lack operations that") as raised:
        StepRunner.load(family_model(name), torch.float32, backend)
    assert raised.value.reason is Reason.MODEL_NOT_LOADED
