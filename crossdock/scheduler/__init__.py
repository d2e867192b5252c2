"""Which requests run next, which KV pages they hold, and which group a request goes to.

Pure decisions on integers: knows neither tensors nor models nor processes.
"""

from crossdock.scheduler.pages import PagePool, extend_digests, root_digest
from crossdock.scheduler.routing import GroupLoad, PrefixIndex, Router, choose_group
from crossdock.scheduler.scheduler import Scheduler

__all__ = [
    "GroupLoad",
    "PagePool",
    "PrefixIndex",
    "Router",
    "Scheduler",
    "choose_group",
    "extend_digests",
    "root_digest",
]
