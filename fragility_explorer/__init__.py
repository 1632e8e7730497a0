"""Interactive pictures: what stands behind a committed result, and what would another plan do?

``results`` shows the committed tables of an experiment; ``passes``, ``training``, ``recipes`` and ``engines`` make its
data, with ``tables`` and ``words``, and ``windows`` computes what tables do not have (``make shipped``). ``build`` is
the page of ``make explorer``. ``form`` is the form of a diagnosis, with its ``fields`` and the ``job`` that it starts.
``continued`` is the page of a text that low precision breaks (``make sentence``).
"""
