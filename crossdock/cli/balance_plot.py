"""The heat map of `balance --plot`."""

from pathlib import Path
from typing import TYPE_CHECKING

from crossdock.core import ConfigError

if TYPE_CHECKING:
    import numpy as np

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raises ConfigError for a kind of file that cannot be drawn, or a place that is not there."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.absolute().parent}")


def draw(before_LR: "np.ndarray", after_LR: "np.ndarray", title: str, path: Path) -> None:
    """Layers by ranks, each cell a rank's load over its layer's mean; both in one scale of colour.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    scaled = [
        load / load.mean(axis=1, keepdims=True).clip(1e-300) for load in (before_LR, after_LR)
    ]
    layers, ranks = before_LR.shape
    most = max(2.0, *(float(load.max()) for load in scaled))
    width = 2 * min(8.0, max(3.0, 0.16 * ranks)) + 1
    figure = Figure(figsize=(width, min(12.0, max(2.6, 0.16 * layers + 1.4))), layout="constrained")
    image, axes = None, figure.subplots(1, 2, sharey=True)
    for axis, load, name in zip(axes, scaled, ("before", "after"), strict=True):
        # Below the mean blue, above it red, whatever the largest load is.
        image = axis.imshow(load, aspect="auto", cmap="coolwarm", vmin=2 - most, vmax=most)
        worst = load.max(axis=1)
        axis.set_title(f"{name}: mean {worst.mean():.3f}, worst {worst.max():.3f}", fontsize=10)
        axis.set_xlabel("rank")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("MoE layer")
    assert image is not None
    bar = figure.colorbar(image, ax=axes, label="load / mean of the layer")
    bar.ax.set_ylim(0, most)
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}") from None
