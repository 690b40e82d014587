"""Asks for forms that nobody means well with, and measures what they cost a gateway, and workers if they pass.

    python -m tests.kit.oracles.hostile_grammars [--cases 2000] [--seed 1] [--write]

changes the schemas of `schemas`, has patterns meet and repeat, and makes grammars and bytes at random. Each is refused
or compiled, and what passes is compiled as on a worker, for 50,000 tokens, and followed along tokens at random. Prints
the slowest; times are of processors. A case is one process of its own, which ends where it takes far too long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from llguidance import LLTokenizer

from benchmarks.kit import record
from blockyard.contract.request import Choices, JsonSchema, Lark, OutputFormat, Regex
from blockyard.errors import BlockyardError, Reason
from blockyard.grammars.limits import MAX_REQUEST_SECONDS
from gateway.grammars.checking import check_format
from gateway.grammars.compiling.compilers import Compilers
from tests.kit.oracles.schemas import SCHEMAS
from worker_service.grammars.matchers import WORD_BITS, Grammars

if TYPE_CHECKING:
    from collections.abc import Callable

STRANGE: list[Any] = [None, True, False, -1, 0, 1e308, 2**70, "", "a", "\ud800", "#/nowhere", [], {}, [{}], "(" * 50]
KEYWORDS = ["not", "type", "items", "$ref", "pattern", "minLength", "maxItems", "anyOf", "enum", "const", "format"]
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
# Of one case before its process is ended, and of a check, a compilation and a mask.
MAX_SECONDS = 12
BOUNDS = {"check": MAX_REQUEST_SECONDS + 0.5, "compile": 1.0, "mask": 0.25}
NUM_TOKENS, NUM_WORDS = 24, 50_000


class Vocabulary:
    """Bytes and random words, as `LLTokenizer` wants to be told them. `special`: the first of them ends a text."""

    eos_token_id = 0
    bos_token_id = None

    def __init__(self, size: int) -> None:
        draw, words = random.Random(size), {bytes([byte]) for byte in range(256)}
        marks = ' \n\t"{}[]():;,.<>/\\_-=+*&^%$#@!'
        while len(words) < size - 1:
            word = "".join(draw.choices(LETTERS, range(26, 0, -1), k=draw.randint(2, 12)))
            others = (
                "".join(draw.choices(marks, k=draw.randint(2, 4))),
                str(draw.randrange(1000)),
                chr(draw.randrange(200, 3000)),
            )
            words.add(draw.choice([word, word.capitalize(), f" {word}", f" {word}", *others]).encode())
        self.tokens = [b"</s>", *sorted(words)]
        self.special_token_ids = [0]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self.tokens.index(bytes([byte])) for byte in data]


def make_vocabulary(size: int) -> LLTokenizer:
    """Makes a vocabulary of so many tokens."""
    from llguidance._tokenizer import TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(Vocabulary(size)))


def change(draw: random.Random, tree: Any) -> Any:
    """Changes one thing somewhere in a tree."""
    if isinstance(tree, dict) and tree and draw.random() < 0.8:
        name = draw.choice(list(tree))
        if draw.random() < 0.15:
            return {**tree, draw.choice(KEYWORDS): draw.choice(STRANGE)}
        if draw.random() < 0.1:
            return {each: value for each, value in tree.items() if each != name}
        return {**tree, name: change(draw, tree[name])}
    if isinstance(tree, list) and tree and draw.random() < 0.8:
        place = draw.randrange(len(tree))
        return [*tree[:place], change(draw, tree[place]), *tree[place + 1 :]]
    return draw.choice([*STRANGE, tree, draw.choice(SCHEMAS)])


def _repeat(draw: random.Random) -> str:
    counted = [
        f"{{{draw.randint(2, 60)}}}",
        f"{{{draw.randint(0, 5)},{draw.randint(6, 120)}}}",
        f"{{{draw.randint(1, 50)},}}",
    ]
    return draw.choice(["*", "+", "?", "", "", *counted])


def make_pattern(draw: random.Random, depth: int = 2) -> str:
    """Makes a regular expression of repetitions and choices that have much in common."""
    parts: list[str] = []
    for _ in range(draw.randint(1, 4)):
        one, two = draw.choice(LETTERS), draw.choice(LETTERS)
        atom = draw.choice([".", "[a-z]", f"[^{one}]", one, "[a-z ]", r"\w", f"({one}|{two}{one})", r"\d", "[^\\n]"])
        if depth and draw.random() < 0.4:
            atom = f"(?:{'|'.join(make_pattern(draw, depth - 1) for _ in range(draw.randint(1, 3)))})"
        parts.append(atom + _repeat(draw))
    return "".join(parts)


def _anchored(draw: random.Random) -> str:
    return draw.choice(["^{}$", "^{}", "{}$", "{}"]).format(make_pattern(draw))


def _similar(draw: random.Random, count: int) -> list[str]:
    """Makes patterns that differ in one letter each."""
    pattern, letter = _anchored(draw), draw.choice(LETTERS)
    return [pattern.replace(letter, other, 1) for other in draw.sample(LETTERS, count)]


def _changed(draw: random.Random) -> OutputFormat:
    tree: Any = draw.choice(SCHEMAS)
    for _ in range(draw.randint(1, 3)):
        tree = change(draw, tree)
    return JsonSchema(json.dumps(tree), compact=draw.random() < 0.5)


def _meeting(draw: random.Random) -> OutputFormat:
    count = draw.randint(2, 14)
    patterns = _similar(draw, count) if draw.random() < 0.5 else [_anchored(draw) for _ in range(count)]
    parts = [{"pattern": pattern} for pattern in patterns]
    if draw.random() < 0.3:
        named = {"type": "object", "patternProperties": {pattern: {} for pattern in patterns}}
        return JsonSchema(json.dumps({**named, "additionalProperties": draw.choice([True, False, {"type": "null"}])}))
    if draw.random() < 0.3:
        names = [{"type": "object", "properties": {"a": {"type": "string", **part}}} for part in parts]
        return JsonSchema(json.dumps({"allOf": names}))
    return JsonSchema(json.dumps({"type": "string", "allOf": parts, "maxLength": draw.randint(1, 3000)}))


def _pattern_and_more(draw: random.Random) -> OutputFormat:
    more = draw.choice(
        [{"format": draw.choice(["date-time", "email", "uri", "uuid", "hostname", "ipv6"])}, {"maxLength": 2000}]
    )
    text = {"type": "string", "pattern": _anchored(draw), "minLength": draw.randint(0, 50), **more}
    return JsonSchema(json.dumps(draw.choice([text, {"items": text, "type": "array"}])))


def _numbers(draw: random.Random) -> OutputFormat:
    parts = [{"multipleOf": draw.choice([draw.randint(1, 50), draw.randint(1, 30_000), draw.random()])}]
    parts += [{"multipleOf": draw.randint(2, 50)} for _ in range(draw.randint(0, 4))]
    bounds = {"minimum": draw.randint(-(10**9), 5), "maximum": 10 ** draw.randint(1, 15)}
    kind = draw.choice(["integer", "number"])
    return JsonSchema(json.dumps({"type": kind, "allOf": parts, **draw.choice([{}, bounds])}))


def _wide(draw: random.Random) -> OutputFormat:
    """Makes an object of many names, or a value of many forms."""
    count = draw.choice([20, 200, 1500])
    value = draw.choice(
        [{"type": "string", "pattern": make_pattern(draw, 1)}, {"type": "integer"}, draw.choice(SCHEMAS)]
    )
    named: dict[str, Any] = {f"{make_pattern(random.Random(place), 0)}{place}": value for place in range(count)}
    tree: dict[str, Any] = {"type": "object", "properties": named, "additionalProperties": draw.random() < 0.5}
    if draw.random() < 0.5:
        tree = {"anyOf": [{"type": "object", "properties": {name: value}, "required": [name]} for name in named]}
    return JsonSchema(json.dumps(tree))


def _terminals(draw: random.Random) -> OutputFormat:
    """Makes a grammar of many patterns, which are lexed side by side."""
    count = draw.choice([5, 50, 300, 900])
    rules = "\n".join(f"T{place}: /{make_pattern(draw, 1)}/" for place in range(count))
    return Lark(f"start: ({' | '.join(f'T{place}' for place in range(count))})*\n{rules}")


def _operators(draw: random.Random) -> OutputFormat:
    parts: list[str] = []
    for _ in range(draw.randint(1, 8)):
        behind = f" & ~/{make_pattern(draw)}/" if draw.random() < 0.5 else ""
        parts.append(f"{draw.choice(['', '', '~'])}/{make_pattern(draw)}/{behind}")
    return Lark(f'start: A{_repeat(draw)} x{_repeat(draw)}\nA: {" | ".join(parts)}\nx: A | x x | ""')


def _rules(draw: random.Random) -> OutputFormat:
    """Makes rules that lead to one another, and may be read in many ways."""
    names = ["start", *"abcd"[: draw.randint(0, 4)]]
    atoms = [*names, *names, "/[a-z]/", "/[a-z]{1,3}/", '"a"', f"/{make_pattern(draw, 0)}/"]

    def make_choice() -> str:
        return " ".join(draw.choice(atoms) + draw.choice(["", "", "", "?", "*"]) for _ in range(draw.randint(1, 3)))

    choices = [[make_choice() for _ in range(draw.randint(1, 3))] for _ in names]
    return Lark("\n".join(f"{name}: {' | '.join([*own, '/[a-z]/'])}" for name, own in zip(names, choices, strict=True)))


def _bytes(draw: random.Random) -> OutputFormat:
    kinds = draw.choice([range(256), b'()[]{}|*+?\\/"^$:ab19\n %&~<>'])
    text = bytes(draw.choices(kinds, k=draw.randint(1, 60))).decode("utf-8", "replace")
    makers: list[Callable[[str], OutputFormat]] = [Regex, Lark, JsonSchema, lambda text: Lark(f"start: {text}")]
    return draw.choice(makers)(text)


def _texts(draw: random.Random) -> OutputFormat:
    if draw.random() < 0.5:
        return Regex("".join(make_pattern(draw) for _ in range(draw.randint(1, 12))))
    return Choices(tuple(make_pattern(draw, 0) * draw.randint(1, 9) for _ in range(draw.randint(1, 4000))))


KINDS: list[Callable[[random.Random], OutputFormat]] = [
    *[_changed, _changed, _changed, _bytes, _texts],
    *[_meeting, _meeting, _pattern_and_more, _numbers, _wide, _terminals, _operators, _rules],
]


def make_form(number: int) -> OutputFormat:
    """Makes a case, the same for the same number."""
    draw = random.Random(number)
    return KINDS[number % len(KINDS)](draw)


class Cost(NamedTuple):
    """Of one case, in seconds of processors; `reason`: that of a gateway which refused it, or of a worker."""

    reason: str = ""
    by: str = ""
    check: float = 0
    compile: float = 0
    mask: float = 0

    def over(self) -> list[str]:
        """The names of those bounds that it exceeds."""
        return [name for name, bound in BOUNDS.items() if getattr(self, name) > bound]


def measure_check(form: OutputFormat, compilers: Compilers) -> tuple[Cost, str]:
    """Checks a form as a gateway does; returns what it costs, and its grammar; empty: it was refused."""
    checks, begin, grammar, reason = compilers.begin(), time.thread_time(), "", ""
    try:
        grammar = check_format(form, checks.complain)
    except BlockyardError as error:
        reasons = {violation.reason for violation in error.violations}
        assert reasons <= {Reason.FIELD_INVALID, Reason.GRAMMAR_TOO_COMPLEX}, error
        reason = min(reasons)
    return Cost(reason, "gateway" if reason else "", time.thread_time() - begin + checks.num_seconds), grammar


def measure_answer(grammar: str, vocabulary: LLTokenizer, seed: int) -> Cost:
    """Compiles a grammar as a worker does, and makes masks along tokens at random."""
    draw, grammars = random.Random(seed), Grammars(vocabulary, vocabulary.vocab_size)
    begin = time.process_time()
    try:
        grammars.prepare(grammar).result()
    except BlockyardError as error:
        return Cost(error.reason, "worker", compile=time.process_time() - begin)
    compiled = time.process_time() - begin
    words = np.zeros(-(-vocabulary.vocab_size // WORD_BITS), np.uint32)
    state, slowest = grammars.follow(grammar, np.array([], np.int64), np.array([0], np.int64)), 0.0
    for _ in range(NUM_TOKENS):
        begin = time.process_time()
        state.fill(words)
        slowest = max(slowest, time.process_time() - begin)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if state.failure is not None:
            return Cost(state.failure.reason, "worker", compile=compiled, mask=slowest)
        if not allowed.size or (token_id := int(draw.choice(allowed))) == 0:
            break
        state.add(token_id)
    return Cost(compile=compiled, mask=slowest)


def measure_apart(grammar: str, vocabulary: LLTokenizer, seed: int) -> Cost:
    """Does the same in a process of its own; infinite costs are those of one that was ended."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        os.write(writing, json.dumps(measure_answer(grammar, vocabulary, seed)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told = stream.read()
    os.waitpid(process, 0)
    return Cost(*json.loads(told)) if told else Cost("DIED", "worker", 0, float("inf"), float("inf"))


def main() -> None:
    """Measures cases and tells the slowest of each kind of cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results")
    arguments = parser.parse_args()
    vocabulary, compilers = make_vocabulary(NUM_WORDS), Compilers()
    costs: dict[int, Cost] = {}
    for number in range(arguments.seed * 1_000_000, arguments.seed * 1_000_000 + arguments.cases):
        cost, grammar = measure_check(make_form(number), compilers)
        answer = measure_apart(grammar, vocabulary, number) if grammar else Cost()
        costs[number] = Cost(cost.reason or answer.reason, cost.by or answer.by, cost.check, *answer[3:])
        if costs[number].over():
            sys.stdout.write(f"{number} {costs[number]} {str(make_form(number))[:600]}\n")
            sys.stdout.flush()
    compilers.close()
    reasons = Counter(f"{cost.by} {cost.reason}".strip() for cost in costs.values())
    slowest = {name: round(max(getattr(cost, name) for cost in costs.values()), 3) for name in BOUNDS}
    over = [number for number, cost in costs.items() if cost.over()]
    told = {"cases": len(costs), "reasons": dict(reasons), "slowest_seconds": slowest, "over": over}
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    if arguments.write:
        record.append("hostile_grammars", told)
    if over:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
