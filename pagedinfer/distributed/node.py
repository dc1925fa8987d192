"""`python -m pagedinfer.distributed.node`: lends this machine's ranks to an engine on another.

    python -m pagedinfer.distributed.node -tp 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1

Everything else is said on node 0. The model must be in the same folder on all nodes.
"""

from __future__ import annotations

import argparse
import sys

from pagedinfer.config import EngineConfig
from pagedinfer.distributed.nodes import run_node
from pagedinfer.errors import PagedinferError


def main(arguments: list[str] | None = None) -> int:
    """Runs a node; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pagedinfer.distributed.node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, required=True, help="ranks of all nodes")
    parser.add_argument("--nnodes", type=int, required=True, help="machines")
    parser.add_argument("--node-rank", type=int, required=True, help="which of them this is, from 1")
    parser.add_argument("--master-addr", required=True, help="of node 0")
    parser.add_argument("--master-port", type=int, default=29500, help="of node 0 (default: 29500)")
    options = vars(parser.parse_args(arguments))
    try:
        if options["node_rank"] == 0:
            raise ValueError("node 0 is the one that makes the LLM")
        return run_node(EngineConfig(model="that of node 0", **options))
    except (ValueError, PagedinferError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
