"""From a model, a kind of GPU and a workload to the layout to run; knows neither torch nor GPUs.

`answer_question` searches all layouts and gives an `Answer`; `document` and `render` show it,
`explain` its formulas, `checklist` what to settle before, `draw` its picture; `simulation` makes it
a `SimConfig` for `simulate`; `validation_document` sets predictions beside published rows.
"""

from crossdock.planner.answer import Answer, Question, answer_question, formats_of
from crossdock.planner.answer_day import document_day, render_day, simulate_day
from crossdock.planner.answer_document import document, number_text
from crossdock.planner.answer_explain import explain
from crossdock.planner.answer_simulation import compared_table, simulation, variants
from crossdock.planner.answer_simulation import render as simulation_table
from crossdock.planner.answer_tables import render
from crossdock.planner.checklist import Item, checklist
from crossdock.planner.describe import load_model
from crossdock.planner.fragmentation import parse_lengths
from crossdock.planner.hardware import Hardware, Link, load_hardware
from crossdock.planner.layout import Layout, Workload
from crossdock.planner.memory import plan_memory, smallest_ep
from crossdock.planner.observed import Observed
from crossdock.planner.observed import observed as parse_observed
from crossdock.planner.plot import check_plot
from crossdock.planner.plot import plot as draw
from crossdock.planner.simulate import SimConfig, SimResult, compare, simulate
from crossdock.planner.validate import document as validation_document

__all__ = [
    "Answer",
    "Hardware",
    "Item",
    "Layout",
    "Link",
    "Observed",
    "Question",
    "SimConfig",
    "SimResult",
    "Workload",
    "answer_question",
    "check_plot",
    "checklist",
    "compare",
    "compared_table",
    "document",
    "document_day",
    "draw",
    "explain",
    "formats_of",
    "load_hardware",
    "load_model",
    "number_text",
    "parse_lengths",
    "parse_observed",
    "plan_memory",
    "render",
    "render_day",
    "simulate",
    "simulate_day",
    "simulation",
    "simulation_table",
    "smallest_ep",
    "validation_document",
    "variants",
]
