"""Trains the demo model from the running interpreter's library and exports it here.

    python models/demo/train.py --work /tmp/demo-train

builds the tokenizer (unless tokenizer.json exists), trains for a fixed number of steps, and
writes the Hugging Face files beside this script. The committed weights were made with
CPython 3.11.7, torch 2.13 and transformers 5.23 on two CPU cores. Owns the schedule and
the optimizer; the text is corpus.py's, the vocabulary tokenizer.py's.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import corpus
import numpy as np
import tokenizer as vocabulary
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
CHECKPOINT = "checkpoint.pt"
END_IDS = [vocabulary.END_OF_TEXT_ID, vocabulary.END_ID]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the model's files")
    parser.add_argument("--steps", type=int, default=5200)
    parser.add_argument("--stop", type=int, help="stop after this step, to resume another time")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens in one step")
    parser.add_argument("--short", type=int, default=256, help="sequence length at first")
    parser.add_argument("--long", type=int, default=vocabulary.MAX_CONTEXT, help="and at last")
    parser.add_argument("--long-share", type=float, default=0.15, help="share of steps at --long")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=20250101)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint-seconds", type=float, default=180.0)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fuse with torch.compile; needs a C++ compiler",
    )
    return parser.parse_args()


def model_config() -> LlamaConfig:
    """5.4 million parameters, of which the tied embedding is a fifth."""
    return LlamaConfig(
        vocab_size=vocabulary.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=vocabulary.MAX_CONTEXT,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=vocabulary.END_OF_TEXT_ID,
        eos_token_id=END_IDS,
        pad_token_id=vocabulary.END_OF_TEXT_ID,
    )


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """All documents as one int64 array, each after a separator."""
    pieces: list[list[int]] = []
    for start in range(0, len(documents), 1000):
        batch = documents[start : start + 1000]
        for encoding in tokenizer.encode_batch(batch):  # the post-processor adds the separator
            pieces.append(encoding.ids)
    return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])


def rows(stream: np.ndarray, length: int) -> np.ndarray:
    """The stream as rows of length + 1 tokens, each row's last being the next one's first."""
    num_rows = (len(stream) - 1) // length
    index = np.arange(num_rows)[:, None] * length + np.arange(length + 1)[None, :]
    return stream[index]


def batches(
    text: corpus.Corpus, tokenizer: Tokenizer, length: int, batch_tokens: int, seed: int
) -> Iterator[torch.Tensor]:
    """Endless batches [batch_tokens / length, length + 1], epoch after epoch."""
    size = batch_tokens // length
    for number in range(1_000_000):
        rng = random.Random(f"{seed}-{length}-{number}")
        packed = rows(encode(tokenizer, corpus.epoch(text, rng)), length)
        order = np.random.default_rng(rng.randrange(2**32)).permutation(len(packed))
        for start in range(0, len(order) - size + 1, size):
            yield torch.from_numpy(packed[order[start : start + size]])


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < arguments.warmup:
        return arguments.learning_rate * (step + 1) / arguments.warmup
    done = (step - arguments.warmup) / max(1, arguments.steps - arguments.warmup)
    return arguments.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer_for(model: LlamaForCausalLM, arguments: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; norms are exempt from decay, since they are gains about one."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": arguments.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=(0.9, 0.98), fused=True)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats; the matrix products run in bfloat16, the loss in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validate(model: torch.nn.Module, tokenizer: Tokenizer, held_out: list[str]) -> float:
    """Mean loss over the held-out files, at the full context length."""
    model.eval()
    packed = torch.from_numpy(rows(encode(tokenizer, held_out), vocabulary.MAX_CONTEXT))[:96]
    losses = [loss_of(model, part).item() for part in packed.split(2)]
    model.train()
    return sum(losses) / len(losses)


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors in bfloat16."""
    copied = copy.deepcopy(model).to(torch.bfloat16)
    copied.generation_config = GenerationConfig(
        bos_token_id=vocabulary.END_OF_TEXT_ID,
        eos_token_id=END_IDS,
        pad_token_id=vocabulary.END_OF_TEXT_ID,
    )
    copied.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone


def load_tokenizer(text: corpus.Corpus, arguments: argparse.Namespace) -> Tokenizer:
    """The committed vocabulary if there is one: weights and vocabulary belong together."""
    path = arguments.output / "tokenizer.json"
    if not path.exists():
        vocabulary.save(vocabulary.build(corpus.epoch(text, random.Random(0))), arguments.output)
    return Tokenizer.from_file(str(path))


def save_checkpoint(folder: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Replaces the checkpoint in one move, so that a kill leaves the old one or the new one."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": num_steps}
    torch.save(state, folder / "checkpoint.new")
    (folder / "checkpoint.new").replace(folder / CHECKPOINT)


def train(
    model: LlamaForCausalLM,
    text: corpus.Corpus,
    tokenizer: Tokenizer,
    arguments: argparse.Namespace,
) -> None:
    """Runs the schedule in place, from the checkpoint's step on if asked to."""
    optimizer = optimizer_for(model, arguments)
    first = 0
    if arguments.resume:
        state = torch.load(arguments.work / CHECKPOINT)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    last = arguments.stop or arguments.steps
    num_short = round(arguments.steps * (1 - arguments.long_share))
    stage = ""
    forward = torch.compile(model, dynamic=False) if arguments.compile else model
    saved = logged = time.monotonic()
    source: Iterator[torch.Tensor] = iter(())
    mean_loss = math.log(vocabulary.VOCAB_SIZE)
    loss_column = TextColumn("{task.fields[loss]}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), loss_column)
    with Progress(*columns) as progress:
        bar = progress.add_task("train", total=arguments.steps, completed=first, loss="")
        for step in range(last):
            wanted = "short" if step < num_short else "long"
            if wanted != stage:
                stage = wanted
                length = arguments.short if stage == "short" else arguments.long
                source = batches(text, tokenizer, length, arguments.batch_tokens, arguments.seed)
            batch = next(source)
            if step < first:
                continue  # a resumed run reads past what it has seen
            rate = learning_rate(step, arguments)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = loss_of(forward, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean_loss += 0.03 * (loss.item() - mean_loss)
            progress.update(bar, completed=step + 1, loss=f"loss {mean_loss:.3f}")
            now = time.monotonic()
            if step % 50 == 49:
                speed = 50 * arguments.batch_tokens / (now - logged)
                logged = now
                progress.print(f"step {step + 1} loss {mean_loss:.3f} tokens/s {speed:.0f}")
            if now - saved > arguments.checkpoint_seconds or step + 1 == last:
                saved = now
                save_checkpoint(arguments.work, model, optimizer, step + 1)


def main() -> None:
    arguments = parse_arguments()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    model = LlamaForCausalLM(model_config())
    text = corpus.load()
    tokenizer = load_tokenizer(text, arguments)
    print(f"Python {platform.python_version()}, {model.num_parameters():,} parameters", flush=True)
    if arguments.export_only:
        state = torch.load(arguments.work / CHECKPOINT)
        model.load_state_dict(state["model"])
        print(f"checkpoint of step {state['step']}")
    else:
        train(model, text, tokenizer, arguments)
    export(model, arguments.output)
    print(f"held-out loss {validate(model, tokenizer, text.held_out):.3f} nats a token")


if __name__ == "__main__":
    main()
