"""Serves a model over HTTP, with OpenAI's interface.

Logs go to stderr. SIGTERM and Ctrl-C refuse new requests, let running ones finish for --shutdown-timeout
seconds, and end the server; a second one ends it at once. Keys may come from PAGEDINFER_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from pagedinfer.cli.engine_arguments import add_engine_arguments, engine_config
from pagedinfer.cli.http_client import API_KEY_VARIABLE
from pagedinfer.cli.parser import human_integer, port_number
from pagedinfer.errors import PagedinferError
from pagedinfer.server.parsing.choose import AUTO, NONE, REASONING_PARSERS, TOOL_CALL_PARSERS

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """Adds the command's flags."""
    parser.add_config_argument()
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1; 0.0.0.0: every one)")
    add("--port", type=port_number, default=8000, metavar="N", help="(default: 8000; 0: any free one)")
    add("--uds", metavar="PATH", help="listen at a Unix socket instead")
    add(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help=f"keys, one of which clients must send; or in {API_KEY_VARIABLE}",
    )
    add("--served-model-name", nargs="+", metavar="NAME", help="names for clients, instead of MODEL")
    add(
        "--tool-call-parser",
        choices=[AUTO, NONE, *TOOL_CALL_PARSERS],
        default=AUTO,
        help="how the model writes tool calls (default: auto, by the chat template)",
    )
    add(
        "--reasoning-parser",
        choices=[AUTO, NONE, *REASONING_PARSERS],
        default=AUTO,
        help="how the model writes its reasoning (default: auto, by the chat template)",
    )
    add(
        "--max-num-queued-requests",
        type=human_integer,
        metavar="N",
        help="most requests that wait; beyond, clients get 503 (default: no limit)",
    )
    add("--max-body-bytes", type=human_integer, default=16 * 2**20, metavar="N", help="(default: 16M)")
    add("--max-header-bytes", type=human_integer, default=64 * 2**10, metavar="N", help="(default: 64K)")
    add("--max-prompts", type=human_integer, default=2048, metavar="N", help="in one request (default: 2048)")
    add("--max-choices", type=human_integer, default=128, metavar="N", help="largest n (default: 128)")
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="X",
        help="seconds that running requests have to finish after SIGTERM (default: 30)",
    )
    add("--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="of CORS, which is off without")
    add("--allowed-methods", nargs="+", default=["*"], metavar="METHOD", help="of CORS")
    add("--allowed-headers", nargs="+", default=["*"], metavar="NAME", help="of CORS")
    add("--allow-credentials", action=argparse.BooleanOptionalAction, default=False, help="of CORS")
    add("--root-path", default="", metavar="PATH", help="prefix under which a proxy serves this server")
    add("--access-log", action="store_true", help="log a line for each HTTP request")
    add("--no-vllm-metrics", action="store_true", help="export metrics as pagedinfer_* only")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal, or the engine's end."""
    if not arguments.model:
        print("pagedinfer serve: error: which MODEL? a folder, a GGUF file or a hub id", file=sys.stderr)
        return 2
    try:
        config = engine_config(arguments)
    except ValueError as error:
        print(f"pagedinfer serve: error: {error}", file=sys.stderr)
        return 2
    if config.node_rank > 0:
        from pagedinfer.distributed.nodes import run_node

        return run_node(config)
    try:
        from pagedinfer.server.run import run_server
        from pagedinfer.server.settings import ServerSettings
    except ImportError as error:
        raise PagedinferError(
            f"serving needs packages that are not installed ({error.name}): pip install 'pagedinfer[serve]'"
        ) from error
    keys = arguments.api_key or [key for key in (os.environ.get(API_KEY_VARIABLE),) if key]
    settings = ServerSettings(
        served_model_names=tuple(arguments.served_model_name or ()),
        api_keys=tuple(keys),
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        max_num_queued_requests=arguments.max_num_queued_requests,
        max_body_bytes=arguments.max_body_bytes,
        max_header_bytes=arguments.max_header_bytes,
        max_prompts=arguments.max_prompts,
        max_choices=arguments.max_choices,
        allowed_origins=tuple(arguments.allowed_origins),
        allowed_methods=tuple(arguments.allowed_methods),
        allowed_headers=tuple(arguments.allowed_headers),
        allow_credentials=arguments.allow_credentials,
        root_path=arguments.root_path,
        vllm_metrics=not arguments.no_vllm_metrics,
    )
    return run_server(
        config,
        settings,
        host=arguments.host,
        port=arguments.port,
        uds=arguments.uds,
        shutdown_timeout=arguments.shutdown_timeout,
        access_log=arguments.access_log,
    )
