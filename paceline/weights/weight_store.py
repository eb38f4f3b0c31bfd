"""Weight store: published weights as objects in a file system or object store (``weights.url``).

    publishing rank ── buckets, then its checksums ──► store
    rank 0 ── the manifest, once all ranks are done ──► store
           └─ its name, in the report ──► ledger ──► directives ──► rollout workers read the objects

Invariants:

- A name is that of one publication of one replica. Nothing is ever written again under it, so what
  was taken back and published anew has another name.
- The name ends in the digest of the manifest, and the manifest has the checksums of the buckets. A
  worker that follows the ledger takes no other bits, whatever became of the store.
- Objects of a name go once the ledger has a newer one and no worker reads them.
"""

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence

from paceline.ids import TaskId, stored_version
from paceline.payloads.open_store import open_payloads
from paceline.payloads.store import Ref

SETTING = "weights.url"
THE_STORE = "the weight store"
"""A process's waits name it so."""
MANIFEST = "manifest"
NAME = r"\d{1,15}-[0-9a-f]{12}-\d{1,15}-[0-9a-f]{32}"
"""Pattern of the names that the ledger knows: version, replica, publication, digest of the
manifest."""


class WeightStore:
    """Objects of one run's weights. Every method raises StoreUnavailable."""

    def __init__(self, url: str, run_id: str) -> None:
        """Raises BadInput if the store cannot be opened."""
        self._objects = open_payloads([url], f"{run_id}.weights", "", SETTING)

    def write(self, prefix: str, objects: Mapping[str, bytes]) -> int:
        """Writes objects by their names, each completely or not at all; returns their number."""
        asyncio.run(self._objects.put({_ref(prefix, k): data for k, data in objects.items()}))
        return len(objects)

    def read(self, prefix: str, names: Sequence[str]) -> Sequence[bytes | None]:
        """The objects of these names; None for one that is not there."""
        return asyncio.run(self._objects.get([_ref(prefix, name) for name in names]))

    def first(self, prefix: str, name: str) -> bytes | None:
        return self.read(prefix, [name])[0]

    async def sweep(self, newest: int, kept: Collection[str]) -> None:
        """Deletes the objects of all weights before version ``newest`` but those with a prefix in
        ``kept``. Of that version, the next replica may be writing its own at this moment."""
        prefixes = {ref: ref[0].partition(".")[0] for ref in await self._objects.list()}
        old = {r: p for r, p in prefixes.items() if stored_version(p) < newest and p not in kept}
        await self._objects.delete(list(old))


def prefix_of(name: str) -> str:
    """The part of a name that its objects have."""
    return name.rpartition("-")[0]


def digest_of(manifest: bytes) -> str:
    return hashlib.blake2b(manifest, digest_size=16).hexdigest()


def _ref(prefix: str, name: str) -> Ref:
    return TaskId(f"{prefix}.{name}"), 0
