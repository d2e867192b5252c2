"""When to move experts: pure decisions over readings of the ranks. Knows no engine and no clock."""

from crossdock.control.rebalance import (
    Decision,
    History,
    Proposal,
    Question,
    decide,
    enough,
    expert_share,
    judged,
    moved,
    propose,
)
from crossdock.control.window import Reading, Window

__all__ = [
    "Decision",
    "History",
    "Proposal",
    "Question",
    "Reading",
    "Window",
    "decide",
    "enough",
    "expert_share",
    "judged",
    "moved",
    "propose",
]
