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
    error: str | None = None

    def line(self) -> str:
        """One line, whatever the client put into the path or had an error quote."""
        line = f"request {self.id} {self.method} {_plain(self.path)} {self.status}"
        if self.prompt_tokens:
            ttft = "-" if self.ttft is None else f"{self.ttft:.3f}s"
            line += f" prompt_tokens={self.prompt_tokens} output_tokens={self.output_tokens}"
            line += f" ttft={ttft}"
        line += f" total={time.perf_counter() - self.started:.3f}s"
        return line if self.error is None else f"{line}: {_plain(self.error)}"


def _plain(text: str) -> str:
    return text.encode("unicode_escape").decode()[:200]


def request_id(given: str | None) -> str:
    """The client's own x-request-id if it is harmless in logs and headers, else a new one."""
    if given is not None and _SANE_ID.fullmatch(given):
        return given
    return uuid.uuid4().hex
