"""What ranks write: labelled, in rank order, live while it comes, cut in the middle where it is too much."""

import os
import re
import sys
import time

from lecture_lib.launch.errors import ipython

KEEP = 16 * 1024  # bytes kept at either end of one rank's output of one run

# A rank writes these where something happened between two lines: application program commands, which terminals ignore.
END = b"\x1b_lecture_lib end\x1b\\"
DISPLAY = "\x1b_lecture_lib display {}\x1b\\"
_DISPLAYED = re.compile("\x1b_lecture_lib display (\\d+)\x1b\\\\\n?")


class Transcript:
    """The output of one rank in one run."""

    def __init__(self, rank: int, size: int):
        self.label = f"rank {rank:>{len(str(size - 1))}} | "
        self.keep_all = False
        self._unread = b""
        self.start()

    def start(self) -> None:
        """Forget the last run. What came after its end (from a thread that goes on) belongs to this one."""
        self.ended = False
        self.displays: list[tuple[dict, dict]] = []  # (data, metadata) of what the rank displayed
        self._head, self._tail = bytearray(), bytearray()
        self._cut_bytes = self._cut_lines = 0
        early, self._unread = self._unread, b""
        self.feed(early)

    def feed(self, data: bytes) -> None:
        data, self._unread = self._unread + data, b""
        if self.ended:  # printed after the end of this run: kept for the next
            self._unread = data
            return
        text, end, rest = data.partition(END)
        if end:
            self.ended, self._unread = True, rest
        else:
            half = next((n for n in range(len(END) - 1, 0, -1) if data.endswith(END[:n])), 0)
            text, self._unread = data[: len(data) - half], data[len(data) - half :]  # perhaps half of the mark
        room = len(text) if self.keep_all else KEEP - len(self._head)
        self._head += text[:room]
        self._tail += text[room:] if room > 0 else text
        if len(self._tail) > 8 * KEEP:
            self._cut(len(self._tail) - 2 * KEEP)

    def _cut(self, n: int) -> None:
        self._cut_bytes += n
        self._cut_lines += self._tail[:n].count(b"\n")
        del self._tail[:n]

    def text(self) -> str:
        """Everything so far, unlabelled."""
        head, tail = bytes(self._head), bytes(self._tail)
        if self._cut_bytes == 0 and len(tail) <= KEEP:
            return (head + tail).decode(errors="replace")
        # Cut at the ends of lines, so that the same output is cut at the same place every time.
        head_end = head.rfind(b"\n") + 1 or len(head)
        tail_start = len(tail) - KEEP
        tail_start = tail.find(b"\n", tail_start) + 1 or tail_start
        cut = head[head_end:] + tail[:tail_start]
        lines, size = self._cut_lines + cut.count(b"\n"), self._cut_bytes + len(cut)
        note = f"... {lines:,} lines, {size:,} bytes, are not shown here ...\n"
        if not head[:head_end].endswith(b"\n"):
            note = "\n" + note
        return head[:head_end].decode(errors="replace") + note + tail[tail_start:].decode(errors="replace")

    def blocks(self) -> list:
        """The labelled output: text, and between texts the (data, metadata) of what was displayed there."""
        pieces = _DISPLAYED.split(self.text())  # text, number, text, number, text
        blocks: list = []
        for i, piece in enumerate(pieces):
            if i % 2 == 0:
                blocks.append(_labelled(piece, self.label))
            elif int(piece) < len(self.displays):
                data, metadata = self.displays[int(piece)]
                blocks.append(_labelled(data.get("text/plain", ""), self.label))
                if set(data) != {"text/plain"}:  # a picture, say, under that line
                    blocks.append((data, metadata))
        return [block for block in blocks if block]


def _labelled(text: str, label: str) -> str:
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return "".join(f"{label}{_last_state(line)}\n" for line in lines)


def _last_state(line: str) -> str:
    """A progress bar rewrites its line after each carriage return: only its last state counts."""
    states = [state for state in line.split("\r") if state]
    return states[-1] if states else ""


def merge(transcripts: list[Transcript]) -> list:
    """The blocks of all ranks in rank order, neighbouring texts joined."""
    merged: list = []
    for block in (block for transcript in transcripts for block in transcript.blocks()):
        if merged and isinstance(block, str) and isinstance(merged[-1], str):
            merged[-1] += block
        else:
            merged.append(block)
    return merged


class Screen:
    """Where the output of a run appears, live. Two kinds of screen:

    - a notebook has one output that is redrawn while lines come. In the end it holds the lines of all ranks in rank
      order. nbval compares the first state of an output and never sees a redraw, so under pytest there is only the end.
    - a terminal cannot take lines back: the first rank that still runs is shown live, those after it when it is done.
    """

    def __init__(self, transcripts: list[Transcript]):
        self._transcripts = transcripts
        self._shown = ""
        self._handle = None
        self._next = 0.0
        shell = ipython()
        self._notebook = shell is not None and hasattr(shell, "kernel")
        for transcript in transcripts:
            transcript.keep_all = not self._notebook  # a terminal forgets by itself; a notebook would store it

    def update(self) -> None:
        """Show what there is while the run goes on, four times a second at most."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 0.25
        if not self._notebook:
            running = [i for i, transcript in enumerate(self._transcripts) if not transcript.ended]
            self._print(_text(merge(self._transcripts[: running[0] + 1] if running else self._transcripts)))
        elif "PYTEST_CURRENT_TEST" not in os.environ:
            self._draw(_text(merge(self._transcripts)))

    def finish(self) -> None:
        """Show all of it."""
        blocks = merge(self._transcripts)
        if not self._notebook:
            return self._print(_text(blocks), end=True)
        from IPython.display import display

        for i, block in enumerate(blocks):
            if i == 0:
                self._draw(block)  # always text: what is displayed comes after its label
            elif isinstance(block, str):
                display({"text/plain": block.rstrip("\n")}, raw=True)
            else:
                data, metadata = block
                display(data, metadata=metadata, raw=True)

    def _print(self, text: str, end: bool = False) -> None:
        if not end:
            text = text[: text[:-1].rfind("\n") + 1]  # the last line may still grow
        if end or text.startswith(self._shown):
            new = text[len(os.path.commonprefix([self._shown, text])) :]
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(new.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
            self._shown = text

    def _draw(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text.rstrip("\n")}
        if text and self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        elif text != self._shown:
            self._handle.update(data, raw=True)
        self._shown = text


def _text(blocks: list) -> str:
    return "".join(block for block in blocks if isinstance(block, str))
