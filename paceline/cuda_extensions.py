"""Extensions of torch that were built for CUDA, beside a torch without it.

vLLM's CPU wheel requires them too, and then neither they nor transformers' models can be imported.
Both do without an extension that is not installed, so these are made to look absent.
"""

import importlib.util
import sys

EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")
_WITHOUT_CUDA = "+cpu"
"""End of the version of a build without CUDA."""


def hide_cuda_extensions() -> list[str]:
    """Makes extensions that cannot work absent for this process, before transformers is
    imported."""
    installed = [name for name in EXTENSIONS if name not in sys.modules and _is_there(name)]
    if not installed or not _version("torch").endswith(_WITHOUT_CUDA):
        return []
    hidden = [name for name in installed if not _version(name).endswith(_WITHOUT_CUDA)]
    # Python's way to say that a module does not exist: find_spec gives None.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    return hidden


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _version(name: str) -> str:
    """Empty if no distribution of that name is installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
