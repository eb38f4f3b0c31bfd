"""Process of vLLM's OpenAI server.

vLLM's processes import this module again if they are spawned, and so Paceline before transformers
(see paceline/cuda_extensions.py): it must not be called ``__main__``. ``vllm serve`` asks for the
metadata of a package "vllm", which the CPU wheel does not have; its module of the server does not.
"""

from __future__ import annotations

import runpy

SERVER = "vllm.entrypoints.openai.api_server"

if __name__ == "__main__":
    runpy.run_module(SERVER, run_name="__main__")
