"""The Open Inference Protocol: completions of the OpenAI front, sent as tensors.

Tensors, parameters and defaults are those of Triton's vLLM backend. Every parameter of a completion is accepted under
the same name.
"""
