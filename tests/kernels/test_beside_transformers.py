from __future__ import annotations


def test_transformers_works_beside_our_kernels() -> None:
    """`kernels` is also a package on PyPI that transformers looks for; ours must not be taken for it."""
    import transformers

    import kernels

    assert transformers.AutoModelForCausalLM is not None
    assert not hasattr(kernels, "get_kernel")
