"""The page of figures: what `attnspan bench` or a monitor measured, in one HTML file that needs no network.

It computes nothing but layout: every figure is a property of the results.
"""

from attnspan_lab.report.page import write_page

__all__ = ["write_page"]
