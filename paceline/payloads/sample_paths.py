"""Samples of several sequences: the path of each, which is all that its model saw and said.

    path of the first sequence of a sample    the group's prompt, its own tokens
    path of a branch                          the beginning of an earlier one's path, its own tokens

A conversation that is compacted or rewritten shares the beginning; one with a prompt of its own,
such as that of a sub-agent, shares nothing.
"""

from itertools import accumulate
from typing import NamedTuple

from paceline.errors import UserError
from paceline.v1 import rollout_pb2

PROMPT, NOTHING = -1, -2
"""The parent of a sequence that goes on from no other one of its sample."""


class BadPaths(UserError, ValueError):
    """Branches that cannot be, and why."""


class Paths(NamedTuple):
    """The paths of a group's sequences, in their order."""

    parents: list[int]
    """The sequence whose own tokens are the last ones of the prefix; or PROMPT, or NOTHING."""
    prefixes: list[int]
    """Tokens of the path before its own."""
    branches: list[int]
    """Sequences of each sample."""

    @property
    def branched(self) -> bool:
        return len(self.branches) < len(self.parents)

    @property
    def samples(self) -> list[slice]:
        """The places of each sample's sequences."""
        ends = [*accumulate(self.branches)]
        return [slice(end - size, end) for end, size in zip(ends, self.branches, strict=True)]


def paths_of(group: rollout_pb2.Group) -> Paths:
    """Raises BadPaths."""
    prompt = len(group.prompt_tokens) // 4
    parents: list[int] = []
    prefixes: list[int] = []
    branches: list[int] = []
    for number, completion in enumerate(group.completions):
        if not completion.HasField("branch"):
            parents.append(PROMPT)
            prefixes.append(prompt)
            branches.append(1)
            continue
        of, shared = completion.branch.of, completion.branch.prefix
        first = number - branches[-1] if branches else number
        if not first <= of < number:
            raise BadPaths(
                f"completions[{number}] is a branch of {of}: name one of its sample before it"
            )
        longest = prefixes[of] + len(group.completions[of].tokens) // 4
        if shared > longest:
            raise BadPaths(
                f"completions[{number}] shares {shared} tokens with a path of {longest} tokens"
            )
        parent = of
        # It may share no more than that one shares itself.
        while parent >= 0 and shared <= prefixes[parent]:
            parent = parents[parent]
        parents.append(parent if shared else NOTHING)
        prefixes.append(shared)
        branches[-1] += 1
    return Paths(parents, prefixes, branches)


def check_sizes(meta: rollout_pb2.GroupMeta, most: int, branches: int) -> int:
    """The samples of ``meta``. Each has at most ``branches`` sequences, and the paths of all but
    the first at most ``most`` tokens. Raises BadPaths."""
    sizes, prefixes, lengths = list(meta.branches), list(meta.prefixes), list(meta.lengths)
    if not sizes and not prefixes:
        return len(lengths)
    if min(sizes, default=0) < 1 or max(sizes) > branches or sum(sizes) != len(lengths):
        what = f"branches {sizes[:64]} of {len(lengths)} sequences"
        raise BadPaths(f"{what}: each sample has 1 to {branches} of them")
    if len(prefixes) != len(lengths):
        raise BadPaths(f"{len(prefixes)} prefixes of {len(lengths)} sequences: one each")
    paths = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    start = 0
    for size in sizes:
        if prefixes[start] != meta.prompt_tokens:
            what = f"prefixes[{start}] is {prefixes[start]} and begins a sample"
            raise BadPaths(f"{what}: {meta.prompt_tokens} is the prompt")
        longest = paths[start]
        for number in range(start + 1, start + size):
            if prefixes[number] > longest:
                what = f"prefixes[{number}] is {prefixes[number]}"
                raise BadPaths(f"{what}, and no path before it in its sample is over {longest}")
            if paths[number] > most:
                raise BadPaths(
                    f"the path of sequence {number} has {paths[number]} tokens, {most} allowed"
                )
            longest = max(longest, paths[number])
        start += size
    return len(sizes)
