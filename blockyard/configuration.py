"""The settings of all services, one dataclass per concern. Each service's `config.py` picks the ones it reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from blockyard.cache_settings import CacheSettings
from blockyard.contract.models import TASKS
from blockyard.contract.parallel import ParallelSizes
from blockyard.lora.settings import LoraSettings
from blockyard.settings import option
from blockyard.speculation import SpeculationSettings
from blockyard.switching.settings import SwitchingSettings

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Share = Annotated[float, Field(gt=0, le=1)]
NotNegativeSeconds = Annotated[float, Field(ge=0)]
Gibibytes = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_ORIGIN = re.compile(r"\*|https?://[^\s/?#,@]+")


def _check_origins(text: str) -> str:
    """Refuses an origin that no browser sends, such as an address with a path."""
    if wrong := [origin.strip() for origin in text.split(",") if text and not _ORIGIN.fullmatch(origin.strip())]:
        values = ", ".join(map(repr, wrong))
        raise ValueError(f"{values} is no origin: give a scheme and a host, and a port if needed: https://example.org")
    return text


Origins = Annotated[str, AfterValidator(_check_origins)]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Names the model. Read by the gateway (its tokenizer) and the scheduler (which passes it on to the workers)."""

    model: str = option("", "folder or hub id of the model; empty: the demo model, where the repository has it")
    revision: str = option("main", "branch, tag or commit of a hub id")


@dataclass(frozen=True, slots=True)
class TextSettings:
    served_model_name: str = option("", "the model's name in requests; empty: the last part of --model")
    chat_template: str = option("", "file with a Jinja chat template, instead of the model's own")
    seed: NotNegative = option(0, "mixed into the seed of requests that bring none")
    dialect: str = option("auto", "form of calls of tools and reasoning: auto (by the chat template), none or its name")
    clamp_max_tokens: bool = option(False, "cut a max_tokens that does not fit, with a warning, instead of refusing it")


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto", "what to compute in; auto: as the model says", choices=("auto", "float32", "bfloat16", "float16")
    )
    quantization: str = option(
        "none",
        "how to hold the weights of products: int8 takes half the memory, is almost twice as fast on a CPU, and a "
        "little less exact; fp8, on a GPU: weights alone, for models whose activations int8 does not suit",
        choices=("none", "int8", "fp8"),
    )
    device_memory_utilization: Share = option(0.9, "share of the device's memory to use for weights, steps and blocks")
    swap_space_gib: Gibibytes = option(1.0, "size of the host pool for swapped blocks, in GiB")


@dataclass(frozen=True, slots=True)
class LoadSettings:
    task: str = option("auto", "what to serve the model for; auto: as its files say", choices=TASKS)
    load_format: str = option(
        "auto",
        "where weights come from; sharded, packed: `blockyard admin save`; random: made on the device, of config.json",
        choices=("auto", "sharded", "packed", "random"),
    )


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    max_model_len: Positive | Literal["auto"] = option("auto", "tokens of prompt and output together; auto: what fits")
    max_num_seqs: Positive = option(256, "sequences of a step at most")
    max_num_batched_tokens: Positive = option(2048, "tokens of a step at most")
    max_prefill_chunk: NotNegative = option(0, "tokens of one sequence's prefill in a step at most; 0: what fits")
    inter_token_latency_target_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = option(
        0.0, "prefill beside running sequences only so much that a step takes so many milliseconds; 0: what fits"
    )
    policy: Literal["fcfs", "priority"] = option(
        "fcfs", "who comes first: in order of arrival, or of priority, less is sooner", choices=("fcfs", "priority")
    )
    aging_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = option(
        60.0, "with --policy priority, waiting so many seconds makes up for one step of priority"
    )
    victims: str = option(
        "last",
        "who gives way when blocks run out, of the lowest priority; auto: who loses least",
        choices=("last", "auto"),
    )
    preemption_mode: str = option(
        "auto",
        "what to do with who gives way; auto: swap where that is cheaper and host blocks suffice",
        choices=("auto", "swap", "recompute"),
    )


@dataclass(frozen=True, slots=True)
class LogSettings:
    log_level: str = option("info", "least important events to write", choices=("debug", "info", "warning", "error"))
    log_format: str = option(
        "auto",
        "text for people, json for machines; auto: text, but `blockyard serve` on a terminal shows bars and warnings",
        choices=("auto", "text", "json"),
    )


@dataclass(frozen=True, slots=True)
class TracingSettings:
    trace_endpoint: str = option(
        "",
        "send traces to this collector by OTLP, http://host:4317 (gRPC) or http://host:4318 (HTTP); empty: where "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, or nowhere",
    )
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = option(
        1.0, "share of the requests to trace that do not come with a trace of their own, which decides for itself"
    )
    trace_every_step: bool = option(False, "a span for each step of a traced sequence, decodes too; for debugging")


@dataclass(frozen=True, slots=True)
class PublicSettings:
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    grpc_port: Port = option(50051, "the public gRPC API; 0: a free port")
    http_port: Port = option(8000, "the OpenAI API; 0: a free port")
    admin_port: Port = option(50052, "the admin API; 0: a free port")
    admin_http_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "vLLM's calls that sleep, wake and load adapters over HTTP, at --admin-host; 0: a free port, -1: none"
    )
    admin_host: str = option(
        "127.0.0.1", "address of the admin API; one that other machines reach needs keys or client certificates"
    )
    allowed_origins: Origins = option(
        "",
        "web pages of these origins may call the HTTP APIs from a browser (CORS), with commas between, "
        "https://chat.example.org for one; *: all; empty: the gateway's own page alone",
    )
    enable_page: bool = option(True, "show the page at / of the HTTP port, and the system's state at /status")


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    tls_certificate: str = option(
        "", "PEM file: the gateway's certificate and those between it and its authority; empty: no TLS"
    )
    tls_key: str = option("", "PEM file: the key of --tls-certificate, without a passphrase")
    tls_client_authority: str = option(
        "", "PEM file: clients have to show a certificate signed by one of these; empty: they need none"
    )
    tls_admin_names: str = option(
        "", "without --api-keys-file: common names of client certificates that open the admin API, with commas between"
    )
    api_keys_file: str = option(
        "", "clients have to send a key of this file, see `blockyard keys`; empty: they need none"
    )
    share_prefixes: bool = option(
        False,
        "let tenants find each other's prompts in the prefix cache: what they have in common is computed once, and how"
        " fast an answer begins tells a tenant what others asked",
    )
    max_connections: Positive = option(4096, "connections at once, on each public port")


@dataclass(frozen=True, slots=True)
class InternalSecuritySettings:
    """The certificates by which the services authenticate each other: all three files, or none."""

    internal_certificate: str = option("", "PEM file: the certificate that this service shows the others; empty: none")
    internal_key: str = option("", "PEM file: the key of --internal-certificate, without a passphrase")
    internal_authority: str = option("", "PEM file: whose signature the other services' certificates have")
    internal_domain: str = option(
        "blockyard", "the certificates' names: gateway, scheduler or worker, a dot, and this domain"
    )


@dataclass(frozen=True, slots=True)
class ResumeSettings:
    """How long an answer outlives its reader. Read by the gateway and the scheduler."""

    resume_window_seconds: NotNegativeSeconds = option(
        60.0, "how long a request without a reader runs on, and how long an answer is kept, in seconds"
    )


@dataclass(frozen=True, slots=True)
class GatewayProcessSettings:
    """Limits of a gateway process, and how it ends."""

    max_requests: NotNegative = option(
        16_384, "requests at once, running and waiting; one more is refused with QUEUE_FULL; 0: no limit"
    )
    drain_seconds: NotNegativeSeconds = option(
        30.0, "how long streams may go on after SIGTERM before they are closed, in seconds"
    )
    max_scheduler_wait_seconds: NotNegativeSeconds = option(
        300.0, "how long requests wait for a scheduler before they fail, in seconds"
    )
    prompt_history: NotNegative = option(
        1000, "number of ended requests whose token ids stay in memory for `blockyard admin misses`; 0: none"
    )
    show_prompt_text: bool = option(
        False, "show operators the clients' text where two prompts part, in `blockyard admin misses`"
    )
    gateway_metrics_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of the gateway's /metrics beside that on its HTTP port; 0: a free port, -1: none"
    )
    vllm_metric_names: bool = option(
        False, "give /metrics under vLLM's names too, for dashboards and autoscalers that are made for these"
    )


@dataclass(frozen=True, slots=True)
class SchedulerProcessSettings:
    """Limits of a scheduler process's queue, and its timeouts."""

    max_worker_wait_seconds: NotNegativeSeconds = option(
        300.0, "how long requests wait for a worker while none is ready, in seconds"
    )
    reattach_seconds: NotNegativeSeconds = option(
        15.0,
        "how long after its start a scheduler waits for gateways to bring their requests before it says of one that it "
        "is not known, and keeps cancels for them, in seconds",
    )
    max_waiting_requests: NotNegative = option(4096, "requests that may wait; 0: no limit")
    max_waiting_tokens: NotNegative = option(4_194_304, "prompt tokens of the requests that may wait; 0: no limit")
    max_tenant_requests: NotNegative = option(0, "requests of one tenant that may wait; 0: no limit")
    step_deadline_seconds: NotNegativeSeconds = option(
        0.0, "a step that takes longer means a worker that hangs, in seconds; 0: by the steps before"
    )
    wait_while_asleep: bool = option(
        False, "let new requests wait while all replicas are asleep; off: they are refused with SLEEPING"
    )
    debug_integrity: bool = option(False, "check all block state after every step; slow, for tests")


@dataclass(frozen=True, slots=True)
class WorkerProcessSettings:
    """Settings of a worker process that its scheduler does not choose."""

    num_threads: NotNegative = option(0, "threads of a CPU worker; 0: what this model gains from, up to what there is")
    cpu_kernels: str = option(
        "auto",
        "what computes on a CPU: the kernels that a table names for this processor, those of one instruction set "
        "(machines that differ then give the same bits), or torch's",
        choices=("auto", "amx", "avx512_bf16", "avx512", "avx2", "reference"),
    )
    gpu_kernels: str = option(
        "auto",
        "what computes on a GPU: our kernels in Triton if they compute what torch's ops do when the worker loads a "
        "model, our kernels, or torch's ops",
        choices=("auto", "triton", "reference"),
    )
    model_code: str = option(
        "auto",
        "what code computes a model: ours; transformers', if it is installed; auto: ours where it knows the model",
        choices=("auto", "native", "transformers"),
    )
    batch_invariant: bool = option(
        False,
        "give an answer the same bits on a GPU whatever runs beside it, as a CPU always does: what is taken over from "
        "a worker that died then goes on exactly; products and attention are slower",
    )
    device_cache_gib: Gibibytes = option(
        0.0, "GiB of a worker's device blocks, whatever else needs memory; 0: what --device-memory-utilization leaves"
    )
    collectives: str = option(
        "auto",
        "how the workers of a replica of many reach each other: NCCL between GPUs, gloo between processors",
        choices=("auto", "gloo", "nccl"),
    )
    enable_sleep: bool = option(
        False,
        "take a GPU's memory such that it can be given up (`blockyard admin sleep`); a processor's always can. It has "
        "not been tried on a GPU yet",
    )
    packed_cache: str = option(
        "", "folder that keeps weights as a worker packs them for its processor, for its next start; empty: none"
    )
    worker_lora_root: str = option(
        "", "folder below which AddLora may find LoRA adapters, links resolved; empty: it reads none"
    )
    worker_model_root: str = option(
        "", "folder below which ReloadWeights may find other weights; empty: it reads those of the loaded model alone"
    )
    worker_extension: str = option(
        "", "classes that add operations to a worker, package.module:Class with commas between; no others are imported"
    )
    worker_save_root: str = option("", "folder below which a worker may save its weights; empty: it saves none")
    enable_debug_rpcs: bool = option(False, "answer ChecksumBlocks, for tests")


def _check_power_of_two(size: int) -> int:
    if size & (size - 1):
        raise ValueError("must be a power of two")
    return size


@dataclass(frozen=True, slots=True)
class ParallelSettings(ParallelSizes):
    """How many workers hold one copy of the model together. Read by the scheduler."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=8), AfterValidator(_check_power_of_two)] = option(
        1, "workers that share each layer of a replica: 1, 2, 4 or 8; the model says which of these it allows"
    )
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = option(
        1, "stages of a replica, each with a run of the layers; at most as many as the model has layers"
    )


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The number of replicas if the services run together."""

    data_parallel_size: Annotated[int, Field(ge=1, le=64)] = option(
        1, "replicas, each with the whole model; they share this machine's processors, memory and GPUs evenly"
    )


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Metrics ports of services that run together; the gateway's metrics are on its HTTP port."""

    scheduler_metrics_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        0, "port of the scheduler's /metrics, on this machine alone; 0: the first free one from 50062 on, -1: none"
    )
    worker_metrics_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        0, "port of the first worker's /metrics, of the others those behind it; 0: free ones from 50072 on, -1: none"
    )


# Service settings that `blockyard serve` does not take, each with the reason for the error message.
CHOSEN_TOGETHER = {
    **dict.fromkeys(
        ("scheduler_address", "worker_address", "gateway_local_address"),
        "the services find one another on private sockets",
    ),
    **dict.fromkeys(
        ("internal_certificate", "internal_key", "internal_authority", "internal_domain"),
        "only this user can open the sockets between the services",
    ),
    **dict.fromkeys(
        ("gateway_health_port", "scheduler_health_port", "worker_health_port"),
        "the services are watched by who starts them; the gateway answers grpc.health.v1 on its public port",
    ),
    **dict.fromkeys(
        ("worker_group", "worker_index", "worker_group_host", "allow_insecure_group"),
        "the workers of a replica are known, and reach each other on this machine alone",
    ),
    "gateway_lora_root": "--lora-root says it",
    "starts_on_demand": "a model starts at its first request where there are several, or with --idle-unload-seconds",
    "worker_device": "--device says it",
    "num_workers": "--data-parallel-size and --tensor-parallel-size say it",
    "worker_device_index": "each worker has a GPU of its own, as far as there are",
    "wait_for_repair": "what is wrong with a model is said at once, and ends the services",
}


@dataclass(frozen=True, slots=True)
class SystemConfiguration:
    """The settings of the three services if they run together: all but those in CHOSEN_TOGETHER."""

    model: ModelSettings = ModelSettings()
    public: PublicSettings = PublicSettings()
    security: SecuritySettings = SecuritySettings()
    text: TextSettings = TextSettings()
    load: LoadSettings = LoadSettings()
    device: DeviceSettings = DeviceSettings()
    cache: CacheSettings = CacheSettings()
    lora: LoraSettings = LoraSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    gateway_process: GatewayProcessSettings = GatewayProcessSettings()
    scheduler_process: SchedulerProcessSettings = SchedulerProcessSettings()
    worker: WorkerProcessSettings = WorkerProcessSettings()
    resume: ResumeSettings = ResumeSettings()
    parallel: ParallelSettings = ParallelSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    switching: SwitchingSettings = SwitchingSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
