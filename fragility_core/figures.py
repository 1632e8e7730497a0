"""Every figure of the project: tidy DataFrame in, matplotlib Axes out."""

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

sns.set_theme(context="notebook", style="whitegrid", palette="colorblind")


def training_curve(log: pd.DataFrame) -> Axes:
    """Training, validation and evaluation loss over tokens seen."""
    losses = log.melt("tokens", [name for name in log if name.endswith("_loss")], "text", "loss")
    losses["text"] = losses["text"].str.removesuffix("_loss")
    _, axes = plt.subplots(figsize=(6.4, 3.6))
    sns.lineplot(losses, x="tokens", y="loss", hue="text", style="text", ax=axes)
    axes.set(xlabel="training tokens", ylabel="cross entropy (nats per token)")
    return axes
