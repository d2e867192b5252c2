"""What is known of one HTTP request, for its log line and its response header."""

import re
import time
import uuid
from dataclasses import dataclass, field

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(eq=False)
class Trace:
    """`started`: time.perf_counter; `ttft`: seconds to the first token of the first sequence."""

    id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))
    status: int | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float | None = None

    def line(self) -> str:
        """One line, whatever the client put into the path."""
        path = self.path.encode("unicode_escape").decode()[:200]
        ttft = "-" if self.ttft is None else f"{self.ttft:.3f}s"
        return (
            f"request {self.id} {self.method} {path} {self.status} "
            f"prompt_tokens={self.prompt_tokens} output_tokens={self.output_tokens} "
            f"ttft={ttft} total={time.perf_counter() - self.started:.3f}s"
        )


def request_id(given: str | None) -> str:
    """The client's own x-request-id if it is harmless in logs and headers, else a new one."""
    if given is not None and _SANE_ID.fullmatch(given):
        return given
    return uuid.uuid4().hex
