"""Other libraries' choices of schemes for layers, made in processes of their own, measured under their quantizers.

``ladders`` says which schemes each library chooses from, and which of ours is the same. ``tasks`` is what a process is
asked and answers. One module for each library drives it; it imports the library inside of functions, as the project's
own environment has none of them. ``python -m fragility_lab.peers TASK ANSWER`` carries out a task.
"""
