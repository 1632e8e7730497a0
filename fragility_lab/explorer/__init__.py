"""A picture of a model in which a reader tries plans: the parts that a plan keeps, its gain, and its cost.

``terms`` makes the data, ``component`` the HTML with its script.
"""
