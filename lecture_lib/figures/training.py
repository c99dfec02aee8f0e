"""Drawings of training runs: how the loss falls, what a rank holds, and where the time of a step goes."""

from .palette import FAINT, GREY, INK, PALETTE, text_color
from .plot import Plot, canvas, plot


def loss_curves(runs: dict[str, list[float]]) -> Plot:
    """``runs``: losses in nats by step, from the first step on, for each name. A later curve is drawn thinner, so that
    one that it covers can be seen."""
    figure, axes = canvas(340)
    for i, (name, losses) in enumerate(runs.items()):
        width = 9 - 6 * i / max(1, len(runs) - 1)
        axes.plot(losses, color=PALETTE[(0, 4, 2, 3)[i % 4]], linewidth=width, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=14)
    steps = ", ".join(f"{name} for {len(losses)} steps" for name, losses in runs.items())
    falls = all(losses[-1] < losses[0] for losses in runs.values())
    return plot(figure, f"Loss by step: {steps}; {'each falls' if falls else 'not each falls'}.")


KINDS = {"matmuls": PALETTE[0], "attention": PALETTE[5], "all other operators": PALETTE[4], "neither": GREY}
HELD = {"parameters": PALETTE[5], "gradients": PALETTE[4], "optimizer": PALETTE[6], "for a moment": GREY}


def step_bars(rows: dict[str, dict[str, float]]) -> Plot:
    """``rows``: for each name the seconds of a step by ``KINDS``. One bar each, of shares of the step."""
    shares = {
        name: {kind: 100 * part / sum(seconds.values()) for kind, part in seconds.items()}
        for name, seconds in rows.items()
    }
    figure = _bars(shares, KINDS, "% of the step", "{:.0f} %")
    return plot(figure, f"Where a step's time goes, by {', '.join(KINDS)}: {', '.join(rows)}.")


def held_bars(held: dict) -> Plot:
    """``held``: for each name a lecture_lib.trace.Memory of a block that ends before the optimizer's step. One bar
    each, up to the most that the rank held. "For a moment" is what that is more than the block's end: activations, and
    what is whole only while it works."""
    rows = {}
    for name, each in held.items():
        rows[name] = {kind: each.at_end[kind] / 1e6 for kind in HELD if kind in each.at_end}
        rows[name]["for a moment"] = each.total / 1e6 - sum(rows[name].values())
    words = (
        f"{name} {sum(parts.values()):.2f} (" + ", ".join(f"{kind} {size:.2f}" for kind, size in parts.items()) + ")"
        for name, parts in rows.items()
    )
    figure = _bars(rows, HELD, "MB held", "{:.2f}")
    for y, most in enumerate(sum(parts.values()) for parts in rows.values()):
        figure.axes[0].text(most, y, f" {most:.2f} MB", va="center", weight="bold", color=INK, fontsize=14)
    return plot(figure, f"MB that a rank holds: {'; '.join(words)}.")


def _bars(rows: dict[str, dict[str, float]], colors: dict[str, str], unit: str, form: str):
    """Stacked bars, and above them which colour is what."""
    figure, axes = canvas(100 + 58 * len(rows))
    longest = max(sum(parts.values()) for parts in rows.values())
    for y, parts in enumerate(rows.values()):
        left = 0.0
        for kind, color in colors.items():
            size = parts[kind]
            axes.barh(y, size, left=left, height=0.62, color=color, edgecolor=FAINT, linewidth=0.8)
            if size > 0.065 * longest:
                middle = left + size / 2
                axes.text(middle, y, form.format(size), ha="center", va="center", color=text_color(color), fontsize=14)
            left += size
    x = 0.0  # in percent of the longest bar
    for kind, color in colors.items():
        axes.barh(
            -0.95, 0.03 * longest, left=x / 100 * longest, height=0.3, color=color, edgecolor=FAINT, linewidth=0.8
        )
        axes.text((x + 4) / 100 * longest, -0.95, kind, va="center", ha="left", fontsize=14, color=INK)
        x += 11 + 1.35 * len(kind)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -1.3)
    axes.set_xlim(0, longest)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit)
    return figure
