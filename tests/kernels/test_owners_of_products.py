"""Two files own all products of matrices, and none uses an activation whose bits depend on the batch: by the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWNERS = {"blockyard_kernels/reference/linear.py": {"linear"}, "blockyard_kernels/reference/attention.py": {"bmm"}}
# Its products are of whole numbers, of which a sum has no order.
OWNERS["blockyard_kernels/reference/int8.py"] = {"mm"}
OWNERS["blockyard_kernels/reference/quantized.py"] = {"mm"}
# And so are sums in float64 of products of few digits: they are exact.
OWNERS["blockyard_kernels/reference/fp8.py"] = {"mm"}
PRODUCTS = {
    "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "inner", "tensordot", "einsum",
    "linear", "bilinear", "scaled_dot_product_attention", "multi_head_attention_forward", "chain_matmul", "cdist",
}  # fmt: skip
UNSAFE = {"silu", "sigmoid", "gelu", "softplus", "hardswish", "mish", "logsigmoid", "logsumexp", "compile", "autocast"}
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("blockyard_kernels/reference", "worker_service/models")
    for path in (ROOT / folder).glob("*.py")
)


def forbidden_uses(source: str, allowed: set[str]) -> list[str]:
    """Finds calls of products and of unsafe functions, as methods or as functions of torch; our ops are not torch's."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            found.append(f"{node.lineno}: @")
        if isinstance(node, ast.Attribute) and node.attr in (PRODUCTS | UNSAFE) - allowed:
            owner = ast.unparse(node.value)
            if owner not in ("backend", "self._backend"):
                found.append(f"{node.lineno}: {owner}.{node.attr}")
    return found


@pytest.mark.parametrize("name", FILES)
def test_no_other_file_multiplies_matrices(name: str):
    source = (ROOT / name).read_text(encoding="utf-8")
    assert forbidden_uses(source, OWNERS.get(name, set())) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.einsum('ij,jk', a, b)",
        "a @ b",
        "a.matmul(b)",
        "functional.silu(a)",
        "functional.linear(a, b)",
        "a.logsumexp(-1)",
    ],
)
def test_the_search_finds_what_it_should(line: str):
    assert forbidden_uses(line, set())


def test_the_owners_are_there():
    assert set(OWNERS) <= set(FILES)
