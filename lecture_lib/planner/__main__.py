"""Memory and time of training, from the command line.

    python -m lecture_lib.planner --model llama3-405b --gpu h100 --gpus 16384 --tp 8 --pp 16 --global-batch 2048

prints both by part. With --best it searches: the ten fastest layouts, what they need, why others are out. With --json
it prints the same for scripts.
"""

import argparse
import json
import sys

from lecture_lib.planner.cluster import Cluster
from lecture_lib.planner.estimate import estimate
from lecture_lib.planner.layout import ATTENTION, PRECISIONS, RECOMPUTE, Layout
from lecture_lib.planner.model import PRESETS, preset
from lecture_lib.planner.search import best


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
    layout = parser.add_argument_group("layout")
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        layout.add_argument(f"--{axis}", default=None if axis == "dp" else "1")
    layout.add_argument("--shard", help="ranks among which ZeRO shards; groups of so many replicate (HSDP)")
    for name in ("virtual-stages", "micro-batch", "global-batch"):
        layout.add_argument(f"--{name}")
    layout.add_argument("--zero-stage", default="1")
    layout.add_argument("--recompute", default="none", choices=RECOMPUTE)
    layout.add_argument("--precision", default="bf16", choices=PRECISIONS)
    layout.add_argument("--attention", choices=ATTENTION)
    parser.add_argument("--best", action="store_true", help="search all layouts for --global-batch sequences a step")
    parser.add_argument("--json", action="store_true")
    return parser


def main(words: list[str] | None = None) -> int:
    a = arguments().parse_args(words)
    try:
        model = preset(a.model)
        model = model.with_(seq=a.seq) if a.seq else model
        cluster = Cluster(a.gpu, a.gpus, a.gpus_per_node, a.internode_gbps_per_gpu, a.oversubscription)
        if a.best:
            if not a.global_batch:
                raise ValueError("--best needs --global-batch, the sequences of one step.")
            plans = best(model, cluster, a.global_batch, precision=a.precision)
            if a.json:
                found = [e.as_dict() for e in plans[:10]]
                print(json.dumps({"best": found, "fit": len(plans), "tried": plans.tried}, indent=2))
            else:
                print(plans.table())
                for reason in plans.reasons()[:5]:
                    print(f"{reason.times:>6} x {reason.example}")
            return 0
        names = ("dp", "tp", "pp", "cp", "ep", "shard", "virtual_stages", "micro_batch", "global_batch")
        names += ("zero_stage", "recompute", "precision", "attention")
        e = estimate(model, cluster, Layout(**{name: getattr(a, name) for name in names}))
        print(json.dumps(e.as_dict(), indent=2) if a.json else e.table())
        return 0
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
