"""Event of reward hacking: the training score rises while what it stands for falls."""

from controller.ledger.events.event import Event, event
from controller.ledger.state.state import State
from paceline.evaluation.reward_hacking import Exploited
from paceline.ids import Step
from paceline.observe.vocabulary import Severity


@event
class RewardHackingSuspected(Event):
    """The training reward, a scorer's, has risen while an evaluation set by another reward has
    fallen, and that was not so at the evaluation before."""

    step: Step
    metric: str  # SET/reward, of which the next three are steps and values
    truth: float
    best_step: Step
    best_truth: float
    score: float  # Training reward before the newest evaluations
    best_score: float  # Before the best one

    directs = False
    severity = Severity.WARNING

    def apply(self, s: State) -> None:
        """The evaluation's own event has changed the state."""

    def text(self) -> str:
        return hacking_in_words(self.metric, self.values)

    @property
    def values(self) -> Exploited:
        return Exploited(
            self.step, self.truth, self.best_step, self.best_truth, self.score, self.best_score
        )


def hacking_in_words(metric: str, found: Exploited) -> str:
    """What is measured, what it means, and the remedy."""
    return (
        f"the training score rises ({found.best_score:.3f} to {found.score:.3f}) while {metric} "
        f"falls ({found.best_truth:.3f} after step {found.best_step}, {found.truth:.3f} after step "
        f"{found.step}): the learned reward is probably being exploited; begin again with a larger "
        f"train.loss.kl_coef, or stop at step {found.best_step}"
    )
