"""Measures the demo model: how many of 50 greedy completions of function headers parse.

    python models/demo/evaluate.py

A completion passes if header and completion together are a valid beginning of a Python module
with at least one whole statement in the function's body. Only the end may be unfinished: the
last line, where the token limit fell, and the statement it belongs to are cut off first. An
error anywhere before fails. Owns the headers and the rule; the model is loaded by transformers.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HEADERS = """\
def add(a, b):
def fibonacci(n):
def is_prime(number):
def read_lines(path, encoding="utf-8"):
def count_words(text):
def reverse(items):
def flatten(nested):
def main():
def main(argv=None):
def parse_args(argv=None):
def load_config(filename):
def save_json(data, filename):
def find_files(root, pattern):
def get_name(self):
def __init__(self, name, value=None):
def __repr__(self):
def __eq__(self, other):
def __len__(self):
def __enter__(self):
def close(self):
def send_message(self, message, timeout=None):
def connect(host, port):
def download(url, target):
def format_size(num_bytes):
def parse_date(string):
def merge(left, right):
def binary_search(items, target):
def quick_sort(items):
def maximum(values):
def mean(values):
def factorial(n):
def gcd(a, b):
def is_palindrome(text):
def remove_duplicates(items):
def write_header(self, file):
def get_value(self, key, default=None):
def set_value(self, key, value):
def copy_file(source, destination):
def split_lines(text):
def join_path(directory, name):
def check_type(value, expected):
def run_command(command, timeout=None):
def start_thread(target, args=()):
def log_error(message, *args):
def to_string(value):
def from_string(cls, string):
def validate(self, value):
def test_empty(self):
def iterate(self):
async def handle(self, reader, writer):
""".splitlines()

QUESTIONS = ("What is lambda?", "What does len do?", "Explain the json module.", "Explain dict")

# The second is codeop's flag (no public name): text that is valid so far gives the message below.
FLAGS = ast.PyCF_ONLY_AST | 0x4000
VALID_SO_FAR = "incomplete input"


def parses(header: str, completion: str, finished: bool) -> bool:
    """Whether the completion, cut after its last whole statement, continues the header.

    `finished` says that the model ended the document itself: then nothing may be cut off.
    """
    lines = f"{header}{completion}".splitlines()
    if not finished:
        lines.pop()
    while len(lines) > 1:
        try:
            compile("\n".join(lines) + "\n", "completion", "exec", FLAGS)
        except SyntaxError as error:
            if finished or VALID_SO_FAR not in str(error):
                return False
            lines.pop()
        else:
            return True
    return False


class Writer:
    """Greedy completion with transformers, one prompt at a time."""

    def __init__(self, folder: Path, dtype: str, num_tokens: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.num_tokens = num_tokens

    def complete(self, prompt: str, add_special_tokens: bool = True) -> tuple[str, bool]:
        """The new text, and whether the model ended it before the limit."""
        inputs = self.tokenizer(prompt, add_special_tokens=add_special_tokens, return_tensors="pt").to(
            self.model.device
        )
        ids = self.model.generate(**inputs, max_new_tokens=self.num_tokens, do_sample=False)
        new_ids = ids[0, inputs["input_ids"].shape[1] :].tolist()
        finished = new_ids[-1] in self.model.generation_config.eos_token_id
        return self.tokenizer.decode(new_ids, skip_special_tokens=True), finished

    def answer(self, question: str) -> str:
        """The reply to one user message."""
        messages = [{"role": "user", "content": question}]
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.complete(prompt, add_special_tokens=False)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--num-tokens", type=int, default=96, help="most new tokens a completion")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--minimum", type=int, default=26, help="fail below this many that parse")
    parser.add_argument("--quiet", action="store_true", help="print the result alone")
    arguments = parser.parse_args()
    writer = Writer(arguments.model, arguments.dtype, arguments.num_tokens)
    num_parsed = 0
    for header in HEADERS:
        completion, finished = writer.complete(header)
        passed = parses(header, completion, finished)
        num_parsed += passed
        if not arguments.quiet:
            print(f"--- {'parses' if passed else 'FAILS'}\n{header}{completion}\n", flush=True)
    for question in () if arguments.quiet else QUESTIONS:
        print(f"--- {question}\n{writer.answer(question)}\n")
    print(f"{num_parsed} of {len(HEADERS)} completions parse")
    if num_parsed < arguments.minimum:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
