"""Inference engines compared with predictions: is a gap between log-probabilities rounding, or a bug?

``logs`` reads the log-probabilities that an engine gives, or has a server score a text (``make score``). ``comparison``
predicts what rounding alone must give for the same tokens, and judges (``make compare``). ``suspects`` are changes of a
model that people reported as bugs: each is run in fp32, and tested against the gap. ``proving`` judges engines whose
truth is known (``make engines``). ``referees`` runs other people's engines beside our predictions of them (``make
referees``), and ``llama_cpp`` makes plans of GGUF's types, which llama.cpp measures (``make gguf``).
"""
