"""Other libraries' choices of schemes for layers, made in processes of their own, measured under their quantizers.

``ladders`` lists the schemes from which each library chooses, each with our equal one. ``tasks`` defines tasks and
answers of a process. One module for each library drives it; it imports the library inside of functions, since the
project's own environment has none of them. ``python -m fragility_peers TASK ANSWER`` carries out a task.
"""
