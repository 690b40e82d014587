"""The commands of docs/guides/security.md, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.configuration import InternalSecuritySettings
from blockyard.security.authentication import OPEN
from blockyard.security.identity import InternalIdentity
from blockyard.security.keys import read_keys
from blockyard.settings import settings_of
from gateway.config import GatewayConfiguration
from scheduler_service.config import SchedulerConfiguration
from worker_service.config import WorkerConfiguration

if TYPE_CHECKING:
    from blockyard.security.identity import ServiceName

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/guides/security.md").read_text()


def run_block(containing: str, folder: Path) -> None:
    """Runs the guide's only shell block that has some text in it."""
    (block,) = [block for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL) if containing in block]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", block],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


SERVICES: tuple[ServiceName, ...] = ("gateway", "scheduler", "worker")


def test_the_certificates_of_the_guide_are_good(tmp_path: Path) -> None:
    run_block("openssl", tmp_path)
    for service in SERVICES:
        files = (tmp_path / f"{service}.pem", tmp_path / f"{service}.key", tmp_path / "authority.pem")
        peer = InternalIdentity(InternalSecuritySettings(*map(str, files))).peer(service)
        assert peer is not None
        assert peer.name in GUIDE
        verify = ["openssl", "verify", "-verify_hostname", peer.name, "-CAfile", str(files[2]), str(files[0])]
        told = subprocess.run(verify, capture_output=True, text=True, timeout=20)
        assert told.returncode == 0, told.stdout + told.stderr


def test_the_keys_of_the_guide_are_good(tmp_path: Path) -> None:
    run_block("keys make", tmp_path)
    assert [(key.name, str(key.role)) for key in read_keys(tmp_path / "keys.yaml")] == [
        ("alice", "user"),
        ("ops", "admin"),
    ]


def test_the_guide_names_no_flag_that_there_is_not() -> None:
    known = {
        setting.flag
        for configuration in (GatewayConfiguration, SchedulerConfiguration, WorkerConfiguration)
        for setting in settings_of(configuration)
    }
    commands = {
        "--file",
        "--expires",
        "--role",
        "--tenant",
        "--max-calls",
        "--target",
        "--tls",
        "--url",
    }
    commands |= {"--tls-authority", "--tls-server-name", "--client-certificate", "--client-key", "--admin-address"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", GUIDE))
    assert named - known - commands == set()


def test_what_is_open_is_told() -> None:
    assert "/grpc.health.v1.Health/*" in OPEN and "/" in OPEN, "else the guide says something else than there is"
    assert "`OPEN` in `blockyard/security/authentication.py`" in GUIDE
