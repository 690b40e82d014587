"""The examples in other languages name every proto that the public API needs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROTOS = ROOT / "protos"


def needed(name: str) -> set[str]:
    """Finds all protos that one imports, those of protobuf itself apart."""
    imports = re.findall(r'^import "(.+)";', (PROTOS / name).read_text(), re.MULTILINE)
    own = {each for each in imports if not each.startswith("google/protobuf/")}
    return own.union(*map(needed, own))


def test_examples_generate_all_that_the_public_api_imports() -> None:
    """The builds take google/rpc/status.proto and all of blockyard/common/v1."""
    assert {name for name in needed("blockyard/inference/v1/inference.proto") if "/common/v1/" not in name} == {
        "google/rpc/status.proto"
    }
    for build in ("java/Makefile", "cpp/CMakeLists.txt"):
        assert "/blockyard/common/v1/*.proto" in (ROOT / "examples" / build).read_text()
