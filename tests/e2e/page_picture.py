"""Takes the guide's picture of the page: the demo model under some load for a minute.

python -m tests.e2e.page_picture docs/images/page.png
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard import Client
from tests.kit.processes.browser import Browser
from tests.kit.processes.system import ROOT, System

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS = ["--num-device-blocks", "100", "--num-host-blocks", "40", "--max-num-seqs", "8"]
PROMPTS = (
    "import os\n",
    "class Reader:\n",
    "def main():\n",
    "for line in lines:\n",
    "try:\n",
    "with open(path) as file:\n",
)


@contextmanager
def load(target: str, num_clients: int = 11) -> Iterator[None]:
    """Has some clients ask for answers, now more of them and now fewer."""
    ended = threading.Event()

    def ask(number: int) -> None:
        chance = random.Random(number)
        with Client(target) as client:
            for prompt in itertools.cycle(PROMPTS):
                long = chance.randint(50, 700)
                client.generate(prompt * chance.randint(1, 20), max_tokens=long, temperature=0.9, ignore_eos=True)
                if ended.wait(chance.uniform(0, 6)):
                    return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def main(target: str) -> None:
    """Takes it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        browser = Browser(folder / "environment")
        with System(ROOT / "models" / "demo", folder / "logs", FLAGS) as system, load(system.grpc_target):
            browser.look("screenshot", system.http_url, target)


if __name__ == "__main__":
    main(sys.argv[1])
