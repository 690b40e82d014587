"""`blockyard plan`: computes the memory that a model needs and what fits, before anything starts."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blockyard.capacity.formats import held_in
from blockyard.capacity.replica_plan import plan_replica
from blockyard.capacity.weights import count_elements
from blockyard.cli import units
from blockyard.cli.system_settings import ConfigFile, Model, resolve_system, with_system_settings
from blockyard.contract.parallel import ParallelSizes
from blockyard.errors import BlockyardError
from blockyard.local.gpus import check_num_gpus
from blockyard.local.hardware import find_hardware
from blockyard.local.model_check import find_refusal, read_model
from blockyard.model_config.fallback import Outline
from blockyard.model_config.parallel_sizes import legal_tensor_sizes
from blockyard.model_files import resolve_model
from blockyard.settings import SettingsError

if TYPE_CHECKING:
    from blockyard.capacity.replica_plan import Hardware, ReplicaPlan
    from blockyard.configuration import SystemConfiguration
    from blockyard.model_config.decoder_config import DecoderConfig

LENGTHS = (1024, 4096, 16384, 65536)


@with_system_settings
def plan(
    model_or_folder: Model = "",
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="memory instead of this machine's, as 24GiB; of each GPU, if any")
    ] = "",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="a GPU instead of this machine's devices, as h100")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    config: ConfigFile = "",
    **settings: Any,
) -> None:
    """Compute a model's memory and what fits beside it, from its config.json alone; nothing is started.

    Takes the settings of `blockyard serve`. Exits with 1 if they would be refused.
    """
    configuration = resolve_system(model_or_folder, config, settings)
    try:
        folder = resolve_model(configuration.model.model, configuration.model.revision, "config")
        network = read_model(folder, configuration)
    except BlockyardError as error:
        _refuse(error.message, as_json=as_json)
        return
    if isinstance(network, Outline):
        if refusal := find_refusal(folder, configuration.device.dtype):
            _refuse(refusal, as_json=as_json)
        tell_outline(network, as_json=as_json)
        return
    hardware = find_hardware(configuration.device, memory, gpu)
    is_here = not (memory or gpu)
    sizes = _sizes(network, configuration)
    plans = [_plan(network, configuration, hardware, each, is_here=is_here) for each in sizes]
    asked = plans[sizes.index(_asked(configuration))]
    report = Report(network, configuration.device.quantization, hardware, asked, plans)
    if as_json:
        typer.echo(json.dumps(report.describe(), indent=2))
    else:
        report.show(Console())
    if report.asked.refusal:
        raise typer.Exit(1)


def tell_outline(outline: Outline, *, as_json: bool) -> None:
    """Prints what is known of a model that transformers' code computes; its memory is unknown until it is loaded."""
    unknown = "what its weights, its KV and a step take is known once a worker has loaded it"
    if as_json:
        model = {"architecture": outline.architecture, "dtype": outline.dtype_name, "code": "transformers"}
        typer.echo(json.dumps({"model": model, "remarks": [*outline.remarks, unknown], "refusal": ""}, indent=2))
        return
    typer.echo(f"model  {outline.architecture}, {outline.dtype_name}")
    for remark in (*outline.remarks, unknown):
        typer.echo(remark)


def _refuse(why: str, *, as_json: bool) -> None:
    """Prints why nothing can be planned, and exits with 1."""
    typer.echo(json.dumps({"refusal": why}, indent=2) if as_json else f"would be refused: {why}")
    raise typer.Exit(1)


def _asked(configuration: SystemConfiguration) -> ParallelSizes:
    parallel = configuration.parallel
    return ParallelSizes(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)


def _plan(
    network: DecoderConfig,
    configuration: SystemConfiguration,
    hardware: Hardware,
    sizes: ParallelSizes,
    *,
    is_here: bool,
) -> ReplicaPlan:
    planned = plan_replica(network, configuration, hardware, sizes)
    if not is_here or planned.refusal:
        return planned
    try:
        check_num_gpus(configuration.device, sizes)
    except SettingsError as error:
        return dataclasses.replace(planned, refusal=str(error))
    return planned


def _sizes(network: DecoderConfig, configuration: SystemConfiguration) -> list[ParallelSizes]:
    """Lists the sizes to compare: every tensor-parallel size that the model allows, with the configured stages."""
    asked = _asked(configuration)
    tensor = sorted({*legal_tensor_sizes(network), asked.tensor_parallel_size})
    return [ParallelSizes(size, asked.pipeline_parallel_size) for size in tensor]


@dataclass(frozen=True, slots=True)
class Report:
    """Plans of one model on one device type: the configured one, and those of other parallel sizes."""

    network: DecoderConfig
    quantization: str
    hardware: Hardware
    asked: ReplicaPlan
    plans: list[ReplicaPlan]

    @property
    def lengths(self) -> list[int]:
        longest = max(each.max_model_len for each in self.plans)
        return [length for length in LENGTHS if length < longest] + ([longest] if longest else [])

    def describe(self) -> dict[str, Any]:
        return {
            "model": {
                "architecture": self.network.architecture,
                "num_parameters": count_elements(self.network),
                "dtype": self.network.dtype_name,
                "quantization": stored.method if (stored := self.network.stored) else self.quantization,
                "stored_format": stored.title if stored else None,
                "task": self.network.task,
                "max_model_len": self.network.max_model_len,
            },
            "device": {
                "name": self.hardware.name,
                "total_bytes": self.hardware.total_bytes,
                "available_bytes": self.hardware.available_bytes,
            },
            "refusal": self.asked.refusal,
            "plan": self._describe_plan(self.asked),
            "parallel_sizes": [self._describe_plan(each) for each in self.plans],
        }

    def _describe_plan(self, planned: ReplicaPlan) -> dict[str, Any]:
        told: dict[str, Any] = {**dataclasses.asdict(planned.sizes), "refusal": planned.refusal}
        if not planned.ranks:
            return told
        least = planned.tightest
        return {
            **told,
            "weights_bytes": [rank.memory.weights_bytes for rank in planned.ranks],
            "lora_bytes": planned.lora_bytes,
            "step_bytes": least.memory.activation_bytes,
            "other_bytes": least.memory.other_bytes,
            "cache_bytes": least.memory.cache_bytes,
            "block_size": least.block_size,
            "block_bytes": least.cache_block_bytes,
            "num_device_blocks": least.num_device_blocks,
            "num_host_blocks": least.num_host_blocks,
            "max_model_len": planned.max_model_len,
            "num_tokens": planned.num_tokens,
            "num_sequences": {str(length): planned.num_sequences(length) for length in self.lengths},
        }

    def show(self, console: Console) -> None:
        network, hardware = self.network, self.hardware
        how = held_in(network, self.quantization)
        held = network.dtype_name + ("" if how == network.dtype_name else f", {how}")
        size = units.count(count_elements(network))
        free = units.size(hardware.available_bytes)
        facts = Table.grid(padding=(0, 2))
        facts.add_row("model", f"{network.architecture}, {size} parameters, {held}")
        if network.pooling is not None:
            facts.add_row("task", f"to {network.pooling.task}, as {network.pooling.source} says")
        facts.add_row("length", f"up to {network.max_model_len} tokens")
        facts.add_row("device", f"{hardware.name}, {units.size(hardware.total_bytes)} ({free} free)")
        if self.asked.ranks:
            for name, text in _of_a_worker(self.asked).items():
                facts.add_row(name, text)
        console.print(facts)
        console.print(self._compare())
        if self.asked.refusal:
            console.print(f"would be refused: {self.asked.refusal}", markup=False, highlight=False, soft_wrap=True)

    def _compare(self) -> Table:
        headings = ("tensor", "pipeline", "weights", "blocks", "tokens", *map(str, self.lengths))
        table = Table(*headings, caption="right: how many sequences of so many tokens run at once")
        for planned in self.plans:
            sizes = str(planned.sizes.tensor_parallel_size), str(planned.sizes.pipeline_parallel_size)
            if planned.refusal:
                table.add_row(*sizes, "refused")
                continue
            least = planned.tightest
            weights = units.size(max(rank.memory.weights_bytes for rank in planned.ranks))
            fitting = [str(planned.num_sequences(length)) for length in self.lengths]
            table.add_row(*sizes, weights, str(least.num_device_blocks), str(planned.num_tokens), *fitting)
        return table


def _of_a_worker(asked: ReplicaPlan) -> dict[str, str]:
    least, usage = asked.tightest, asked.tightest.memory
    weights = ", ".join(dict.fromkeys(units.size(rank.memory.weights_bytes) for rank in asked.ranks))
    blocks = f"{least.num_device_blocks} device blocks and {least.num_host_blocks} host blocks"
    a_token, a_block = (
        units.size(least.cache_block_bytes * len(least.kv_windows) / least.block_size),
        units.size(least.cache_block_bytes),
    )
    loras = {"adapters": f"{units.size(asked.lora_bytes)} at most"} if asked.lora_bytes else {}
    return {
        "weights": f"{weights} at each worker",
        **loras,
        "KV": f"{a_token} a token, {a_block} a block of {least.block_size} tokens",
        "step": f"{units.size(usage.activation_bytes)} at most",
        "process": f"{units.size(usage.other_bytes - asked.lora_bytes)} beside these",
        "blocks": f"{units.size(least.memory.cache_bytes)}: {blocks}",
        "longest": f"{asked.max_model_len} tokens",
    }
