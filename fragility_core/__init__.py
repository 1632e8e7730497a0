"""Numerical fragility in Transformers: what low precision does to a forward pass, layer by layer.

Importing the package imports nothing heavy; take what you need from its modules. "Protocol section N" in their
docstrings is a section of docs/protocol.md, and LaTeX labels are the paper's.
"""

__version__ = "0.1.0"
