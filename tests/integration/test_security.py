"""TLS, keys and mutual TLS between the real services: who gets in, and what a change of certificates costs."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from blockyard import LLM, Client
from blockyard.admin.v1 import admin_pb2
from blockyard.cli.main import main
from blockyard.client.access import ClientAccess
from blockyard.client.retry import RetryPolicy
from blockyard.configuration import InternalSecuritySettings
from blockyard.contract.events import Delta
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.scheduler.v1 import scheduler_pb2
from blockyard.security.identity import InternalIdentity
from blockyard.security.keys import Key, KeyRole, add_key, digest, revoke_key
from blockyard.service.servers import channel_options
from blockyard.worker.v1 import worker_pb2
from tests.integration.conftest import DEMO
from tests.kit.authority import Authority, Pair, trust
from tests.kit.processes.system import System
from tests.kit.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from blockyard.client.results import GenerationOptions
    from blockyard.security.identity import ServiceName

SERVICES: tuple[ServiceName, ...] = ("gateway", "scheduler", "worker")
SCHEDULER_FLAGS = ("--dtype", "float32", "--num-device-blocks", "200", "--num-host-blocks", "50", "--debug-integrity")
KEY, ADMIN_KEY = "the-key", "the-admin-key"
PROMPT = "def add(a, b):\n"
EXACT: GenerationOptions = {"ignore_eos": True, "temperature": 0.0, "return_token_ids": True}
ONCE = RetryPolicy(max_attempts=1, resume_seconds=0.0)


@dataclass
class Secured:
    """A system with everything on, and what opens it."""

    system: System
    folder: Path
    public: Authority
    internal: Authority
    trusted: Path

    def issue_internal(self, authority: Authority, service: ServiceName, **options: Any) -> Pair:
        """Signs a service's certificate for another service, into the files that it reads."""
        names = [f"{service}.blockyard"]
        return authority.issue(f"internal-{service}", names=names, folder=self.folder, **options)

    def client(self, key: str = KEY, authority: Authority | None = None, **options: Any) -> Client:
        """Makes a client that trusts an authority."""
        return Client(self.system.grpc_target, api_key=key, tls=(authority or self.public).client(), **options)


def internal_flags(pair: Pair, authority: Path) -> list[str]:
    return [*pair.flags("internal"), f"--internal-authority={authority}"]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    public, internal = Authority(folder / "public"), Authority(folder / "internal")
    trusted = folder / "internal-authority.pem"
    trust(trusted, internal)
    add_key(folder / "keys.yaml", Key(name="mine", sha256=digest(KEY), tenant="acme"))
    add_key(folder / "keys.yaml", Key(name="ops", sha256=digest(ADMIN_KEY), tenant="ops", role=KeyRole.ADMIN))
    system = System(DEMO, folder / "logs", SCHEDULER_FLAGS, access=ClientAccess(tls=public.client()))
    told = Secured(system, folder, public, internal, trusted)
    flags = {service: internal_flags(told.issue_internal(internal, service), trusted) for service in SERVICES}
    system.worker_flags = flags["worker"]
    system.scheduler_flags = [*SCHEDULER_FLAGS, *flags["scheduler"]]
    pair = public.issue("gateway", folder=folder)
    system.gateway_flags = [*flags["gateway"], *pair.flags("tls"), f"--api-keys-file={folder / 'keys.yaml'}"]
    with system:
        yield told


def generate(client: Client, num_tokens: int) -> list[int]:
    with client:
        (choice,) = client.generate(PROMPT, max_tokens=num_tokens, **EXACT).choices
    assert len(choice.token_ids) == num_tokens
    return list(choice.token_ids)


def test_the_answer_is_that_of_an_open_system(secured: Secured, demo: System) -> None:
    assert generate(secured.client(), 40) == generate(Client(demo.grpc_target), 40)


@pytest.mark.parametrize("wrong", ["no key", "another key", "another authority", "no TLS"])
def test_others_do_not_get_in(secured: Secured, wrong: str, tmp_path: Path) -> None:
    client = {
        "no key": lambda: secured.client("", retry=ONCE),
        "another key": lambda: secured.client("x", retry=ONCE),
        "another authority": lambda: secured.client(authority=Authority(tmp_path), retry=ONCE),
        "no TLS": lambda: Client(secured.system.grpc_target, api_key=KEY, retry=ONCE),
    }[wrong]()
    with client, pytest.raises(BlockyardError) as raised:
        client.list_models()
    assert raised.value.reason is (Reason.UNAUTHENTICATED if "key" in wrong else Reason.NO_READY_WORKER)


@pytest.mark.parametrize(("key", "code"), [(ADMIN_KEY, 0), (KEY, 1), ("", 1)])
def test_operators_have_keys_of_their_own(
    secured: Secured, capsys: pytest.CaptureFixture[str], key: str, code: int
) -> None:
    """Through the gateway to the scheduler, which takes the gateway's certificate for it."""
    options = [f"--api-key={key}", f"--tls-authority={secured.public.certificate}"]
    address = f"--admin-address=127.0.0.1:{secured.system.port('admin')}"
    for command in (["status", "--json"], ["dump"]):
        with pytest.raises(SystemExit) as ended:
            main([*options, "admin", *command, address])
        out, err = capsys.readouterr()
        assert int(ended.value.code or 0) == code, err
        assert bool(out) is (code == 0)


def test_a_revoked_key_is_refused_and_a_new_one_is_not(secured: Secured) -> None:
    path = secured.folder / "keys.yaml"
    add_key(path, Key(name="second", sha256=digest("second"), tenant="acme"))
    patient = RetryPolicy(max_attempts=1)
    with secured.client("second", retry=patient) as client:
        wait_until(lambda: is_let_in(client))
        revoke_key(path, "second")
        wait_until(lambda: not is_let_in(client))
    with secured.client() as client:
        assert is_let_in(client)


def is_let_in(client: Client) -> bool:
    try:
        client.list_models()
    except BlockyardError as error:
        assert error.reason is Reason.UNAUTHENTICATED
        return False
    return True


def test_an_llm_uses_its_services_whatever_they_ask_of_others(secured: Secured) -> None:
    pair = secured.public.issue("llm")
    asked = {"api_keys_file": str(secured.folder / "keys.yaml"), **pair.settings("tls")}
    with LLM(str(DEMO), dtype="float32", num_device_blocks=200, **asked) as llm:
        (answer,) = llm.generate([PROMPT], max_tokens=5, **EXACT)
        assert list(answer.choices[0].token_ids) == generate(secured.client(), 5)
        with Client(llm.target, tls=secured.public.client(), retry=ONCE) as other:
            assert not is_let_in(other)


# Between the services.


def caller(secured: Secured, pair: Pair, server: ServiceName, address: str) -> grpc.Channel:
    """A channel of whoever holds a certificate to one of the services."""
    told = InternalSecuritySettings(str(pair.certificate), str(pair.key), str(secured.trusted))
    peer = InternalIdentity(told).peer(server)
    assert peer is not None
    options = [*channel_options(2**20, use_proxy=False), ("grpc.ssl_target_name_override", peer.name)]
    return grpc.secure_channel(address, peer.credentials(), options)


def methods_of(services: Sequence[Any]) -> list[str]:
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


def call(channel: grpc.Channel, method: str) -> BlockyardError | None:
    """Calls any method with an empty message; gives the error that it ends with."""
    stream: Any = channel.stream_stream(method)(iter([b""]), timeout=10)
    try:
        next(stream, None)
    except grpc.RpcError as error:
        return from_rpc_error(error)
    finally:
        stream.cancel()
    return None


REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
# The services of each process, and who may call them.
INTERNAL: dict[str, tuple[list[Any], str]] = {
    "scheduler": (
        [*scheduler_pb2.DESCRIPTOR.services_by_name.values(), *admin_pb2.DESCRIPTOR.services_by_name.values()],
        "gateway",
    ),
    "worker": ([*worker_pb2.DESCRIPTOR.services_by_name.values()], "scheduler"),
}


@pytest.mark.parametrize("server", ["scheduler", "worker"])
def test_a_service_lets_in_its_caller_only(secured: Secured, server: Any, tmp_path: Path) -> None:
    services, its_caller = INTERNAL[server]
    address = getattr(secured.system, f"{server}_address")
    others = [f"{name}.blockyard" for name in SERVICES if name != its_caller]
    stranger = secured.internal.issue("stranger", names=others, folder=tmp_path)
    with caller(secured, stranger, server, address) as channel:
        for method in methods_of([*services, REFLECTION]):
            error = call(channel, method)
            assert error is not None
            assert error.reason is Reason.PERMISSION_DENIED, method
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10).status == 1


@pytest.mark.parametrize("wrong", ["another authority", "expired"])
def test_a_service_takes_no_wrong_certificate(secured: Secured, wrong: str, tmp_path: Path) -> None:
    signer = Authority(tmp_path) if wrong == "another authority" else secured.internal
    valid = timedelta(days=-1) if wrong == "expired" else timedelta(days=1)
    pair = signer.issue("wrong", names=["scheduler.blockyard"], valid=valid, folder=tmp_path)
    with caller(secured, pair, "worker", secured.system.worker_address) as channel:
        error = call(channel, "/blockyard.worker.v1.WorkerService/GetWorkerInfo")
        assert error is not None
        assert error.reason is Reason.NO_READY_WORKER


def test_a_worker_that_is_killed_comes_back_and_the_stream_goes_on(secured: Secured) -> None:
    truth = generate(secured.client(), 150)
    with (
        secured.client() as client,
        client.stream(PROMPT, max_tokens=150, **EXACT) as stream,
    ):
        wait_for_tokens(stream, 10)
        kill(secured.system, "worker")
        secured.system.start_service("worker")
        assert list(stream.result().choices[0].token_ids) == truth


def wait_for_tokens(stream: Any, num_tokens: int) -> None:
    for event in stream:
        if isinstance(event, Delta):
            num_tokens -= len(event.token_ids)
        if num_tokens <= 0:
            return


def kill(system: System, name: str) -> None:
    system.services[name].stop(signal.SIGKILL)


def test_all_certificates_change_under_a_running_stream(secured: Secured, tmp_path: Path) -> None:
    """Keys, certificates and authorities of every listener, and then a worker dies that has to be dialled anew."""
    truth = generate(secured.client(), 200)
    new_public, new_internal = Authority(tmp_path / "public"), Authority(tmp_path / "internal")
    with (
        secured.client() as client,
        client.stream(PROMPT, max_tokens=200, **EXACT) as stream,
    ):
        wait_for_tokens(stream, 5)
        new_public.issue("gateway", folder=secured.folder)
        trust(secured.trusted, new_internal)
        for service in SERVICES:
            secured.issue_internal(new_internal, service)
        # Who comes now sees the new certificate, and whoever trusts only the old authority trusts no more.
        assert generate(secured.client(authority=new_public), 5) == truth[:5]
        with secured.client(retry=ONCE) as old, pytest.raises(BlockyardError):
            old.list_models()
        assert not stream.num_resumes
        kill(secured.system, "worker")
        secured.system.start_service("worker")
        assert list(stream.result().choices[0].token_ids) == truth
        assert not stream.num_resumes, "the client's connection went on all the time"
    kill(secured.system, "scheduler")
    secured.system.start_service("scheduler")
    assert generate(secured.client(authority=new_public), 200) == truth
    for service in SERVICES:
        assert "cannot be used" not in secured.system.log(service)


# Nothing of what people write is in a log.

MARKER = "zebrafinch"


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> str:
    """Posts anything, and gives the answer, whatever it is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, raw, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


def marked_requests(url: str) -> list[str]:
    """Sends the marker in every place where text goes, good and bad; gives the answers' texts."""
    text = f"x = {MARKER}\n"
    bodies: Sequence[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": text, "max_tokens": 20, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": text, "stop": [MARKER], "max_tokens": 5, "bad_words": [MARKER], "stream": True}),
        ("/v1/completions", {"prompt": text * 2000}),
        ("/v1/completions", {"prompt": text, "temperature": -1, "user": MARKER}),
        ("/v1/completions", {"prompt": {MARKER: text}}),
        ("/v1/completions", {"prompt": text, MARKER: text}),
        ("/v1/completions", f'{{"prompt": "{MARKER}'.encode()),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": MARKER, "content": text}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": MARKER, "text": text}]}]}),
        ("/tokenize", {"prompt": text}),
        ("/detokenize", {"tokens": [MARKER]}),
    ]
    return [post(url + path, {"model": "demo", **body} if isinstance(body, dict) else body) for path, body in bodies]


def test_no_log_holds_what_people_write(tmp_path: Path) -> None:
    """At the level debug, through errors, an abort, a worker's death and its recovery."""
    with System(DEMO, tmp_path, SCHEDULER_FLAGS) as system:
        answers = marked_requests(system.http_url)
        assert sum(MARKER in answer for answer in answers) > 0, "the marker went through"
        with Client(system.grpc_target) as client:
            for options in ({"max_tokens": 5}, {"temperature": -1.0}, {"stop": ["", MARKER]}, {"model": "other"}):
                with suppress(BlockyardError):
                    client.generate(f"y = {MARKER}\n", **options)  # type: ignore[arg-type]
            with client.stream(f"z = {MARKER}\n", max_tokens=200, ignore_eos=True) as stream:
                wait_for_tokens(stream, 5)
                kill(system, "worker")
                system.start_service("worker")
                text = stream.result().choices[0].text
            with client.stream(f"w = {MARKER}\n", max_tokens=200, ignore_eos=True) as stream:
                wait_for_tokens(stream, 5)
        logs = {service: system.log(service) for service in SERVICES}
    # What the model wrote: each of its longer lines.
    written = [MARKER, *(line.strip() for line in text.splitlines() if len(line.strip()) > 12)]
    for service, log in logs.items():
        assert "listening" in log, service
        for line in written:
            assert line not in log, f"{service}: {line!r}"
