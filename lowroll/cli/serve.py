"""`lowroll serve MODEL`: an OpenAI-compatible server of one model."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowroll import machine
from lowroll.quant.format_budget import is_budget, parse
from lowroll.quant.table import DEFAULT, FORMATS
from lowroll.tool_calls import FORMATS as TOOL_FORMATS

if TYPE_CHECKING:
    import torch
    from aiohttp import web

    from lowroll.engine.native import NativeEngine
    from lowroll.model.transformer import Transformer
    from lowroll.server.limits import Credentials, ServerState
    from lowroll.weights.sync.client import WeightClient

GRACE_S = 20.0  # batch systems kill 30 s or more after the signal
LOOKAHEAD = 8  # decode steps on a GPU between checks for requests
# Requests come one by one, so their prompts run at once with decoding rows on a GPU
# (docs/log/engine.md).
PROMPTS: dict[str, Any] = {"gather": 0, "max_prefill_tokens": 4096, "one_pass": True}
SWITCH_S = 0.001  # the engine thread's wait for the GIL, instead of 5 ms
SHORTEST_TOKEN = 16  # characters
# options that a run's settings decide
SETTINGS = {
    "host": "serve.host",
    "port": "serve.port",
    "device": "device",
    "weights": "rollout.weights",
    "kv": "rollout.kv.policy",
    "cache_tokens": "rollout.cache_tokens",
    "max_batch": "rollout.max_batch",
    "lora_rank": "train.lora_rank",
    "lora_alpha": "train.lora_alpha",
    "uaq_scale": "train.uaq_scale",
    "tool_call_parser": "rollout.tool_call_parser",
}
OF_MODEL = ("lookahead", "noisy", "token_env", "admin_token_env")  # options that follow from a run
LORA_ALPHA = 32.0  # the default of `train.lora_alpha`


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll serve",
        description=(
            "Serve a model to OpenAI clients: /v1/completions, /v1/chat/completions, token ids in "
            "and out, scoring. On this machine alone, unless --host says otherwise and there is a "
            "token."
        ),
    )
    p.add_argument(
        "model",
        metavar="MODEL | FILE",
        help="a model or adapter folder, a hub id; or the YAML file of a run, or infer.yaml of the "
        "three-file form, for that run's engine",
    )
    p.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="key=value",
        help="with FILE: dotted overrides of it",
    )
    p.add_argument(
        "--weights",
        help=f"format of the linear weights: {', '.join(FORMATS)}; or a budget, such as max_kl=0.02 "
        f"(default: what the folder holds if it is low-bit, else {DEFAULT})",
    )
    p.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    p.add_argument(
        "--port", type=int, default=8000, help="0: one that is free (default: %(default)s)"
    )
    p.add_argument(
        "--tool-call-parser",
        choices=tuple(TOOL_FORMATS),
        help="how the model writes calls of tools (default: as its chat template shows it)",
    )
    p.add_argument("--name", help="what clients call the model (default: its folder's name)")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    _add_engine(p.add_argument_group("the engine"))
    _add_access(p.add_argument_group("who may ask, and for how much"))
    return p


def _add_engine(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--kv",
        default="dense",
        metavar="CACHE",
        help="the KV cache: dense, a policy with its own defaults, fp8, or <policy>+fp8",
    )
    p.add_argument(
        "--cache-tokens",
        type=int,
        help="tokens that the KV cache holds (default: 4,096 a sequence, in 16 GiB at most)",
    )
    p.add_argument("--max-batch", type=int, default=256, help="samples decoded together")
    p.add_argument(
        "--lookahead",
        type=int,
        metavar="STEPS",
        help="decode steps between two looks at new requests and streams: fewer answer sooner, "
        f"more draw faster (default: {LOOKAHEAD} on a GPU, else 1)",
    )
    p.add_argument(
        "--lora-rank",
        type=int,
        metavar="R",
        help="put an adapter of this rank on the model, which is the model itself until POST "
        "/weights fills it",
    )
    p.add_argument(
        "--lora-alpha",
        type=float,
        metavar="A",
        help=f"of that adapter (default: {LORA_ALPHA:g}, as a run's)",
    )
    p.add_argument(
        "--uaq-scale",
        type=float,
        metavar="S",
        help="scale the model as a run with train.uaq_scale does, for the weights of such a run",
    )
    p.add_argument(
        "--noisy",
        action="store_true",
        help="norms that take the noise of a run with a noise section, with its weights",
    )
    p.add_argument(
        "--exact",
        action="store_true",
        help="a request gets the same bits whatever runs beside it; on a CPU in float32",
    )
    p.add_argument(
        "--weights-dir",
        metavar="DIR",
        help="a folder of published weights, a folder a version, for POST /weights",
    )

    p.add_argument(
        "--weights-from",
        metavar="HOST:PORT | FILE",
        help="a trainer, or the file in which it says where it is, that sends whole models from device to device "
        "(weight_broadcast.type: nccl or cuda_ipc); their versions are still those of --weights-dir",
    )


def _add_access(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable that holds the token of clients",
    )
    p.add_argument(
        "--admin-token-env",
        metavar="NAME",
        help="environment variable that holds the token of control routes; without it there are none",
    )
    p.add_argument("--max-n", type=int, default=64, help="samples of one prompt")
    p.add_argument("--max-prompts", type=int, default=256, help="prompts of one request")
    p.add_argument("--max-requests", type=int, default=1024, help="requests open at a time")
    p.add_argument("--max-body-mb", type=int, default=8, help="largest body of a request")


def run(arguments: argparse.Namespace) -> int:
    from lowroll.server.app import bind, run
    from lowroll.server.limits import STATE

    role = None
    with ExitStack() as stack:
        if arguments.model.endswith((".yaml", ".yml")):
            role = EngineRole(arguments, stack)
            arguments = role.arguments
        elif arguments.settings:
            raise ValueError(f"{arguments.settings[0]}: a setting is of a run's YAML file")
        _check_arguments(arguments)
        tokens = credentials(arguments) if role is None else role.tokens
        server_socket = stack.enter_context(bind(arguments.host, arguments.port))
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
        sys.setswitchinterval(SWITCH_S)
        host, port = server_socket.getsockname()[:2]
        app = application(arguments, tokens, role)
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        def ready() -> None:
            print(f"serving {app[STATE].name} at {address}/v1", flush=True)
            if role is not None:  # the orchestrator finds it in the heartbeat
                role.heartbeat.update(url=address, phase="serving")

        with machine.long_lived():
            signal_number = asyncio.run(run(app, server_socket, ready, GRACE_S))
    return 128 + signal_number


class EngineRole:
    """The engine of a run, when a run's file is named instead of a model."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        from lowroll.cli.settings import read_role
        from lowroll.runs.roles import engine
        from lowroll.runs.roles.heartbeat import Heartbeat
        from lowroll.runs.roles.limits import refuse_engine
        from lowroll.runs.roles.local import die_with_parent
        from lowroll.runs.roles.run_paths import ENGINE_ROLE, RunPaths
        from lowroll.server.limits import Credentials

        die_with_parent()
        _refuse_model_options(arguments)
        arguments.settings = [arguments.model, *arguments.settings]
        self.cfg = read_role("serve", arguments).resolved()
        refuse_engine(self.cfg)
        self.paths = RunPaths(self.cfg.output_dir)
        self.name, attempt = engine.take_role(self.paths, stack, os.environ.get(ENGINE_ROLE))
        self.arguments = engine.arguments_of(self.cfg, arguments)
        self.tokens = Credentials(*self.paths.tokens())
        heartbeat = Heartbeat(self.paths.heartbeat(self.name), self.name, attempt)
        self.heartbeat = stack.enter_context(heartbeat)

        self.make_engine = partial(engine.build, self.cfg)
        if self.cfg.rollout.engine == "vllm":  # does not return
            engine.serve_vllm(self.cfg, self.paths, self.name, self.heartbeat)


def _refuse_model_options(arguments: argparse.Namespace) -> None:
    for name in (*SETTINGS, *OF_MODEL):
        value = getattr(arguments, name)
        if value == parser().get_default(name):
            continue
        option = f"--{name.replace('_', '-')}"
        if name in SETTINGS:
            raise ValueError(f"{option}: with a run's file write {SETTINGS[name]}={value}")
        problem = f"{option}: it is for a model; a run's file says it"
        if "token" in name:
            problem += "; tokens are LOWROLL_TOKEN and LOWROLL_ADMIN_TOKEN (docs/roles.md)"
        raise ValueError(problem)


def credentials(arguments: argparse.Namespace) -> Credentials:
    """Return the tokens. ValueError for a missing or short one, or a public address without any."""
    from lowroll.server.limits import Credentials

    tokens = Credentials(
        _token("--token-env", arguments.token_env),
        _token("--admin-token-env", arguments.admin_token_env),
    )
    if tokens.token is not None and tokens.token == tokens.admin:
        raise ValueError(
            "--admin-token-env: it holds the token of --token-env, so every client could change "
            "weights: put another one into a variable of its own"
        )
    if not is_loopback(arguments.host) and tokens.token is None:
        raise ValueError(
            f"--host: {arguments.host} can be reached by others, which takes a token: put one into "
            "an environment variable and name it by --token-env"
        )
    return tokens


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; of names only `localhost` is trusted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def application(
    arguments: argparse.Namespace, tokens: Credentials, role: EngineRole | None = None
) -> web.Application:
    from lowroll.model.folder import resolve
    from lowroll.server.app import make_app
    from lowroll.server.weight_store import WeightStore

    folder = resolve(arguments.model)
    weight_store = None
    if arguments.weights_dir is not None:
        if tokens.admin is None:
            raise ValueError(
                "--weights-dir: POST /weights is a control route, which needs --admin-token-env"
            )
        weight_store = WeightStore(
            arguments.weights_dir, folder, weight_client(arguments, tokens.admin)
        )
    elif arguments.weights_from is not None:
        raise ValueError("--weights-from: the versions are those of --weights-dir")
    server_state = serving(arguments, folder, role)
    return make_app(server_state, tokens, weight_store, loopback=is_loopback(arguments.host))


def weight_client(arguments: argparse.Namespace, admin: str) -> WeightClient | None:
    """Return the client of the trainer's direct route, if there is one."""
    from lowroll.model.device import pick_device
    from lowroll.weights.sync.base import transfer_token
    from lowroll.weights.sync.client import WeightClient

    if arguments.weights_from is None:
        return None
    token, device = transfer_token(admin), pick_device(arguments.device)
    if arguments.weights_from.endswith(".json"):
        return WeightClient("", 0, device, file=Path(arguments.weights_from), token=token)
    host, _, port = arguments.weights_from.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--weights-from: expected HOST:PORT, got {arguments.weights_from}")
    return WeightClient(host, int(port), device, token=token)


def serving(
    arguments: argparse.Namespace, folder: Path, role: EngineRole | None = None
) -> ServerState:
    """Return the engine's loop, not started, and the model's facts for the routes."""
    from lowroll import __version__
    from lowroll.model.device import pick_device
    from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer, tokenizer_home
    from lowroll.server.engine_thread import EngineThread
    from lowroll.server.limits import ServerLimits, ServerState
    from lowroll.server.text import Vocabulary

    name = arguments.name or folder.resolve().name
    print(f"loading {name} from {folder}", file=sys.stderr, flush=True)
    tokenizer, tokenizer_folder = None, tokenizer_home(folder)
    if (tokenizer_folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(tokenizer_folder)
    engine = role.make_engine() if role else make_engine(arguments, folder, tokenizer)
    engine.warm_up()
    print(words(engine, pick_device(arguments.device)), file=sys.stderr, flush=True)
    chats = getattr(tokenizer, "chat_template", None)
    limits = ServerLimits(
        body=arguments.max_body_mb << 20,
        n=arguments.max_n,
        prompts=arguments.max_prompts,
        requests=arguments.max_requests,
    )
    return ServerState(
        EngineThread(engine),
        ChatTokenizer(tokenizer, arguments.tool_call_parser) if chats else None,
        name,
        engine.capabilities,
        None if tokenizer is None else Vocabulary(tokenizer),
        limits,
        __version__,
    )


def make_engine(arguments: argparse.Namespace, folder: Path, tokenizer: Any) -> NativeEngine:
    """Return the engine over a folder, or over its model with a fresh adapter."""
    from lowroll.config.rollout import KvConfig
    from lowroll.engine.native import NativeEngine
    from lowroll.kv.policy.table import make
    from lowroll.model.device import pick_device

    kv = KvConfig().another(arguments.kv)
    device = pick_device(arguments.device)
    if is_budget(arguments.weights):
        from lowroll.runs.format_search import of_model

        if arguments.uaq_scale is not None:
            raise ValueError(
                "--uaq-scale: a budget is searched for the model as it is; write a format"
            )
        arguments.weights = of_model(folder, arguments.weights, device)
    model: Path | Transformer = folder
    if arguments.lora_rank is not None:
        model = adapted(folder, device, arguments)
    elif arguments.uaq_scale is not None:
        model = scaled(folder, device, arguments)
    return NativeEngine(
        model,
        arguments.weights,
        make(kv.policy, **kv.options),
        device,
        tokenizer=tokenizer,
        cache_tokens=arguments.cache_tokens,
        max_batch=arguments.max_batch,
        kv_dtype=kv.kv_dtype,
        noisy=arguments.noisy,
        exact=arguments.exact,
        lookahead=arguments.lookahead or (LOOKAHEAD if device.type == "cuda" else None),
        **(PROMPTS if device.type == "cuda" else {}),
    )


def words(engine: NativeEngine, device: torch.device) -> str:
    capabilities, stats = engine.capabilities, engine.stats()
    cache_kind = "+".join(filter(None, (capabilities.kv_policy, capabilities.kv_dtype)))
    return (
        f"{stats.weights} weights, {cache_kind} cache of {stats.cache_tokens:,} tokens, context of "
        f"{capabilities.context_length:,}, on {device.type}"
    )


def adapted(folder: Path, device: torch.device, arguments: argparse.Namespace) -> Transformer:
    """Return the model with a fresh adapter."""
    from lowroll.model import hf, lora
    from lowroll.model.device import dtype_on
    from lowroll.model.headers import exact_format
    from lowroll.quant.formats import get_format
    from lowroll.weights.publish import quantize_base

    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"--lora-rank: {folder} is an adapter folder, and brings its own")
    rank = arguments.lora_rank
    alpha = LORA_ALPHA if arguments.lora_alpha is None else arguments.lora_alpha
    format = arguments.weights or exact_format(folder, dtype_on(device)) or DEFAULT
    if arguments.uaq_scale is not None:  # dense weights are scaled
        model = quantize_base(scaled(folder, device, arguments), format)
    else:
        model = hf.load(folder, device, get_format(format).dtype, format)
    if model.spec.mixture.num_experts:  # experts take no adapter
        return lora.attach(model, rank, alpha, lora.attention_targets(model.spec))
    return lora.attach(model, rank, alpha)


def scaled(folder: Path, device: torch.device, arguments: argparse.Namespace) -> Transformer:
    from lowroll.model import hf, scaling
    from lowroll.quant.formats import get_format

    dtype = get_format(arguments.weights or DEFAULT).dtype
    return scaling.scale(hf.load(folder, device, dtype), arguments.uaq_scale)


def _token(option: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        raise ValueError(f"{option}: the environment has no {variable}, or it is empty")
    is_plain = token.isascii() and token.isprintable() and " " not in token
    if len(token) < SHORTEST_TOKEN or not is_plain:
        raise ValueError(
            f"{option}: {variable}: a token has at least {SHORTEST_TOKEN} printable ASCII "
            "characters, and no space"
        )
    return token


def _check_arguments(arguments: argparse.Namespace) -> None:
    from lowroll.config.rollout import KvConfig

    if not 0 <= arguments.port < 1 << 16:
        raise ValueError(f"--port: expected a number in 0..65535, got {arguments.port}")
    for name in (
        "lookahead",
        "cache_tokens",
        "max_batch",
        "max_n",
        "max_prompts",
        "max_requests",
        "max_body_mb",
        "lora_rank",
    ):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    if is_budget(arguments.weights):
        try:
            parse(arguments.weights)
        except ValueError as error:
            raise ValueError(f"--weights: {error}") from None
    elif arguments.weights is not None and arguments.weights not in FORMATS:
        known_formats = ", ".join(FORMATS)
        raise ValueError(f"--weights: unknown format {arguments.weights!r}; known: {known_formats}")
    KvConfig().another(arguments.kv)
    if arguments.lora_alpha is not None and arguments.lora_rank is None:
        raise ValueError("--lora-alpha: it is of --lora-rank's adapter")
