"""Environments that a whole run of its own processes can name."""

from __future__ import annotations

from rollout_worker.environments.base import Sample, Task


async def openai_agent(task: Task, sample: Sample) -> dict[str, float]:
    """Talks for two turns through the real client; more digits are better."""
    from openai import AsyncOpenAI

    assert task.openai is not None
    async with AsyncOpenAI(base_url=task.openai.base_url, api_key=task.openai.api_key) as client:
        messages = [{"role": "user", "content": str(task.row["prompt"])}]
        said = ""
        for hint in ("more", ""):
            reply = await client.chat.completions.create(
                model=task.openai.model,
                messages=messages,  # type: ignore[arg-type]
            )
            said += reply.choices[0].message.content or ""
            messages.append(reply.choices[0].message.model_dump())
            messages.append({"role": "user", "content": hint})
    return {"digits": sum(map(str.isdigit, said)) / max(1, len(said)), "brief": -0.001 * len(said)}


async def broken(task: Task, sample: Sample) -> float:
    await sample(task.prompt)
    raise KeyError("the shop has no such door")
