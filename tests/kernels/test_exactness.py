"""Any schedule gives the same bits: logits of one sequence against the same sequence computed whole.

Our own kernels promise that everywhere. The reference does where its probe finds it so, and is near elsewhere.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kit.kernels.backends import COMPILED, KERNELS, REFERENCES, Kernels, in_dtype
from tests.kit.kernels.plain_backend import PlainBackend
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

LENGTH = 300
DTYPES = [torch.float32, torch.bfloat16]
EXACT = in_dtype(KERNELS, *DTYPES)
for_all = pytest.mark.parametrize("kernels", EXACT, ids=str)


def random_ids(length: int, seed: int = 1) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(VOCAB_SIZE) for _ in range(length)]


TOKEN_IDS = random_ids(LENGTH)


def random_pieces(length: int, seed: int) -> list[int]:
    chooser, pieces = random.Random(seed), []
    while length:
        pieces.append(min(length, chooser.choice([1, 2, 3, 5, 8, 13, 16, 31, 64, 100])))
        length -= pieces[-1]
    return pieces


def alone(runner: StepRunner, pieces: Sequence[int]) -> Tensor:
    return runner.run("subject", TOKEN_IDS, pieces)


def with_mates(runner: StepRunner, pieces: Sequence[int], num_mates: int, seed: int) -> Tensor:
    """Runs beside sequences that join, prefill, decode and leave, in an order shuffled for each step."""
    chooser = random.Random(seed)
    logits: list[Tensor] = []
    start = 0
    for length in pieces:
        work: list[tuple[object, list[int]]] = [("subject", TOKEN_IDS[start : start + length])]
        for mate in range(num_mates):
            if chooser.random() < 0.2:
                continue
            if runner.length(mate) > 350:
                runner.drop(mate)
            work.append((mate, random_ids(chooser.choice([1, 1, 1, 1, 2, 3, 7, 16, 33]), chooser.randrange(99))))
        chooser.shuffle(work)
        results = runner.step(work)
        logits.append(results[[key for key, _ in work].index("subject")])
        start += length
    return torch.cat(logits)


def recomputed(runner: StepRunner) -> Tensor:
    """Decodes, is preempted, and starts anew in other pieces beside another sequence."""
    runner.run("subject", TOKEN_IDS, [200, *[1] * 20])
    runner.drop("subject")
    runner.step([("mate", TOKEN_IDS[:77])])
    again = runner.step([("subject", TOKEN_IDS[:101]), ("mate", [5])])[:1]
    again += runner.step([("mate", [6]), ("subject", TOKEN_IDS[101:221])])[1:]
    again += [runner.step([("subject", TOKEN_IDS[221:])])[0]]
    return torch.cat(again)


def swapped(runner: StepRunner) -> Tensor:
    """Goes to other blocks in the middle of a block."""
    first = runner.run("subject", TOKEN_IDS, [210])
    runner.step([("mate", TOKEN_IDS[:100])])
    runner.move("subject")
    return torch.cat([first, *(runner.step([("subject", [token_id])])[0] for token_id in TOKEN_IDS[210:])])


def forked(runner: StepRunner) -> Tensor:
    """Its parent goes on otherwise after the fork, in the same step."""
    first = runner.run("parent", TOKEN_IDS, [205])
    runner.fork("parent", "subject")
    rest = [runner.step([("parent", random_ids(60)), ("subject", TOKEN_IDS[205:240])])[1]]
    runner.drop("subject")
    runner.run("other", TOKEN_IDS, [240])
    runner.fork("other", "subject")
    return torch.cat([first, *rest, *runner.step([("subject", TOKEN_IDS[240:])])])


def prefix_shared(runner: StepRunner) -> Tensor:
    """Starts on another sequence's full blocks, which that one goes on reading."""
    first = runner.run("owner", TOKEN_IDS, [128])
    runner.share("owner", "subject", 128 // 32)
    runner.step([("owner", TOKEN_IDS[128:260])])
    rest = [
        runner.step([("subject", TOKEN_IDS[128:178]), ("owner", random_ids(7))])[0],
        *runner.step([("subject", TOKEN_IDS[178:179])]),
        *runner.step([("subject", TOKEN_IDS[179:])]),
    ]
    return torch.cat([first, *rest])


SCHEDULES: dict[str, Callable[[StepRunner], Tensor]] = {
    "again": lambda runner: alone(runner, [LENGTH]),
    "pieces of 16": lambda runner: alone(runner, [16] * 18 + [12]),
    "one token at a time": lambda runner: alone(runner, [LENGTH - 150, *[1] * 150]),
    "random pieces": lambda runner: alone(runner, random_pieces(LENGTH, 3)),
    "one mate": lambda runner: with_mates(runner, random_pieces(LENGTH, 50), 1, 0),
    "three mates": lambda runner: with_mates(runner, random_pieces(LENGTH, 51), 3, 1),
    "twenty mates": lambda runner: with_mates(runner, random_pieces(LENGTH, 52), 20, 2),
    "decode with nine mates": lambda runner: with_mates(runner, [LENGTH - 20, *[1] * 20], 9, 3),
    "recomputed": recomputed,
    "swapped": swapped,
    "forked": forked,
    "prefix shared": prefix_shared,
}
# Half of the time of all on two threads, which on a busy machine wait for each other far longer than they compute.
LONG = ("one token at a time", "twenty mates")


def count_differing_rows(runner: StepRunner) -> dict[str, int]:
    expected = alone(runner, [LENGTH])
    differing: dict[str, int] = {}
    for name, schedule in SCHEDULES.items():
        runner.drop_all()
        differing[name] = runner.differing_rows(schedule(runner), expected)
    runner.drop_all()
    return differing


def load(name: str, kernels: Kernels, **options: int) -> StepRunner:
    runner = StepRunner.load(tiny_model(name), kernels.dtype, kernels.backend, **options).probe()
    assert runner.is_exact or kernels.is_reference
    return runner


@pytest.mark.parametrize("kernels", in_dtype(REFERENCES, *DTYPES), ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_window", "qwen3"])
def test_every_schedule_gives_the_same_bits(name: str, kernels: Kernels):
    assert count_differing_rows(load(name, kernels)) == dict.fromkeys(SCHEDULES, 0)


@pytest.mark.parametrize("kernels", COMPILED, ids=str)
@pytest.mark.parametrize("name", ["llama_bias", "mistral", "qwen2_window", "qwen3"])
def test_every_schedule_gives_the_same_bits_replayed_or_not(name: str, kernels: Kernels):
    """Steps of up to 70 tokens are replayed, larger ones are not: most schedules have both, some on two threads."""
    runner = load(name, kernels)
    expected = alone(runner, [LENGTH])
    runner.drop_all()
    runner.capture(70)
    differing: dict[str, int] = {}
    for schedule_name, schedule in SCHEDULES.items():
        kernels.backend.set_num_threads(1 if schedule_name in LONG else 2)
        differing[schedule_name] = runner.differing_rows(schedule(runner), expected)
        runner.drop_all()
    kernels.backend.set_num_threads(1)
    assert differing == dict.fromkeys(SCHEDULES, 0)
    assert runner.num_replayed > 300


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_fails_the_battery(dtype: torch.dtype):
    runner = StepRunner.load(tiny_model("llama"), dtype, PlainBackend())
    runner.is_exact = True
    differing = count_differing_rows(runner)
    assert differing.pop("again") == 0
    assert sum(count > 0 for count in differing.values()) >= len(differing) // 2, differing


@for_all
def test_threads_block_sizes_and_places_do_not_matter(kernels: Kernels):
    """Wherever the fingerprints agree, which those of our own kernels always do."""
    results: dict[str, list[Tensor]] = {}
    for num_threads, block_size, seed in ((3, 64, 2), (2, 256, 3), (4, 8, 4), (1, 16, 1)):
        kernels.backend.set_num_threads(num_threads)
        runner = load("llama", kernels, block_size=block_size, seed=seed)
        told = runner.model.fingerprint() if runner.is_exact else str(num_threads)
        results.setdefault(told, []).append(with_mates(runner, random_pieces(LENGTH, num_threads), num_threads, seed))
    assert len(results) == 1 or kernels.is_reference
    for alike in results.values():
        assert all(torch.equal(result, alike[0]) for result in alike[1:])


@for_all
def test_a_step_without_new_tokens_computes_nothing(kernels: Kernels):
    """A child that samples from its parent's logits has none, and may be alone in a step."""
    runner = load("llama", kernels)
    runner.run("parent", TOKEN_IDS, [40])
    before = runner.pool.clone()
    (logits,) = runner.step([("parent", [])])
    assert logits.shape == (0, VOCAB_SIZE)
    torch.testing.assert_close(runner.pool, before, rtol=0, atol=0, equal_nan=True)
    expected = runner.run("whole", TOKEN_IDS, [45])[40:]
    mixed = runner.step([("whole", []), ("parent", TOKEN_IDS[40:45])])
    assert runner.differing_rows(mixed[1], expected) == 0


@pytest.mark.parametrize("kernels", in_dtype(EXACT, torch.bfloat16), ids=str)
def test_a_context_of_several_splits_is_exact(kernels: Kernels):
    token_ids = random_ids(1100)
    runner = load("qwen3", kernels)
    expected = runner.run("whole", token_ids, [1100])
    got = runner.run("pieces", token_ids, [255, 1, 1, 500, 256, *[1] * 12, 75])
    assert runner.differing_rows(got, expected) == 0


def test_the_fingerprint_tells_dtypes_weights_and_kernels_apart_and_nothing_else():
    def fingerprint(name: str, kernels: Kernels) -> str:
        return load(name, kernels).model.fingerprint()

    prints = [fingerprint("llama", kernels) for kernels in EXACT]
    assert prints == [fingerprint("llama", kernels) for kernels in EXACT]
    assert fingerprint("mistral", EXACT[0]) not in prints
    by_dtype = {dtype: {prints[EXACT.index(each)] for each in in_dtype(EXACT, dtype)} for dtype in DTYPES}
    assert not by_dtype[torch.float32] & by_dtype[torch.bfloat16]
    assert len(by_dtype[torch.bfloat16]) > 1, "a product of pairs is not two products"
