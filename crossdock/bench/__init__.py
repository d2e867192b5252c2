"""Every benchmark: `engine`, `serve`, `comm`. Each gives a run, and of it a report (`report.py`)
that becomes one JSON document. Imported by name: `serve` needs no torch, `engine` no HTTP."""
