"""The Open Inference Protocol: completions of the OpenAI front whose bodies come as tensors.

Tensors, parameters and defaults are those of Triton's vLLM backend. Every parameter of a completion is taken under the
same name.
"""
