"""Memory and time of training, from the command line.

    python -m lecture_lib.planner --model llama3-405b --gpu h100 --gpus 16384 --tp 8 --pp 16 --global-batch 2048

prints both by part. With --best it searches: the ten fastest layouts, what they need, why others are out. What is given
of a layout stays as it is, and the rest is searched. With --json it prints the same for scripts.
"""

import argparse
import json
import signal
import sys

from lecture_lib.planner.cluster import Cluster
from lecture_lib.planner.estimate import estimate
from lecture_lib.planner.layout import ATTENTION, PRECISIONS, RECOMPUTE, Layout
from lecture_lib.planner.model import PRESETS, Transformer, preset
from lecture_lib.planner.numbers import whole
from lecture_lib.planner.search import Plans, best

AXES = ("dp", "tp", "pp", "cp", "ep", "shard", "virtual_stages", "micro_batch", "zero_stage", "recompute", "attention")
# What each is called in a search; dp is what the other axes leave, and groups of shards are not searched.
SEARCHED = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "virtual_stages": "parts", "micro_batch": "micro_batches"}
SEARCHED |= {"zero_stage": "zero_stages", "recompute": "recompute"}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lecture_lib.planner", description="Memory and time of training.")
    parser.add_argument("--model", default="llama3-8b", help=", ".join(PRESETS))
    parser.add_argument("--seq", help="tokens in a sequence; the model's own, if not given")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpu", default="H100", help="H100, A100-40GB, H100-96GB-500W, B200, ...")
    cluster.add_argument("--gpus", default="8")
    cluster.add_argument("--gpus-per-node")
    cluster.add_argument("--internode-gbps-per-gpu", metavar="GBPS", help="Gbit/s per direction")
    cluster.add_argument("--oversubscription", type=float, default=1.0)
    layout = parser.add_argument_group("layout", "with --best, what is not given is searched")
    layout.add_argument("--dp", help="what the other axes leave, if not given")
    for axis in ("tp", "pp", "cp", "ep"):
        layout.add_argument(f"--{axis}", help="1, if not given")
    layout.add_argument("--shard", help="ranks among which ZeRO shards; groups of so many replicate (HSDP)")
    for name in ("virtual-stages", "micro-batch", "global-batch"):
        layout.add_argument(f"--{name}")
    layout.add_argument("--zero-stage", help="1, if not given")
    layout.add_argument("--recompute", choices=RECOMPUTE, help="none, if not given")
    layout.add_argument("--precision", default="bf16", choices=PRECISIONS)
    layout.add_argument("--attention", choices=ATTENTION)
    parser.add_argument("--best", action="store_true", help="search all layouts for --global-batch sequences a step")
    parser.add_argument("--json", action="store_true")
    return parser


def given(a: argparse.Namespace) -> dict[str, str]:
    """What the command line says of the layout."""
    return {name: value for name in AXES if (value := getattr(a, name)) is not None}


def search(model: Transformer, cluster: Cluster, a: argparse.Namespace) -> Plans:
    """The best layouts with what is given. Raises ValueError for what a search cannot be told."""
    wanted = {"precision": a.precision}
    for name, value in given(a).items():
        if name in ("dp", "shard"):
            why = "it is what tp, pp and cp leave" if name == "dp" else "groups of shards are not searched"
            raise ValueError(f"--best takes no --{name}: {why}; leave out one of the two.")
        if name == "attention":
            wanted[name] = value
        else:
            least = 0 if name == "zero_stage" else 1
            wanted[SEARCHED[name]] = [value if name == "recompute" else whole(name, value, least)]
    return best(model, cluster, a.global_batch, **wanted)


def main(words: list[str] | None = None) -> int:
    a = arguments().parse_args(words)
    try:
        model = preset(a.model)
        model = model.with_(seq=a.seq) if a.seq else model
        cluster = Cluster(a.gpu, a.gpus, a.gpus_per_node, a.internode_gbps_per_gpu, a.oversubscription)
        if a.best:
            if not a.global_batch:
                raise ValueError("--best needs --global-batch, the sequences of one step.")
            plans = search(model, cluster, a)
            if a.json:
                found = [e.as_dict() for e in plans[:10]]
                print(json.dumps({"best": found, "fit": len(plans), "tried": plans.tried}, indent=2))
            else:
                print(plans.table())
                for reason in plans.reasons()[:5]:
                    print(f"{reason.times:>6} x {reason.example}")
            return 0
        layout = Layout(global_batch=a.global_batch, precision=a.precision, **{"zero_stage": 1} | given(a))
        e = estimate(model, cluster, layout)
        print(json.dumps(e.as_dict(), indent=2) if a.json else e.table())
        return 0
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # where it exists: end in silence when the reader has enough, as in "... | head"
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
