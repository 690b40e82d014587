"""Attacks by size, depth and time, and by the files of a model."""

from __future__ import annotations

from typing import Any

from tests.security.attack import (
    ANSWERED,
    CHAT,
    COMPLETIONS,
    GRPC,
    INVALID,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    TOO_LARGE,
    TOO_LONG,
    Ask,
    Attack,
)


def _nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _tool(parameters: dict[str, Any]) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    return {"tools": tools, "tool_choice": "required"}


SIZES = (
    Attack(
        "a regular expression that explodes",
        "vLLM",
        ("CVE-2026-55574", "GHSA-rwxx-mrjm-wc2m"),
        "it was compiled without a limit of time: a worker hung",
        "followed without backtracking, and compiled in a process with bounds of time and memory: answered",
        (
            Ask(COMPLETIONS, {"structured_outputs": {"regex": "(a+)+b"}}, ANSWERED),
            Ask(GRPC, {"format": {"regex": "(a|a)*(b|b)*" * 20}}, ANSWERED),
            Ask(COMPLETIONS, {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}}, ANSWERED),
            Ask(GRPC, {"format": {"regex": "(.{0,999}x){0,999}"}}, ANSWERED),
        ),
    ),
    Attack(
        "a regular expression that is none",
        "vLLM",
        ("CVE-2025-48943", "GHSA-9hcf-v7m4-6m2j"),
        "the server ended",
        "refused",
        (
            Ask(COMPLETIONS, {"structured_outputs": {"regex": "[a-"}}, INVALID),
            Ask(CHAT, {"guided_regex": "(?<=x)("}, INVALID),
            Ask(GRPC, {"format": {"regex": "*"}}, INVALID),
        ),
    ),
    Attack(
        "a schema that is none",
        "vLLM",
        ("CVE-2025-48942",),
        "the server ended",
        "refused with the path in the schema",
        (
            Ask(COMPLETIONS, {"guided_json": {"properties": {"a": {"type": "stsring"}}}}, INVALID),
            Ask(
                CHAT,
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}},
                INVALID,
            ),
            Ask(GRPC, {"format": {"jsonSchema": {"schema": "{"}}}, INVALID),
        ),
    ),
    Attack(
        "tools with a schema that is none",
        "vLLM",
        ("CVE-2025-48944", "GHSA-vrq3-r879-7m65"),
        "a wrong `pattern` or `type` ended the worker",
        "refused",
        (
            Ask(CHAT, _tool({"type": "object", "properties": {"a": {"type": "string", "pattern": "["}}}), INVALID),
            Ask(CHAT, _tool({"type": "stsring"}), INVALID),
        ),
    ),
    Attack(
        "a schema or a body nested too deep",
        "vLLM (xgrammar), protobuf",
        ("CVE-2026-25048", "GHSA-7rgv-gqhr-fxg3", "CVE-2026-0994", "CVE-2025-4565"),
        "recursion without a limit ended the process",
        "refused: bodies, schemas and messages have a greatest depth",
        (
            Ask(COMPLETIONS, {"structured_outputs": {"json": _nested_schema(300)}}, INVALID),
            Ask(COMPLETIONS, b'{"prompt": ' + b"[" * 200_000, INVALID),
            Ask(CHAT, b'{"messages": ' + b'{"a":' * 200_000, INVALID),
            Ask(MESSAGES, b'{"messages": ' + b"[" * 200_000, INVALID),
            Ask(RESPONSES, b'{"input": ' + b"[" * 200_000, INVALID),
            Ask(GRPC, b"\x0b" * 200_000, INVALID),
        ),
    ),
    Attack(
        "a grammar that never ends",
        "vLLM (xgrammar)",
        ("PYSEC-2026-2054",),
        "a rule that is itself filled the stack",
        "refused",
        (
            Ask(COMPLETIONS, {"structured_outputs": {"grammar": "start: start"}}, INVALID),
            Ask(GRPC, {"format": {"grammar": "start: a\na: b\nb: a"}}, INVALID),
        ),
    ),
    Attack(
        "a format without content",
        "vLLM",
        ("CVE-2026-105757", "GHSA-85xf-c7hm-whqw"),
        "an empty choice, expression or grammar ended the engine",
        "refused; the empty expression is one, and is answered with the empty text",
        (
            Ask(COMPLETIONS, {"structured_outputs": {"choice": []}}, INVALID),
            Ask(COMPLETIONS, {"structured_outputs": {"regex": ""}}, ANSWERED),
            Ask(CHAT, {"structured_outputs": {"grammar": ""}}, INVALID),
            Ask(GRPC, {"format": {"jsonSchema": {"schema": ""}}}, INVALID),
        ),
    ),
    Attack(
        "formats that fill a cache",
        "vLLM (outlines, xgrammar)",
        ("CVE-2025-29770", "GHSA-mgrm-fgjv-mhv8", "CVE-2025-32381", "GHSA-389x-67px-mjg3"),
        "each new schema stayed in memory or on the disk",
        "compiled formats are few, and bounded: each is answered",
        tuple(
            Ask(COMPLETIONS, {"structured_outputs": {"choice": [f"answer {i}", f"other {i}"]}}, ANSWERED)
            for i in range(8)
        ),
    ),
    Attack(
        "headers without end",
        "vLLM",
        ("CVE-2025-48956", "GHSA-rxc4-3w6r-4v47"),
        "one header filled memory",
        "the connection is closed at 16 KiB",
        by="send_long_headers",
    ),
    Attack(
        "a body without end",
        "llamafile, SGLang",
        ("mozilla-ai/llamafile#835", "CVE-2026-109225"),
        "a prompt of 2 GiB, or an upload, was read into memory: the process ended",
        "refused at 16 MiB, before it is parsed",
        (
            Ask(COMPLETIONS, b'{"prompt": "' + b"\\n" * 9_000_000 + b'"}', TOO_LARGE),
            Ask(MESSAGES, b'{"prompt": "' + b"\\n" * 9_000_000 + b'"}', TOO_LARGE),
            Ask(TOKENIZE, b'{"prompt": "' + b"\\n" * 9_000_000 + b'"}', TOO_LARGE),
        ),
    ),
    Attack(
        "a body that grows when it is unpacked",
        "Ollama",
        ("CVE-2024-12886", "GO-2025-3548"),
        "a gzip bomb was unpacked into memory",
        "HTTP bodies are not unpacked, gRPC's are up to 16 MiB: refused",
        by="send_bombs",
    ),
    Attack(
        "a body in thousands of pieces",
        "Triton",
        ("CVE-2025-23310",),
        "an input of a special form overflowed a buffer on the stack",
        "answered, as one body",
        by="send_pieces",
    ),
    Attack(
        "calls that are begun and broken off",
        "HTTP/2 servers",
        ("CVE-2023-44487", "GHSA-m425-mq94-257g"),
        "streams that were reset at once took all of the server",
        "300 calls are cancelled as they begin, and nothing runs on",
        by="reset_calls",
    ),
    Attack(
        "texts that are hard to tokenize",
        "llama.cpp, vLLM",
        (),
        "one long word, or characters that no other has, took quadratic time or broke the text",
        "refused by length before they are tokenized; broken Unicode is refused",
        (
            Ask(COMPLETIONS, {"prompt": "a" * 4_000_000}, TOO_LONG),
            Ask(GRPC, {"text": "\u0301" * 1_000_000}, TOO_LONG),
            Ask(TOKENIZE, {"prompt": "\U0001f469\u200d" * 300_000}, TOO_LONG),
            Ask(COMPLETIONS, b'{"model": "demo", "prompt": "\\ud800"}', INVALID),
            Ask(CHAT, b'{"model": "demo", "messages": [{"role": "user", "content": "\xff"}]}', INVALID),
        ),
    ),
)

FILES = (
    Attack(
        "a template that runs commands",
        "SGLang",
        ("CVE-2026-5760",),
        "the chat template of a model was rendered without a sandbox: code ran",
        "Jinja's sandbox refuses it, and the request fails",
        by="render_hostile_templates",
    ),
    Attack(
        "a template nested too deep",
        "llama.cpp",
        (),
        "the parser's stack overflowed when the model was loaded",
        "the model is refused",
        by="read_nested_templates",
    ),
    Attack(
        "code that comes with a model",
        "vLLM",
        ("CVE-2026-22807",),
        "`auto_map` was run, `trust_remote_code` or not",
        "the model is refused, and nothing is imported",
        by="read_models_with_code",
    ),
    Attack(
        "weights as a pickle",
        "SGLang",
        ("CVE-2026-15976",),
        "`.bin` files were unpickled: code ran",
        "weights are read from safetensors alone: refused",
        by="read_pickled_weights",
    ),
    Attack(
        "a header that lies about its tensors",
        "Ollama, llama.cpp",
        ("CVE-2026-7482", "CVE-2026-33298", "GHSA-96jg-mvhq-q7q7", "GHSA-vgg9-87g3-85w8"),
        "sizes past the file's end, or that overflow, read or wrote foreign memory",
        "GGUF is not read; the same lies in a safetensors header are refused",
        by="read_lying_headers",
    ),
    Attack(
        "shards outside the model's folder",
        "Accelerate",
        ("CVE-2026-69112",),
        "`weight_map` named files elsewhere, or a pipe that never ends",
        "refused",
        by="read_shards_elsewhere",
    ),
)
