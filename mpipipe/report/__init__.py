"""What a person sees of a run: progress, metrics, the summary, drawings of a timeline."""

from mpipipe.report.draw import draw_png, draw_text
from mpipipe.report.metrics import Metrics, cut_metrics, read_metrics
from mpipipe.report.progress import Progress
from mpipipe.report.summary import summary

__all__ = ["Metrics", "Progress", "cut_metrics", "draw_png", "draw_text", "read_metrics", "summary"]
