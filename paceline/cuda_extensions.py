"""Extensions of torch that were built for CUDA, beside a torch without it.

vLLM's CPU wheel requires them too, and then neither they nor transformers' models can be imported.
Both do without an extension that is not installed, so these are made to look absent.

A process that a library spawns with multiprocessing imports the library before any of our modules.
There the extensions have to be hidden before that: multiprocessing imports the parent's main module
first, so for a while that is this module.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")
_WITHOUT_CUDA = "+cpu"
"""End of the version of a build without CUDA."""


def hide_cuda_extensions() -> list[str]:
    """Makes extensions that cannot work absent for this process, before transformers is
    imported."""
    installed = [name for name in EXTENSIONS if name not in sys.modules and find_spec(name)]
    if not installed or not _version("torch").endswith(_WITHOUT_CUDA):
        return []
    hidden = [name for name in installed if not _version(name).endswith(_WITHOUT_CUDA)]
    # Python's way to say that a module does not exist: find_spec gives None.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    return hidden


def _version(name: str) -> str:
    """Empty if no distribution of that name is installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


VLLM_MARK = "PACELINE_VLLM_ENGINE"
"""Environment variable of vLLM's processes that end with the one that started them: other uses of
vLLM in the same Python environment are left alone (rollout_worker/engine/vllm/plugin.py)."""
_THIS = "paceline.cuda_extensions"


@contextmanager
def hidden_in_children() -> Iterator[None]:
    """Hides in children that are spawned inside what ``hide_cuda_extensions`` has hidden here, if
    it is anything. Objects of the main module cannot be handed to children inside."""
    main = sys.modules["__main__"]
    before = main.__spec__
    if any(sys.modules.get(name, main) is None for name in EXTENSIONS):
        main.__spec__ = find_spec(_THIS)
    try:
        yield
    finally:
        main.__spec__ = before
