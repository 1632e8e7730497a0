"""What the teaching notebooks compute and draw, one module for each notebook and a few that they share.

Drawing functions take the values of a notebook's controls. They return the Axes of the panels, and a line with the
numbers to read off (``widgets.Explorer``). Functions of their own compute the tables behind the pictures.
"""
