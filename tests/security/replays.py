"""Sends the published attacks to a running system, and gives the hostile files to their readers."""

from __future__ import annotations

import base64
import gzip
import json
import os
import socket
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from google.protobuf import json_format

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from gateway.dialects.answer_parser import AnswerParser, ParsingRule, ToolSchema
from gateway.dialects.table import BY_NAME
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.processes.status import scheduler_status
from tests.kit.processes.system import ROOT
from tests.security import attack
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kit.processes.system import System

DEMO = ROOT / "models" / "demo"
USER = [{"role": "user", "content": "x"}]
GOOD: dict[str, dict[str, Any]] = {
    attack.GRPC: {"text": "x = 1\n", "stop": {"maxTokens": 2}},
    attack.COMPLETIONS: {"model": "demo", "prompt": "x = 1\n", "max_tokens": 2},
    attack.CHAT: {"model": "demo", "messages": USER, "max_tokens": 2},
    attack.RESPONSES: {"model": "demo", "input": "x", "max_output_tokens": 2},
    attack.MESSAGES: {"model": "demo", "messages": USER, "max_tokens": 2},
    attack.TOKENIZE: {"model": "demo", "prompt": "x"},
    attack.GENERATE: {"text_input": "x = 1\n", "parameters": {"max_tokens": 2}},
}


@dataclass
class Attacked:
    """A running system, and the answer that an innocent request gets there alone."""

    system: System
    folder: Path
    alone: list[int]

    def processes(self) -> dict[str, int]:
        running = {name: service.process for name, service in self.system.services.items()}
        return {name: process.pid for name, process in running.items() if process.poll() is None}

    def epoch(self) -> int:
        return scheduler_status(self.system).replicas[0].epoch

    def has_run_code(self) -> bool:
        return attack.MARK.exists()

    @contextmanager
    def channel(self, **options: Any) -> Iterator[grpc.Channel]:
        unlimited = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(self.system.grpc_target, unlimited, **options) as channel:
            yield channel

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        return httpx.post(self.system.http_url + path, content=content, headers=headers, timeout=60)

    def verdict(self, ask: attack.Ask) -> str:
        if ask.front == attack.GRPC:
            return self._verdict_of_call(ask.body)
        body = ask.body if isinstance(ask.body, bytes) else _merge(GOOD.get(ask.front, {}), ask.body)
        return _verdict_of_answer(self.post(ask.path or ask.front, body))

    def _verdict_of_call(self, body: dict[str, Any] | bytes) -> str:
        if not isinstance(body, bytes):
            spec = json_format.ParseDict(_merge(GOOD[attack.GRPC], body), inference_pb2.GenerationSpec())
            body = inference_pb2.GenerateRequest(spec=spec).SerializeToString()
        with self.channel() as channel:
            try:
                channel.unary_unary("/blockyard.inference.v1.InferenceService/Generate")(body, timeout=60)
            except grpc.RpcError as error:
                return str(from_rpc_error(error).reason)
        return attack.ANSWERED


def _merge(good: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Puts changes into a good request; a prompt of another kind replaces its prompt."""
    prompts = {"tokenIds", "text"} if "text" in good else {"prompt", "messages"}
    kept = {key: value for key, value in good.items() if not (key in prompts and prompts & changes.keys())}
    for key, value in changes.items():
        merged = isinstance(value, dict) and isinstance(kept.get(key), dict)
        kept[key] = {**kept[key], **value} if merged else value
    return kept


def _verdict_of_answer(answer: httpx.Response) -> str:
    if answer.status_code == 200:
        return attack.ANSWERED
    with suppress(ValueError, KeyError, TypeError):
        error = answer.json()["error"]
        reason = error.partition(":")[0] if isinstance(error, str) else error.get("reason")
        if reason in set(map(str, Reason)):
            return str(reason)
    return str(answer.status_code)


def send_raw(port: int, data: bytes, *, ends: bool = True) -> bytes:
    """Sends bytes to a port, and returns what comes until the connection ends. `ends`: nothing more will be sent."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection, suppress(OSError):
        connection.sendall(data)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65536):
            received += piece
    return received


def send_pickles(attacked: Attacked) -> None:
    pickled = base64.b64decode(attack.PICKLED)
    for name in ("grpc", "http", "admin"):
        send_raw(attacked.system.port(name), pickled)
    for address in (attacked.system.scheduler_address, attacked.system.worker_address):
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(30)
            connection.connect(address.removeprefix("unix:"))
            connection.sendall(pickled)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass


@contextmanager
def _nobody_calls() -> Iterator[str]:
    """Yields an address that must not be called."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BlockingIOError):
            server.accept()


def name_addresses(attacked: Attacked) -> None:
    with _nobody_calls() as address:
        url = f"http://{address}/latest/meta-data"
        part = [{"type": "image_url", "image_url": {"url": url}}]
        source = [{"type": "image", "source": {"type": "url", "url": url}}]
        inputs = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
        for front, body in (
            (attack.CHAT, {"messages": [{"role": "user", "content": part}]}),
            (attack.MESSAGES, {"messages": [{"role": "user", "content": source}]}),
            (attack.RESPONSES, {"input": inputs}),
            (attack.TOKENIZE, {"messages": [{"role": "user", "content": part}]}),
        ):
            verdict = attacked.verdict(attack.Ask(front, body, ""))
            assert verdict in (attack.UNSUPPORTED, attack.INVALID), (front, verdict)


def name_addresses_in_texts(attacked: Attacked) -> None:
    with _nobody_calls() as address:
        text = f"![x](http://{address}/large.png)"
        assert attacked.verdict(attack.Ask(attack.CHAT, attack.conversation(text), "")) == attack.ANSWERED
        assert attacked.verdict(attack.Ask(attack.COMPLETIONS, {"prompt": text}, "")) == attack.ANSWERED
        assert attacked.verdict(attack.Ask(attack.GRPC, {"text": text}, "")) == attack.ANSWERED


def name_addresses_in_headers(attacked: Attacked) -> None:
    with _nobody_calls() as address:
        headers = {"X-Request-Id": f"___decode_addr_{address}_1", "Referer": f"http://{address}"}
        assert attacked.post(attack.COMPLETIONS, GOOD[attack.COMPLETIONS], **headers).status_code == 200


def load_adapters_elsewhere(attacked: Attacked) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{attacked.system.port('admin')}") as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        for path in ("../../etc", "/etc", str(DEMO), "https://example.com/adapter"):
            with pytest.raises(grpc.RpcError) as caught:
                stub.LoadLora(admin_pb2.LoadLoraRequest(name="a", path=path), timeout=30)
            reason = from_rpc_error(caught.value).reason
            assert reason in (Reason.FIELD_INVALID, Reason.PERMISSION_DENIED, Reason.MODEL_NOT_LOADED), (path, reason)


def cancel_by_prefix(attacked: Attacked) -> None:
    with attacked.channel() as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        names = ["i", "innocent", "innocent-", "", "*", "%"]
        told = stub.CancelGenerate(inference_pb2.CancelGenerateRequest(request_ids=names), timeout=30)
    assert list(told.cancelled_request_ids) == []
    answer = httpx.delete(f"{attacked.system.http_url}/v1/requests/i", timeout=30)
    assert answer.json()["cancelled"] is False


def look_for_prefixes(attacked: Attacked) -> None:
    prompt = list(range(3, 67))

    def count(tenant: str) -> int:
        body = {**GOOD[attack.COMPLETIONS], "prompt": prompt}
        answer = attacked.post(attack.COMPLETIONS, body, **{"x-blockyard-tenant": tenant})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [count("victim"), count("thief"), count("victim") > 0] == [0, 0, True]


def send_long_headers(attacked: Attacked) -> None:
    port = attacked.system.port("http")
    for header in (b"x: " + b"a" * 2**20, b"x: a\r\n" * 50_000, b"a" * 2**20):
        received = send_raw(port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n")
        assert received == b"" or received.split()[1].startswith(b"4"), received[:80]
    with attacked.channel() as channel, pytest.raises(grpc.RpcError):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.ListModels(inference_pb2.ListModelsRequest(), metadata=[("x", "a" * 2**20)], timeout=30)


def send_bombs(attacked: Attacked) -> None:
    bomb = gzip.compress(b'{"prompt": "' + b" " * 30_000_000 + b'"}')
    answer = attacked.post(attack.COMPLETIONS, bomb, **{"Content-Encoding": "gzip"})
    assert _verdict_of_answer(answer) == attack.INVALID
    spec = inference_pb2.GenerationSpec(text=" " * 30_000_000)
    with attacked.channel(compression=grpc.Compression.Gzip) as channel, pytest.raises(grpc.RpcError) as caught:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.Generate(inference_pb2.GenerateRequest(spec=spec), timeout=60)
    assert from_rpc_error(caught.value).reason is Reason.MESSAGE_TOO_LARGE


def send_pieces(attacked: Attacked) -> None:
    body = json.dumps({**GOOD[attack.COMPLETIONS], "prompt": "x" * 200}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    spaces = b"1\r\n \r\n" * 20_000
    pieces = b"".join(b"1\r\n" + body[place : place + 1] + b"\r\n" for place in range(len(body)))
    received = send_raw(attacked.system.port("http"), head + spaces + pieces + b"0\r\n\r\n", ends=False)
    assert received.startswith(b"HTTP/1.1 200"), received[:200]


def reset_calls(attacked: Attacked) -> None:
    with attacked.channel() as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        spec = inference_pb2.GenerationSpec(text="x = 1\n")
        for _ in range(300):
            stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec)).cancel()
        assert stub.Generate(inference_pb2.GenerateRequest(spec=json_format.ParseDict(GOOD[attack.GRPC], spec)))


# Files, which no running process reads: the readers are called.


def _copy_demo(attacked: Attacked, name: str, **files: dict[str, Any]) -> Path:
    """Makes a model's folder with the demo's files, and changes in some of the JSON."""
    folder = attacked.folder / name
    folder.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        content = json.loads((DEMO / file).read_text())
        content.update(files.get(file.removesuffix(".json"), {}))
        (folder / file).write_text(json.dumps(content))
    return folder


def render_hostile_templates(attacked: Attacked) -> None:
    reached = f"open('{attack.MARK}', 'w')"
    for number, template in enumerate(
        (
            "{{ lipsum.__globals__['os'].popen('touch " + str(attack.MARK) + "').read() }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ cycler.__init__.__globals__.__builtins__." + reached + " }}",
            "{{ messages.__class__.__init__.__globals__ }}{{ ('%s' % messages).format_map(x) }}",
            "{% set f = messages|map(attribute='__class__') %}{{ (f|first).__base__.__subclasses__() }}",
        )
    ):
        folder = _copy_demo(attacked, f"template-{number}", tokenizer_config={"chat_template": template})
        with pytest.raises(BlockyardError) as caught:
            load_tokenizer(folder).apply_chat_template(USER)
        assert caught.value.reason is Reason.FIELD_INVALID


def read_nested_templates(attacked: Attacked) -> None:
    loops = "{% for x in messages %}" * 100 + "{% endfor %}" * 100
    templates = ("{{ " + "(" * 6_000 + ")" * 6_000 + " }}", "{% if x %}" * 6_000 + "{% endif %}" * 6_000, loops)
    for number, template in enumerate(templates):
        folder = _copy_demo(attacked, f"nested-{number}", tokenizer_config={"chat_template": template})
        with pytest.raises(BlockyardError) as caught:
            load_tokenizer(folder)
        assert caught.value.reason is Reason.MODEL_NOT_LOADED


def read_models_with_code(attacked: Attacked) -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "model.Model", "AutoTokenizer": ["model.Tokenizer", None]}}
    for file in ("config", "tokenizer_config"):
        folder = _copy_demo(attacked, f"code-{file}", **{file: code})
        (folder / "model.py").write_text(f"open({str(attack.MARK)!r}, 'w')\n")
        with pytest.raises(BlockyardError, match="auto_map") as caught:
            load_tokenizer(folder)
        assert caught.value.reason is Reason.MODEL_NOT_LOADED


def _refuse_weights(folder: Path) -> None:
    with pytest.raises(BlockyardError) as caught:
        WeightFiles(folder, lambda done_bytes, total_bytes: None, root=folder)
    assert caught.value.reason in (Reason.MODEL_NOT_LOADED, Reason.PERMISSION_DENIED)


def read_pickled_weights(attacked: Attacked) -> None:
    folder = _copy_demo(attacked, "pickled")
    (folder / "pytorch_model.bin").write_bytes(base64.b64decode(attack.PICKLED))
    _refuse_weights(folder)
    (folder / "model.safetensors").write_bytes(base64.b64decode(attack.PICKLED))
    _refuse_weights(folder)


def read_lying_headers(attacked: Attacked) -> None:
    folder = _copy_demo(attacked, "lies")
    lies: list[tuple[Any, int | None]] = [
        ({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, None),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**63]}}, None),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, None),
        ({"a": {"dtype": "F32", "shape": [2**61], "data_offsets": [0, 0]}}, None),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, None),
        ({}, 2**63),
        ({}, 2**64 - 8),
    ]
    for header, length in lies:
        content = json.dumps(header).encode()
        size = struct.pack("<Q", len(content) if length is None else length)
        (folder / "model.safetensors").write_bytes(size + content + bytes(4))
        _refuse_weights(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62))
    _refuse_weights(folder)


def read_shards_elsewhere(attacked: Attacked) -> None:
    folder = _copy_demo(attacked, "shards")
    (attacked.folder / "elsewhere.safetensors").write_bytes((DEMO / "model.safetensors").read_bytes())
    os.mkfifo(folder / "pipe")
    for name in ("../elsewhere.safetensors", "/etc/passwd", "pipe", str(attacked.folder / "elsewhere.safetensors")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        _refuse_weights(folder)


def parse_hostile_calls(attacked: Attacked) -> None:
    code = f"open('{attack.MARK}', 'w')", f"__import__('os').system('touch {attack.MARK}')"
    texts = [f"[f(a={each})]" for each in code]
    texts += [f"<tool_call><function=f><parameter=a>{each}</parameter></function></tool_call>" for each in code]
    for name in BY_NAME:
        for text in texts:
            rule = ParsingRule(name, (ToolSchema("f", '{"properties": {"a": {"type": "object"}}}'),))
            pieces = AnswerParser(rule, "r", 0, reasoning_is_open=False).push(text, is_last=True)
            assert all(isinstance(call.arguments, str) for piece in pieces for call in piece.calls)


BY: dict[str, Callable[[Attacked], None]] = {
    function.__name__: function
    for function in (
        send_pickles,
        name_addresses,
        name_addresses_in_texts,
        name_addresses_in_headers,
        load_adapters_elsewhere,
        cancel_by_prefix,
        look_for_prefixes,
        send_long_headers,
        send_bombs,
        send_pieces,
        reset_calls,
        parse_hostile_calls,
        render_hostile_templates,
        read_nested_templates,
        read_models_with_code,
        read_pickled_weights,
        read_lying_headers,
        read_shards_elsewhere,
    )
}
