"""How long ranks work on the experts of a window, counted in rows.

Reading an expert's weights takes as long as multiplying some hundred rows with them (on an H200 in
BF16 some 180), and with fewer rows the time does not follow their number: a roofline (Williams,
Waterman and Patterson 2009) for each expert. So the popular experts together on one rank cost
prompts dearly and decodes, which read nearly all experts for a handful of rows each, hardly
anything.
"""

import numpy as np

from crossdock.balance import Answer, slot_load
from crossdock.control.window import Window


def rank_time(window: Window, answer: Answer, ranks: int, read_rows: float) -> np.ndarray:
    """`time_KLR` of all steps of each size K together, in rows.

    Args:
        read_rows: rows whose products take as long as reading an expert; 0: time follows the rows
            alone.
    """
    load_LP = slot_load(window.load_LE, answer)
    times = []
    for steps, part in window.sizes:
        rows_LP = load_LP * (part / steps)
        # Of experts that get a row or none, not all are read in every step.
        took_LP = np.maximum(rows_LP, -read_rows * np.expm1(-rows_LP)) * steps
        times.append(took_LP.reshape(len(took_LP), ranks, -1).sum(axis=2))
    return np.stack(times)
