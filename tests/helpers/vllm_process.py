"""A process with a vLLM engine of two ranks, which prints the ids of its processes and waits."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil

from tests.helpers.engines import make_test_engine, tiny_config


async def main() -> None:
    config = tiny_config(Path(sys.argv[1]), engine="vllm", tensor_parallel=2, slots=4)
    engine = make_test_engine("vllm", config)
    await engine.start()
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    print(json.dumps(children), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
