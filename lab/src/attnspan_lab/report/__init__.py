"""HTML page of results from `attnspan bench` or a monitor, in one self-contained file.

The page only formats values. All values are properties of the results.
"""

from attnspan_lab.report.page import write_page

__all__ = ["write_page"]
