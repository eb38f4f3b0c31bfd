"""Weights links: the threads that publisher and receiver run, one for each link.

    converge ──► link thread: form a mesh of two ──► transfer until it is withdrawn or fails

- A link is named by its generation. Withdrawing it frees its thread within a slice, whatever it
  waits for.
- It has one or more sources, the ranks of the replica that publishes. The receiver joins a mesh of
  two with each of them. If one of these breaks, the link has failed as a whole.
- A link that fails is reported once, and stays dead until another generation takes its place.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.process import threads
from paceline.process.structured_log import event
from paceline.weights.weight_manifest import WeightsRefused

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0
FORM_S = 60.0

LinkKey = tuple[int, int]
"""Generation and incarnation of the peer. A failover of Redis that loses the newest entries of the
journal lets a generation be counted again, for another process."""


@dataclass(eq=False)
class WeightLink:
    """One link, as one of its ends sees it."""

    generation: int
    peer: str
    newest: int | None = None
    """Newest version that the controller knew when it named the link."""
    reload: bool = False
    """The receiver's weights of that version were withdrawn."""
    tree: int = 0
    """Number of the tree of links that this one belongs to; a higher one is newer."""
    relayed: bool = False
    heard_t: float | None = None
    """Receiver: when it last heard of the publisher (monotonic); None while it does not listen."""
    owing: dict[int, float] = field(default_factory=dict)
    """Receiver: sources from 1 on that owe it something, and when it last heard of each."""
    fault: str = ""
    """Reason for which the link was ended; empty if none was given."""
    withdrawn: threading.Event = field(default_factory=threading.Event)
    formed: bool = False


@dataclass(kw_only=True, eq=False)
class LinkEnd(ABC):
    """Base class of publisher and receiver. Links are served by threads; methods do not block."""

    rank: ClassVar[int]
    thread_name: ClassVar[str]
    url: str
    run_id: str
    device: torch.device
    on_link_error: Callable[[int, str], None]
    """Called from a link's thread with the generation of a link that failed and the reason."""
    host: str | None = None

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._links: dict[LinkKey, WeightLink] = {}
        self._threads: list[threading.Thread] = []
        self.last_transfer_s = 0.0
        threads.on_exit(self._withdraw)

    @property
    def first_source(self) -> int:
        """The source of a link whose mesh is formed first."""
        return 0

    @property
    def form_s(self) -> float:
        """Seconds in which the other end has to come to the mesh."""
        return FORM_S

    @abstractmethod
    def transfer(self, link: WeightLink, mesh: ProcessMesh) -> NoReturn:
        """Transfers versions over a formed mesh until it raises: EpochCancelled once the link is
        withdrawn, any other exception if the link failed."""

    def formed_generations(self) -> list[int]:
        """Generations of the links that are formed and healthy."""
        with self._changed:
            return sorted(link.generation for link in self._links.values() if link.formed)

    def close(self) -> None:
        """Withdraws all links and waits for their threads, which end at once."""
        self._withdraw()
        threads.join(self._threads, _CLOSE_S)

    def _converge(self, desired: Mapping[LinkKey, WeightLink]) -> None:
        with self._changed:
            for key in self._links.keys() - desired.keys():
                self._links.pop(key).withdrawn.set()
            for key in desired.keys() - self._links.keys():
                link = self._links[key] = desired[key]
                self._begin(link)
            self._changed.notify_all()

    def _begin(self, link: WeightLink) -> None:
        thread = threads.start(self._serve, f"{self.thread_name}-{link.generation}", [link])
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _withdraw(self) -> None:
        self._converge({})

    def _formed(self, link: WeightLink, **fields: Any) -> None:
        link.formed = True
        event(_log, "weights link formed", generation=link.generation, peer=link.peer, **fields)

    def _over(self, link: WeightLink) -> bool:
        """True if what is under way on the link is to end."""
        if link.withdrawn.is_set():
            return True
        # What is ended for a fault stays faulty, even if the other end is heard meanwhile.
        link.fault = link.fault or self.fault_of(link)
        return bool(link.fault)

    def fault_of(self, link: WeightLink) -> str:
        """Trouble of a link of which no operation has failed; empty if there is none."""
        return ""

    def _form(self, link: WeightLink, source: int) -> ProcessMesh:
        key = f"paceline:{self.run_id}:rdv:link:{link.generation}"
        return ProcessMesh.form(
            url=self.url,
            key=f"{key}:{source}" if source else key,
            rank=self.rank,
            size=2,
            device=torch.device("cpu"),
            cancelled=lambda: self._over(link),
            timeout_s=self.form_s,
            host=self.host,
        )

    def _serve(self, link: WeightLink) -> None:
        mesh: ProcessMesh | None = None
        try:
            mesh = self._form(link, self.first_source)
            self.transfer(link, mesh)
        except EpochCancelled:
            if fault := link.fault or self.fault_of(link):
                self._failed(link, MeshError(fault))
        except Exception as error:
            # Whatever it was, the engine's loading included: this link has ended and is replaced.
            self._failed(link, error)
        finally:
            link.formed = False
            if mesh is not None:
                mesh.abandon()

    def _failed(self, link: WeightLink, error: Exception) -> None:
        link.formed = False
        if not isinstance(error, MeshError | WeightsRefused):
            _log.error(
                "weights could not be transferred generation=%d", link.generation, exc_info=error
            )
        if not link.withdrawn.is_set():
            fields = {"generation": link.generation, "peer": link.peer, "error": error}
            event(_log, "weights link failed", logging.WARNING, **fields)
            self.on_link_error(link.generation, str(error))
