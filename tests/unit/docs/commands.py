"""The commands and programs that the pages show, and for each of them who sees to it that it works.

`shown()` finds them: every line of an indented block, every fenced block of shell or Python. `HOLDERS` says of each, by
its first line, which test runs it, or why none does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LANGUAGES = ("sh", "python")


@dataclass(frozen=True, slots=True)
class Command:
    """One command line, or one program, as a page shows it."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first_line(self) -> str:
        """What it is called by: its first line without a comment and the sign that another one follows."""
        return re.sub(r"(\s{2,}#.*|\s*\\)$", "", self.text.partition("\n")[0]).strip()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.first_line}"


@dataclass(frozen=True, slots=True)
class By:
    """A test that runs it, `file::function`, as it stands but for addresses and names, or does the same in its way."""

    test: str


@dataclass(frozen=True, slots=True)
class NotRun:
    """Why no test runs it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of a page that stand apart from its text."""

    line: int
    language: str | None
    """Of a fenced block; None: indented."""
    text: str


def blocks_of(text: str) -> Iterator[Block]:
    """Finds fenced and indented blocks. Inside a fence nothing is indented, and a list's lines are text."""
    lines = text.splitlines()
    number, before = 0, ""
    while number < len(lines):
        start, line = number, lines[number]
        if line.startswith("```"):
            number = lines.index("```", start + 1)
            yield Block(start + 2, line.removeprefix("```"), "\n".join(lines[start + 1 : number]))
        elif line.startswith("    ") and not before.strip():
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or _goes_on(lines, number + 1)):
                number += 1
            yield Block(start + 1, None, "\n".join(each[4:] for each in lines[start : number + 1]))
        before = lines[number]
        number += 1


def _goes_on(lines: list[str], number: int) -> bool:
    """An empty line within an indented block."""
    return not lines[number].strip() and number + 1 < len(lines) and lines[number + 1].startswith("    ")


def commands_of(page: str, text: str) -> Iterator[Command]:
    """Finds what a page shows: a fenced program is one; an indented block has one in each line, also a broken one."""
    for block in blocks_of(text):
        if block.language in LANGUAGES:
            yield Command(page, block.line, block.language, block.text)
        elif block.language is None and not block.text.startswith(tuple(OUTPUTS.get(page, ()))):
            line = block.line
            for command in re.split(r"(?<!\\)\n", block.text):
                if command and not command.startswith("#"):
                    yield Command(page, line, "sh", command)
                line += command.count("\n") + 1


def shown() -> list[Command]:
    """Everything that the pages show."""
    return [
        command
        for page in PAGES
        for command in commands_of(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    ]


def holder_of(command: Command) -> By | NotRun | None:
    """Who holds a command: by its whole first line, or by a beginning that ends with `…`."""
    rows = HOLDERS.get(command.page, {})
    if (exact := rows.get(command.first_line)) is not None:
        return exact
    return next((rows[key] for key in beginnings_in(rows) if command.first_line.startswith(key[:-1])), None)


def beginnings_in(rows: dict[str, By | NotRun]) -> list[str]:
    """The keys that stand for all commands that begin so."""
    return [key for key in rows if key.endswith("…")]


def held_by(test: str) -> list[Command]:
    """The commands that a test says it runs."""
    return [command for command in shown() if holder_of(command) == By(test)]


# Indented blocks that show what a program writes, by how they begin.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "docs/guides/logs.md": ("11:44:57.136 I gateway", "W the worker was lost", "W lost the scheduler"),
    "docs/guides/operate.md": ("blockyard 0.1.0  127.0.0.1:50052", "ago        request"),
    "docs/guides/several-models.md": (": loading large:",),
}

AT_SERVICES = By("tests/integration/test_documented_commands.py::test_it_works_at_the_services")
PROGRAMS = By("tests/integration/test_documented_commands.py::test_the_programs_of_a_page_run")
AS_IT_STANDS = By("tests/e2e/test_first_steps.py::test_the_first_steps_as_they_stand")
NUMBERS = By("tests/integration/pooling/test_calls.py::test_the_program_writes_numbers_and_nothing_else")
SETTINGS = By("tests/unit/docs/test_commands.py::test_a_service_takes_what_it_is_given")
PROTOCOL_PARTS = By("tests/unit/docs/test_protocol_page.py::test_the_parts_are_those_of_the_program")
ALONE = By("tests/unit/docs/test_commands.py::test_it_works_alone")
OPERATE = By("tests/unit/blockyard/cli/admin/test_cli_admin.py::test_what_the_guide_says_works")
METRICS = By("tests/integration/test_metrics.py::test_what_is_told_is_what_happened")
SECURITY = "tests/unit/docs/test_security_guide.py::"
COMPOSE = "tests/e2e/containers/test_compose.py::"
WHEEL = By("tests/e2e/test_installed.py::test_a_wheel_serves_the_demo_model_without_a_compiler")
EXAMPLES = By("tests/e2e/test_examples.py::test_a_text_streams")
RENDERED = By("tests/integration/deploy/test_rendered.py::test_what_is_rendered_keeps_to_every_rule")
KUBECTL = By("tests/integration/deploy/test_kubernetes_guide.py::test_what_its_commands_name_exists")

ADDED_MODEL = By("tests/kernels/test_add_a_model_guide.py::test_what_it_says_comes")

SIMULATION = By("tests/integration/simulation/test_simulation.py::test_the_program_runs_and_replays")

THIS = NotRun("it is what makes the environment of the tests, or what runs them")
RUN = By("tests/integration/blockyard/cli/test_run_command.py::test_only_the_answer_is_written")
TALK = By("tests/integration/test_terminal.py::test_run_talks_stops_an_answer_and_keeps_its_history")
BACKGROUND = By("tests/integration/test_background.py::test_up_serves_until_down")
MODELS = By("tests/integration/blockyard/cli/test_models.py::test_a_model_comes_and_goes")
LAUNCH = By(
    "tests/integration/blockyard/cli/test_launch_command.py::test_it_starts_a_system_for_the_agent_and_ends_with_it"
)
SYSTEMD = NotRun("it needs systemd")
A_CLUSTER = NotRun("it needs a cluster")
HOURS = NotRun("it installs systems of others (6 GB) and measures for many minutes, on a quiet machine")
A_HOST = NotRun("it needs a gateway of this name, with keys and TLS; tests/integration/test_security.py has one")

HOLDERS: dict[str, dict[str, By | NotRun]] = {
    "README.md": {
        "make demo": By("tests/integration/test_documented_commands.py::test_the_demo_runs"),
        ".venv/bin/blockyard run": TALK,
        ".venv/bin/blockyard serve": AS_IT_STANDS,
        ".venv/bin/blockyard serve Qwen/Qwen3-0.6B": SETTINGS,
        "from blockyard import Client": PROGRAMS,
        "from openai import OpenAI": PROGRAMS,
        "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json'": AT_SERVICES,
    },
    "CONTRIBUTING.md": {
        "make setup": THIS,
        "make check": THIS,
        "make unit": THIS,
        "make test": THIS,
        "make lint": NotRun("it changes the working tree"),
        "python -m tests.kit.fakes.fake_worker --help": ALONE,
        "python -m tests.kit.chaos.fault_proxy --listen 127.0.0.1:7000 --target 127.0.0.1:50070": By(
            "tests/unit/kit/test_fault_proxy.py::test_the_program_obeys_lines"
        ),
        "BLOCKYARD_FAULTS=step.after_answer:kill@7 python -m worker_service": By(
            "tests/integration/test_faults.py::test_a_fault_at_each_point_of_a_step_costs_a_pause"
        ),
    },
    "docs/reliability/simulation.md": {
        "make sim MINUTES=10": SIMULATION,
        "python -m tests.kit.simulation replay…": SIMULATION,
    },
    "docs/concepts/protocol.md": {
        'grpcurl -plaintext -d \'{"spec": {"text": "Hello", "stop": {"max_tokens": 8}}}\'': By(
            "tests/integration/test_documented_commands.py::test_what_grpcurl_is_told_is_a_request"
        ),
        "python -m tests.kit.simulation.spec…": By("tests/unit/kit/test_protocol_spec.py::test_the_command_prints_it"),
        "class …": PROTOCOL_PARTS,
        "def …": PROTOCOL_PARTS,
    },
    "docs/reliability/planted.md": {
        "python -m tests.kit.simulation.planted --write": By(
            "tests/integration/simulation/test_planted.py::test_a_planted_mistake_is_found"
        )
    },
    "docs/guides/add-a-backend.md": {".venv/bin/python -m pytest -q tests/kernels": THIS},
    "docs/guides/add-a-model.md": {
        'RECIPES["cwm"] = Recipe("CwmForCausalLM", "CwmConfig", '
        '{"head_dim": 32, "sliding_window": 40, "layer_types": _KINDS})': ADDED_MODEL,
        ".venv/bin/python -m pytest -q tests/kernels/test_families.py -k cwm": THIS,
        "def cwm(fields: Fields) -> DecoderConfig:": ADDED_MODEL,
        ".venv/bin/blockyard serve --model ./my-model": SETTINGS,
        '.venv/bin/blockyard generate "Once upon a time"': By(
            "tests/integration/test_one_machine.py::test_generate_streams_what_it_gives_at_once"
        ),
    },
    "docs/guides/benchmarks.md": {
        "python benchmarks/peers.py …": HOURS,
        "OUT=results bash benchmarks/gpu_day.sh --wheels ./wheels": By(
            "tests/integration/benchmarks/test_gpu_day.py::test_a_dry_day_leaves_every_result"
        ),
    },
    "docs/guides/gpu.md": {
        "sh install_torch.sh .venv/bin/python https://download.pytorch.org/whl/cu130": NotRun("it installs gigabytes"),
        ".venv/bin/blockyard serve …": SETTINGS,
        "OUT=results bash benchmarks/gpu_day.sh": By(
            "tests/integration/benchmarks/test_gpu_day.py::test_a_dry_day_leaves_every_result"
        ),
        "BLOCKYARD_TEST_DEVICE=cuda .venv/bin/python -m pytest -m gpu tests/gpu tests/kernels/triton": NotRun(
            "it needs a GPU"
        ),
    },
    "docs/guides/call.md": {
        "import blockyard": PROGRAMS,
        'client = blockyard.Client("gateway-1:50051,gateway-2:50051", tenant="team-1")': PROGRAMS,
        "from blockyard import Message, Tool, ToolCall": PROGRAMS,
        'answer = client.generate("Once upon a time", max_tokens=5, logprobs=3, prompt_logprobs=0)': PROGRAMS,
        'client.completions.create(model="demo", prompt="Once upon a time", '
        'extra_body={"top_k": 20, "return_token_ids": True})': PROGRAMS,
        "cd examples/node && npm install && node index.js 127.0.0.1:50051": EXAMPLES,
        "cd examples/java && make run ADDRESS=127.0.0.1:50051": EXAMPLES,
        "cd examples/cpp && cmake -B build && cmake --build build && build/stream 127.0.0.1:50051": EXAMPLES,
    },
    "docs/guides/agents.md": {
        "blockyard launch claude --model MODEL": LAUNCH,
        "import json": PROGRAMS,
        "python examples/agent.py http://127.0.0.1:8000": By(
            "tests/integration/examples/test_examples.py::test_an_agent"
        ),
        "cd examples/node-agent && npm install && node index.js http://127.0.0.1:8000": By(
            "tests/e2e/test_agents.py::test_the_example_in_node_runs"
        ),
    },
    "docs/guides/compose.md": {
        "docker compose up --build --detach": By(COMPOSE + "test_each_starts_when_the_one_behind_it_is_healthy"),
        "curl http://127.0.0.1:8000/v1/models": AT_SERVICES,
        "docker compose down": By(COMPOSE + "test_down_drains"),
        "COMPOSE_PROFILES=gpu docker compose up --build --detach": NotRun("it needs a GPU in containers"),
        "COMPOSE_PROFILES=cpu,monitoring docker compose up --detach": By(
            COMPOSE + "test_prometheus_finds_every_service"
        ),
        "make up COMPOSE_PROFILES=cpu,monitoring": By(COMPOSE + "test_prometheus_finds_every_service"),
        "BLOCKYARD_MODELS=/srv/models BLOCKYARD_MODEL_NAME=my-model docker compose up --build --detach": By(
            COMPOSE + "test_a_model_is_served_from_a_folder_that_is_mounted"
        ),
        "sudo sh docker/base_image.sh blockyard-base": NotRun("it makes the base that BASE_IMAGE names in `make e2e`"),
        "BASE_IMAGE=blockyard-base docker compose up --build --detach": NotRun(
            "it is how `make e2e` is run without one"
        ),
        "docker compose up --detach --scale worker=2": By(
            COMPOSE + "test_one_of_two_workers_is_killed_for_good_and_nothing_is_lost"
        ),
        ".venv/bin/blockyard keys make my-app --file /etc/blockyard/gateway/keys.yaml": By(
            COMPOSE + "test_keys_are_asked_for_where_an_override_brings_them"
        ),
        "chmod 644 /etc/blockyard/gateway/keys.yaml": By(
            COMPOSE + "test_keys_are_asked_for_where_an_override_brings_them"
        ),
        "docker compose ps": By(COMPOSE + "test_each_starts_when_the_one_behind_it_is_healthy"),
        "docker compose logs --follow": NotRun("it shows, and does not end"),
        'docker compose exec gateway blockyard generate "def read_lines(path):"': By(
            COMPOSE + "test_the_command_line_is_in_the_image"
        ),
        "docker build --file docker/control.Dockerfile --tag blockyard-control:dev .": By(
            "tests/e2e/containers/test_images.py::test_what_the_images_add_to_their_base"
        ),
        "docker build --file docker/worker.Dockerfile --tag blockyard-worker:dev .": By(
            "tests/e2e/containers/test_images.py::test_what_the_images_add_to_their_base"
        ),
        "make e2e": THIS,
    },
    "docs/guides/kubernetes.md": {
        "kubectl …": KUBECTL,
        "helm install …": By(
            "tests/integration/deploy/test_kubernetes_guide.py::test_the_values_of_helm_say_what_they_are"
        ),
    },
    "docs/guides/logs.md": {
        "grep -h request_id=req-0 *.log | sort": By(
            "tests/integration/test_documented_commands.py::test_logs_are_joined_by_the_request"
        ),
    },
    "docs/guides/open-inference.md": {
        "curl http://127.0.0.1:8000/v2/models/demo/generate -H 'Content-Type: application/json'": AT_SERVICES,
        "import json": By("tests/integration/test_open_inference.py::test_the_programs_of_the_guide"),
    },
    "docs/guides/tools.md": {
        "from blockyard import Client, Message, Tool": By(
            "tests/unit/gateway/fronts/openai/test_tool_calls.py::test_a_client_of_ours_reads_the_same"
        ),
    },
    "docs/guides/structured-outputs.md": {
        "from blockyard import Client, StructuredOutputsParams": PROGRAMS,
        "from openai import OpenAI": PROGRAMS,
    },
    "docs/guides/embeddings.md": {
        ".venv/bin/blockyard serve …": SETTINGS,
        "import openai": By("tests/integration/pooling/test_calls.py::test_openai_client_reads_both_encodings"),
        ".venv/bin/blockyard embed …": NUMBERS,
        ".venv/bin/blockyard score …": NUMBERS,
        ".venv/bin/blockyard classify …": NUMBERS,
        "import blockyard": By(
            "tests/integration/pooling/test_real_worker.py::test_a_script_asks_for_vectors_and_scores"
        ),
    },
    "docs/guides/lora.md": {
        "blockyard serve --model /models/base …": SETTINGS,
        "blockyard lora …": By("tests/unit/blockyard/cli/admin/test_cli_lora.py::test_what_the_guide_says_works"),
    },
    "docs/guides/install.md": {
        "pip install 'blockyard[serve]'": WHEEL,
        "blockyard serve": WHEEL,
        "pip install torch --index-url https://download.pytorch.org/whl/cpu": NotRun("it needs PyTorch's index"),
        "make setup": THIS,
        "make wheel": NotRun("it takes minutes; `make wheel-test` begins with it"),
    },
    "docs/guides/inspect.md": {
        "blockyard admin …": By(
            "tests/unit/blockyard/cli/admin/test_cli_inspection.py::test_what_the_guide_says_works"
        ),
        '"""largest.py, somewhere on the worker\'s PYTHONPATH."""': By(
            "tests/unit/worker_service/operations/test_extensions.py::test_the_guides_extension_is_one"
        ),
        ".venv/bin/python -m worker_service --worker-extension largest:Largest": SETTINGS,
        'with blockyard.LLM("./my-model", worker_extension="largest:Largest") as llm:': By(
            "tests/integration/test_operations.py::test_a_script_operates_its_system"
        ),
    },
    "docs/guides/first-minutes.md": {
        "blockyard run": TALK,
        "blockyard run Qwen/Qwen3-0.6B": TALK,
        'blockyard run demo "def read_lines(path):" --max-tokens 40': RUN,
        'git diff | blockyard run Qwen/Qwen3-0.6B "Say what this changes."': RUN,
        "blockyard pull Qwen/Qwen3-0.6B": MODELS,
        "blockyard ls": MODELS,
        "blockyard show Qwen/Qwen3-0.6B": MODELS,
        "blockyard rm Qwen/Qwen3-0.6B": MODELS,
        "blockyard up demo": BACKGROUND,
        "blockyard ps": BACKGROUND,
        "blockyard logs demo --follow": By("tests/unit/blockyard/cli/test_systems.py::test_logs_follows_to_the_end"),
        "blockyard down demo": BACKGROUND,
        "blockyard launch …": LAUNCH,
    },
    "docs/guides/operate.md": {
        "systemctl --user enable --now blockyard": SYSTEMD,
        "loginctl enable-linger": SYSTEMD,
        "blockyard admin …": OPERATE,
        "blockyard top": OPERATE,
    },
    "docs/guides/sleep.md": {"blockyard admin …": OPERATE},
    "docs/guides/saving.md": {"blockyard serve …": SETTINGS, "blockyard admin …": OPERATE},
    "docs/guides/weights.md": {
        "blockyard admin …": OPERATE,
        "from blockyard import update_weights": By(
            "tests/integration/test_sleep.py::test_answers_are_the_same_through_sleeps"
        ),
        'save_file(policy.state_dict(), "/dev/shm/policy/model.safetensors")': By(
            "tests/integration/test_sleep.py::test_answers_are_the_same_through_sleeps"
        ),
    },
    "docs/guides/parallel.md": {
        ".venv/bin/blockyard serve --tensor-parallel-size 2": SETTINGS,
        ".venv/bin/python -m worker_service …": SETTINGS,
        ".venv/bin/python -m scheduler_service …": SETTINGS,
        "COMPOSE_PROFILES=tp2 docker compose up --build --detach": By(
            "tests/e2e/containers/test_ranks.py::test_two_ranks_answer_as_one_worker_and_outlive_each_other"
        ),
        "kubectl apply --kustomize k8s/overlays/gpu-tp": RENDERED,
        "kubectl apply --kustomize k8s/overlays/gpu-nvlink": RENDERED,
    },
    "docs/guides/playground.md": {
        "curl http://127.0.0.1:8000/status": AT_SERVICES,
        "curl 'http://127.0.0.1:8000/status?model=demo'": AT_SERVICES,
    },
    "docs/guides/restart.md": {
        "pkill -TERM -f 'worker_service .*/worker-0'": By(
            "tests/unit/docs/test_commands.py::test_pkill_finds_one_service"
        ),
        "docker compose up --detach --no-deps --build …": By(
            COMPOSE + "test_a_service_is_replaced_and_nothing_is_lost"
        ),
        "kubectl rollout …": A_CLUSTER,
        "blockyard admin status --json": AT_SERVICES,
    },
    "docs/guides/resume.md": {
        "curl -N localhost:8000/v1/chat/completions -H 'Content-Type: application/json' "
        "-H 'Idempotency-Key: order-17' -d '{": AT_SERVICES,
    },
    "docs/guides/plan.md": {
        ".venv/bin/blockyard doctor": By("tests/unit/blockyard/cli/doctor/test_command.py::test_every_part_is_told"),
        ".venv/bin/blockyard doctor --config blockyard.yaml --json": By(
            "tests/unit/blockyard/cli/doctor/test_command.py::test_what_fails_is_told_as_json"
        ),
        ".venv/bin/blockyard doctor --scheduler-address …": By(
            "tests/unit/blockyard/cli/doctor/test_command.py::test_what_fails_is_told_as_json"
        ),
        ".venv/bin/blockyard plan": By("tests/unit/blockyard/cli/test_plan_command.py::test_the_demo_model_fits"),
        ".venv/bin/blockyard plan ./my-model --gpu h100 --tensor-parallel-size 2": By(
            "tests/unit/blockyard/cli/test_plan_command.py::test_a_large_model_on_a_large_gpu"
        ),
        ".venv/bin/blockyard plan ./my-model --memory 24GiB --json": By(
            "tests/unit/blockyard/cli/test_plan_command.py::test_replicas_share_a_memory"
        ),
    },
    "docs/guides/run.md": {
        "make setup": THIS,
        ".venv/bin/blockyard serve": AS_IT_STANDS,
        ".venv/bin/blockyard serve …": SETTINGS,
        "pip install 'blockyard[transformers]'": NotRun("it needs a package index that has us"),
        "blockyard serve --model ./apertus": By(
            "tests/integration/test_transformers_code.py::test_it_gives_together_what_it_gives_alone"
        ),
        ".venv/bin/python -m worker_service": SETTINGS,
        ".venv/bin/python -m scheduler_service --model ./my-model": SETTINGS,
        ".venv/bin/python -m gateway --model ./my-model": SETTINGS,
        ".venv/bin/python benchmarks/kernels/int8_accuracy.py --model ./my-model --text ./my-text": By(
            "tests/unit/benchmarks/test_int8_accuracy.py::test_the_demo_model_predicts_nearly_the_same_in_int8"
        ),
        "docker compose up --build --detach": By(COMPOSE + "test_each_starts_when_the_one_behind_it_is_healthy"),
        "curl http://127.0.0.1:8000/v1/models": AT_SERVICES,
        "docker compose down": By(COMPOSE + "test_down_drains"),
        "kubectl apply --kustomize k8s/overlays/cpu": By(
            "tests/integration/deploy/test_rendered.py::test_what_is_rendered_keeps_to_every_rule"
        ),
        "kubectl port-forward service/blockyard-gateway 8000 50051": A_CLUSTER,
    },
    "docs/guides/security.md": {
        "blockyard keys make alice --file keys.yaml --expires 90d": By(
            SECURITY + "test_the_keys_of_the_guide_are_good"
        ),
        "blockyard serve --host 0.0.0.0 --api-keys-file keys.yaml "
        "--tls-certificate gateway.pem --tls-key gateway.key": SETTINGS,
        'client = blockyard.Client("gateway.example:50051", api_key=key, tls=True)': PROGRAMS,
        "export BLOCKYARD_API_KEY=…": A_HOST,
        "blockyard --tls …": A_HOST,
        'blockyard.Client("10.0.0.7:50051", tls=blockyard.ClientTls(authority="ca.pem", '
        'server_name="gateway.example"))': PROGRAMS,
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650": By(
            SECURITY + "test_the_certificates_of_the_guide_are_good"
        ),
        "python -m worker_service --worker-address 0.0.0.0:50070": SETTINGS,
    },
    "docs/guides/several-models.md": {
        ".venv/bin/blockyard serve ./small org/large": SETTINGS,
        ".venv/bin/python -m gateway --scheduler-address small=…": SETTINGS,
        "curl http://127.0.0.1:8000/v1/models/load …": By(
            "tests/integration/test_several_models.py::test_a_load_by_name_is_as_one_for_a_request"
        ),
    },
    "docs/guides/tracing.md": {
        "pip install 'blockyard[tracing]'": NotRun("it needs a package index that has us"),
        "blockyard serve --trace-endpoint http://127.0.0.1:4317": SETTINGS,
        "curl http://127.0.0.1:8000/v1/completions": AT_SERVICES,
    },
    "docs/guides/watch.md": {
        "blockyard serve --scheduler-metrics-port 50062 --worker-metrics-port 50072": SETTINGS,
        "curl http://127.0.0.1:8000/metrics": AT_SERVICES,
        "curl http://127.0.0.1:50062/metrics": By(
            "tests/integration/test_metrics.py::test_what_is_told_is_what_happened"
        ),
        "curl http://127.0.0.1:50072/metrics": By(
            "tests/integration/test_metrics.py::test_what_is_told_is_what_happened"
        ),
    },
}
