"""What the teaching notebooks compute and draw: one module for each notebook.

Functions that draw take the values of a notebook's controls and return the Axes and a line with the
numbers to be read off (``widgets.Explorer``); the tables behind them are functions of their own.
"""
