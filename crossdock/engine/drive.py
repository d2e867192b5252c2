"""Forward passes are generators that yield where communication is in flight; this runs them."""

from collections.abc import Generator

from torch import Tensor


def drive(forward: Generator[None, None, Tensor]) -> Tensor:
    """Runs one forward straight through, with no work of another put where it yields."""
    while True:
        try:
            next(forward)
        except StopIteration as done:
            return done.value


def drive_both(*forwards: Generator[None, None, Tensor]) -> list[Tensor]:
    """Runs forwards of the same model alternately, each from where it yields to where it yields
    next; the first one is always ahead."""
    done: dict[int, Tensor] = {}
    while len(done) < len(forwards):
        for i, forward in enumerate(forwards):
            try:
                if i not in done:
                    next(forward)
            except StopIteration as ended:
                done[i] = ended.value
    return [done[i] for i in range(len(forwards))]
