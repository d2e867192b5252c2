"""Every benchmark, a module each that gives a run, and of it a report (`report.py`) that becomes a
JSON document. Imported by name: `serve` needs no torch; `engine`, `comm`, `experts` and `moe` need
no HTTP. What runs in a rank's process is in modules named `*_rank`."""
