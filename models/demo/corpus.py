"""The demo model's training text, taken from the running interpreter alone.

Owns the choice of documents: standard library files, their functions, pydoc topics, and
conversations built from topics and docstrings. Knows nothing of tokens or of training.
Everything is a function of the interpreter's version and of the seeds given, so that the
same Python release gives the same text on every machine.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pydoc
import pydoc_data.topics
import re
import sysconfig
import textwrap
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

# Folders with tests, vendored code, generated tables or bindings: long, repetitive, or not ours
# to describe as the standard library.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
# Modules written in C, whose docstrings exist only at run time.
BUILT_IN_MODULES = (
    "builtins",
    "math",
    "itertools",
    "time",
    "sys",
    "array",
    "binascii",
    "cmath",
    "errno",
    "gc",
    "marshal",
    "operator",
    "functools",
)

QUESTIONS = {
    "topic": (
        "What is {x}?",
        "Explain {x}",
        "Explain {x}.",
        "What are {x}?",
        "Tell me about {x}.",
        "How does {x} work?",
        "What does {x} do?",
        "{x}",
    ),
    "statement": (
        "What is {x}?",
        "What is {x} in Python?",
        "Explain {x}.",
        "Explain the {x} statement.",
        "What does {x} do?",
        "What does the {x} statement do?",
        "What is the {x} statement?",
        "How do I use {x}?",
    ),
    "module": (
        "What is {x}?",
        "What is the {x} module?",
        "What does the {x} module do?",
        "Explain {x}.",
        "Explain the {x} module.",
    ),
    "object": (
        "What is {x}?",
        "What does {x} do?",
        "Explain {x}",
        "Explain {x}.",
        "How do I use {x}?",
    ),
}
MAX_ANSWER_CHARS = 500


@dataclass(frozen=True)
class Answer:
    """What is known of one subject, and the kind of question (a key of QUESTIONS) it answers."""

    subject: str
    kind: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """All documents of one interpreter, before they are sampled into epochs.

    `files` and `functions` come from the training part of the library, `held_out` from the
    files kept for validation; `common` are the answers worth seeing in every epoch.
    """

    files: list[str]
    functions: list[str]
    topics: list[str]
    common: list[Answer]
    docstrings: list[Answer]
    held_out: list[str]


def load() -> Corpus:
    """Reads the running interpreter's library, topics and docstrings."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[str] = []
    functions: list[str] = []
    docstrings: list[Answer] = []
    held_out: list[str] = []
    for path in library_paths(root):
        name = path.relative_to(root).as_posix()
        source = _clean(path.read_text(encoding="utf-8", errors="replace"))
        if zlib.crc32(name.encode()) % 40 == 0:
            held_out.append(source)
            continue
        files.append(source)
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue  # a template or a Python 2 grammar example; still readable as text
        functions.extend(_functions(source, tree))
        docstrings.extend(_source_answers(name, tree))
    topics = [_clean(text) for _, text in sorted(pydoc_data.topics.topics.items())]
    common = [*_topic_answers(), *_built_in_answers()]
    return Corpus(files, functions, topics, common, docstrings, held_out)


def epoch(corpus: Corpus, rng: random.Random) -> list[str]:
    """One shuffled pass: every file, function and topic, and conversations drawn anew.

    Topics and common answers are repeated, because they are few and a reader asks for them.
    """
    answers = corpus.common * 3 + rng.sample(corpus.docstrings, len(corpus.docstrings) // 2)
    rng.shuffle(answers)
    documents = [
        *corpus.files,
        *corpus.functions,
        *corpus.topics * 2,
        *conversations(corpus, answers, rng),
    ]
    rng.shuffle(documents)
    return documents


def conversations(corpus: Corpus, answers: list[Answer], rng: random.Random) -> Iterator[str]:
    """Writes the answers as documents of one to three turns in the chat template's form."""
    start = 0
    while start < len(answers):
        num_turns = rng.choice((1, 1, 1, 2, 3))
        turns = answers[start : start + num_turns]
        start += num_turns
        text = ""
        if rng.random() < 0.15:  # so that a system message does not throw the model off
            text += f"<|system|>{_first_sentence(rng.choice(corpus.docstrings).text)}<|end|>"
        for turn in turns:
            question = rng.choice(QUESTIONS[turn.kind]).format(x=turn.subject)
            text += f"<|user|>{question}<|end|><|assistant|>{turn.text}<|end|>"
        yield text


def library_paths(root: Path) -> list[Path]:
    """The library's own source files in a fixed order, without what depends on the machine."""
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not any(_skipped(folder) for folder in path.relative_to(root).parts[:-1])
        and not path.name.startswith("_sysconfigdata")
    ]


def _skipped(folder: str) -> bool:
    return folder in SKIPPED_FOLDERS or folder.startswith("config-")


def _clean(text: str) -> str:
    """Spaces for tabs, no trailing blanks: fewer spellings of the same indentation."""
    return "\n".join(line.rstrip() for line in text.expandtabs(8).splitlines()) + "\n"


def _functions(source: str, tree: ast.AST) -> Iterator[str]:
    """Functions and methods as documents of their own, dedented, half of them undocumented.

    A prompt is usually one function header at the margin; in the files such a thing is rare.
    """
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        end = node.end_lineno or node.lineno
        body = lines[node.lineno - 1 : end]
        if not 3 <= len(body) <= 60 or len(node.body) < 2:
            continue
        if ast.get_docstring(node) is not None and zlib.crc32(node.name.encode()) % 2:
            first = node.body[0]
            cut = (first.end_lineno or first.lineno) - node.lineno + 1
            body[first.lineno - node.lineno : cut] = []
        yield textwrap.dedent("\n".join(body)) + "\n"


def _source_answers(name: str, tree: ast.Module) -> Iterator[Answer]:
    """Answers from the docstrings of one file's module, public classes and functions."""
    parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
    if any(part.startswith("_") for part in parts):
        return
    module = ".".join(parts)
    yield from _answer(module, "module", ast.get_docstring(tree))
    yield from _member_answers(module, tree)


def _member_answers(prefix: str, node: ast.Module | ast.ClassDef) -> Iterator[Answer]:
    for child in node.body:
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if child.name.startswith("_"):
            continue
        yield from _answer(f"{prefix}.{child.name}", "object", ast.get_docstring(child))
        if isinstance(child, ast.ClassDef):
            yield from _member_answers(f"{prefix}.{child.name}", child)


def _built_in_answers() -> Iterator[Answer]:
    for name in BUILT_IN_MODULES:
        module = builtins if name == "builtins" else importlib.import_module(name)
        prefix = "" if module is builtins else f"{name}."
        if prefix:
            yield from _answer(name, "module", inspect.getdoc(module))
        for member in sorted(dir(module)):
            value = getattr(module, member)
            if member.startswith("_") or not (inspect.isroutine(value) or inspect.isclass(value)):
                continue
            yield from _answer(f"{prefix}{member}", "object", inspect.getdoc(value))


def _topic_answers() -> Iterator[Answer]:
    """Answers from the pydoc topics, under every name by which `help()` finds them."""
    topics = pydoc_data.topics.topics
    names: dict[tuple[str, str], str] = {(key, "topic"): key for key in topics}
    for kind, table in (("statement", pydoc.Helper.keywords), ("topic", pydoc.Helper.topics)):
        for name, target in table.items():
            key = target[0] if isinstance(target, tuple) else target
            while isinstance(key, str) and key not in topics and key in table:
                key = table[key][0] if isinstance(table[key], tuple) else table[key]
            if key in topics and name.isalpha():
                names[(name if kind == "statement" else name.lower(), kind)] = key
    for (name, kind), key in sorted(names.items()):
        yield from _answer(name, kind, topics[key])
    for text in (topics[key] for key in sorted(topics)):
        # A heading is a line over a line of one repeated mark; what follows explains it.
        parts = re.split(r"^(\S.*)\n[*=\-~^]{3,}\n", text, flags=re.MULTILINE)
        for title, body in zip(parts[1::2], parts[2::2], strict=True):
            subject = title.replace('"', "").strip()
            yield from _answer(subject[0].lower() + subject[1:], "topic", body)


def _answer(subject: str, kind: str, text: str | None) -> Iterator[Answer]:
    """The text's first paragraphs as an answer, if they say anything."""
    answer = _opening(text or "")
    if len(answer) >= 20 and len(subject) <= 60:
        yield Answer(subject, kind, answer)


def _opening(text: str) -> str:
    """Whole paragraphs from the start, prose on one line each, without headings and grammar."""
    text = re.sub(r"^\S.*\n[*=\-~^]{3,}\n", "", text, flags=re.MULTILINE)
    chosen: list[str] = []
    length = 0
    for raw in re.split(r"\n\s*\n", text.expandtabs(8).strip("\n")):
        if "::=" in raw or not raw.strip():
            continue
        indented = raw.startswith("  ") or "\n  " in raw or ">>>" in raw
        paragraph = textwrap.dedent(raw).rstrip() if indented else " ".join(raw.split())
        if chosen and length + len(paragraph) > MAX_ANSWER_CHARS:
            break
        if len(paragraph) > 2 * MAX_ANSWER_CHARS:
            paragraph = _sentences(paragraph) if not indented else ""
        if not paragraph:
            break
        chosen.append(paragraph)
        length += len(paragraph)
    return "\n\n".join(chosen)


def _sentences(text: str) -> str:
    cut = text.rfind(". ", 0, MAX_ANSWER_CHARS)
    return text[: cut + 1] if cut > 0 else ""


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".") + "."
