"""The computations and pictures of the teaching notebooks: one module for each notebook, and a few that they share.

Drawing functions take the values of a notebook's controls. They return the Axes of the panels, and a line with the
numbers to read off (``explorers.Explorer``). Other functions compute the tables behind the pictures.
"""
