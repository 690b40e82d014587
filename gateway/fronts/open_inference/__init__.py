"""The Open Inference Protocol as a third front: a completion of the OpenAI front whose body comes as tensors.

Tensors, parameters and defaults are those of Triton's vLLM backend. Whatever a completion takes is taken here under the
same name.
"""
