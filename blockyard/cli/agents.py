"""Points coding agents at a system through environment variables and flags; the agents' own files stay unchanged."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from blockyard.local.user_folders import state_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from blockyard.contract.models import Model

Agent = Literal["claude", "codex", "opencode"]
INSTALL: dict[Agent, str] = {
    "claude": "npm install -g @anthropic-ai/claude-code",
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
}
PROVIDER = "blockyard"
# The variable that Codex reads the key from.
_CODEX_KEY = "BLOCKYARD_KEY"
_CODEX_INSTRUCTIONS = (
    "You are a coding agent. Work in the directory that you are told of, and say what you did. "
    "Look before you change a file, and run what shows that a change works."
)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an agent: its command line, the variables to set and those to remove."""

    command: list[str]
    environment: dict[str, str]
    removed: tuple[str, ...] = field(default=())

    def make_environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in self.removed}
        return {**inherited, **self.environment}

    def describe(self) -> str:
        """Formats it as lines of a shell."""
        lines = [f"unset {name}" for name in self.removed]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return "\n".join([*lines, shlex.join(self.command)])


def make_launch(agent: Agent, url: str, key: str, model: Model) -> Launch:
    """Makes the launch of an agent.

    Args:
        agent: which one.
        url: the root of the system's HTTP APIs.
        key: the API key; agents want one even if the system asks for none.
        model: the model to use.
    """
    makers: dict[Agent, Callable[[str, str, Model], Launch]] = {
        "claude": _launch_claude,
        "codex": _launch_codex,
        "opencode": _launch_opencode,
    }
    return makers[agent](url, key, model)


def _launch_claude(url: str, key: str, model: Model) -> Launch:
    # Claude Code asks for models by names of Anthropic's: each of them is this model.
    names = ("", "_DEFAULT_OPUS", "_DEFAULT_SONNET", "_DEFAULT_HAIKU")
    models = {f"ANTHROPIC{name}_MODEL": model.name for name in names}
    # A key of Anthropic's would be sent to this system.
    environment = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, **models}
    return Launch(["claude"], environment, ("ANTHROPIC_API_KEY",))


def _launch_codex(url: str, key: str, model: Model) -> Launch:
    provider = f"model_providers.{PROVIDER}"
    settings = {
        "model": model.name,
        "model_provider": PROVIDER,
        "model_catalog_json": str(_write_catalog(model)),
        "web_search": "disabled",
        f"{provider}.name": "Blockyard",
        f"{provider}.base_url": f"{url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": _CODEX_KEY,
    }
    # A text in JSON's quotation marks is one in TOML's.
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launch(["codex", *flags], {_CODEX_KEY: key})


def _write_catalog(model: Model) -> Path:
    """Writes what Codex has to know of the model; without it, it takes a length of its own."""
    known = {
        "slug": model.name,
        "display_name": model.name,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "context_window": model.max_model_len,
        "input_modalities": ["text"],
        "truncation_policy": {"mode": "tokens", "limit": min(10_000, model.max_model_len // 4)},
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "shell_type": "unified_exec",
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
    }
    path = state_folder() / "codex-models.json"
    path.write_text(json.dumps({"models": [known]}, indent=2), encoding="utf-8")
    return path


def _launch_opencode(url: str, key: str, model: Model) -> Launch:
    limit = {"context": model.max_model_len, "output": max(1, model.max_model_len // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Blockyard",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model.name: {"name": model.name, "limit": limit}},
    }
    chosen = f"{PROVIDER}/{model.name}"
    content = {"provider": {PROVIDER: provider}, "model": chosen, "small_model": chosen}
    return Launch(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(content)})
