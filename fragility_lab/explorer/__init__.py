"""A picture of a model in which a reader tries plans: what each keeps, what that gains, and what it costs.

``terms`` makes the data, ``component`` the HTML with its script, ``build`` a page of its own (``make explorer``).
"""
