"""One self-contained HTML report of training runs, drawn from what they wrote to disk."""

from flashrl.report.page import write_report
from flashrl.report.readers import RunReader, read_runs
from flashrl.report.records import Run, RunWriter
from flashrl.report.summary import summarize

__all__ = ["Run", "RunReader", "RunWriter", "read_runs", "summarize", "write_report"]
