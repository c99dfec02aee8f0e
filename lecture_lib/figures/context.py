"""A long sequence over ranks in pictures: who holds which tokens, whose keys are where, tokens traded for heads."""

from .palette import INK, WASH, rank_color, text_color
from .plot import Plot, canvas, plot
from .svg import Figure, box, figure, label, line
from .tensor_parallel import striped

RANKS = 4


def causal_work(name: str) -> Figure:
    """Which blocks of a causal attention each rank computes: chunks of queries down, chunks of keys across."""
    from lecture_lib.parallel.context import blocks_by_rank, contiguous, zigzag

    cell, top, chunks = 34, 92, 2 * RANKS
    strokes, words = [], []
    for left, layout, title in ((84, contiguous, "neighbouring chunks"), (548, zigzag, "zig-zag")):
        holder = {chunk: rank for rank, held in enumerate(layout(RANKS)) for chunk in held}
        strokes.append(label(left + cell * chunks / 2, 22, title, bold=True))
        strokes.append(label(left + cell * chunks / 2, 50, "keys of chunk"))
        for query in range(chunks):
            y, color = top + cell * query, rank_color(holder[query])
            strokes.append(label(left + cell * (query + 0.5), 76, query))
            strokes.append(label(left - 14, y + cell / 2, query, anchor="end"))
            for key in range(chunks):
                fill = color if key <= query else WASH
                strokes.append(box(left + cell * key + 1, y + 1, cell - 2, cell - 2, fill=fill, stroke=fill, radius=2))
                if key <= query:
                    strokes.append(
                        label(left + cell * (key + 0.5), y + cell / 2, holder[query], color=text_color(color))
                    )
        counts = [sum(steps) for steps in blocks_by_rank(RANKS, layout)]
        y, wide = top + cell * chunks + 36, cell * chunks / RANKS
        strokes.append(label(left - 14, y, "blocks", anchor="end"))
        for rank, count in enumerate(counts):
            color = rank_color(rank)
            strokes.append(box(left + wide * rank + 1, y - 19, wide - 2, 38, fill=color, stroke=color, radius=19))
            strokes.append(label(left + wide * (rank + 0.5), y, count, color=text_color(color), bold=True))
        held = ", ".join(f"rank {rank} {a} and {b}" for rank, (a, b) in enumerate(layout(RANKS)))
        words.append(f"{title}: {held}; they compute {', '.join(map(str, counts))} blocks")
    text = (
        f"{chunks} chunks of queries against {chunks} chunks of keys, causal, each block with the number of the rank "
        f"that computes it; {'; '.join(words)}."
    )
    return figure(name, "Who computes which block", text, 900, top + cell * chunks + 72, strokes)


def tokens_and_heads(name: str) -> Figure:
    """(tokens, heads) as squares: each rank's tokens, all heads; its heads, all tokens; and back."""
    size, top, lefts = 150, 76, (70, 375, 680)
    heads = ("each its tokens,", "all heads"), ("each its heads,", "all tokens"), ("each its tokens,", "all heads")
    strokes = []
    for left, two, way in zip(lefts, heads, ("rows", "columns", "rows"), strict=True):
        strokes += [label(left + size / 2, 24 + 26 * i, words, bold=True) for i, words in enumerate(two)]
        strokes += striped(left, top, size, size, way)
    strokes += [
        label(lefts[0] + size / 2, top + size + 24, "heads across, tokens down"),
        label(lefts[1] + size / 2, top + size + 24, "attention, head by head"),
    ]
    for left, following in zip(lefts, lefts[1:]):
        a, b, middle = left + size + 10, following - 8, top + size / 2
        strokes += [
            label((a + b) / 2, middle - 24, "all-to-all"),
            line([(a, middle), (b - 12, middle)], width=3),
            f'<path d="M{b:g} {middle:g}l-14 -9v18z" fill="{INK}"/>',
        ]
    text = (
        f"a square of tokens down and heads across, on {RANKS} ranks. Each rank has its tokens, with all heads; an "
        "all-to-all gives each rank its heads, with all tokens, and attention works head by head; a second all-to-all "
        "leads back."
    )
    return figure(name, "Tokens for heads", text, 900, top + size + 48, strokes)


def turning(lines: list) -> Plot:
    """Whose keys each rank worked with, step by step. ``lines``: one lecture_lib.trace.Timeline per rank, of a
    ring_attention."""
    owners = [
        [int(event.name.rsplit(" ", 1)[1]) for event in line.events if event.name.startswith("keys of rank ")]
        for line in lines
    ]
    drawing, axes = canvas(70 + 62 * len(lines))
    for rank, seen in enumerate(owners):
        for step, owner in enumerate(seen):
            color = rank_color(owner)
            axes.barh(rank, 0.94, 0.78, step + 0.03, align="center", color=color)
            words = {"ha": "center", "va": "center", "color": text_color(color), "fontsize": 14}
            axes.text(step + 0.5, rank, f"keys of {owner}", **words)
            if step:  # from the left neighbour, one step ago
                above = (rank - 1) % len(lines)
                if above < rank:
                    axes.annotate(
                        "", (step + 0.1, rank - 0.36), (step - 0.1, above + 0.36), arrowprops={"arrowstyle": "->"}
                    )
    axes.set_yticks(range(len(lines)), [f"rank {line.rank}" for line in lines])
    axes.set_xticks([step + 0.5 for step in range(len(owners[0]))], [f"step {step}" for step in range(len(owners[0]))])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlim(0, len(owners[0]))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    said = "; ".join(f"rank {line.rank}: {', '.join(map(str, seen))}" for line, seen in zip(lines, owners))
    return plot(drawing, f"Whose keys a rank works with, step by step. {said}.")
