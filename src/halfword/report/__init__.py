"""Compare runs: what a precision costs in loss, memory and time, and whether two are equal."""

from halfword.report.command import compare as compare
from halfword.report.command import report as report
from halfword.report.comparison import Comparison as Comparison

__all__ = ["Comparison", "compare", "report"]
