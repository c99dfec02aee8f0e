"""A Jupyter kernel that tests drive as JupyterLab would: run a cell, see its outputs, interrupt, restart, kill."""

import contextlib
import os
import time
from dataclasses import dataclass, field

from jupyter_client.manager import KernelManager


@dataclass
class Cell:
    """What a cell left: the text a person sees in the end, the error, and the messages in the order they came."""

    text: str = ""
    error: str = ""
    messages: list = field(default_factory=list)


class Kernel:
    def __init__(self, cwd, **environ):
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(cwd), env={**os.environ, **environ})
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def start(self, code: str) -> str:
        return self.client.execute(code)

    def run(self, code: str, timeout: float = 60, on_message=lambda message: None) -> Cell:
        return self.finish(self.start(code), timeout, on_message)

    def finish(self, request: str, timeout: float = 60, on_message=lambda message: None) -> Cell:
        """Read messages until the kernel is idle again, as a notebook front end does (redraws included)."""
        cell, displays, deadline = Cell(), {}, time.monotonic() + timeout
        pieces: list = []  # text, or the id of an output that may be redrawn
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            cell.messages.append((kind, content))
            if kind == "stream":
                pieces.append(content["text"])
            elif kind in ("display_data", "execute_result", "update_display_data"):
                identity = content.get("transient", {}).get("display_id") or f"anonymous {len(displays)}"
                if identity not in displays:
                    pieces.append([identity])
                displays[identity] = content["data"].get("text/plain", "") + "\n"
            elif kind == "error":
                cell.error = "\n".join(content["traceback"])
                cell.ename, cell.evalue = content["ename"], content["evalue"]
            cell.text = "".join(piece if isinstance(piece, str) else displays[piece[0]] for piece in pieces)
            on_message(cell)
            if kind == "status" and content["execution_state"] == "idle":
                return cell

    def close(self):
        with contextlib.suppress(Exception):
            self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
