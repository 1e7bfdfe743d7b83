"""Tasksets of verifiers 0.4 (`verifiers.v1`), in this process, without harness or server.

`Env.run` runs with a scripted agent: it replays the drawn turns, calls the toolsets between, and
raises with the messages since (`source.TurnPending`). Tasks that need a program's sandbox (a
runtime, a container, setup hooks) are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects import parse_message
from verifiers.v1.episode import EnvInfo
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import invoke_all

from lowroll.envs.return_values import awaited
from lowroll.envs.tools import MALFORMED
from lowroll.envs.verifiers.source import TurnPending, VerifiersSource, calls_of, plain
from lowroll.types import Message, Score


class Tasksets(VerifiersSource):
    """A taskset by id with its environment; ValueError names a missing requirement."""

    def __init__(self, env_id: str, args: dict[str, Any]) -> None:
        config = _resolve_config(env_id, args)
        agents_by_name = agent_config_fields(config)
        if len(agents_by_name) != 1:
            raise ValueError(
                f"{env_id} is played by several agents ({', '.join(agents_by_name)}); lowroll draws for one"
            )
        ((self.agent_name, agent),) = agents_by_name.items()
        self.env = vf.load_environment(config)
        self.task_class = type(self.env.taskset).task_type()
        self._refuse_runtimes(env_id)
        self.toolsets = [
            *self.env.taskset.toolsets(config.taskset),
            *self.task_class.toolsets(config.taskset.task),
        ]
        self.box = _Box(self.toolsets) if self.toolsets else None
        self.has_tools, self.endless = bool(self.toolsets), not self.env.taskset.bounded
        has_several_turns = self.has_tools or not isinstance(self.env, vf.SingleAgentEnv)
        self.max_turns = agent.max_turns or (-1 if has_several_turns else 1)

    def _refuse_runtimes(self, env_id: str) -> None:
        task = self.task_class
        needs = [
            name
            for name in ("setup", "finalize")
            if getattr(task, name) is not getattr(vf.Task, name)
        ]
        if task.NEEDS_CONTAINER or needs:
            subject = f"its task's {' and '.join(needs)}" if needs else "its task"
            raise ValueError(
                f"{env_id}: {subject} needs a runtime of verifiers (a container or a program's "
                "sandbox); roll out with verifiers itself against `lowroll serve`"
            )

    def tools(self) -> tuple[dict[str, Any], ...]:
        return self.box.schemas if self.box is not None else ()

    def tasks(self, split: str) -> tuple[Iterator[Any], bool]:
        return iter(self.env.taskset), False

    def key(self, task: Any) -> str:
        return str(task.key)

    async def judge(self, task: Any, turns: list[Message]) -> Score:
        """Score these turns; ValueError for a missing reward."""
        trace = await self._run(task, turns, scored=True)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            raise ValueError(
                f"verifiers computed no reward ({', '.join(missing) or 'it has none'})"
            )
        scores = {name: reward.score for name, reward in trace.rewards.items()}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Score(float(trace.reward), {**metrics, **scores})

    async def _run(self, task: Any, turns: list[Message], scored: bool) -> Any:
        scripted = _ScriptedAgent(turns, self.box, ends=scored)
        episode = vf.Episode(env=EnvInfo(id=self.env.config.env_id), task=_trace_task(task))
        agents = SimpleNamespace(**{self.agent_name: scripted})
        await self.env.setup(agents)
        await self.env.run(task, agents)
        if len(scripted.traces) != 1:
            raise ValueError(
                f"the environment ran its agent {len(scripted.traces)} times; 1 is known here"
            )
        (trace,) = episode.traces = scripted.traces
        if scored:
            for fn in (*scripted.task.hooks("reward"), *scripted.task.hooks("metric")):
                _refuse_runtime(fn)
            trace.ok = True
            await scripted.task.score(trace)
            await self.env.finalize(task, episode)
        return trace


def _resolve_config(env_id: str, args: dict[str, Any]) -> Any:
    try:
        return vf.resolve_env_config({"taskset": {"id": env_id, **args}})
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        first_error = error.errors()[0]
        path = ".".join(map(str, first_error["loc"])).removeprefix("taskset.")
        raise ValueError(f"{env_id}: {path}: {first_error['msg']}") from error


class _ScriptedAgent:
    """A scripted agent. ends: the script's end ends the exchange."""

    def __init__(self, turns: list[Message], box: _Box | None, ends: bool) -> None:
        self.turns, self.box, self.ends = iter(turns), box, ends
        self.trainable = True
        self.traces: list[Any] = []
        self.task: Any = None

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as talk:
            await talk.turn()
        return talk.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Talk]:
        self.task = task
        talk = _Talk(self, task)
        self.traces.append(talk.trace)
        if self.box is not None:
            await self.box.begin(task)
        yield talk
        talk.trace.stop("user_closed")


class _Talk:
    def __init__(self, scripted: _ScriptedAgent, task: Any) -> None:
        self.scripted, self.task = scripted, task
        self.over = False
        self.begun = False
        self.failed: dict[int, str] = {}  # errors of calls, by the node that answers
        self.trace = vf.Trace(
            task=_trace_task(task),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            state=state_cls(type(task))(),
        )
        if task.data.system_prompt:
            self._add(vf.SystemMessage(content=task.data.system_prompt))

    async def turn(self, message: Any = None) -> Any:
        """Add a user's turn and the agent's replies as a segment.

        The first turn without a message is the task's prompt. The agent replies until a turn calls
        no tool or a hook stops the conversation.
        """
        if not self.begun and message is None:
            message = self.task.data.prompt
        self.begun = True
        if self.over:
            return vf.Segment(messages=[], terminated=True)
        for new_message in _parse_messages(message):
            self._add(new_message)
        begin = len(self.trace.nodes)
        while not self.over:
            reply = next(self.scripted.turns, None)
            if reply is None:
                return self._ended(begin)
            calls = calls_of(reply) or None
            self._add(vf.AssistantMessage(content=reply["content"], tool_calls=calls), sampled=True)
            self.over = await self._stops()
            calls_tools = reply.get("tool_calls") or reply.get("ill_formed")
            if self.over or not calls_tools:
                break
            await self._call(reply)
        return vf.Segment(messages=[node.message for node in self.trace.nodes[begin:]])

    def _ended(self, begin: int) -> Any:
        nodes = self.trace.nodes
        if not self.scripted.ends:
            sampled_positions = [i for i, node in enumerate(nodes) if node.sampled]
            first_new = sampled_positions[-1] + 1 if sampled_positions else 0
            new_messages = []
            for i in range(first_new, len(nodes)):
                message = plain(nodes[i].message)
                if i in self.failed:
                    message["failed"] = self.failed[i]
                new_messages.append(message)
            raise TurnPending(new_messages)
        self.over = True
        self.trace.stop("max_turns")
        messages = [node.message for node in self.trace.nodes[begin:]]
        return vf.Segment(messages=messages, terminated=not messages)

    async def _call(self, said: Message) -> None:
        """Add the results of a turn's calls. `failed` keeps the kind of failure by the node of the
        result."""
        for call in said.get("tool_calls", ()):
            name, text = call["function"]["name"], ""
            try:
                text = await _call_tool(self.scripted.box, **call["function"])
            except Exception as error:
                self.failed[len(self.trace.nodes)] = "call"
                text = f"error: {error}"
            self._add(vf.ToolMessage(tool_call_id=call["id"], name=name, content=text))
        for reason in said.get("ill_formed", ()):
            self.failed[len(self.trace.nodes)] = "form"
            text = f"error: this tool call cannot be read: {reason}"
            self._add(vf.ToolMessage(tool_call_id=MALFORMED, content=text))

    async def _stops(self) -> bool:
        hooks = self.task.hooks("stop")
        stop_flags = await invoke_all(
            hooks, {"task": self.task.data, "trace": self.trace, vf.Trace: self.trace}
        )
        for hook, stops in zip(hooks, stop_flags, strict=True):
            if stops:
                self.trace.stop(hook.__name__)
        return any(stop_flags)

    def _add(self, message: Any, sampled: bool = False) -> None:
        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))


class _Box:
    """The tools of toolsets, registered as their servers would, and called here."""

    def __init__(self, toolsets: list[Any]) -> None:
        from mcp.server.mcpserver import MCPServer

        self.toolsets = toolsets
        self.servers: list[tuple[str, Any]] = []
        for toolset in toolsets:
            if state_cls(type(toolset)) is not vf.State:
                raise ValueError(
                    f"the toolset {type(toolset).__name__} keeps a state of its own, which must not "
                    "outlive a turn here; roll out with verifiers itself against `lowroll serve`"
                )
            server = MCPServer(toolset.server_name or type(toolset).__name__)
            toolset.register(server)
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            self.servers.append((prefix, server))
        self._ready = False

    @cached_property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        return awaited(self._listed())

    async def _listed(self) -> tuple[dict[str, Any], ...]:
        schemas = []
        for prefix, server in self.servers:
            for tool in await server.list_tools():
                description = {
                    "name": f"{prefix}{tool.name}",
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                schemas.append({"type": "function", "function": description})
        return tuple(schemas)

    async def begin(self, task: Any) -> None:
        for toolset in self.toolsets:
            if not self._ready:
                await toolset.setup()
            await toolset.setup_task(task.data)
        self._ready = True

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a tool's output; its exceptions pass, ValueError for an unknown name."""
        for prefix, server in self.servers:
            tool_names = {tool.name for tool in await server.list_tools()}
            if name.startswith(prefix) and name.removeprefix(prefix) in tool_names:
                return _result_text(await server.call_tool(name.removeprefix(prefix), arguments))
        raise ValueError(f"there is no tool {name!r}")


async def _call_tool(box: _Box | None, name: str, arguments: dict[str, Any]) -> str:
    if box is None:
        raise ValueError(f"there is no tool {name!r}")
    return await box.call(name, arguments)


def _result_text(result: Any) -> str:
    blocks = result[0] if isinstance(result, tuple) else getattr(result, "content", result)
    return "\n".join(block.text if block.type == "text" else str(block) for block in blocks)


def _trace_task(task: Any) -> Any:
    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _parse_messages(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, str):
        return [vf.UserMessage(content=given)]
    return [parse_message(message) if isinstance(message, dict) else message for message in given]


def _refuse_runtime(fn: Any) -> None:
    parameter = inspect.signature(fn).parameters.get("runtime")
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        raise ValueError(f"the reward {fn.__name__} runs a program in a runtime of verifiers")
